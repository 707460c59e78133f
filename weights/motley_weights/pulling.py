"""The local side of a pull: folders that are complete and checked, or not there."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from motley_weights.backend import READ_BYTES
from motley_weights.errors import ViewCorruptError
from motley_weights.manifest import MANIFEST_FILE, FileEntry, Manifest


def is_plain_name(name: str) -> bool:
    """Whether a file name cannot leave its folder."""
    return bool(name) and "/" not in name and "\\" not in name and "\0" not in name and not name.startswith(".")


def check_names(manifest: Manifest, *, where: str) -> None:
    """ViewCorruptError for a manifest that names files outside its folder."""
    for name in (*manifest.files, *manifest.stored):
        if not is_plain_name(name) or name == MANIFEST_FILE:
            raise ViewCorruptError(f"{where}: file name must be plain, got {name!r}")


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


def is_intact(folder: Path, manifest_bytes: bytes, manifest: Manifest) -> bool:
    """Whether a pulled folder is exactly this version: same manifest, every file with its size and checksum, nothing
    missing.
    """
    try:
        if (folder / MANIFEST_FILE).read_bytes() != manifest_bytes:
            return False
        sizes_fit = all((folder / name).stat().st_size == entry.size for name, entry in manifest.files.items())
        return sizes_fit and all(entry_of(folder / name) == entry for name, entry in manifest.files.items())
    except (FileNotFoundError, NotADirectoryError):
        return False


class Building:
    """A folder beside its final place; `commit` renames it there, leaving without that removes it."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self.folder = target.parent / f".{target.name}.{uuid.uuid4().hex}.partial"

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def commit(self, is_intact: Callable[[Path], bool]) -> None:
        """Puts the folder in place of whatever is there. Another process may do the same: then its intact result is as
        good.
        """
        retired = self.folder.with_suffix(".old")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._target, retired)
        try:
            os.rename(self.folder, self._target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not is_intact(self._target):
                raise
        finally:
            shutil.rmtree(retired, ignore_errors=True)
