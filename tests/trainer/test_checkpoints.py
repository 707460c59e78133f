"""A checkpoint counts only when all of it is there, is this run's, and is what was saved."""

import pytest
from motley_trainer.checkpoints import MANIFEST, TRACKER, CheckpointDamagedError, CheckpointFolder


def save(folder, step, *, keep=2, content=b"weights"):
    path = folder.begin(step)
    (path / "shard_0").write_bytes(content)
    (path / "deep").mkdir()
    (path / "deep" / "meta").write_bytes(b"m")
    return folder.complete(step, keep=keep)


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path, run_uid="u")


def test_nothing_saved_is_none(folder):
    assert folder.newest() is None


def test_the_newest_of_what_is_kept(folder, tmp_path):
    assert [save(folder, step) for step in (2, 4, 6)] == [2, 2, 4]
    assert folder.newest() == 6
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000004", "step-000006"]


def test_a_save_without_tracker_does_not_count(folder, tmp_path):
    save(folder, 2)
    path = folder.begin(4)
    (path / "shard_0").write_bytes(b"half")
    assert folder.newest() == 2
    save(folder, 4)  # begins anew in the same place
    assert folder.newest() == 4


@pytest.mark.parametrize("harm", ["change", "cut", "remove", "add", "manifest"])
def test_a_damaged_checkpoint_is_passed_over(folder, harm):
    save(folder, 2)
    save(folder, 4)
    shard = folder.path(4) / "shard_0"
    if harm == "change":
        shard.write_bytes(b"weighty")
    elif harm == "cut":
        shard.write_bytes(b"w")
    elif harm == "remove":
        shard.unlink()
    elif harm == "add":
        (folder.path(4) / "extra.pkl").write_bytes(b"x")
    else:
        (folder.path(4) / MANIFEST).write_bytes(b"{}")
    with pytest.raises(CheckpointDamagedError):
        folder.verify(4)
    assert folder.newest() == 2


def test_all_damaged_stops_instead_of_starting_over(folder, tmp_path):
    save(folder, 2)
    (folder.path(2) / "shard_0").unlink()
    with pytest.raises(CheckpointDamagedError, match=f"remove {tmp_path / TRACKER} to start from"):
        folder.newest()


def test_another_run_s_checkpoint_is_not_loaded(tmp_path):
    save(CheckpointFolder(tmp_path, run_uid="other"), 2)
    with pytest.raises(CheckpointDamagedError):
        CheckpointFolder(tmp_path, run_uid="u").newest()


def test_a_checkpoint_of_a_lineage_that_was_rewound_is_not_the_newest(folder, tmp_path):
    save(folder, 2)
    save(folder, 4)
    (tmp_path / TRACKER).write_bytes(b'{"step":2}')
    assert folder.newest() == 2


def test_going_back_takes_the_newest_whole_checkpoint_of_at_most_that_step_and_puts_later_ones_aside(tmp_path):
    folder = CheckpointFolder(tmp_path, run_uid="u")
    for step in (10, 20, 30, 34):
        save(folder, step, keep=5)
    (folder.path(20) / MANIFEST).write_text("{")
    assert folder.rewind(29) == 10  # 20 is damaged
    assert folder.newest() == 10
    assert sorted(path.name for path in tmp_path.glob("undone-*")) == [
        "undone-step-000020",
        "undone-step-000030",
        "undone-step-000034",
    ]
    save(folder, 12, keep=5)
    assert folder.newest() == 12  # and not one of those that were undone
    with pytest.raises(ValueError, match=r"a checkpoint that is there \(10, 12\), got 9"):
        folder.rewind(9)
