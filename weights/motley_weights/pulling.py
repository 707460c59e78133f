"""The local side of a pull: folders that are complete and checked, or not there."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from motley_weights import delta
from motley_weights.backend import READ_BYTES
from motley_weights.errors import ViewCorruptError
from motley_weights.manifest import DELTA_SUFFIX, MANIFEST_FILE, FileEntry, Manifest


def is_plain_name(name: str) -> bool:
    """Whether a file name cannot leave its folder."""
    return bool(name) and "/" not in name and "\\" not in name and "\0" not in name and not name.startswith(".")


def check_names(manifest: Manifest, *, where: str) -> None:
    """ViewCorruptError for a manifest that names files outside its folder."""
    for name in (*manifest.files, *manifest.stored):
        if not is_plain_name(name) or name == MANIFEST_FILE:
            raise ViewCorruptError(f"{where}: file name must be plain, got {name!r}")


@dataclasses.dataclass(frozen=True)
class FilePlan:
    """How one file of a version comes about: a copy from `origin`, then the deltas of later links. Links are
    indices.
    """

    name: str
    origin: int
    deltas: tuple[int, ...]


def plan_files(links: Sequence[Manifest], *, first_is_local: bool) -> list[FilePlan]:
    """A plan for each file of the last link. Pure.

    links: from an anchor, or a version that lies complete on this machine, through deltas to the wanted version. A file
    starts from the newest link that has it whole. ViewCorruptError when a delta is missing in between.
    """
    last = len(links) - 1
    plans = []
    for name in links[last].files:
        whole = [
            i
            for i in range(last, -1, -1)
            if name in links[i].stored or (i == 0 and first_is_local and name in links[0].files)
        ]
        if not whole:
            raise ViewCorruptError(
                f"{name}: no version between {links[0].version} and {links[last].version} has it whole"
            )
        deltas = tuple(range(whole[0] + 1, last + 1))
        for i in deltas:
            if name + DELTA_SUFFIX not in links[i].stored:
                raise ViewCorruptError(f"{name}: version {links[i].version} holds neither it nor a delta for it")
        plans.append(FilePlan(name, whole[0], deltas))
    return plans


def save(chunks: Iterable[bytes], path: Path, want: FileEntry, *, where: str) -> None:
    """Writes chunks to a new file, checking size and checksum on the way. ViewCorruptError when they are not `want`."""
    sha256, size = hashlib.sha256(), 0
    with open(path, "xb", buffering=0) as file:
        for chunk in chunks:
            sha256.update(chunk)
            size += len(chunk)
            if size > want.size:
                break
            file.write(chunk)
    check(FileEntry(size, sha256.hexdigest()), want, where=where)


def patch(path: Path, change: bytes, *, where: str) -> None:
    """Applies a delta to a local file in place."""
    mapped = np.memmap(path, dtype=np.uint8, mode="r+")
    try:
        delta.apply(memoryview(mapped), change, where=where)
    except (KeyError, ValueError) as error:  # of a base whose header is damaged
        raise ViewCorruptError(f"{where}: does not fit {path.name}: {error}") from error


def check(got: FileEntry, want: FileEntry, *, where: str) -> None:
    if got.size < want.size:
        raise ViewCorruptError(f"{where}: truncated: must have {want.size} bytes, has {got.size}")
    if got.size > want.size:
        raise ViewCorruptError(f"{where}: too long: must have {want.size} bytes, has at least {got.size}")
    if got.sha256 != want.sha256:
        raise ViewCorruptError(f"{where}: changed: SHA-256 must be {want.sha256}, is {got.sha256}")


def entry_of(path: Path) -> FileEntry:
    """Size and checksum of a local file."""
    sha256, size = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(READ_BYTES):
            sha256.update(chunk)
            size += len(chunk)
    return FileEntry(size, sha256.hexdigest())


def looks_like(folder: Path, manifest_bytes: bytes, manifest: Manifest) -> bool:
    """Whether a folder claims to be this version and its files have their sizes; contents are not read."""
    try:
        return (folder / MANIFEST_FILE).read_bytes() == manifest_bytes and all(
            (folder / name).stat().st_size == entry.size for name, entry in manifest.files.items()
        )
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_intact(folder: Path, manifest_bytes: bytes, manifest: Manifest) -> bool:
    """Whether a pulled folder is exactly this version: same manifest, every file with its size and checksum."""
    return looks_like(folder, manifest_bytes, manifest) and all(
        entry_of(folder / name) == entry for name, entry in manifest.files.items()
    )


class Building:
    """A folder beside its final place; `commit` renames it there. As a context, leaving without that removes it."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self.folder = target.parent / f".{target.name}.{uuid.uuid4().hex}.partial"

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.discard()

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def commit(self, as_good: Callable[[Path], bool] = lambda folder: False) -> Path:
        """Puts the folder in place of whatever is there. Another process may do the same at once: its result stays if
        `as_good`.
        """
        retired = self.folder.with_suffix(".old")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._target, retired)
        try:
            os.rename(self.folder, self._target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not as_good(self._target):
                raise
        finally:
            shutil.rmtree(retired, ignore_errors=True)
        return self._target
