"""Publishing, pulling, pointers."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from motley_api.keys import STANDARD_VIEWS
from motley_weights import codecs
from motley_weights.backend import open_backend
from motley_weights.checkpoints import read_checkpoint
from motley_weights.errors import (
    CodecError,
    NonFiniteWeightsError,
    StoreError,
    VersionNotFoundError,
    VersionRefusedError,
    ViewCorruptError,
)
from motley_weights.store import WeightStore


def equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return got.keys() == want.keys() and all(torch.equal(raw(got[name]), raw(want[name])) for name in want)


@pytest.mark.parametrize("view", STANDARD_VIEWS)
def test_what_is_pulled_is_what_was_published(model: Any, url: str, tmp_path: Path, view: str):
    publisher, reader = WeightStore(url, "run"), WeightStore(url, "run")
    report = model.publish(publisher, 10)
    assert report.complete
    assert set(report.views) == set(STANDARD_VIEWS)
    assert reader.latest(view) == 10
    folder = reader.pull(view, 10, tmp_path / "pulled")
    assert folder == tmp_path / "pulled" / view / "v000010"
    assert equal(reader.load(folder), codecs.encode_group(view, model.tensors))
    assert (folder / "tokenizer.json").read_bytes() == model.files["tokenizer.json"]
    assert json.loads((folder / "config.json").read_bytes())["hidden_size"] == 32


def test_the_layout_is_the_one_that_others_read(model: Any, tmp_path: Path):
    store = WeightStore(str(tmp_path), "demo")
    model.publish(store, 3, ["nvfp4"])
    folder = tmp_path / "demo" / "views" / "nvfp4" / "v000003"
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "hf_quant_config.json",
        "manifest.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    index = json.loads((folder / "model.safetensors.index.json").read_bytes())
    with safetensors.safe_open(folder / "model.safetensors", framework="pt") as file:
        assert set(index["weight_map"]) == set(file.keys())
    assert json.loads((folder.parent / "latest").read_bytes())["version"] == 3


def test_shards_stay_below_their_bound_and_hold_every_tensor_once(model: Any, url: str, tmp_path: Path):
    store = WeightStore(url, "run", shard_bytes=5000)
    model.publish(store, 1, ["bf16"])
    folder = store.pull("bf16", 1, tmp_path)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    for shard in shards:
        with safetensors.safe_open(shard, framework="pt") as file:
            sizes = [model.tensors[name].numel() * 2 for name in file.keys()]  # noqa: SIM118
        assert sum(sizes) <= 5000 or len(sizes) == 1
    assert equal(store.load(folder), model.tensors)
    assert equal(dict(read_checkpoint(folder).tensors), model.tensors)


def test_equal_weights_give_equal_bytes(model: Any, make_model: Any, url: str):
    store = WeightStore(url, "run")
    for version in (1, 2):
        make_model().publish(store, version)
    for view in STANDARD_VIEWS:
        assert store.manifest(view, 1).files == store.manifest(view, 2).files


# ---------------------------------------------------------------- pointers


def test_tensors_encoded_together_give_the_bytes_that_they_give_one_by_one(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Large ones among small ones, at the end and in the middle, beside fusion groups that come in pieces."""
    for batch_bytes in (1, 3000, 1 << 30):
        monkeypatch.setattr("motley_weights.store.BATCH_BYTES", batch_bytes)
        model.publish(WeightStore(str(tmp_path / str(batch_bytes)), "run", shard_bytes=4000), 1)
    folders = [tmp_path / str(batch_bytes) / "run" for batch_bytes in (1, 3000, 1 << 30)]
    files = [
        {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
        for folder in folders
    ]
    assert any("model-00003" in name for name in files[0])
    assert files[0] == files[1] == files[2]


def test_a_publish_holds_one_shard_and_one_batch_whatever_the_size_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_model: Any
):
    """Counted in the tensors that are alive while the stream goes on: the publisher drops what it has written."""
    shard_bytes, batch_bytes = 20_000, 5_000
    monkeypatch.setattr("motley_weights.store.BATCH_BYTES", batch_bytes)
    most: dict[int, int] = {}
    for layers in (4, 16):
        model = make_model(num_hidden_layers=layers)
        alive: dict[int, int] = {}

        def stream(source: Any = model, alive: dict[int, int] = alive) -> Iterator[tuple[str, torch.Tensor]]:
            for i, name in enumerate(source.tensors):
                tensor = source.tensors[name].clone()
                alive[i] = tensor.nbytes
                weakref.finalize(tensor.untyped_storage(), alive.pop, i)
                yield name, tensor
                del tensor
                most[source.config["num_hidden_layers"]] = max(
                    most.get(source.config["num_hidden_layers"], 0), sum(alive.values())
                )

        store = WeightStore(str(tmp_path / str(layers)), "run", shard_bytes=shard_bytes)
        report = store.publish(1, stream(), model_dir_files=model.files, views=["bf16"])
        assert report.complete
    largest = max(tensor.nbytes for tensor in model.tensors.values())
    assert max(most.values()) <= shard_bytes + batch_bytes + 6 * largest  # a shard, a batch, incomplete fusion groups
    assert sum(tensor.nbytes for tensor in model.tensors.values()) > 4 * max(most.values())
    assert most[16] <= 1.2 * most[4]


