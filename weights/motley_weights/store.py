"""The versioned weight store: publish views, pull them, move pointers. Layout under the store's URL:

    <run>/views/<view>/v000010/   safetensors shards, their index, config.json, tokenizer files, manifest.json (written
    last) <run>/views/<view>/latest     the pointer, moved after everything it points at is durable

A version exists once its manifest does. A reader follows checksums from the pointer to the manifest to every file, so
that what it loads is either exactly what was published or nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from motley_api import keys
from torch import Tensor

from motley_weights import codecs, pulling, safetensors_io
from motley_weights.backend import Backend, Chunk, open_backend
from motley_weights.errors import (
    CodecError,
    StoreError,
    VersionNotFoundError,
    VersionRefusedError,
    ViewCorruptError,
    WeightsError,
)
from motley_weights.manifest import (
    MANIFEST_FILE,
    FileEntry,
    Manifest,
    Pointer,
    decode_manifest,
    decode_pointer,
    digest,
    encode_manifest,
    encode_pointer,
    fingerprint,
)

SHARD_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class ViewReport:
    """One view that was published."""

    view: str
    version: int
    kind: str  # "anchor" | "delta"
    stored_bytes: int  # written to the store
    full_bytes: int  # of the folder that a reader gets


@dataclasses.dataclass(frozen=True)
class PublishReport:
    """What `publish` did. `failed`: view -> reason; those views' pointers did not move."""

    version: int
    views: Mapping[str, ViewReport]
    failed: Mapping[str, str]

    @property
    def complete(self) -> bool:
        return not self.failed

    def raise_for_failures(self) -> None:
        if self.failed:
            reasons = "; ".join(f"{view}: {reason}" for view, reason in sorted(self.failed.items()))
            raise StoreError(f"version {self.version} was not published in {reasons}")


