"""Lossless deltas between two safetensors files of the same layout. Pure on bytes.

A training step changes about one BF16 element in a hundred, mostly by one unit in the last place. A delta keeps, per
tensor, the gaps between changed words and the differences of those words, each kind in one stream for the whole file,
compressed by zstd. Words are two bytes where the element size is even, else one; differences wrap around and are
zigzag-coded, so that a step of one up or down is 2 or 1. A tensor that changed widely stores the differences of all its
words instead.

Layout of a delta: 8 bytes little-endian length, a msgpack `_Header`, the compressed streams in the order of `_STREAMS`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from motley_weights.errors import ViewCorruptError

FORMAT = "motley-delta/1"
_STREAMS = ("gaps", "long_gaps", "low", "high")
_LONG_GAP = 255  # in `gaps`: the real gap is the next uint32 of `long_gaps`
_DENSE_FROM = 4  # one changed word in so many, or more: all words are stored
_CHUNK_WORDS = 1 << 22
_LEVEL = 3

Words = npt.NDArray[np.unsignedinteger[Any]]
Buffer = bytes | bytearray | memoryview


class _Tensor(msgspec.Struct, frozen=True, array_like=True):
    """changed: number of changed words. dense: differences of all words are stored, and no gaps."""

    changed: int
    dense: bool


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    format: str = FORMAT
    tensors: list[_Tensor]
    raw: list[int]  # bytes of each stream before compression
    compressed: list[int]


def encode(old: Buffer, new: Buffer) -> bytes | None:
    """The delta that makes the safetensors file `new` of `old`. None when their layouts (headers) differ."""
    old_layout, new_layout = _layout(old), _layout(new)
    if old_layout != new_layout:
        return None
    streams: dict[str, list[bytes]] = {name: [] for name in _STREAMS}
    tensors = [_encode_tensor(_words(old, *place), _words(new, *place), streams) for place in new_layout.places]
    raw = [b"".join(streams[name]) for name in _STREAMS]
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    packed = [compressor.compress(stream) for stream in raw]
    header = msgspec.msgpack.encode(
        _Header(tensors=tensors, raw=[len(s) for s in raw], compressed=[len(s) for s in packed])
    )
    return b"".join((len(header).to_bytes(8, "little"), header, *packed))


def apply(file: bytearray | memoryview, delta: Buffer, *, where: str) -> None:
    """Turns a safetensors file, in place, into the one that `delta` was made for. ViewCorruptError when the delta does
    not fit; the file may then hold a mixture."""
    header, streams = _open(delta, where)
    places = _layout(file).places
    if len(places) != len(header.tensors):
        raise ViewCorruptError(f"{where}: is for a file of {len(header.tensors)} tensors, not {len(places)}")
    readers = {name: _Reader(stream, where) for name, stream in streams.items()}
    for place, tensor in zip(places, header.tensors, strict=True):
        _apply_tensor(_words(file, *place), tensor, readers, where)
    for name, reader in readers.items():
        if reader.left:
            raise ViewCorruptError(f"{where}: {reader.left} bytes of {name} are left over")


# ---------------------------------------------------------------- one tensor


def _encode_tensor(old: Words, new: Words, streams: dict[str, list[bytes]]) -> _Tensor:
    changed = _changed(old, new)
    if changed.size == 0:
        return _Tensor(0, False)
    dense = changed.size * _DENSE_FROM >= new.size
    if dense:
        differences = _zigzag(new - old)
    else:
        differences = _zigzag(new[changed] - old[changed])
        gaps = np.diff(changed, prepend=-1) - 1
        streams["gaps"].append(np.minimum(gaps, _LONG_GAP).astype(np.uint8).tobytes())
        streams["long_gaps"].append(gaps[gaps >= _LONG_GAP].astype("<u4").tobytes())
    streams["low"].append(differences.astype(np.uint8).tobytes())
    if differences.itemsize == 2:
        streams["high"].append((differences >> 8).astype(np.uint8).tobytes())
    return _Tensor(int(changed.size), dense)


def _apply_tensor(words: Words, tensor: _Tensor, readers: dict[str, _Reader], where: str) -> None:
    if tensor.changed == 0:
        return
    if not 0 < tensor.changed <= words.size:
        raise ViewCorruptError(f"{where}: {tensor.changed} changed words in a tensor of {words.size}")
    count = words.size if tensor.dense else tensor.changed
    at: Any = slice(None)
    if not tensor.dense:
        gaps = readers["gaps"].take(count, "u1").astype(np.int64)
        long = gaps == _LONG_GAP
        gaps[long] = readers["long_gaps"].take(int(long.sum()), "<u4")
        at = np.cumsum(gaps + 1) - 1
        if at[-1] >= words.size:
            raise ViewCorruptError(f"{where}: changes word {at[-1]} of a tensor of {words.size}")
    differences = readers["low"].take(count, "u1").astype(words.dtype)
    if words.itemsize == 2:
        differences |= readers["high"].take(count, "u1").astype(words.dtype) << 8
    words[at] += _unzigzag(differences)


def _changed(old: Words, new: Words) -> npt.NDArray[np.int64]:
    """Ascending indices of words that differ; in chunks, so that the comparison stays in the cache."""
    found = [
        np.flatnonzero(old[start : start + _CHUNK_WORDS] != new[start : start + _CHUNK_WORDS]) + start
        for start in range(0, new.size, _CHUNK_WORDS)
    ]
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _zigzag(differences: Words) -> Words:
    """0, -1, 1, -2, ... -> 0, 1, 2, 3, ..., on the wrapped differences."""
    signed = differences.view(f"i{differences.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * signed.itemsize - 1))).view(differences.dtype)


def _unzigzag(codes: Words) -> Words:
    one = codes.dtype.type(1)
    return (codes >> one) ^ (~(codes & one) + one)


# ---------------------------------------------------------------- files and streams


class _Layout(msgspec.Struct, frozen=True):
    """A safetensors file's header bytes and each tensor's (start, end, word size), in file order."""

    header: bytes
    places: list[tuple[int, int, int]]


def _layout(file: Buffer) -> _Layout:
    view = memoryview(file)
    start = 8 + int.from_bytes(view[:8], "little")
    header = bytes(view[:start])
    entries = {name: entry for name, entry in json.loads(header[8:]).items() if name != "__metadata__"}
    places = []
    for entry in sorted(entries.values(), key=lambda entry: entry["data_offsets"]):
        first, last = entry["data_offsets"]
        places.append((start + first, start + last, 2 if entry["dtype"] in ("BF16", "F16", "F32", "I32") else 1))
    return _Layout(header, places)


def _words(file: Buffer, start: int, end: int, word_size: int) -> Words:
    return np.frombuffer(file, dtype=f"<u{word_size}", count=(end - start) // word_size, offset=start)


class _Reader:
    """Takes typed arrays off the front of a stream."""

    def __init__(self, stream: bytes, where: str) -> None:
        self._stream = stream
        self._where = where
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._stream) - self._at

    def take(self, count: int, dtype: str) -> Words:
        size = count * np.dtype(dtype).itemsize
        if size > self.left:
            raise ViewCorruptError(f"{self._where}: a stream ends early")
        taken: Words = np.frombuffer(self._stream, dtype=dtype, count=count, offset=self._at)
        self._at += size
        return taken


def _open(delta: Buffer, where: str) -> tuple[_Header, dict[str, bytes]]:
    view = memoryview(delta)
    start = 8 + int.from_bytes(view[:8], "little")
    try:
        header = msgspec.msgpack.decode(view[8:start], type=_Header)
        streams: dict[str, bytes] = {}
        for name, (packed, raw) in zip(_STREAMS, _sizes(header), strict=True):
            stream = zstandard.ZstdDecompressor().decompress(view[start : start + packed], max_output_size=raw)
            if len(stream) != raw:
                raise ViewCorruptError(f"{where}: stream {name} must have {raw} bytes, has {len(stream)}")
            streams[name] = stream
            start += packed
    except (msgspec.DecodeError, zstandard.ZstdError, ValueError) as error:
        raise ViewCorruptError(f"{where}: not a delta: {error}") from error
    if header.format != FORMAT:
        raise ViewCorruptError(f"{where}: format must be {FORMAT}, got {header.format!r}")
    return header, streams


def _sizes(header: _Header) -> Iterator[tuple[int, int]]:
    return zip(header.compressed, header.raw, strict=True)