def test_before_the_first_publish_there_is_nothing(url: str):
    store = WeightStore(url, "run")
    assert (store.latest("bf16"), store.versions("bf16"), store.views()) == (None, [], [])


def test_runs_do_not_see_each_other(model: Any, url: str):
    model.publish(WeightStore(url, "one"), 4)
    assert WeightStore(url, "two").latest("bf16") is None


@pytest.mark.parametrize("version", [4, 5])
def test_a_version_at_or_below_the_pointer_is_refused_and_changes_nothing(model: Any, url: str, version: int):
    store = WeightStore(url, "run")
    model.publish(store, 5)
    before = store.manifest("bf16", 5)
    with pytest.raises(VersionRefusedError, match=rf"bf16: version must be above 5, which is published, got {version}"):
        model.publish(store, version)
    assert (store.latest("bf16"), store.versions("bf16")) == (5, [5])
    assert store.manifest("bf16", 5) == before


def test_one_view_ahead_refuses_the_publish_in_all(model: Any, url: str):
    store = WeightStore(url, "run")
    model.publish(store, 7, ["fp8"])
    with pytest.raises(VersionRefusedError, match="fp8"):
        model.publish(store, 6)
    assert store.latest("bf16") is None
    assert store.versions("bf16") == []


def test_a_rewound_pointer_lets_the_resumed_trainer_publish_again(
    model: Any, make_model: Any, url: str, tmp_path: Path
):
    store = WeightStore(url, "run")
    for version in (1, 2, 3):
        model.publish(store, version)
    engine = WeightStore(url, "run")
    abandoned = engine.pull("bf16", 2, tmp_path)
    for view in STANDARD_VIEWS:
        store.rewind(view, 1)
        assert store.latest(view) == 1
    retrained = make_model(seed=9)
    assert retrained.publish(store, 2).complete
    # The engine holds the abandoned version 2: it is not taken for the new one.
    again = engine.pull("bf16", 2, tmp_path)
    assert again == abandoned
    assert equal(engine.load(again), retrained.tensors)


def test_a_rewind_needs_the_version_complete_in_every_view(model: Any, url: str):
    store = WeightStore(url, "run")
    model.publish(store, 1, ["bf16"])
    model.publish(store, 2)
    with pytest.raises(VersionRefusedError, match="version 1 is not complete"):
        store.rewind("bf16", 1)
    assert store.latest("bf16") == 2