class WeightStore:
    """One run's weights. One publisher, any number of readers; safe to use from one thread at a time."""

    def __init__(self, url: str, run: str, *, backend: Backend | None = None, shard_bytes: int = SHARD_BYTES) -> None:
        """url: any fsspec URL or a path; the run's files lie under <url>/<run>/. shard_bytes bounds what `publish`
        holds in memory per view."""
        if not run or "/" in run or run.startswith("."):
            raise ValueError(f"run: must be a plain name, got {run!r}")
        self.run = run
        self._backend = backend if backend is not None else open_backend(url)
        self._shard_bytes = shard_bytes
        self._fingerprint: str | None = None  # of the first version read: one store, one model

    # ------------------------------------------------------------ what there is

    def views(self) -> list[str]:
        """Names of views that anything was ever written to."""
        return [name for name in self._backend.list(f"{self.run}/views") if _is_view_name(name)]

    def latest(self, view: str) -> int | None:
        """The version that the view's pointer names; None before the first publish."""
        pointer = self._pointer(view)
        return None if pointer is None else pointer.version

    def versions(self, view: str) -> list[int]:
        """Complete versions, ascending. Those above `latest` were abandoned by a rewind or a crash."""
        found = (_version_of(name) for name in self._backend.list(self._view_path(view)))
        return sorted(v for v in found if v is not None and MANIFEST_FILE in self._backend.list(self._path(view, v)))

    def manifest(self, view: str, version: int) -> Manifest:
        """The checked manifest. VersionNotFoundError when the version is not complete; ViewCorruptError when it is not
        what it should be.
        """
        return self._manifest(view, version)[1]

    # ------------------------------------------------------------ writing

    def publish(
        self,
        version: int,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        model_dir_files: Mapping[str, bytes],
        views: Sequence[str],
    ) -> PublishReport:
        """Writes one version in every view, each encoded from the same tensors, then moves each view's pointer.

        tensors: BF16 under Hugging Face names, consumed once; they must keep their values until this returns.
        model_dir_files: config.json (required) and tokenizer files. A view that fails is named in the report and keeps
        its old pointer and the others go on; what is wrong for all (a stale version, NaN, another model, an error of
        the iterator) raises and no pointer moves.

        Raises VersionRefusedError when a view already points at `version` or beyond (see `rewind`), CodecError for
        tensors that are not BF16, NonFiniteWeightsError for NaN or infinity, StoreError for a model that differs from
        what the run published before.
        """
        self._refuse_stale(version, views)
        config = _parse_config(model_dir_files)
        writers = {view: _ViewWriter(self._backend, self._path(view, version), self._shard_bytes) for view in views}
        failed: dict[str, str] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for view, writer in writers.items():
            _guard(failed, view, writer.start)
        for group in codecs.fusion_groups(_checked(tensors, shapes)):
            magnitudes = {name: codecs.absolute_max(name, tensor) for name, tensor in group.items()}
            for view, writer in writers.items():
                if view not in failed:
                    _guard(failed, view, writer.add, view, group, magnitudes)
        model = fingerprint(config, shapes)
        self._refuse_other_model(model, views)
        reports: dict[str, ViewReport] = {}
        for view, writer in writers.items():
            if view not in failed:
                report = _guard(
                    failed, view, self._finish, writer, view, version, model, config, shapes, model_dir_files
                )
                if report is not None:
                    reports[view] = report
        for view in failed:
            _guard({}, view, writers[view].abandon)
        return PublishReport(version, reports, failed)

    def rewind(self, view: str, version: int) -> None:
        """Moves a view's pointer back to `version`, on purpose: before a trainer resumes from an older checkpoint.

        VersionRefusedError unless the version is complete in every view of the run and not newer than the view's
        pointer.
        """
        for other in {*self.views(), view}:
            self._require_complete(other, version)
        current = self.latest(view)
        if current is not None and version > current:
            raise VersionRefusedError(f"{view}: rewind must go back from version {current}, got {version}")
        content, _ = self._manifest(view, version)
        self._point(view, version, content)

    def prune(self, keep: int) -> dict[str, list[int]]:
        """Removes all but the newest `keep` versions up to each view's pointer, and what they need. Returns what was
        removed.

        Versions above a pointer stay: a publish may be writing them.
        """
        if keep < 1:
            raise ValueError(f"keep: must be >= 1, got {keep}")
        removed: dict[str, list[int]] = {}
        for view in self.views():
            latest = self.latest(view)
            if latest is None:
                continue
            complete = [version for version in self.versions(view) if version <= latest]
            needed = set(complete[-keep:]) | {latest}
            for version in sorted(needed):
                needed.update(self._bases(view, version))
            found = (_version_of(name) for name in self._backend.list(self._view_path(view)))
            doomed = sorted(version for version in found if version is not None and version < latest)
            removed[view] = [version for version in doomed if version not in needed]
            for version in removed[view]:
                self._backend.remove(f"{self._path(view, version)}/{MANIFEST_FILE}")
                self._backend.remove(self._path(view, version))
        return removed

    # ------------------------------------------------------------ reading

    def pull(self, view: str, version: int, into: Path, *, expect_fingerprint: str | None = None) -> Path:
        """The folder <into>/<view>/v000010, complete and checked, ready for an engine to load.

        What is already there is checked and reused. A new folder is built beside its place and renamed into it, so that
        it is never seen half-made, and what was there before stays until then. ViewCorruptError names the file when
        bytes are truncated, changed, or of another run, model, view or version; VersionNotFoundError when there is no
        such version.
        """
        content, manifest = self._manifest(view, version)
        for expected in (expect_fingerprint, self._fingerprint):
            if expected is not None and manifest.fingerprint != expected:
                raise ViewCorruptError(
                    f"{self._path(view, version)}: belongs to another model: fingerprint must be {expected}, "
                    f"got {manifest.fingerprint}"
                )
        self._fingerprint = manifest.fingerprint
        target = Path(into) / view / keys.version_dir(version)
        if pulling.is_intact(target, content, manifest):
            return target
        with pulling.Building(target) as building:
            self._download(manifest, building.folder)
            (building.folder / MANIFEST_FILE).write_bytes(content)
            building.commit(lambda folder: pulling.is_intact(folder, content, manifest))
        return target

    def load(self, path: Path) -> dict[str, Tensor]:
        """The stored tensors of a pulled folder, memory-mapped; `codecs.decode` makes plain values of them."""
        return safetensors_io.load_folder(Path(path))

    # ------------------------------------------------------------ inside

    def _view_path(self, view: str) -> str:
        if not _is_view_name(view):
            raise ValueError(f"view: must be a plain name, got {view!r}")
        return f"{self.run}/views/{view}"

    def _path(self, view: str, version: int) -> str:
        return f"{self._view_path(view)}/{keys.version_dir(version)}"

    def _pointer(self, view: str) -> Pointer | None:
        path = f"{self._view_path(view)}/{keys.LATEST_POINTER}"
        try:
            return decode_pointer(self._backend.read(path), where=path)
        except FileNotFoundError:
            return None

    def _manifest(self, view: str, version: int) -> tuple[bytes, Manifest]:
        """(bytes, content), checked against the pointer when it names this version."""
        path = f"{self._path(view, version)}/{MANIFEST_FILE}"
        try:
            content = self._backend.read(path)
        except FileNotFoundError:
            raise VersionNotFoundError(
                f"{path}: no such version, or it is not complete; there are {self.versions(view)}"
            ) from None
        manifest = decode_manifest(content, where=path)
        for field, want, got in (
            ("run", self.run, manifest.run),
            ("view", view, manifest.view),
            ("version", version, manifest.version),
        ):
            if want != got:
                raise ViewCorruptError(f"{path}: {field} must be {want!r}, got {got!r}")
        pointer = self._pointer(view)
        if pointer is not None and pointer.version == version and pointer.manifest_sha256 != digest(content):
            raise ViewCorruptError(f"{path}: differs from the manifest that {keys.LATEST_POINTER} names")
        pulling.check_names(manifest, where=path)
        return content, manifest

    def _bases(self, view: str, version: int) -> set[int]:
        """Versions that `version` is stored relative to."""
        found: set[int] = set()
        base = self.manifest(view, version).base
        while base is not None and base.version not in found:
            found.add(base.version)
            base = self.manifest(view, base.version).base
        return found

    def _refuse_stale(self, version: int, views: Sequence[str]) -> None:
        if not views or len(set(views)) != len(views):
            raise ValueError(f"views: must be one or more different names, got {list(views)}")
        keys.version_dir(version)
        for view in views:
            codecs.codec(view)
            latest = self.latest(view)
            if latest is not None and version <= latest:
                raise VersionRefusedError(
                    f"{view}: version must be above {latest}, which is published, got {version}; "
                    "a resumed trainer rewinds the pointer first"
                )

    def _refuse_other_model(self, model: str, views: Sequence[str]) -> None:
        for view in views:
            pointer = self._pointer(view)
            if pointer is None:
                continue
            published = self.manifest(view, pointer.version).fingerprint
            if published != model:
                raise StoreError(
                    f"{view}: the tensors' names and shapes or the config differ from version {pointer.version}, which this "
                    f"run published: fingerprint must be {published}, got {model}"
                )

    def _require_complete(self, view: str, version: int) -> None:
        """VersionRefusedError unless a version, and all it is stored relative to, has all its files in their right
        sizes.
        """
        try:
            for needed in {version, *self._bases(view, version)}:
                self._verify_durable(view, needed, self.manifest(view, needed).stored)
        except (StoreError, FileNotFoundError) as error:
            raise VersionRefusedError(f"{view}: version {version} is not complete: {error}") from error

    def _finish(
        self,
        writer: _ViewWriter,
        view: str,
        version: int,
        model: str,
        config: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        model_dir_files: Mapping[str, bytes],
    ) -> ViewReport:
        """Everything durable and checked, then the manifest, then the pointer."""
        small = {**model_dir_files, **codecs.view_model_files(view, config, shapes)}
        writer.finish(small)
        self._verify_durable(view, version, writer.files)
        manifest = Manifest(
            run=self.run,
            view=view,
            version=version,
            fingerprint=model,
            encoder=codecs.ENCODER_VERSION,
            tensors=writer.tensors,
            files=writer.files,
            stored=writer.files,
        )
        content = encode_manifest(manifest)
        path = f"{self._path(view, version)}/{MANIFEST_FILE}"
        self._backend.replace(path, content)
        if self._backend.read(path) != content:
            raise ViewCorruptError(f"{path}: reads back other bytes than were written")
        self._point(view, version, content)
        full = sum(entry.size for entry in manifest.files.values())
        return ViewReport(view, version, "anchor", manifest.stored_bytes, full)

    def _verify_durable(self, view: str, version: int, files: Mapping[str, FileEntry]) -> None:
        for name, entry in files.items():
            size = self._backend.size(f"{self._path(view, version)}/{name}")
            if size != entry.size:
                raise ViewCorruptError(f"{self._path(view, version)}/{name}: must have {entry.size} bytes, has {size}")

    def _point(self, view: str, version: int, manifest: bytes) -> None:
        pointer = Pointer(version=version, manifest_sha256=digest(manifest))
        self._backend.replace(f"{self._view_path(view)}/{keys.LATEST_POINTER}", encode_pointer(pointer))

    def _download(self, manifest: Manifest, folder: Path) -> None:
        source = self._path(manifest.view, manifest.version)
        for name, entry in manifest.files.items():
            try:
                pulling.save(
                    self._backend.read_chunks(f"{source}/{name}"), folder / name, entry, where=f"{source}/{name}"
                )
            except FileNotFoundError:
                raise ViewCorruptError(f"{source}/{name}: named in the manifest but missing") from None


