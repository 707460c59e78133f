"""The versioned weight store: publish views, pull them, move pointers. Layout under the store's URL:

    <run>/views/<view>/v000010/   safetensors shards, their index, config.json, tokenizer files, manifest.json (written
    last) <run>/views/<view>/latest     the pointer, moved after everything it points at is durable

A version exists once its manifest does. A reader follows checksums from the pointer to the manifest to every file, so
that what it loads is either exactly what was published or nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from motley_api import keys
from torch import Tensor

from motley_weights import codecs, pulling, safetensors_io
from motley_weights.backend import Backend, open_backend
from motley_weights.errors import (
    CodecError,
    StoreError,
    VersionNotFoundError,
    VersionRefusedError,
    ViewCorruptError,
    WeightsError,
)
from motley_weights.manifest import (
    DELTA_SUFFIX,
    MANIFEST_FILE,
    DeltaBase,
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
from motley_weights.publishing import CachedBase, DeltaPolicy, ViewWriter, usable_base

SHARD_BYTES = 256 << 20
BATCH_BYTES = 2 << 20  # of BF16, encoded at a time; or one fusion group, if that is larger


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

    def __init__(
        self,
        url: str,
        run: str,
        *,
        backend: Backend | None = None,
        shard_bytes: int = SHARD_BYTES,
        deltas: DeltaPolicy | None = None,
    ) -> None:
        """url: any fsspec URL or a path; the run's files lie under <url>/<run>/. shard_bytes bounds what `publish`
        holds in memory per view. deltas: how a publisher stores versions between anchors; None stores every version
        whole.
        """
        if not run or "/" in run or run.startswith("."):
            raise ValueError(f"run: must be a plain name, got {run!r}")
        self.run = run
        self._backend = backend if backend is not None else open_backend(url)
        self._shard_bytes = shard_bytes
        self._deltas = deltas
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
        return sorted(version for version in found if version is not None and self._is_complete(view, version))

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
        writers = {view: self._writer(view, version) for view in views}
        failed: dict[str, str] = {}
        try:
            shapes = _write_tensors(writers, tensors, failed)
            model = fingerprint(config, shapes)
            self._refuse_other_model(model, views)
            reports: dict[str, ViewReport] = {}
            for view, writer in writers.items():
                if view not in failed:
                    small = {**model_dir_files, **codecs.view_model_files(view, config, shapes)}
                    report = _guard(failed, view, self._finish, writer, view, version, model, small)
                    if report is not None:
                        reports[view] = report
        except BaseException:
            for view, writer in writers.items():
                _guard({}, view, self._abandon, writer, view, version)
            raise
        for view in failed:
            _guard({}, view, self._abandon, writers[view], view, version)
        return PublishReport(version, reports, failed)

    def rewind(self, view: str, version: int) -> None:
        """Moves a view's pointer back to `version`, on purpose: before a trainer resumes from an older checkpoint.

        VersionRefusedError unless the version is complete in every view of the run and not newer than the view's
        pointer.
        """
        try:
            current = self.latest(view)
        except ViewCorruptError:
            current = None  # a torn pointer is mended by choosing a version
        for other in sorted({*self.views(), view}):
            self._require_complete(other, version)
        if current is not None and version > current:
            raise VersionRefusedError(f"{view}: rewind must go back from version {current}, got {version}")
        content, _ = self._manifest(view, version)
        self._point(view, version, content)

    def prune(self, keep: int, *, also: Collection[int] = ()) -> dict[str, list[int]]:
        """Removes all versions up to each view's pointer but the newest `keep`, those of `also`, and what these are
        stored relative to. Returns what was removed.

        Versions above a pointer stay: a publish may be writing them.
        """
        if keep < 1:
            raise ValueError(f"keep: must be >= 1, got {keep}")
        removed: dict[str, list[int]] = {}
        for view in self.views():
            latest = self.latest(view)
            if latest is None:
                continue
            found = (_version_of(name) for name in self._backend.list(self._view_path(view)))
            below = sorted(version for version in found if version is not None and version < latest)
            complete = (version for version in reversed(below) if self._is_complete(view, version))
            needed: set[int] = set()
            for version in {latest, *itertools.islice(complete, keep - 1), *(set(also) & set(below))}:
                if version not in needed and (version == latest or self._is_complete(view, version)):
                    needed |= {version, *self._bases(view, version)}
            removed[view] = [version for version in below if version not in needed]
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
            self._build(manifest, Path(into), building.folder)
            (building.folder / MANIFEST_FILE).write_bytes(content)
            building.commit(lambda folder: pulling.is_intact(folder, content, manifest))
        return target

    def drop_pulled(self, view: str, into: Path, *, keep: Collection[int]) -> None:
        """Removes pulled folders of a view except those versions, and what a killed pull left half-made."""
        folder = Path(into) / view
        for path in folder.iterdir() if folder.is_dir() else ():
            if _version_of(path.name) not in keep and path.is_dir():
                shutil.rmtree(path, ignore_errors=True)

    def load(self, path: Path) -> dict[str, Tensor]:
        """The stored tensors of a pulled folder, memory-mapped; `codecs.decode` makes plain values of them."""
        return safetensors_io.load_folder(Path(path))

    # ------------------------------------------------------------ inside

    def _is_complete(self, view: str, version: int) -> bool:
        return MANIFEST_FILE in self._backend.list(self._path(view, version))

    def _view_path(self, view: str) -> str:
        if not _is_view_name(view):
            raise ValueError(f"view: must be a plain name, got {view!r}")
        return f"{self.run}/views/{view}"

    def _path(self, view: str, version: int) -> str:
        return f"{self._view_path(view)}/{keys.version_dir(version)}"

    def _pointer(self, view: str) -> Pointer | None:
        path = f"{self._view_path(view)}/{keys.LATEST_POINTER}"
        content = self._read_or_none(path)
        return None if content is None else decode_pointer(content, where=path)

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
        try:
            pointer = self._pointer(view)
        except ViewCorruptError:
            pointer = None  # torn: whoever asks for `latest` hears of it
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

    def _writer(self, view: str, version: int) -> ViewWriter:
        folder = self._path(view, version)
        if self._deltas is None:
            return ViewWriter(self._backend, folder, self._shard_bytes)
        base = usable_base(self._deltas, self._cached_base(self._deltas, view))
        cache = pulling.Building(self._cache_folder(self._deltas, view, version))
        return ViewWriter(self._backend, folder, self._shard_bytes, self._deltas, base, cache)

    def _cache_folder(self, policy: DeltaPolicy, view: str, version: int) -> Path:
        return policy.cache / self.run / view / keys.version_dir(version)

    def _cached_base(self, policy: DeltaPolicy, view: str) -> CachedBase | None:
        """The version that the pointer names, when the cache holds just that; else None."""
        pointer = self._pointer(view)
        if pointer is None:
            return None
        folder = self._cache_folder(policy, view, pointer.version)
        try:
            content = (folder / MANIFEST_FILE).read_bytes()
        except OSError:
            return None
        if digest(content) != pointer.manifest_sha256:
            return None
        pinned = DeltaBase(pointer.version, pointer.manifest_sha256)
        return CachedBase(folder, pinned, decode_manifest(content, where=str(folder)))

    def _finish(
        self, writer: ViewWriter, view: str, version: int, model: str, small_files: Mapping[str, bytes]
    ) -> ViewReport:
        """Everything durable and checked, then the manifest, then the pointer."""
        writer.finish(small_files)
        self._verify_durable(view, version, writer.stored)
        base = writer.base
        manifest = Manifest(
            run=self.run,
            view=view,
            version=version,
            fingerprint=model,
            encoder=codecs.ENCODER_VERSION,
            tensors=writer.tensors,
            files=writer.files,
            stored=writer.stored,
            base=base.pinned if base else None,
            chain=base.manifest.chain + 1 if base else 0,
            chain_bytes=base.manifest.chain_bytes + writer.delta_bytes if base else 0,
        )
        content = encode_manifest(manifest)
        path = f"{self._path(view, version)}/{MANIFEST_FILE}"
        self._backend.replace(path, content)
        if self._backend.read(path) != content:
            raise ViewCorruptError(f"{path}: reads back other bytes than were written")
        self._point(view, version, content)
        _guard({}, view, writer.keep_in_cache, content)  # without it the next version is an anchor, no more
        full = sum(entry.size for entry in manifest.files.values())
        return ViewReport(view, version, "delta" if base else "anchor", manifest.stored_bytes, full)

    def _abandon(self, writer: ViewWriter, view: str, version: int) -> None:
        """Removes a version that was not published; leaves it when its pointer moved, or cannot be read to tell."""
        writer.discard_cache()
        if self.latest(view) != version:
            writer.abandon()

    def _verify_durable(self, view: str, version: int, files: Mapping[str, FileEntry]) -> None:
        for name, entry in files.items():
            size = self._backend.size(f"{self._path(view, version)}/{name}")
            if size != entry.size:
                raise ViewCorruptError(f"{self._path(view, version)}/{name}: must have {entry.size} bytes, has {size}")

    def _point(self, view: str, version: int, manifest: bytes) -> None:
        """Moves the pointer and reads it back: an answer may be lost after the write, or given without one.

        Raises when the pointer is not the new one; it is then the old one again, so far as the store still answers.
        """
        path = f"{self._view_path(view)}/{keys.LATEST_POINTER}"
        old, new = self._read_or_none(path), encode_pointer(Pointer(version=version, manifest_sha256=digest(manifest)))
        refusal: Exception | None = None
        try:
            self._backend.replace(path, new)
        except Exception as error:
            refusal = error
        found = self._read_or_none(path)
        if found == new:
            return
        if found != old:  # torn, by a store that does not replace atomically
            if old is None:
                self._backend.remove(path)
            else:
                self._backend.replace(path, old)
        raise refusal or ViewCorruptError(f"{path}: reads back other bytes than were written")

    def _read_or_none(self, path: str) -> bytes | None:
        try:
            return self._backend.read(path)
        except FileNotFoundError:
            return None

    def _build(self, manifest: Manifest, into: Path, folder: Path) -> None:
        """All files of a version in `folder`: from the nearest version in `into` when deltas lead from it, else from
        the store.
        """
        links, local = self._links(manifest, into)
        try:
            self._materialise(links, local, folder)
        except ViewCorruptError:
            if local is None:
                raise
            # What lay here may be what is damaged.
            for path in folder.iterdir():
                path.unlink()
            links, _ = self._links(manifest, None)
            self._materialise(links, None, folder)

    def _links(self, manifest: Manifest, into: Path | None) -> tuple[list[Manifest], Path | None]:
        """(versions from the start of the chain to the wanted one, the folder here that holds the first of them or
        None).
        """
        links = [manifest]
        while (base := links[0].base) is not None:
            content, older = self._manifest(manifest.view, base.version)
            if digest(content) != base.manifest_sha256:
                where = self._path(manifest.view, base.version)
                raise ViewCorruptError(f"{where}: is not the version that {links[0].version} is a delta against")
            links.insert(0, older)
            if into is not None:
                local = into / manifest.view / keys.version_dir(base.version)
                if pulling.looks_like(local, content, older):
                    return links, local
        return links, None

    def _materialise(self, links: list[Manifest], local: Path | None, folder: Path) -> None:
        for plan in pulling.plan_files(links, first_is_local=local is not None):
            path, origin = folder / plan.name, links[plan.origin]
            if local is not None and plan.origin == 0:
                shutil.copyfile(local / plan.name, path)
            else:
                self._fetch(origin, plan.name, path)
            for link in plan.deltas:
                name = plan.name + DELTA_SUFFIX
                change = folder / name
                self._fetch(links[link], name, change)
                pulling.patch(path, change.read_bytes(), where=f"{self._path(origin.view, links[link].version)}/{name}")
                change.unlink()
            if plan.deltas or plan.origin == 0:
                pulling.check(pulling.entry_of(path), links[-1].files[plan.name], where=str(path))

    def _fetch(self, manifest: Manifest, name: str, path: Path) -> None:
        """One stored file, checked."""
        source = f"{self._path(manifest.view, manifest.version)}/{name}"
        try:
            pulling.save(self._backend.read_chunks(source), path, manifest.stored[name], where=source)
        except FileNotFoundError:
            raise ViewCorruptError(f"{source}: named in the manifest but missing") from None


def _write_tensors(
    writers: Mapping[str, ViewWriter], tensors: Iterable[tuple[str, Tensor]], failed: dict[str, str]
) -> dict[str, tuple[int, ...]]:
    """Feeds every view from the one stream; returns each tensor's shape. A view that fails is noted and left out from
    then on.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for view, writer in writers.items():
        _guard(failed, view, writer.start)
    for batch in _batches(codecs.fusion_groups(_checked(tensors, shapes))):
        magnitudes = {name: codecs.absolute_max(name, tensor) for name, tensor in batch.items()}
        for view, writer in writers.items():
            if view not in failed:
                _guard(failed, view, writer.add, view, batch, magnitudes)
    return shapes


def _batches(groups: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Groups in their order, small ones together: each call of a codec costs as much as some ten thousand elements."""
    batch: dict[str, Tensor] = {}
    size = 0
    for group in groups:
        batch |= group
        size += sum(safetensors_io.nbytes(tensor) for tensor in group.values())
        if size >= BATCH_BYTES:
            yield batch
            batch, size = {}, 0
    if batch:
        yield batch


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
