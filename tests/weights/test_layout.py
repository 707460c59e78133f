"""What a view's files must hold: told from config.json, checked by headers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from motley_api.keys import STANDARD_VIEWS
from motley_weights import codecs, layout
from motley_weights.errors import CodecError, ViewCorruptError
from motley_weights.store import WeightStore

DTYPES = {torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8", torch.float32: "F32"}


@pytest.mark.parametrize("view", STANDARD_VIEWS)
def test_the_layout_is_that_of_what_the_encoder_makes(model: Any, view: str):
    shapes = {name: tuple(tensor.shape) for name, tensor in model.tensors.items()}
    stored = codecs.encode_group(view, model.tensors)
    want = {name: (DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in stored.items()}
    assert layout.stored_layout(view, shapes) == want


def test_partial_blocks_have_scales_too():
    stored = layout.stored_layout("fp8", {"model.layers.0.mlp.down_proj.weight": (130, 257)})
    assert stored["model.layers.0.mlp.down_proj.weight_scale_inv"] == ("F32", (2, 3))


def test_an_unknown_view_names_those_there_are():
    with pytest.raises(CodecError, match="must be one of bf16, fp8, nvfp4, got 'int4'"):
        layout.stored_layout("int4", {})


@pytest.fixture(params=STANDARD_VIEWS)
def pulled(request: pytest.FixtureRequest, model: Any, url: str, tmp_path: Path) -> tuple[str, Path]:
    store = WeightStore(url, "run", shard_bytes=4000)
    model.publish(store, 1)
    return request.param, store.pull(request.param, 1, tmp_path / "pulled")


def test_what_was_published_passes(pulled: tuple[str, Path]):
    view, folder = pulled
    layout.check_folder(folder, view)
    layout.check_folder(folder, view, like=folder)


def a_shard_gone(folder: Path) -> None:
    next(folder.glob("model-00001*.safetensors")).unlink()


def a_byte_short(folder: Path) -> None:
    path = next(folder.glob("model-00001*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])


def half_a_header(folder: Path) -> None:
    path = next(folder.glob("model-00001*.safetensors"))
    path.write_bytes(path.read_bytes()[:50])


def an_unknown_dtype(folder: Path) -> None:
    path = next(folder.glob("model-00001*.safetensors"))
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"Q4_K"', 1))


def a_header_that_is_a_list(folder: Path) -> None:
    next(folder.glob("model-00001*.safetensors")).write_bytes((2).to_bytes(8, "little") + b"[]")


def a_config_cut_short(folder: Path) -> None:
    (folder / "config.json").write_bytes((folder / "config.json").read_bytes()[:20])


@pytest.mark.parametrize(
    ("damage", "want"),
    [
        (a_shard_gone, "missing in view"),
        (a_byte_short, "must have .* bytes, has"),
        (half_a_header, "not a safetensors header"),
        (an_unknown_dtype, "dtype must be BF16 in view .*, got Q4_K"),
        (a_header_that_is_a_list, "not a safetensors header"),
        (a_config_cut_short, "config.json must be JSON"),
    ],
)
def test_what_is_not_the_view_is_refused_by_name(pulled: tuple[str, Path], damage: Callable[[Path], None], want: str):
    view, folder = pulled
    damage(folder)
    with pytest.raises(ViewCorruptError, match=want):
        layout.check_folder(folder, view)


def test_one_view_is_not_another(pulled: tuple[str, Path]):
    view, folder = pulled
    for other in set(STANDARD_VIEWS) - {view}:
        with pytest.raises(ViewCorruptError, match=f"view {other}"):
            layout.check_folder(folder, other)


def test_a_view_of_another_model_is_refused_beside_the_one_served(make_model: Any, tmp_path: Path):
    folders = []
    for name, changes in (("one", {}), ("two", {"vocab_size": 32})):
        store = WeightStore(str(tmp_path / name), "run")
        make_model(**changes).publish(store, 1)
        folders.append(store.pull("bf16", 1, tmp_path / f"pulled-{name}"))
    layout.check_folder(folders[1], "bf16")
    with pytest.raises(ViewCorruptError, match="belongs to another model than the one served"):
        layout.check_folder(folders[1], "bf16", like=folders[0])
    shutil.copy(folders[0] / "config.json", folders[1] / "config.json")
    with pytest.raises(ViewCorruptError, match=r"shape must be \(24, 32\) in view bf16, got \(32, 32\)"):
        layout.check_folder(folders[1], "bf16")
