"""What people did by hand during the study, as docs/cases.md lists it: the points that no other test holds against the real part."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
from motley_api import records
from motley_api.records import Ratio, StepRecord, Trajectory, WorkRequest
from motley_operator.planner.plan import plan
from motley_sampler.sandbox.host import SandboxHost
from motley_sampler.tasks.files import make_workspace
from motley_sampler.tasks.format import load_task
from motley_sampler.tasks.grading import GradingError, GradingFailure, grade
from motley_trainer.buffer.batch import Notice, Resume
from motley_trainer.buffer.core import BufferCore
from motley_trainer.buffer.db import BufferDb
from motley_trainer.buffer.ledger import Ledger
from motley_trainer.checkpoints import CheckpointFolder
from planner import study
from planner.study import at
from planner.test_plan import running, settle
from trainer.kit import RUN, UID, make_trajectory, spec_of

# 3: runs preempted before their first save started from scratch. A trainer that is asked to leave saves whatever step it is at, which
# tests/trainer/test_supervisor.py holds; here: one that is killed has lost no sample that was acknowledged.


def open_core(root: Path, ledger: Ledger | None = None) -> BufferCore:
    root.mkdir(exist_ok=True)
    return BufferCore(
        run=RUN,
        spec=spec_of(root),
        db=BufferDb(root / "buffer.sqlite3", run_uid=UID),
        ledger=ledger or Ledger(f"file://{root}/store/{RUN}"),
        train_tasks=[f"train-{number}" for number in range(5)],
        heldout_tasks=[],
    )


def record(step: int, attempt: int = 1) -> StepRecord:
    return StepRecord(
        run=RUN, step=step, attempt=attempt, started_unix_s=0, finished_unix_s=0, wait_s=0, train_s=0, publish_s=0,
        reward=Ratio(1, 2), kl=Ratio(1, 2), out_of_range=Ratio(), entropy=Ratio(), grad_norm=1.0, loss=0.0, lag=Ratio(),
        groups=[],
    )  # fmt: skip


def batch_ids(core: BufferCore, step: int) -> list[str]:
    for _ in itertools.repeat(None, 8):
        batch = core.next_batch(step, waited_s=0.0)
        if batch is not None:
            return [trajectory.id for trajectory in batch.trajectories]
        works = core.work(WorkRequest(worker="w/1", sessions=8))
        core.deliver([make_trajectory(work, sample, version=step - 1) for work in works for sample in work.samples])
    raise AssertionError("no batch")


def test_point_3_a_run_killed_before_its_first_save_repeats_its_steps_on_the_same_samples(tmp_path: Path) -> None:
    core = open_core(tmp_path)
    core.resume(Resume(step=0, durable=0))
    want = []
    for step in (1, 2, 3):
        want.append(batch_ids(core, step))
        core.commit(record(step))
    core.db.close()
    again = open_core(tmp_path)
    assert again.resume(Resume(step=0, durable=0)) == 2  # the second attempt, of one run
    assert [batch_ids(again, step) for step in (1, 2, 3)] == want
    again.db.close()


# 4: uploads hung with shards missing; someone uploaded the rest, compared bytes, wrote the tracker last.


def save(folder: CheckpointFolder, step: int) -> None:
    path = folder.begin(step)
    for shard in range(4):
        (path / f"__{shard}_0.distcp").write_bytes(f"{step}-{shard}".encode())
    folder.complete(step, keep=3)


@pytest.mark.parametrize("harm", ["missing shard", "half a shard", "another step's shard", "no manifest"])
def test_point_4_a_checkpoint_that_is_not_whole_is_never_resumed_from(tmp_path: Path, harm: str) -> None:
    folder = CheckpointFolder(tmp_path, run_uid=UID)
    save(folder, 2)
    save(folder, 4)
    assert folder.newest() == 4
    shard = folder.path(4) / "__3_0.distcp"
    match harm:
        case "missing shard":
            shard.unlink()
        case "half a shard":
            shard.write_bytes(shard.read_bytes()[:1])
        case "another step's shard":
            shard.write_bytes((folder.path(2) / shard.name).read_bytes())
        case "no manifest":
            (folder.path(4) / "manifest.json").unlink()
    assert folder.newest() == 2


def test_point_4_a_save_that_hung_before_its_tracker_moved_does_not_count(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, run_uid=UID)
    save(folder, 2)
    (folder.begin(4) / "__0_0.distcp").write_bytes(b"4-0")  # and then nothing more came
    assert folder.newest() == 2
    save(folder, 4)  # what was left there is no part of the next save
    assert folder.newest() == 4


# 9: a transient file error in an event logger killed a trainer.


class FailingLedger(Ledger):
    """A store that has a bad moment."""

    def __init__(self, url: str, error: Exception) -> None:
        super().__init__(url)
        self.error, self.fails = error, False

    @property
    def _fs(self) -> Any:
        if self.fails:
            raise self.error
        return self._real

    @_fs.setter
    def _fs(self, fs: Any) -> None:
        self._real = fs


class ClientError(Exception):
    """As client libraries of object stores raise: no OSError."""


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ClientError("SlowDown")])
def test_point_9_a_ledger_that_cannot_be_written_stops_no_step_and_is_written_later(
    tmp_path: Path, error: Exception
) -> None:
    ledger = FailingLedger(f"file://{tmp_path}/store/{RUN}", error)
    core = open_core(tmp_path, ledger)
    core.resume(Resume(step=0, durable=0))

    def files() -> list[str]:
        return sorted(path.name for path in (tmp_path / "store" / RUN / "ledger").glob("step-*.json"))

    for step in (1, 2, 3):
        ledger.fails = step == 2
        batch_ids(core, step)
        core.commit(record(step))
        assert files() == [f"step-{done:06d}.json" for done in ((1, 2, 3) if step == 3 else (1,))]
    ledger.fails = True
    batch_ids(core, 4)
    core.commit(record(4))
    core.notice(Notice(finished=True))
    core.db.close()
    # The pod dies before the store is well again: the next attempt mends it.
    ledger.fails = False
    again = open_core(tmp_path, ledger)
    again.resume(Resume(step=4, durable=4))
    assert files() == [f"step-{step:06d}.json" for step in (1, 2, 3, 4)]
    again.db.close()


# 10: 128 candidates for each token as JSON objects made rollouts three times slower.


def test_point_10_candidates_travel_as_arrays_of_eight_bytes_each() -> None:
    tokens, candidates = 400, 128
    support = records.Candidates(
        counts=b"\x80\x00" * tokens, ids=bytes(4 * candidates * tokens), logprobs=bytes(4 * candidates * tokens)
    )
    work = records.Work(id="1", task="t", samples=[0], seed=0, min_version=0, deadline_unix_s=0)
    trajectory = msgspec.structs.replace(make_trajectory(work, 0), candidates=support)
    bare = msgspec.structs.replace(trajectory, candidates=records.Candidates(counts=b"", ids=b"", logprobs=b""))
    size = len(records.encode(trajectory)) - len(records.encode(bare))
    # an id and a log-prob for each, a count for each token, and a few bytes of headers
    assert 0 <= size - (8 * candidates * tokens + 2 * tokens) < 32
    assert msgspec.msgpack.decode(records.encode(trajectory), type=Trajectory) == trajectory


# 11: fleets of one group logged their source as "unknown".


def test_point_11_a_fleet_of_one_group_is_named_and_a_sample_without_a_source_is_no_sample() -> None:
    work = records.Work(id="1", task="t", samples=[0], seed=0, min_version=0, deadline_unix_s=0)
    fields = msgspec.to_builtins(make_trajectory(work, 0))
    for source in ("group", "view", "engine"):
        without = {name: value for name, value in fields.items() if name != source}
        with pytest.raises(msgspec.ValidationError, match=source):
            msgspec.convert(without, Trajectory)

    seen = running()
    alone = settle(study.snapshot(seen.groups[:1], seen.pods[:1], trainer=seen.trainer, router=seen.router), at(60))
    group = records.GroupStep(name="h100-fp8", view="fp8", samples=8, turns=80)
    decided = plan(study.snapshot(alone.groups, alone.pods, steps=(study.step(1, groups=[group]),)), at(90))
    assert decided.status is not None
    assert [(row.name, row.samples) for row in decided.status.groups] == [("h100-fp8", 8)]


# 15: a grading sandbox hung for 49 minutes past its limit, with every other episode done.


@pytest.mark.parametrize(
    "script",
    [
        "trap '' TERM INT HUP; while :; do sleep 1; done",
        "(trap '' TERM; sleep 300) & (setsid sleep 300) & exec sleep 300",
        "kill -STOP $$",
    ],
    ids=["deaf to signals", "leaves processes behind", "stopped itself"],
)
async def test_point_15_a_grader_that_hangs_ends_at_its_limit_and_grades_nothing(tmp_path: Path, script: str) -> None:
    folder = tmp_path / "tasks" / "hangs"
    for name, text in {
        "task.toml": "[verifier]\ntimeout_sec = 1.0\n",
        "instruction.md": "Wait.\n",
        "environment/code.py": "pass\n",
        "tests/test.sh": f"echo 1 > /logs/verifier/reward.txt\n{script}\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    task = load_task(folder)
    make_workspace(task, tmp_path / "work")
    async with await SandboxHost.start(tmp_path / "sandboxes") as host:
        with pytest.raises(GradingError) as error:
            await grade(host, task, tmp_path / "work")
    assert error.value.kind is GradingFailure.TIMEOUT
