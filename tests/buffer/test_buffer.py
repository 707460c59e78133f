"""The buffer's promises: nothing acknowledged is lost or trained on twice, whatever comes late, twice or never."""

import msgspec
import pytest
from motley_api.records import EndedBy, Fleet, GroupShare
from motley_trainer.buffer.batch import Notice, Resume
from motley_trainer.buffer.db import BufferBrokenError, BufferDb
from trainer.kit import UID, make_trajectory


def ids(batch):
    return [trajectory.id for trajectory in batch.trajectories]


def test_no_work_before_an_attempt_has_begun(bench_of):
    bench = bench_of()
    assert bench.ask() == []
    bench.core.resume(Resume(step=0, durable=0))
    assert bench.ask() != []


def test_work_fills_free_sessions_in_whole_prompts(bench):
    works = bench.ask(sessions=8)
    assert [work.samples for work in works] == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert bench.ask(sessions=0) == []
    assert len({work.id for work in works}) == 2


def test_outstanding_prompts_are_bounded(bench):
    # 8 sessions / 4 samples + 2 slack + 2 waiting = 6 groups, however often a worker asks
    works = [work for _ in range(10) for work in bench.ask(sessions=8)]
    assert len(works) == 6
    assert bench.core.status().outstanding == 24


def test_delivered_twice_is_kept_once(bench):
    works = bench.ask()
    first = bench.deliver(works)
    again = bench.deliver(works)
    assert len(first.accepted) == 8
    assert first.duplicates == []
    assert again.accepted == []
    assert sorted(again.duplicates) == sorted(first.accepted)
    assert sorted(ids(bench.core.next_batch(1, waited_s=0.0))) == sorted(first.accepted)


def test_a_batch_waits_for_whole_groups(bench):
    works = bench.ask()
    bench.deliver(works[:1])
    assert bench.core.next_batch(1, waited_s=0.0) is None
    bench.core.deliver([make_trajectory(works[1], sample) for sample in (0, 1, 2)])
    assert bench.core.next_batch(1, waited_s=0.0) is None
    bench.core.deliver([make_trajectory(works[1], 3)])
    assert len(bench.core.next_batch(1, waited_s=2.5).trajectories) == 8


def test_infrastructure_failures_leave_the_batch_and_are_counted(bench):
    works = bench.ask()
    failed = make_trajectory(works[0], 0, ended_by=EndedBy.INFRASTRUCTURE)
    bench.core.deliver([msgspec.structs.replace(failed, reward=None)])
    bench.core.deliver([make_trajectory(works[0], sample) for sample in (1, 2, 3)])
    bench.deliver(works[1:])
    batch = bench.core.next_batch(1, waited_s=0.0)
    assert failed.id not in ids(batch)
    assert len(batch.trajectories) == 7
    (tally,) = batch.tallies
    assert (tally.name, tally.discarded, tally.infrastructure_failures) == ("h100-fp8", 1, 1)


def test_a_group_with_one_graded_sample_is_dropped_and_another_prompt_takes_its_place(bench):
    works = bench.ask()
    lost = [make_trajectory(works[0], sample) for sample in range(4)]
    bench.core.deliver([lost[0], *(msgspec.structs.replace(t, reward=None) for t in lost[1:])])
    bench.deliver(works[1:])
    assert bench.core.next_batch(1, waited_s=0.0) is None
    bench.deliver(bench.ask(sessions=4))
    batch = bench.core.next_batch(1, waited_s=0.0)
    assert not set(ids(batch)) & {t.id for t in lost}
    (tally,) = batch.tallies
    assert (tally.discarded, tally.infrastructure_failures) == (4, 3)


def test_three_rollouts_that_never_return_do_not_stop_the_step(bench):
    works = bench.ask()
    bench.core.deliver([make_trajectory(works[0], 0), make_trajectory(works[0], 1)])  # two of four come back
    bench.deliver(works[1:])
    assert bench.core.next_batch(1, waited_s=0.0) is None
    bench.now_s = works[0].deadline_unix_s
    batch = bench.core.next_batch(1, waited_s=0.0)
    assert len(batch.trajectories) == 6
    late = bench.core.deliver([make_trajectory(works[0], 2)])
    assert "closed" in late.refused[f"{works[0].id}/2"]


