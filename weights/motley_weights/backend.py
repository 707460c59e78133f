"""Where the store's bytes lie: a folder (POSIX calls, so that writes can be made durable), or any other fsspec file
system.

Paths are relative to the root, with forward slashes. Every write is durable when it returns.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import fsspec

Chunk = bytes | memoryview
READ_BYTES = 4 << 20
_OBJECT_STORES = frozenset({"s3", "gs", "gcs", "az", "abfs", "oci"})


class Backend(Protocol):
    """The few operations that the store is made of. Reads of what is not there raise FileNotFoundError."""

    def write(self, path: str, chunks: Iterable[Chunk]) -> None:
        """A new file. It may be seen half-written: nothing may rely on it before a manifest names it."""

    def replace(self, path: str, content: bytes) -> None:
        """A small file, old or new content at any moment, never a mixture."""

    def read(self, path: str) -> bytes: ...

    def read_chunks(self, path: str) -> Iterator[bytes]: ...

    def size(self, path: str) -> int: ...

    def list(self, path: str) -> list[str]:
        """Names directly below a folder; empty when there is none."""

    def remove(self, path: str) -> None:
        """A file or a folder with all it holds; nothing when it is not there."""


def open_backend(url: str) -> Backend:
    """file:// URLs and plain paths give a folder; any other URL goes to fsspec (memory://, s3://, gs://, ...)."""
    protocol = url.split("://", 1)[0] if "://" in url else "file"
    if protocol in ("file", "local"):
        return FolderBackend(Path(url.split("://", 1)[-1]))
    return FsspecBackend(url)


class FolderBackend:
    """A folder on a POSIX file system, local or a mounted volume."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def write(self, path: str, chunks: Iterable[Chunk]) -> None:
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())

    def replace(self, path: str, content: bytes) -> None:
        target = self._root / path
        temporary = f"{path}.{uuid.uuid4().hex}.tmp"
        try:
            self.write(temporary, [content])
            os.replace(self._root / temporary, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._root / temporary)
            raise
        _fsync_folder(target.parent)

    def read(self, path: str) -> bytes:
        return (self._root / path).read_bytes()

    def read_chunks(self, path: str) -> Iterator[bytes]:
        with open(self._root / path, "rb", buffering=0) as file:
            while chunk := file.read(READ_BYTES):
                yield chunk

    def size(self, path: str) -> int:
        return (self._root / path).stat().st_size

    def list(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(self._root / path))
        except FileNotFoundError:
            return []

    def remove(self, path: str) -> None:
        target = self._root / path
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)


class FsspecBackend:
    """Any other file system of fsspec. A PUT of an object store is durable and atomic once it answered.

    Errors: OSError, whatever the client library raises.
    """

    def __init__(self, url: str) -> None:
        self._fs, self._root = fsspec.core.url_to_fs(url)
        protocols = self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,)
        self._is_object_store = not _OBJECT_STORES.isdisjoint(protocols)

    def write(self, path: str, chunks: Iterable[Chunk]) -> None:
        with _as_os_error(path):
            target = self._path(path)
            self._make_parent(target)
            with self._fs.open(target, "wb") as file:
                for chunk in chunks:
                    file.write(bytes(chunk) if isinstance(chunk, memoryview) else chunk)

    def replace(self, path: str, content: bytes) -> None:
        with _as_os_error(path):
            target = self._path(path)
            self._make_parent(target)
            self._fs.pipe_file(target, content)

    def read(self, path: str) -> bytes:
        with _as_os_error(path):
            content: bytes = self._fs.cat_file(self._path(path))
            return content

    def read_chunks(self, path: str) -> Iterator[bytes]:
        with _as_os_error(path), self._fs.open(self._path(path), "rb") as file:
            while chunk := file.read(READ_BYTES):
                yield chunk

    def size(self, path: str) -> int:
        with _as_os_error(path):
            self._fs.invalidate_cache()
            info: dict[str, Any] = self._fs.info(self._path(path))
            return int(info["size"])

    def list(self, path: str) -> list[str]:
        with _as_os_error(path):
            self._fs.invalidate_cache()
            try:
                found: list[str] = self._fs.ls(self._path(path), detail=False)
            except FileNotFoundError:
                return []
            return sorted(name.rstrip("/").rsplit("/", 1)[-1] for name in found)

    def remove(self, path: str) -> None:
        with _as_os_error(path), contextlib.suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            self._fs.rm(self._path(path), recursive=True)

    def _make_parent(self, target: str) -> None:
        """Nothing on an object store: folders are parts of names there, and asking for one asks for a bucket."""
        if not self._is_object_store:
            self._fs.makedirs(target.rsplit("/", 1)[0], exist_ok=True)

    def _path(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}"


@contextlib.contextmanager
def _as_os_error(path: str) -> Iterator[None]:
    """Client libraries have exceptions of their own for a server that is away, and fsspec passes some of them on."""
    try:
        yield
    except (OSError, GeneratorExit):
        raise
    except Exception as error:
        raise OSError(f"{path}: {type(error).__name__}: {error}") from error


def _fsync_folder(folder: Path) -> None:
    """Makes a rename in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
