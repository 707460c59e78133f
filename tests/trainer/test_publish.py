"""Views after a crash: behind, ahead, lacking; version 0; a view that fails."""

import json

import pytest
import torch
from motley_trainer.publish import KEEP_VERSIONS, Publisher, bf16
from motley_weights.errors import StoreError
from motley_weights.store import WeightStore
from trainer.kit import CONFIG, write_model


@pytest.fixture
def setting(tmp_path):
    from motley_weights.checkpoints import model_dir_files, read_checkpoint

    model = write_model(tmp_path / "model", hidden_size=128, moe_intermediate_size=128)
    tensors = read_checkpoint(model).tensors
    store = WeightStore(f"file://{tmp_path}/store", "r")
    return store, Publisher(store, model_dir_files(model)), lambda: ((name, tensors[name]) for name in tensors)


def test_a_version_is_published_once_in_every_view(setting):
    store, publisher, tensors = setting
    assert publisher.lacking(0) == ["bf16", "fp8", "nvfp4"]
    assert publisher.publish(0, tensors()) == {}
    assert publisher.lacking(0) == []
    assert publisher.newest_common() == 0
    assert publisher.publish(0, tensors()) == {}
    assert [store.latest(view) for view in ("bf16", "fp8", "nvfp4")] == [0, 0, 0]


def test_views_that_a_crash_left_behind_catch_up_and_those_ahead_are_rewound(setting):
    store, publisher, tensors = setting
    files = {"config.json": json.dumps(CONFIG | {"hidden_size": 128, "moe_intermediate_size": 128}).encode()}
    publisher = Publisher(store, files)
    publisher.publish(0, tensors())
    store.publish(1, tensors(), model_dir_files=files, views=["bf16", "fp8"])  # killed before nvfp4
    store.publish(2, tensors(), model_dir_files=files, views=["bf16"])
    assert publisher.lacking(1) == ["nvfp4"]
    publisher.publish(1, tensors())
    assert store.latest("nvfp4") == 1
    assert store.latest("bf16") == 2
    publisher.rewind(1)
    assert [store.latest(view) for view in ("bf16", "fp8", "nvfp4")] == [1, 1, 1]
    publisher.publish(2, tensors())
    assert publisher.newest_common() == 2


def test_a_version_that_is_gone_beneath_its_pointer_stops_the_resume(setting):
    _, publisher, tensors = setting
    for version in range(KEEP_VERSIONS + 2):
        publisher.publish(version, tensors())
    publisher.prune([])
    with pytest.raises(StoreError, match="version 1 is not complete, and the pointer is beyond it"):
        publisher.lacking(1)


def test_only_checkpoints_and_the_newest_versions_stay(setting):
    store, publisher, tensors = setting
    for version in range(9):
        publisher.publish(version, tensors())
        publisher.prune([0, 3] if version >= 3 else [0])
    for view in ("bf16", "fp8", "nvfp4"):
        assert store.versions(view) == [0, 3, 5, 6, 7, 8]
    publisher.rewind(3)
    assert publisher.newest_common() == 3


def test_a_store_that_cannot_remove_does_not_stop_training(setting, monkeypatch, caplog):
    store, publisher, tensors = setting
    for version in range(KEEP_VERSIONS + 1):
        publisher.publish(version, tensors())

    def refuses(path):
        raise PermissionError(f"{path}: access denied")

    monkeypatch.setattr(store._backend, "remove", refuses)
    publisher.prune([])
    assert "event=prune_failed" in caplog.text
    monkeypatch.undo()
    publisher.prune([])
    assert store.versions("bf16") == [1, 2, 3, 4]


def test_one_view_that_fails_leaves_the_others_going(setting, monkeypatch):
    store, publisher, tensors = setting
    publisher.publish(0, tensors())
    real = store._finish

    def failing(writer, view, *rest):
        if view == "fp8":
            raise OSError("no space left")
        return real(writer, view, *rest)

    monkeypatch.setattr(store, "_finish", failing)
    assert "no space left" in publisher.publish(1, tensors())["fp8"]
    assert [store.latest(view) for view in ("bf16", "fp8", "nvfp4")] == [1, 0, 1]
    assert publisher.newest_common() == 0
    monkeypatch.undo()
    publisher.publish(2, tensors())
    assert publisher.newest_common() == 2


def test_sources_in_other_precisions_become_bf16():
    assert [tensor.dtype for _, tensor in bf16([("a", torch.ones(2))])] == [torch.bfloat16]