def test_a_prompt_with_too_few_samples_at_its_deadline_is_dealt_again_without_what_arrived(bench):
    works = bench.ask(sessions=4)
    bench.core.deliver([make_trajectory(works[0], 2)])
    bench.now_s = works[0].deadline_unix_s
    again = bench.ask(sessions=3)
    assert again[0].id == works[0].id
    assert again[0].samples == [0, 1, 3]
    assert again[0].deadline_unix_s > works[0].deadline_unix_s


def test_work_of_a_vanished_worker_is_dealt_again(bench):
    works = bench.ask(sessions=4, worker="a/1")
    bench.now_s += 60
    assert works[0].id not in [work.id for work in bench.ask(sessions=4, worker="b/1")]
    bench.now_s += 100  # 160 s of silence from a, 100 from b
    assert bench.ask(sessions=4, worker="b/1")[0].id == works[0].id


def test_a_new_incarnation_of_a_worker_takes_over_at_once(bench):
    works = bench.ask(sessions=4, worker="rollout-0/aaaa")
    bench.core.deliver([make_trajectory(works[0], 1)])
    again = bench.ask(sessions=4, worker="rollout-0/bbbb")
    assert again[0].id == works[0].id
    assert again[0].samples == [0, 2, 3]


def test_refused_samples_do_not_hold_their_group_up(bench):
    works = bench.ask()
    ack = bench.core.deliver([make_trajectory(works[0], 0, version=9)])  # a version of a lineage that is gone
    assert "not published" in ack.refused[f"{works[0].id}/0"]
    bench.core.deliver([make_trajectory(works[0], sample) for sample in (1, 2, 3)])
    bench.deliver(works[1:])
    batch = bench.core.next_batch(1, waited_s=0.0)
    assert len(batch.trajectories) == 7
    assert batch.tallies[0].discarded == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"work": "99", "id": "99/0"}, "not dealt"), ({"work": "x", "id": "x/0"}, "not dealt"), ({"task": "other"}, "task"),
     ({"sample": 7, "id": "1/7"}, "sample")],
)  # fmt: skip
def test_what_was_not_dealt_is_refused(bench, change, reason):
    (work, *_) = bench.ask()
    ack = bench.core.deliver([msgspec.structs.replace(make_trajectory(work, 0), **change)])
    assert reason in next(iter(ack.refused.values()))
    assert ack.accepted == []


def test_staleness_cap_discards_old_samples_at_assembly(bench_of):
    bench = bench_of(staleness={"maxSteps": 0})
    bench.core.resume(Resume(step=0, durable=0))
    first, second = bench.ask(sessions=8)
    assert bench.ask(sessions=8) == []  # with a cap of 0, one batch at a time
    bench.deliver([first, second])
    bench.train(1)
    works = bench.ask(sessions=8)
    assert [work.min_version for work in works] == [1, 1]
    bench.deliver(works, version=0)  # served by an engine that ignored min_version
    assert bench.core.next_batch(2, waited_s=0.0) is None
    assert bench.core.db.counts().waiting_groups == 0
    bench.deliver(bench.ask(sessions=8), version=1)
    (tally,) = bench.core.next_batch(2, waited_s=0.0).tallies
    assert (tally.discarded, tally.stale) == (8, 8)


def test_quarantine_refuses_new_samples_and_discards_buffered_ones(bench):
    works = bench.ask()
    bench.core.deliver([make_trajectory(works[0], 0, group="bad")])
    bench.core.deliver([make_trajectory(works[0], sample) for sample in (1, 2, 3)])
    share = GroupShare(name="bad", view="fp8", capacity_sessions=8, share_milli=0, quarantined=True)
    bench.core.put_fleet(Fleet(generation=5, groups=[share]))
    ack = bench.core.deliver([make_trajectory(works[1], 0, group="bad")])
    assert "quarantined" in ack.refused[f"{works[1].id}/0"]
    bench.core.deliver([make_trajectory(works[1], sample) for sample in (1, 2, 3)])
    batch = bench.core.next_batch(1, waited_s=0.0)
    assert {trajectory.group for trajectory in batch.trajectories} == {"h100-fp8"}
    assert [(tally.name, tally.discarded) for tally in batch.tallies] == [("bad", 2)]


