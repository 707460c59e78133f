"""The writing side of one view of one version: shards, checksums, deltas against the version before."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from motley_weights import codecs, delta, safetensors_io
from motley_weights.backend import Backend, Chunk
from motley_weights.manifest import DELTA_SUFFIX, MANIFEST_FILE, DeltaBase, FileEntry, Manifest
from motley_weights.pulling import Building

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class DeltaPolicy:
    """When a version is stored as a delta against the one before.

    cache: a local folder (fast disk or tmpfs) that keeps the newest full files of every view between publishes. After a
    restart without it, or with another version in it, the next version is an anchor.
    """

    cache: Path
    max_chain: int = 16  # deltas in a row, before the next anchor
    max_ratio: float = (
        0.5  # of a file's size, for its delta; and of all files' sizes, for the deltas of a chain together
    )
    min_file_bytes: int = 4 << 20  # smaller files are stored whole and not cached


@dataclasses.dataclass(frozen=True)
class CachedBase:
    """The version before, with its files in `folder`."""

    folder: Path
    pinned: DeltaBase
    manifest: Manifest


def usable_base(policy: DeltaPolicy, base: CachedBase | None) -> CachedBase | None:
    """The base for another delta; None when the chain is long enough, or costs a newcomer too many bytes. Pure."""
    if base is None or base.manifest.encoder != codecs.ENCODER_VERSION or base.manifest.chain >= policy.max_chain:
        return None
    full_bytes = sum(entry.size for entry in base.manifest.files.values())
    return None if base.manifest.chain_bytes > policy.max_ratio * full_bytes else base


class ViewWriter:
    """Writes one view of one version in shards; holds at most one shard's tensors."""

    def __init__(
        self,
        backend: Backend,
        folder: str,
        shard_bytes: int,
        policy: DeltaPolicy | None = None,
        base: CachedBase | None = None,
        cache: Building | None = None,
    ) -> None:
        """folder: of the version, in the store. cache: where full files are kept for the next delta; None without a
        policy.
        """
        self._backend = backend
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._policy = policy
        self._base = base
        self._cache = cache
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards = 0
        self._weight_map: dict[str, str] = {}
        self._total_bytes = 0
        self.files: dict[str, FileEntry] = {}
        self.stored: dict[str, FileEntry] = {}

    @property
    def tensors(self) -> int:
        return len(self._weight_map)

    @property
    def delta_bytes(self) -> int:
        return sum(entry.size for name, entry in self.stored.items() if name not in self.files)

    @property
    def base(self) -> CachedBase | None:
        """What the version is stored relative to: None for an anchor."""
        return self._base if self.stored.keys() - self.files.keys() else None

    def start(self) -> None:
        """Clears what an abandoned attempt left, its manifest first: from then on the version is not there."""
        if self._backend.list(self._folder):
            self._backend.remove(f"{self._folder}/{MANIFEST_FILE}")
            self._backend.remove(self._folder)
        if self._cache is not None:
            try:
                self._cache.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                self._go_without_cache(error)

    def add(self, view: str, group: Mapping[str, Tensor], magnitudes: Mapping[str, float]) -> None:
        for name, tensor in codecs.encode_group(view, group, magnitudes=magnitudes).items():
            size = safetensors_io.nbytes(tensor)
            if self._pending and self._pending_bytes + size > self._shard_bytes:
                self._flush(f"model-{self._shards + 1:05d}.safetensors")
            self._pending[name] = tensor
            self._pending_bytes += size

    def finish(self, small_files: Mapping[str, bytes]) -> None:
        """The last shard, the index and the small files."""
        if self._pending or not self._shards:
            self._flush(f"model-{self._shards + 1:05d}.safetensors" if self._shards else safetensors_io.SINGLE_FILE)
        index = safetensors_io.index(self._weight_map, self._total_bytes)
        for name, content in {**small_files, safetensors_io.INDEX_FILE: index}.items():
            self.files[name] = self._store(name, [content])

    def keep_in_cache(self, manifest: bytes) -> None:
        """After the pointer moved: the full files become the base of the next version, those before go."""
        if self._cache is None:
            return
        if not any(self._cache.folder.iterdir()):
            self._cache.discard()
            return
        (self._cache.folder / MANIFEST_FILE).write_bytes(manifest)
        target = self._cache.commit()
        for other in target.parent.iterdir():
            if other != target:
                shutil.rmtree(other, ignore_errors=True)

    def abandon(self) -> None:
        """Removes what was written, so far as the store still answers."""
        self.discard_cache()
        self._backend.remove(self._folder)

    def discard_cache(self) -> None:
        """Removes the local files of a publish that will not finish."""
        if self._cache is not None:
            self._cache.discard()

    def _flush(self, name: str) -> None:
        if self._policy is None or self._pending_bytes < self._policy.min_file_bytes or not self._put_in_cache(name):
            self.files[name] = self._store(name, safetensors_io.chunks(self._pending))
        else:
            assert self._cache is not None
            self._store_from_cache(name, self._cache.folder, self._policy)
        self._weight_map.update(dict.fromkeys(self._pending, name))
        self._total_bytes += self._pending_bytes
        self._shards += 1
        self._pending, self._pending_bytes = {}, 0

    def _put_in_cache(self, name: str) -> bool:
        """The pending tensors as a full file in the cache. False when there is no cache, or no room in it: weights go
        out without."""
        if self._cache is None:
            return False
        hashing = Hashing(safetensors_io.chunks(self._pending))
        try:
            with open(self._cache.folder / name, "wb") as target:
                for chunk in hashing:
                    target.write(chunk)
        except OSError as error:
            self._go_without_cache(error)
            return False
        self.files[name] = hashing.entry()
        return True

    def _store_from_cache(self, name: str, cache: Path, policy: DeltaPolicy) -> None:
        """To the store a file's delta, or all of it when that is not much more."""
        new = _mapped(cache / name)
        change = self._delta(name, new)
        if change is not None and len(change) <= policy.max_ratio * self.files[name].size:
            self._store(name + DELTA_SUFFIX, [change])
        else:
            self._store(name, [new])

    def _go_without_cache(self, error: OSError) -> None:
        """This version needs none; the next one will be an anchor."""
        log.warning("event=delta_cache_unusable folder=%s error=%r", self._folder, str(error))
        self.discard_cache()
        self._cache = None

    def _delta(self, name: str, new: memoryview) -> bytes | None:
        """Against the same file of the version before; None when that is not in the cache exactly as it was published:
        readers could not use such a delta."""
        if self._base is None or name not in self._base.manifest.files:
            return None
        path = self._base.folder / name
        if not path.is_file() or path.stat().st_size == 0:
            return None
        old = _mapped(path)
        if FileEntry(len(old), hashlib.sha256(old).hexdigest()) != self._base.manifest.files[name]:
            return None
        return delta.encode(old, new)

    def _store(self, name: str, chunks: Iterable[Chunk]) -> FileEntry:
        hashing = Hashing(chunks)
        self._backend.write(f"{self._folder}/{name}", hashing)
        self.stored[name] = hashing.entry()
        return self.stored[name]


def _mapped(path: Path) -> memoryview:
    """A file's bytes, memory-mapped for reading while anything refers to them."""
    return memoryview(np.memmap(path, dtype=np.uint8, mode="r"))


class Hashing:
    """Passes chunks on and keeps their size and checksum."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self._chunks = chunks
        self._sha256 = hashlib.sha256()
        self._size = 0

    def __iter__(self) -> Iterator[Chunk]:
        for chunk in self._chunks:
            self._sha256.update(chunk)
            self._size += len(chunk)
            yield chunk

    def entry(self) -> FileEntry:
        return FileEntry(self._size, self._sha256.hexdigest())