class _ViewWriter:
    """Writes one view of one version in shards; holds at most one shard's tensors."""

    def __init__(self, backend: Backend, folder: str, shard_bytes: int) -> None:
        self._backend = backend
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards = 0
        self._weight_map: dict[str, str] = {}
        self._total_bytes = 0
        self.files: dict[str, FileEntry] = {}

    @property
    def tensors(self) -> int:
        return len(self._weight_map)

    def start(self) -> None:
        """Clears what an abandoned attempt left, its manifest first: from then on the version is not there."""
        if self._backend.list(self._folder):
            self._backend.remove(f"{self._folder}/{MANIFEST_FILE}")
            self._backend.remove(self._folder)

    def add(self, view: str, group: Mapping[str, Tensor], magnitudes: Mapping[str, float]) -> None:
        for name, tensor in codecs.encode_group(view, group, magnitudes=magnitudes).items():
            size = safetensors_io.nbytes(tensor)
            if self._pending and self._pending_bytes + size > self._shard_bytes:
                self._flush(f"model-{self._shards + 1:05d}.safetensors")
            self._pending[name] = tensor
            self._pending_bytes += size

    def finish(self, small_files: Mapping[str, bytes]) -> None:
        if self._pending or not self._shards:
            self._flush(f"model-{self._shards + 1:05d}.safetensors" if self._shards else safetensors_io.SINGLE_FILE)
        index = safetensors_io.index(self._weight_map, self._total_bytes)
        for name, content in {**small_files, safetensors_io.INDEX_FILE: index}.items():
            self._write(name, [content])

    def abandon(self) -> None:
        self._backend.remove(self._folder)

    def _flush(self, name: str) -> None:
        self._write(name, safetensors_io.chunks(self._pending))
        self._weight_map.update(dict.fromkeys(self._pending, name))
        self._total_bytes += self._pending_bytes
        self._shards += 1
        self._pending, self._pending_bytes = {}, 0

    def _write(self, name: str, chunks: Iterable[Chunk]) -> None:
        hashing = _Hashing(chunks)
        self._backend.write(f"{self._folder}/{name}", hashing)
        self.files[name] = hashing.entry()