def test_a_rewind_never_goes_forward(model: Any, url: str):
    store = WeightStore(url, "run")
    for version in (1, 2):
        model.publish(store, version)
    store.rewind("bf16", 1)
    with pytest.raises(VersionRefusedError, match="must go back from version 1, got 2"):
        store.rewind("bf16", 2)


def test_a_rewind_notices_a_missing_or_short_file(model: Any, tmp_path: Path):
    store = WeightStore(str(tmp_path), "run")
    for version in (1, 2):
        model.publish(store, version)
    shard = tmp_path / "run" / "views" / "fp8" / "v000001" / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(VersionRefusedError, match=r"fp8: version 1 is not complete.*must have \d+ bytes"):
        store.rewind("bf16", 1)
    shard.unlink()
    with pytest.raises(VersionRefusedError, match="fp8: version 1 is not complete"):
        store.rewind("bf16", 1)


# ---------------------------------------------------------------- pruning


def test_pruning_keeps_the_newest_and_what_the_pointer_names(model: Any, url: str, tmp_path: Path):
    store = WeightStore(url, "run")
    for version in range(1, 6):
        model.publish(store, version, ["bf16", "fp8"])
    store.rewind("fp8", 3)
    assert store.prune(keep=2) == {"bf16": [1, 2, 3], "fp8": [1]}
    assert store.versions("bf16") == [4, 5]
    assert store.versions("fp8") == [2, 3, 4, 5]  # above its pointer nothing is touched
    store.pull("fp8", 3, tmp_path)
    with pytest.raises(VersionNotFoundError, match=r"there are \[4, 5\]"):
        store.pull("bf16", 2, tmp_path)


def test_pruning_to_nothing_is_refused(url: str):
    with pytest.raises(ValueError, match="keep: must be >= 1, got 0"):
        WeightStore(url, "run").prune(keep=0)


# ---------------------------------------------------------------- pulling


