"""What a view's files must hold, told from its config.json: every tensor's name, dtype and shape. Only headers are read.

Checksums say that a folder is what was published; this says that what was published is the view of a model. An engine that
serves is asked to load only folders that pass: one published wrongly must not take down the fleet.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from motley_api.keys import VIEW_BF16, VIEW_FP8, VIEW_NVFP4

from motley_weights import codecs
from motley_weights.codecs import fp8, nvfp4
from motley_weights.errors import ViewCorruptError
from motley_weights.names import ModelShape, expected_shapes

Layout = Mapping[str, tuple[str, tuple[int, ...]]]  # name -> (dtype as safetensors spells it, shape)
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


def stored_layout(view: str, shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    """Of every tensor that `codecs.encode` makes of tensors with these names and shapes. Pure.

    CodecError for an unknown view.
    """
    codecs.codec(view)
    stored: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        if view == VIEW_BF16 or not codecs.is_quantised(name):
            stored[name] = ("BF16", shape)
            continue
        n, k = shape
        prefix = name.removesuffix(".weight")
        if view == VIEW_FP8:
            stored[name] = ("F8_E4M3", shape)
            stored[f"{name}_scale_inv"] = ("F32", (fp8.blocks(n), fp8.blocks(k)))
        elif view == VIEW_NVFP4:
            stored[name] = ("U8", (n, k // 2))
            stored[f"{prefix}.weight_scale"] = ("F8_E4M3", (n, k // nvfp4.BLOCK))
            stored[f"{prefix}.weight_scale_2"] = stored[f"{prefix}.input_scale"] = ("F32", ())
    return stored


def check_folder(folder: Path, view: str, *, like: Path | None = None) -> None:
    """Raises ViewCorruptError naming a tensor, and what it must be, when a folder does not hold `view` of the model that its
    config.json describes; or when that is not the model of the folder `like`. WeightsError or OSError when it has none.
    """
    shape = _shape(folder)
    if like is not None and shape != (served := _shape(like)):
        raise ViewCorruptError(f"{folder.name}: belongs to another model than the one served: {shape} is not {served}")
    want, got = stored_layout(view, expected_shapes(shape)), read_layout(folder)
    for name in sorted(want.keys() | got.keys()):
        if name not in got:
            raise ViewCorruptError(f"{folder.name}: {name}: missing in view {view}")
        if name not in want:
            raise ViewCorruptError(f"{folder.name}: {name}: not a tensor of view {view}")
        for what, wanted, found in zip(("dtype", "shape"), want[name], got[name], strict=True):
            if wanted != found:
                raise ViewCorruptError(f"{folder.name}: {name}: {what} must be {wanted} in view {view}, got {found}")


def read_layout(folder: Path) -> Layout:
    """From the headers of a folder's safetensors files. ViewCorruptError when one is damaged or cut short."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= _header(path)
    return found


def _header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        content = file.read(min(length, _MAX_HEADER_BYTES))
    try:
        entries = {name: entry for name, entry in json.loads(content).items() if name != "__metadata__"}
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
        layout = {name: (str(entry["dtype"]), tuple(entry["shape"])) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ViewCorruptError(f"{path.name}: not a safetensors header: {type(error).__name__}: {error}") from error
    if path.stat().st_size != 8 + length + end:
        raise ViewCorruptError(f"{path.name}: must have {8 + length + end} bytes, has {path.stat().st_size}")
    return layout


def _shape(folder: Path) -> ModelShape:
    try:
        config: Any = json.loads((folder / "config.json").read_bytes())
    except ValueError as error:
        raise ViewCorruptError(f"{folder.name}: config.json must be JSON: {error}") from error
    if not isinstance(config, dict):
        raise ViewCorruptError(f"{folder.name}: config.json must be an object, got {type(config).__name__}")
    return ModelShape.from_hf_config(config)
