"""Complete checkpoints of a run: what is there, what may be trusted, what goes. Knows files, not Megatron.

    <store>/<run>/checkpoints/step-000010/   Megatron's files, then manifest.json with the checksum of each
    <store>/<run>/checkpoints/latest.json    the tracker, moved last

A checkpoint's files hold pickled metadata: one is read only from the run's own folder, after its checksums.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
TRACKER = "latest.json"


class CheckpointDamagedError(RuntimeError):
    """Files that are missing or differ from their checksums."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    run_uid: str
    step: int
    files: dict[str, str]  # name -> sha256


class Tracker(msgspec.Struct, frozen=True, kw_only=True):
    step: int


class CheckpointFolder:
    """root: a folder on a file system that all ranks see."""

    def __init__(self, root: Path, *, run_uid: str) -> None:
        self._root = root
        self._run_uid = run_uid

    def path(self, step: int) -> Path:
        return self._root / f"step-{step:06d}"

    def begin(self, step: int) -> Path:
        """An empty folder to save into; what an abandoned save left there is removed."""
        path = self.path(step)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def complete(self, step: int, *, keep: int) -> int:
        """Makes the folder durable, then moves the tracker, then removes all but the newest `keep`. Returns the oldest kept
        step."""
        path = self.path(step)
        files = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
        for name in files:
            _fsync(path / name)
        manifest = Manifest(run_uid=self._run_uid, step=step, files={name: _sha256(path / name) for name in files})
        _replace(path / MANIFEST, msgspec.json.encode(manifest))
        _fsync(path)
        _replace(self._root / TRACKER, msgspec.json.encode(Tracker(step=step)))
        steps = [known for known in self._steps() if known <= step]
        for old in steps[:-keep]:
            shutil.rmtree(self.path(old))
        return steps[-keep:][0]

    def newest(self) -> int | None:
        """The newest step whose files are all what they were when saved; damaged ones are passed over, loudly.

        None without a tracker: no save was ever completed.
        """
        tracked = self._tracked()
        if tracked is None:
            return None
        for step in reversed([known for known in self._steps() if known <= tracked]):
            try:
                self.verify(step)
            except CheckpointDamagedError as error:
                log.error("event=checkpoint_damaged step=%d error=%r", step, str(error))
            else:
                return step
        raise CheckpointDamagedError(
            f"{self._root}: a save of step {tracked} was completed, but no checkpoint is whole; restore one, or remove"
            f" {self._root / TRACKER} to start from the model's source"
        )

    def rewind(self, at_most: int) -> int:
        """Makes the newest whole checkpoint of at most that step the newest of all; later ones are put aside. Returns its step.

        Errors: ValueError naming the steps that are there.
        """
        steps = self._steps()
        for step in reversed([known for known in steps if known <= at_most]):
            try:
                self.verify(step)
            except CheckpointDamagedError as error:
                log.error("event=checkpoint_damaged step=%d error=%r", step, str(error))
                continue
            _replace(self._root / TRACKER, msgspec.json.encode(Tracker(step=step)))
            for later in [known for known in steps if known > step]:
                aside = self._root / f"undone-{self.path(later).name}"
                shutil.rmtree(aside, ignore_errors=True)
                self.path(later).rename(aside)
            return step
        raise ValueError(
            f"must be at least the step of a checkpoint that is there ({', '.join(map(str, steps)) or 'none is'}), got {at_most}"
        )

    def resumable(self) -> list[int]:
        """Steps that a resume may start from, ascending: complete checkpoints, or the model's source before the
        first."""
        return self._steps() or [0]

    def verify(self, step: int) -> None:
        """Errors: CheckpointDamagedError, naming the file."""
        path = self.path(step)
        try:
            manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
        except (OSError, msgspec.DecodeError) as error:
            raise CheckpointDamagedError(f"{path / MANIFEST}: {error}") from error
        if (manifest.run_uid, manifest.step) != (self._run_uid, step):
            raise CheckpointDamagedError(f"{path}: is step {manifest.step} of run uid {manifest.run_uid}")
        present = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()} - {MANIFEST}
        if present != set(manifest.files):
            odd = sorted(present ^ set(manifest.files))
            raise CheckpointDamagedError(f"{path}: files missing or not of the save: {', '.join(odd)}")
        for name, want in manifest.files.items():
            if _sha256(path / name) != want:
                raise CheckpointDamagedError(f"{path / name}: differs from its checksum")

    def _tracked(self) -> int | None:
        try:
            return msgspec.json.decode((self._root / TRACKER).read_bytes(), type=Tracker).step
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise CheckpointDamagedError(f"{self._root / TRACKER}: {error}") from error

    def _steps(self) -> list[int]:
        """Steps with a manifest, ascending."""
        return sorted(int(path.parent.name.removeprefix("step-")) for path in self._root.glob(f"step-*/{MANIFEST}"))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace(path: Path, data: bytes) -> None:
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    _fsync(path.parent)