class _Hashing:
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


def _guard[R](failed: dict[str, str], view: str, step: Callable[..., R], *args: object) -> R | None:
    """step(*args); an error is noted against the view, so that the other views go on. Backends raise whatever their
    client libraries do, hence the broad except; it ends nowhere else."""
    try:
        return step(*args)
    except Exception as error:
        failed[view] = str(error) if isinstance(error, WeightsError) else f"{type(error).__name__}: {error}"
        return None


def _checked(tensors: Iterable[tuple[str, Tensor]], shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    """The same pairs; notes each shape, refuses duplicates and other dtypes."""
    for name, tensor in tensors:
        if tensor.dtype != torch.bfloat16:
            raise CodecError(f"{name}: dtype must be bfloat16, got {tensor.dtype}")
        if name in shapes:
            raise CodecError(f"{name}: given twice")
        shapes[name] = tuple(tensor.shape)
        yield name, tensor.detach()


def _parse_config(model_dir_files: Mapping[str, bytes]) -> dict[str, Any]:
    if "config.json" not in model_dir_files:
        raise ValueError(f"model_dir_files: must hold config.json, got {sorted(model_dir_files)}")
    for name in model_dir_files:
        if name == MANIFEST_FILE or not pulling.is_plain_name(name):
            raise ValueError(f"model_dir_files: {name!r} must be a plain file name other than {MANIFEST_FILE}")
    config = json.loads(model_dir_files["config.json"])
    if not isinstance(config, dict):
        raise ValueError("model_dir_files: config.json must be a JSON object")
    return config


def _is_view_name(name: str) -> bool:
    return bool(name) and "/" not in name and not name.startswith(".")


def _version_of(folder: str) -> int | None:
    """10 for "v000010"; None for any other name."""
    digits = folder[1:]
    return int(digits) if folder.startswith("v") and digits.isdecimal() and len(digits) >= 6 else None
