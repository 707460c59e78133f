"""Writing and reading safetensors files without a copy of the tensors.

The format (https://huggingface.co/docs/safetensors): 8 bytes little-endian header length, a JSON header that gives each
tensor's dtype, shape and byte range, then the bytes. The writer keeps the caller's order, so equal tensors in equal
order give equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from motley_weights.errors import ViewCorruptError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_DTYPE_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
}
_ALIGNMENT = 8


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def chunks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file that holds `tensors` in their order; views of the tensors' own memory where
    contiguous.

    Raises ValueError for a dtype that is not written here.
    """
    yield header(tensors)
    for tensor in tensors.values():
        yield raw_bytes(tensor)


def header(tensors: Mapping[str, Tensor]) -> bytes:
    """Length and JSON header, padded with spaces so that the data starts aligned."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPE_NAMES:
            raise ValueError(f"{name}: dtype must be one of {sorted(_DTYPE_NAMES.values())}, got {tensor.dtype}")
        end = offset + nbytes(tensor)
        entries[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    content = json.dumps(entries, separators=(",", ":")).encode()
    content += b" " * (-len(content) % _ALIGNMENT)
    return len(content).to_bytes(8, "little") + content


def raw_bytes(tensor: Tensor) -> memoryview:
    """The tensor's little-endian bytes, without a copy when it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


def index(weight_map: Mapping[str, str], total_size: int) -> bytes:
    """model.safetensors.index.json: which file holds which tensor."""
    content = {"metadata": {"total_size": total_size}, "weight_map": dict(weight_map)}
    return (json.dumps(content, indent=1) + "\n").encode()


def shard_files(folder: Path) -> dict[str, list[str]]:
    """File name -> tensor names, from the index or, without one, the single file. Empty when the folder holds no
    weights. ValueError, KeyError or SafetensorError when index or file are damaged.
    """
    if (folder / INDEX_FILE).is_file():
        weight_map = json.loads((folder / INDEX_FILE).read_bytes())["weight_map"]
        if not isinstance(weight_map, dict):
            raise ValueError(f"{INDEX_FILE}: weight_map must be an object, got {weight_map!r}")
        files: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or "/" in file or "\\" in file:
                raise ValueError(f"{INDEX_FILE}: {name} must lie in a file of the same folder, got {file!r}")
            files.setdefault(file, []).append(name)
        return files
    if (folder / SINGLE_FILE).is_file():
        with safetensors.safe_open(folder / SINGLE_FILE, framework="pt") as single:
            return {SINGLE_FILE: list(single.keys())}
    return {}


def load_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, memory-mapped. ViewCorruptError when a file is missing, truncated or not what the index
    says.
    """
    tensors: dict[str, Tensor] = {}
    try:
        files = shard_files(folder)
    except (ValueError, KeyError, safetensors.SafetensorError) as error:
        raise ViewCorruptError(f"{folder}: weights are not readable: {error}") from error
    if not files:
        raise ViewCorruptError(f"{folder}: holds neither {INDEX_FILE} nor {SINGLE_FILE}")
    for file, names in files.items():
        try:
            loaded = safetensors.torch.load_file(folder / file)
        except (OSError, safetensors.SafetensorError) as error:
            raise ViewCorruptError(f"{folder / file}: {error}") from error
        if set(loaded) != set(names):
            raise ViewCorruptError(
                f"{folder / file}: tensors differ from the index: {sorted(set(loaded) ^ set(names))[:5]}"
            )
        tensors.update(loaded)
    return tensors
