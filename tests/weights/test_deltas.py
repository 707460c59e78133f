"""Versions stored as lossless deltas against the one before."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from motley_api.keys import STANDARD_VIEWS
from motley_weights import codecs, delta, safetensors_io
from motley_weights.backend import open_backend
from motley_weights.errors import VersionNotFoundError, ViewCorruptError
from motley_weights.store import DeltaPolicy, WeightStore


def as_file(tensors: dict[str, torch.Tensor]) -> bytes:
    return b"".join(bytes(chunk) for chunk in safetensors_io.chunks(tensors))


def applied(old: bytes, change: bytes) -> bytes:
    file = bytearray(old)
    delta.apply(file, change, where="change")
    return bytes(file)


# ---------------------------------------------------------------- the format

DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=4),
    share=st.sampled_from([0.0, 0.001, 0.01, 0.2, 0.3, 1.0]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_a_delta_reproduces_the_file_byte_for_byte(sizes: list[int], share: float, dtype: torch.dtype, seed: int):
    random = np.random.default_rng(seed)
    width = torch.empty(0, dtype=dtype).element_size()
    old, new = {}, {}
    for i, size in enumerate(sizes):
        before = random.integers(0, 256, size * width, dtype=np.uint8)  # any bytes, NaN patterns included
        after = np.where(
            random.random(size * width) < share, random.integers(0, 256, size * width, dtype=np.uint8), before
        )
        for tensors, values in ((old, before), (new, after)):
            tensors[f"t{i}"] = torch.from_numpy(values).view(dtype) if size else torch.empty(0, dtype=dtype)
    change = delta.encode(as_file(old), as_file(new))
    assert change is not None
    assert applied(as_file(old), change) == as_file(new)


def test_words_that_wrap_around_and_gaps_beyond_a_byte_come_back():
    old = torch.zeros(70_000, dtype=torch.int16)
    new = old.clone()
    # Gaps 0, 254, 255, 256 and 65,000; differences to both ends of the range.
    for at, value in ((0, -1), (255, 32767), (511, -32768), (768, 1), (65_769, -2)):
        new[at] = value
    before, after = ({"t": t.view(torch.bfloat16)} for t in (old, new))
    change = delta.encode(as_file(before), as_file(after))
    assert change is not None
    assert applied(as_file(before), change) == as_file(after)
    assert len(change) < 300


def test_files_of_another_layout_have_no_delta():
    assert delta.encode(as_file({"t": torch.ones(2)}), as_file({"t": torch.ones(3)})) is None
    assert delta.encode(as_file({"t": torch.ones(2)}), as_file({"u": torch.ones(2)})) is None


def test_a_training_step_is_more_than_twenty_times_smaller(make_model: Any):
    model = make_model(hidden_size=128, vocab_size=4096)
    before = {view: as_file(codecs.encode_group(view, model.tensors)) for view in STANDARD_VIEWS}
    model.step(seed=1, share=0.01)
    for view in STANDARD_VIEWS:
        after = as_file(codecs.encode_group(view, model.tensors))
        change = delta.encode(before[view], after)
        assert change is not None
        assert len(change) * 20 < len(after), view


@pytest.mark.parametrize("at", [3, 20, -1])
@pytest.mark.parametrize("cut", [True, False])
def test_a_damaged_delta_is_refused_or_its_result_is_caught(at: int, cut: bool):
    old, new = {"t": torch.zeros(5000).to(torch.bfloat16)}, {"t": torch.zeros(5000).to(torch.bfloat16)}
    new["t"][::7] = 1.0
    change = bytearray(delta.encode(as_file(old), as_file(new)) or b"")
    damaged = bytes(change[:at]) if cut else bytes(change[:at]) + bytes([change[at] ^ 0x55]) + bytes(change[at:][1:])
    try:
        result = applied(as_file(old), damaged)
    except ViewCorruptError:
        return
    assert result != as_file(new)  # a pull compares checksums


# ---------------------------------------------------------------- in the store


@pytest.fixture
def policy(tmp_path: Path) -> DeltaPolicy:
    return DeltaPolicy(tmp_path / "cache", max_chain=3, min_file_bytes=0)


def train(model: Any, store: WeightStore, versions: range) -> dict[int, dict[str, torch.Tensor]]:
    history = {}
    for version in versions:
        model.step(seed=version)
        assert model.publish(store, version).complete
        history[version] = dict(model.tensors)
    return history


def assert_pulls(store: WeightStore, into: Path, version: int, tensors: dict[str, torch.Tensor]) -> None:
    for view in STANDARD_VIEWS:
        folder = store.pull(view, version, into)
        assert as_file(store.load(folder)) is not None
        got, want = store.load(folder), codecs.encode_group(view, tensors)
        assert as_file(dict(sorted(got.items()))) == as_file(dict(sorted(want.items()))), (view, version)


def test_a_chain_of_deltas_ends_at_an_anchor_and_every_version_pulls_the_same(
    model: Any, url: str, policy: DeltaPolicy, tmp_path: Path
):
    store = WeightStore(url, "run", deltas=policy)
    history = train(model, store, range(1, 7))
    chains = [store.manifest("bf16", version).chain for version in range(1, 7)]
    assert chains == [0, 1, 2, 3, 0, 1]
    reader = WeightStore(url, "run")
    for version, tensors in history.items():
        assert_pulls(reader, tmp_path / f"fresh-{version}", version, tensors)
    for version in (2, 4, 3, 6):  # forwards from what is there, backwards, across an anchor
        assert_pulls(reader, tmp_path / "engine", version, history[version])


def test_a_reader_that_has_the_version_before_fetches_only_the_delta(
    model: Any, url: str, policy: DeltaPolicy, tmp_path: Path, monkeypatch: Any
):
    store = WeightStore(url, "run", deltas=policy)
    train(model, store, range(1, 4))
    reader = WeightStore(url, "run")
    reader.pull("bf16", 2, tmp_path)
    fetched: list[str] = []
    whole = reader._backend.read_chunks
    monkeypatch.setattr(reader._backend, "read_chunks", lambda path: fetched.append(path) or whole(path))
    reader.pull("bf16", 3, tmp_path)
    assert [path for path in fetched if "model.safetensors" in path and "index" not in path] == [
        "run/views/bf16/v000003/model.safetensors.delta"
    ]


def test_a_damaged_local_base_is_found_out_and_the_anchor_used(
    model: Any, url: str, policy: DeltaPolicy, tmp_path: Path
):
    store = WeightStore(url, "run", deltas=policy)
    history = train(model, store, range(1, 4))
    reader = WeightStore(url, "run")
    shard = reader.pull("bf16", 2, tmp_path) / "model.safetensors"
    for damage in (-1, 3):  # in a tensor; in the header
        content = bytearray(shard.read_bytes())
        content[damage] ^= 1
        shard.write_bytes(content)
    assert_pulls(reader, tmp_path, 3, history[3])


def test_a_damaged_cache_makes_an_anchor_not_a_delta_nobody_can_apply(
    model: Any, url: str, policy: DeltaPolicy, tmp_path: Path
):
    store = WeightStore(url, "run", deltas=policy)
    train(model, store, range(1, 2))
    cached = policy.cache / "run" / "bf16" / "v000001" / "model.safetensors"
    content = bytearray(cached.read_bytes())
    content[-1] ^= 1
    cached.write_bytes(content)
    report = model.publish(store, 2)
    assert {view: made.kind for view, made in report.views.items()} == {
        "bf16": "anchor",
        "fp8": "delta",
        "nvfp4": "delta",
    }
    assert_pulls(WeightStore(url, "run"), tmp_path / "pulled", 2, model.tensors)


def test_a_restarted_publisher_begins_with_an_anchor(model: Any, url: str, policy: DeltaPolicy, tmp_path: Path):
    train(model, WeightStore(url, "run", deltas=policy), range(1, 3))
    elsewhere = DeltaPolicy(tmp_path / "other-cache", min_file_bytes=0)
    assert model.publish(WeightStore(url, "run", deltas=elsewhere), 3).views["fp8"].kind == "anchor"
    # Its own cache is one version behind by now.
    assert model.publish(WeightStore(url, "run", deltas=policy), 4).views["fp8"].kind == "anchor"


def test_after_a_rewind_deltas_start_from_an_anchor_and_old_readers_are_not_fooled(
    model: Any, make_model: Any, url: str, policy: DeltaPolicy, tmp_path: Path
):
    store = WeightStore(url, "run", deltas=policy)
    train(model, store, range(1, 4))
    reader = WeightStore(url, "run")
    reader.pull("bf16", 2, tmp_path)  # of the attempt that is abandoned
    for view in STANDARD_VIEWS:
        store.rewind(view, 1)
    retrained = make_model(seed=5)
    history = train(retrained, store, range(2, 5))
    assert store.manifest("bf16", 2).chain == 0
    assert store.manifest("bf16", 3).chain == 1
    assert_pulls(reader, tmp_path, 3, history[3])
    assert_pulls(reader, tmp_path, 4, history[4])


def test_a_replaced_base_is_refused(model: Any, tmp_path: Path, policy: DeltaPolicy):
    store = WeightStore(str(tmp_path / "store"), "run", deltas=policy)
    train(model, store, range(1, 3))
    other = WeightStore(str(tmp_path / "twin"), "run")
    model.publish(other, 1)
    backend = open_backend(str(tmp_path))
    for name in backend.list("twin/run/views/bf16/v000001"):
        content = backend.read(f"twin/run/views/bf16/v000001/{name}")
        backend.write(f"store/run/views/bf16/v000001/{name}", [content])
    with pytest.raises(ViewCorruptError, match="is not the version that 2 is a delta against"):
        store.pull("bf16", 2, tmp_path / "pulled")
    assert not any((tmp_path / "pulled" / "bf16").glob("v*"))


def test_pruning_keeps_what_a_kept_delta_needs(model: Any, url: str, policy: DeltaPolicy, tmp_path: Path):
    store = WeightStore(url, "run", deltas=policy)
    history = train(model, store, range(1, 9))  # anchors at 1 and 5
    assert store.prune(keep=1)["bf16"] == [1, 2, 3, 4]
    assert store.versions("bf16") == [5, 6, 7, 8]
    assert_pulls(WeightStore(url, "run"), tmp_path / "pulled", 8, history[8])
    with pytest.raises(VersionNotFoundError):
        store.pull("bf16", 4, tmp_path / "pulled")


def test_small_files_are_stored_whole_and_leave_no_cache(model: Any, url: str, tmp_path: Path):
    store = WeightStore(url, "run", deltas=DeltaPolicy(tmp_path / "cache"))
    for version in (1, 2):
        report = model.publish(store, version)
        assert {made.kind for made in report.views.values()} == {"anchor"}
    assert not any((tmp_path / "cache").rglob("*.safetensors"))


def test_weights_that_changed_all_over_are_stored_whole(model: Any, make_model: Any, url: str, policy: DeltaPolicy):
    store = WeightStore(url, "run", deltas=policy)
    model.publish(store, 1)
    report = make_model(seed=77).publish(store, 2)
    assert report.views["bf16"].kind == "anchor"


def test_the_cache_holds_one_version_of_each_view(model: Any, url: str, policy: DeltaPolicy):
    train(model, WeightStore(url, "run", deltas=policy), range(1, 5))
    held = sorted(str(path.relative_to(policy.cache)) for path in policy.cache.glob("*/*/*"))
    assert held == ["run/bf16/v000004", "run/fp8/v000004", "run/nvfp4/v000004"]


def test_without_large_files_the_cache_stays_empty(model: Any, url: str, tmp_path: Path):
    store = WeightStore(url, "run", deltas=DeltaPolicy(tmp_path / "cache"))
    for version in (1, 2):
        model.publish(store, version)
    assert [path for path in (tmp_path / "cache").rglob("*") if path.name.endswith(".partial")] == []


def test_pruning_keeps_versions_asked_for_and_what_they_need(model: Any, url: str, policy: DeltaPolicy, tmp_path: Path):
    store = WeightStore(url, "run", deltas=policy)
    history = train(model, store, range(1, 12))  # anchors at 1, 5 and 9
    assert store.prune(keep=2, also=[6, 99])["bf16"] == [1, 2, 3, 4, 7, 8]
    assert store.versions("bf16") == [5, 6, 9, 10, 11]
    assert_pulls(WeightStore(url, "run"), tmp_path / "pulled", 6, history[6])
    assert_pulls(WeightStore(url, "run"), tmp_path / "pulled", 11, history[11])


def test_a_cache_that_cannot_be_made_costs_deltas_and_nothing_else(model: Any, url: str, tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    store = WeightStore(url, "run", deltas=DeltaPolicy(tmp_path / "file" / "cache", min_file_bytes=0))
    history = train(model, store, range(1, 3))
    assert store.manifest("bf16", 2).chain == 0
    assert_pulls(WeightStore(url, "run"), tmp_path / "pulled", 2, history[2])


def test_a_cache_that_fails_halfway_leaves_a_version_that_pulls(
    model: Any, url: str, policy: DeltaPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("motley_weights.store.BATCH_BYTES", 1)
    store = WeightStore(url, "run", deltas=policy, shard_bytes=4000)
    model.publish(store, 1)
    model.step(seed=1)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for i, pair in enumerate(model.tensors.items()):
            if i == len(model.tensors) // 2:  # shards before this one are in the cache, and deltas in the store
                for partial in policy.cache.rglob("*.partial"):
                    shutil.rmtree(partial)
            yield pair

    report = store.publish(2, tensors(), model_dir_files=model.files, views=STANDARD_VIEWS)
    assert report.complete
    assert report.views["bf16"].kind == "delta"
    assert {"model-00001.safetensors.delta", "model-00003.safetensors"} <= store.manifest("bf16", 2).stored.keys()
    assert_pulls(WeightStore(url, "run"), tmp_path / "pulled", 2, dict(model.tensors))
    model.step(seed=2)
    assert model.publish(store, 3).views["bf16"].kind == "anchor"
    assert_pulls(WeightStore(url, "run"), tmp_path / "pulled", 3, dict(model.tensors))
