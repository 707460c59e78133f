"""manifest.json of a version: what it is, which files it has, and their checksums. Written last: a version without one
is not there.

And the pointer file `latest`, one line of JSON.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from motley_weights.errors import ViewCorruptError

MANIFEST_FILE = "manifest.json"
DELTA_SUFFIX = ".delta"  # of the file that a stored delta makes
FORMAT = "motley-view/1"


class FileEntry(msgspec.Struct, frozen=True):
    """One file: size in bytes and SHA-256 as hex."""

    size: int
    sha256: str


class DeltaBase(msgspec.Struct, frozen=True):
    """The version whose files a delta applies to; its manifest's digest pins its exact bytes."""

    version: int
    manifest_sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a version folder holds.

    files: what a pulled folder holds, byte for byte. stored: what lies in the store; equal to `files` for an anchor. A
    file that is in both is stored as it is, the rest is made from `base` and the delta files.
    """

    format: str = FORMAT
    run: str
    view: str
    version: int
    fingerprint: str  # of the model: its config and its tensors' names and shapes
    encoder: str
    tensors: int
    files: dict[str, FileEntry]
    stored: dict[str, FileEntry]
    base: DeltaBase | None = None
    chain: int = 0  # deltas between this version and its anchor, this one included
    chain_bytes: int = 0  # of those deltas together

    @property
    def stored_bytes(self) -> int:
        return sum(entry.size for entry in self.stored.values())


class Pointer(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `latest`."""

    version: int
    manifest_sha256: str


def encode_manifest(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def decode_manifest(content: bytes, *, where: str) -> Manifest:
    """ViewCorruptError when the content is not a manifest of a format known here."""
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
    except msgspec.DecodeError as error:
        raise ViewCorruptError(f"{where}: not a manifest: {error}") from error
    if manifest.format != FORMAT:
        raise ViewCorruptError(f"{where}: format must be {FORMAT}, got {manifest.format!r}")
    return manifest


def encode_pointer(pointer: Pointer) -> bytes:
    return msgspec.json.encode(pointer) + b"\n"


def decode_pointer(content: bytes, *, where: str) -> Pointer:
    try:
        return msgspec.json.decode(content, type=Pointer)
    except msgspec.DecodeError as error:
        raise ViewCorruptError(f"{where}: not a pointer: {error}") from error


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def fingerprint(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Identity of a model whatever its view and weights: SHA-256 over what shapes it (config.json without storage
    details) and its tensors' names and shapes."""
    storage = {"quantization_config", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "use_cache"}
    model = {key: value for key, value in config.items() if key not in storage}
    return digest(json.dumps([model, sorted(shapes.items())], sort_keys=True).encode())