def test_an_older_fleet_does_not_replace_a_newer_one(bench, tmp_path):
    bench.core.put_fleet(Fleet(generation=7, groups=[], paused=True))
    bench.core.put_fleet(Fleet(generation=6, groups=[], paused=False))
    assert bench.ask() == []
    assert bench.core.status().fleet_generation == 7


def test_fleet_file_is_read_when_it_changes(bench, tmp_path):
    path = tmp_path / "fleet.json"
    bench.core.fleet_file = path
    assert bench.ask(sessions=4) != []
    path.write_bytes(msgspec.json.encode(Fleet(generation=1, groups=[], paused=True)))
    assert bench.ask(sessions=4) == []


# ------------------------------------------------------------------------------------------------ crashes and replays
def test_a_restart_finds_everything_that_was_acknowledged(bench):
    works = bench.ask()
    ack = bench.deliver(works)
    bench.reopen()
    assert bench.core.status().buffered == 8
    assert sorted(ids(bench.core.next_batch(1, waited_s=0.0))) == sorted(ack.accepted)


def test_steps_after_the_last_checkpoint_replay_on_the_same_batches(bench):
    batches = {step: ids(bench.train(step)) for step in (1, 2, 3, 4)}
    bench.core.durable(2, 2)
    bench.deliver(bench.ask(), version=4)  # waiting, sampled from a version that is not durable yet
    bench.reopen()
    assert bench.core.resume(Resume(step=2, durable=2)) == 2
    assert bench.core.status().step == 2
    for step in (3, 4):
        replay = bench.core.next_batch(step, waited_s=0.0)
        assert replay.replayed
        assert ids(replay) == batches[step]
        bench.core.commit(bench.record(step, attempt=2))
    assert not bench.core.next_batch(5, waited_s=0.0).replayed
    trained = [name for _, name in bench.core.db.trained_ids()]
    assert len(trained) == len(set(trained)) == 5 * 8


def test_the_ledger_keeps_each_step_once_and_what_was_superseded_beside_it(bench):
    for step in (1, 2, 3):
        bench.train(step)
    bench.core.resume(Resume(step=1, durable=1))
    folder = bench.root / "store" / "tiny" / "ledger"
    assert sorted(path.name for path in folder.glob("*.json")) == ["step-000001.json"]
    assert sorted(path.name for path in (folder / "superseded").iterdir()) == [
        "attempt-001-step-000002.json",
        "attempt-001-step-000003.json",
    ]
    bench.train(2, attempt=2)
    assert msgspec.json.decode((folder / "step-000002.json").read_bytes())["attempt"] == 2
    assert [(record.step, record.attempt) for record in bench.core.db.steps_after(0)] == [(1, 1), (2, 2)]


def test_bodies_go_when_no_checkpoint_needs_them_and_their_ids_stay(bench):
    for step in (1, 2, 3):
        bench.train(step)
    bench.core.durable(3, 2)
    bodies = bench.core.db._db.execute("select count(*) from trajectories where body is not null").fetchone()[0]
    assert bodies == 8  # step 3's
    again = bench.core.deliver([make_trajectory(w, 0) for w in [_work_of(bench, 1)]])
    assert len(again.duplicates) == 1


def _work_of(bench, number):
    from trainer.kit import make_work

    task = bench.core.db._db.execute("select task from works where id = ?", (number,)).fetchone()[0]
    return make_work(number, task=task)


def test_a_resume_from_before_what_was_pruned_trains_on_new_batches(bench):
    for step in (1, 2, 3):
        bench.train(step)
    bench.core.durable(3, 3)
    bench.core.resume(Resume(step=0, durable=0))  # every checkpoint was lost
    batch = bench.train(1, attempt=2)
    assert not batch.replayed
    assert len(batch.trajectories) == 8