def test_what_is_already_there_is_not_read_again(model: Any, faulty: Any, url: str, tmp_path: Path, monkeypatch: Any):
    store = WeightStore(url, "run")
    model.publish(store, 1)
    folder = store.pull("fp8", 1, tmp_path)
    inode = (folder / "model.safetensors").stat().st_ino
    monkeypatch.setattr(store._backend, "read_chunks", lambda path: pytest.fail(f"read {path} again"))
    assert store.pull("fp8", 1, tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_ino == inode


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_local_copy_is_replaced(model: Any, url: str, tmp_path: Path, damage: str):
    store = WeightStore(url, "run")
    model.publish(store, 1)
    shard = store.pull("bf16", 1, tmp_path) / "model.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    if damage == "remove":
        shard.unlink()
    else:
        shard.write_bytes(content if damage == "flip" else content[:-1])
    assert equal(store.load(store.pull("bf16", 1, tmp_path)), model.tensors)
    assert [path.name for path in (tmp_path / "bf16").iterdir()] == ["v000001"]


FILES = ["config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["flip", "truncate", "extend", "remove"])
def test_damaged_bytes_in_the_store_are_refused_and_nothing_is_applied(
    model: Any, url: str, tmp_path: Path, file: str, damage: str
):
    store = WeightStore(url, "run")
    model.publish(store, 1)
    served = store.pull("fp8", 1, tmp_path / "pulled")
    model.publish(store, 2)
    path = f"run/views/fp8/v000002/{file}"
    backend = open_backend(url)
    content = bytearray(backend.read(path))
    content[len(content) // 2] ^= 0x10
    if damage == "remove":
        backend.remove(path)
    else:
        changed = {"flip": content, "truncate": content[:-3], "extend": content + b"x"}[damage]
        backend.write(path, [bytes(changed)])
    with pytest.raises(ViewCorruptError, match=file):
        store.pull("fp8", 2, tmp_path / "pulled")
    assert [entry.name for entry in (tmp_path / "pulled" / "fp8").iterdir()] == ["v000001"]
    assert store.load(served)


def test_a_damaged_manifest_is_refused(model: Any, url: str, tmp_path: Path):
    store = WeightStore(url, "run")
    model.publish(store, 1)
    path = "run/views/bf16/v000001/manifest.json"
    backend = open_backend(url)
    content = backend.read(path)
    for damaged in (content[:-20], content.replace(b'"tensors": ', b'"tensors": 1'), b""):
        backend.write(path, [damaged])
        with pytest.raises(ViewCorruptError, match=r"manifest\.json"):
            store.pull("bf16", 1, tmp_path)


def test_a_view_of_another_kind_version_run_or_model_is_refused(model: Any, make_model: Any, url: str, tmp_path: Path):
    store, other = WeightStore(url, "run"), WeightStore(url, "other")
    for version in (1, 2):
        model.publish(store, version)
    bigger = make_model(vocab_size=48)
    bigger.publish(other, 1)
    backend = open_backend(url)

    def copy(source: str, target: str) -> None:
        for name in backend.list(source):
            backend.write(f"{target}/{name}", [backend.read(f"{source}/{name}")])

    copy("run/views/fp8/v000001", "run/views/bf16/v000001")
    with pytest.raises(ViewCorruptError, match="view must be 'bf16', got 'fp8'"):
        store.pull("bf16", 1, tmp_path)
    copy("run/views/nvfp4/v000002", "run/views/nvfp4/v000001")
    with pytest.raises(ViewCorruptError, match="version must be 1, got 2"):
        store.pull("nvfp4", 1, tmp_path)
    copy("other/views/fp8/v000001", "run/views/fp8/v000001")
    with pytest.raises(ViewCorruptError, match="run must be 'run', got 'other'"):
        store.pull("fp8", 1, tmp_path)
    wanted = store.manifest("fp8", 2).fingerprint
    with pytest.raises(ViewCorruptError, match="belongs to another model"):
        other.pull("fp8", 1, tmp_path, expect_fingerprint=wanted)
    assert not any(tmp_path.glob("*/v*"))


def test_an_engine_refuses_a_model_other_than_the_first_it_pulled(
    model: Any, make_model: Any, url: str, tmp_path: Path
):
    engine = WeightStore(url, "run")
    model.publish(WeightStore(url, "run"), 1)
    engine.pull("bf16", 1, tmp_path)
    open_backend(url).remove("run")
    make_model(vocab_size=48).publish(WeightStore(url, "run"), 2)
    with pytest.raises(ViewCorruptError, match="belongs to another model"):
        engine.pull("bf16", 2, tmp_path)


def test_a_manifest_cannot_write_outside_its_folder(model: Any, url: str, tmp_path: Path):
    store = WeightStore(url, "run")
    model.publish(store, 1, ["bf16"])
    backend, path = open_backend(url), "run/views/bf16/v000001/manifest.json"
    manifest = json.loads(backend.read(path))
    for bad in ("../evil", "/evil", ".hidden", "a\\b", "manifest.json"):
        entry = manifest["files"]["config.json"]
        changed = {**manifest, "files": {bad: entry}, "stored": {bad: entry}}
        backend.write(path, [json.dumps(changed).encode()])
        backend.remove("run/views/bf16/latest")
        with pytest.raises(ViewCorruptError, match="file name must be plain"):
            store.pull("bf16", 1, tmp_path)


def test_a_version_that_is_not_there_names_those_that_are(model: Any, url: str, tmp_path: Path):
    store = WeightStore(url, "run")
    model.publish(store, 2)
    with pytest.raises(VersionNotFoundError, match=r"v000009/manifest\.json: .* there are \[2\]"):
        store.pull("bf16", 9, tmp_path)


def test_old_pulls_are_dropped_and_a_half_made_one_with_them(model: Any, url: str, tmp_path: Path):
    store = WeightStore(url, "run")
    for version in (1, 2, 3):
        model.publish(store, version, ["bf16"])
        store.pull("bf16", version, tmp_path)
    (tmp_path / "bf16" / ".v000004.0.partial").mkdir()
    store.drop_pulled("bf16", tmp_path, keep={2, 3})
    assert sorted(path.name for path in (tmp_path / "bf16").iterdir()) == ["v000002", "v000003"]


# ---------------------------------------------------------------- what publish refuses


def test_nan_in_one_tensor_stops_the_publish_in_every_view(model: Any, url: str):
    store = WeightStore(url, "run")
    model.publish(store, 1)
    model.tensors["model.norm.weight"][3] = float("nan")
    with pytest.raises(NonFiniteWeightsError, match=r"model\.norm\.weight"):
        model.publish(store, 2)
    for view in STANDARD_VIEWS:
        assert (store.latest(view), store.versions(view)) == (1, [1])


def test_an_error_of_the_trainer_leaves_nothing_behind(model: Any, tmp_path: Path):
    store = WeightStore(str(tmp_path), "run", shard_bytes=4000)

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        for count, pair in enumerate(model.tensors.items()):
            if count == 9:
                raise RuntimeError("a rank died")
            yield pair

    with pytest.raises(RuntimeError, match="a rank died"):
        store.publish(1, gather(), model_dir_files=model.files, views=["bf16", "fp8"])
    assert (store.latest("bf16"), store.versions("bf16")) == (None, [])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_different_model_cannot_continue_a_run(model: Any, make_model: Any, url: str):
    store = WeightStore(url, "run")
    model.publish(store, 1)
    with pytest.raises(StoreError, match="differ from version 1"):
        make_model(vocab_size=48).publish(store, 2)
    del model.tensors["lm_head.weight"]
    with pytest.raises(StoreError, match="differ from version 1"):
        model.publish(store, 2)
    assert store.latest("bf16") == 1


def test_a_view_that_cannot_hold_the_model_does_not_stop_the_others(make_model: Any, url: str):
    odd = make_model(hidden_size=24)  # no multiple of 16
    report = odd.publish(WeightStore(url, "run"), 1)
    assert set(report.failed) == {"nvfp4"}
    assert "multiple of 16" in report.failed["nvfp4"]
    with pytest.raises(StoreError, match=r"version 1 was not published in nvfp4: model\.layers"):
        report.raise_for_failures()
    reader = WeightStore(url, "run")
    assert [reader.latest(view) for view in STANDARD_VIEWS] == [1, 1, None]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"views": []}, ValueError, "views: must be one or more different names"),
        ({"views": ["bf16", "bf16"]}, ValueError, "views: must be one or more different names"),
        ({"views": ["int4"]}, CodecError, "must be one of bf16, fp8, nvfp4, got 'int4'"),
        ({"version": -1}, ValueError, "version must be >= 0, got -1"),
        ({"model_dir_files": {}}, ValueError, r"must hold config\.json"),
        ({"model_dir_files": {"config.json": b"[]"}}, ValueError, "must be a JSON object"),
        ({"model_dir_files": {"config.json": b"{}", "../x": b""}}, ValueError, "must be a plain file name"),
        ({"tensors": [("a", torch.ones(2))]}, CodecError, "a: dtype must be bfloat16"),
        ({"tensors": [("a", torch.ones(2, dtype=torch.bfloat16))] * 2}, CodecError, "a: given twice"),
    ],
)
def test_bad_arguments_are_named(model: Any, url: str, change: dict[str, Any], error: type[Exception], message: str):
    arguments: dict[str, Any] = {
        "version": 1,
        "tensors": model.tensors.items(),
        "model_dir_files": model.files,
        "views": ["bf16"],
        **change,
    }
    with pytest.raises(error, match=message):
        WeightStore(url, "run").publish(**arguments)
    assert WeightStore(url, "run").versions("bf16") == []


@pytest.mark.parametrize("run", ["", "a/b", ".hidden"])
def test_a_run_is_a_plain_name(run: str, tmp_path: Path):
    with pytest.raises(ValueError, match="run: must be a plain name"):
        WeightStore(str(tmp_path), run)
