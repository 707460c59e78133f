"""The pod's side of the weight store: the view's pointer, pulled folders, and what to do about a new pointer."""

from __future__ import annotations

import enum
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from motley_api import keys
from motley_weights import layout
from motley_weights.backend import Backend, open_backend
from motley_weights.manifest import MANIFEST_FILE, decode_pointer, digest
from motley_weights.store import WeightStore

_VERSION_FOLDER = re.compile(r"v(\d{6,})")


@dataclass(frozen=True)
class Identity:
    """One version of a view, exactly: after a rewind the same number may come again with other weights."""

    version: int
    manifest_sha256: str


class Move(enum.Enum):
    """What a pointer asks of an engine."""

    STAY = "stay"
    ADVANCE = "advance"
    REWIND = "rewind"  # the run went back to a checkpoint: what is served belongs to steps that never were


def decide(served: Identity | None, pointed: Identity | None) -> Move:
    """Only the pointer decides. It grows with every publish, which refuses to go back; only an explicit rewind of the store,
    which a resuming trainer does before its first step, moves it back or makes a number mean other weights."""
    if pointed is None or pointed == served:
        return Move.STAY
    if served is None or pointed.version > served.version:
        return Move.ADVANCE
    return Move.REWIND


class ViewSource:
    """Blocking; the agent calls it from a thread."""

    def __init__(self, url: str, run: str, view: str, scratch: Path, *, backend: Backend | None = None) -> None:
        self._backend = backend or open_backend(url)
        self._store = WeightStore(url, run, backend=self._backend)
        self._pointer_path = f"{run}/views/{view}/{keys.LATEST_POINTER}"
        self._view = view
        self._into = scratch / "views"

    def pointed(self) -> Identity | None:
        """One small read; None before the first publish. Raises ViewCorruptError, OSError, or what the store's client raises."""
        try:
            content = self._backend.read(self._pointer_path)
        except FileNotFoundError:
            return None
        pointer = decode_pointer(content, where=self._pointer_path)
        return Identity(pointer.version, pointer.manifest_sha256)

    def check(self, folder: Path, *, like: Path | None) -> None:
        """Raises WeightsError or OSError when a folder does not hold the view, or another model than `like`."""
        layout.check_folder(folder, self._view, like=like)

    def pull(self, version: int, *, fresh: bool = False) -> tuple[Path, Identity]:
        """The checked folder of a version. fresh: what lies here is thrown away first."""
        folder = self._into / self._view / keys.version_dir(version)
        if fresh:
            shutil.rmtree(folder, ignore_errors=True)
        folder = self._store.pull(self._view, version, self._into)
        return folder, Identity(version, digest((folder / MANIFEST_FILE).read_bytes()))

    def prune(self, served: Path, keep: int) -> list[Path]:
        """Removes pulled folders but the served one and the `keep` newest others. Returns what was removed."""
        folders = [path for path in (self._into / self._view).glob("v*") if _VERSION_FOLDER.fullmatch(path.name)]
        others = sorted((path for path in folders if path != served), key=_version, reverse=True)
        for path in others[keep:]:
            shutil.rmtree(path, ignore_errors=True)
        return others[keep:]


def _version(path: Path) -> int:
    match = _VERSION_FOLDER.fullmatch(path.name)
    return int(match[1]) if match else -1