def test_going_back_on_purpose_trains_on_new_batches_and_a_later_crash_on_the_same_ones(bench):
    first = {step: bench.train(step) for step in (1, 2, 3)}
    bench.core.durable(3, 1)
    bench.core.db.rewind(2)
    bench.core.resume(Resume(step=2, durable=2))
    assert bench.core.db.get("rewound") == 2

    def ids(batch):
        return {trajectory.id for trajectory in batch.trajectories}

    again = bench.train(3, attempt=2)
    assert not ids(again) & set.union(*(ids(batch) for batch in first.values()))
    bench.core.resume(Resume(step=2, durable=2))  # killed; nothing is to be undone this time
    replayed = bench.core.next_batch(3, waited_s=0.0)
    assert (replayed.replayed, ids(replayed)) == (True, ids(again))


def test_a_finished_run_is_known_after_a_restart_and_deals_no_more(bench):
    bench.train(1)
    bench.core.notice(Notice(finished=True))
    bench.reopen()
    assert bench.core.finished
    assert bench.ask() == []


# ------------------------------------------------------------------------------------------------ evaluation
def test_evaluations_are_graded_and_never_trained_on(bench_of):
    bench = bench_of(evaluation={"everySteps": 1, "samplesPerTask": 2})
    bench.core.resume(Resume(step=0, durable=0))
    works = bench.ask(sessions=4)
    assert [(work.split, work.task, work.samples) for work in works] == [
        ("heldout", "heldout-0", [0, 1]),
        ("heldout", "heldout-1", [0, 1]),
    ]
    assert not bench.core.may_finish()
    bench.deliver(works)  # rewards 0 and 1 each
    assert bench.core.may_finish()
    evaluation = bench.core.status().evaluation
    assert (evaluation.step, evaluation.tasks, evaluation.pass_at_1.num, evaluation.pass_at_1.den) == (0, 2, 2.0, 4.0)
    batch = bench.train(1)
    assert {trajectory.split for trajectory in batch.trajectories} == {"train"}
    assert bench.ask(sessions=2)[0].min_version == 1  # the evaluation after step 1 wants version 1
    assert (bench.root / "store" / "tiny" / "ledger" / "evaluation-000000.json").exists()


def test_an_evaluation_of_a_lost_step_is_done_again(bench_of):
    bench = bench_of(evaluation={"everySteps": 2, "samplesPerTask": 1})
    bench.core.resume(Resume(step=0, durable=0))
    bench.deliver(bench.ask(sessions=2))
    bench.train(1)
    bench.train(2)
    bench.deliver(bench.ask(sessions=2), version=2)
    assert bench.core.status().evaluation.step == 2
    bench.core.resume(Resume(step=1, durable=1))
    assert bench.core.status().evaluation.step == 0
    bench.core.commit(bench.record(2, attempt=2))
    assert [work.split for work in bench.ask(sessions=2)] == ["heldout", "heldout"]


# ------------------------------------------------------------------------------------------------ the disk
def test_a_full_disk_acknowledges_nothing_and_says_so(bench):
    works = bench.ask()
    pages = bench.core.db._db.execute("pragma page_count").fetchone()[0]
    bench.core.db._db.execute(f"pragma max_page_count = {pages}")
    with pytest.raises(BufferBrokenError, match="full"):
        bench.deliver(works)  # 8 rows of 1 KB do not fit
    assert bench.core.status().buffered == 0
    bench.core.db._db.execute("pragma max_page_count = 1000000")
    assert len(bench.deliver(works).accepted) == 8


def test_a_damaged_file_is_refused_by_name(tmp_path):
    path = tmp_path / "buffer.sqlite3"
    db = BufferDb(path, run_uid=UID)
    db.put(**{f"key{number}": number for number in range(3000)})
    db.close()
    data = bytearray(path.read_bytes())
    data[4096 * 2 : 4096 * 6] = b"\xff" * 4096 * 4
    path.write_bytes(data)
    with pytest.raises(BufferBrokenError, match=r"buffer.sqlite3: .*move it away"):
        BufferDb(path, run_uid=UID)


def test_a_file_of_another_run_is_refused(tmp_path):
    BufferDb(tmp_path / "b", run_uid="one").close()
    with pytest.raises(BufferBrokenError, match="belongs to run uid one"):
        BufferDb(tmp_path / "b", run_uid="two")
