import itertools

import pytest
from motley_api.records import Ratio, StepRecord, WorkRequest
from motley_trainer.buffer.batch import Resume
from motley_trainer.buffer.core import BufferCore
from motley_trainer.buffer.db import BufferDb
from motley_trainer.buffer.ledger import Ledger
from motley_trainer.buffer.metrics import TrainerMetrics
from trainer.kit import RUN, UID, make_trajectory, spec_of


class Bench:
    """A buffer with a clock of its own, and a rollout worker that does as it is told."""

    def __init__(self, root, **changes):
        self.root, self.changes, self.now_s = root, changes, 1000.0
        self.core = self.open()

    def open(self):
        (self.root / "buffer").mkdir(parents=True, exist_ok=True)
        return BufferCore(
            run=RUN,
            spec=spec_of(self.root, **self.changes),
            db=BufferDb(self.root / "buffer" / "buffer.sqlite3", run_uid=UID),
            ledger=Ledger(f"file://{self.root}/store/{RUN}"),
            train_tasks=[f"train-{number}" for number in range(5)],
            heldout_tasks=["heldout-0", "heldout-1"],
            now=lambda: self.now_s,
            metrics=TrainerMetrics(),
        )

    def reopen(self):
        self.core.db.close()
        self.core = self.open()

    def ask(self, sessions=8, worker="w/1"):
        return self.core.work(WorkRequest(worker=worker, sessions=sessions))

    def deliver(self, works, *, version=0, **changes):
        return self.core.deliver(
            [make_trajectory(work, sample, version=version, **changes) for work in works for sample in work.samples]
        )

    def record(self, step, attempt=1):
        return StepRecord(
            run=RUN, step=step, attempt=attempt, started_unix_s=0, finished_unix_s=0, wait_s=0, train_s=0, publish_s=0,
            reward=Ratio(1, 2), kl=Ratio(1, 2), out_of_range=Ratio(), entropy=Ratio(), grad_norm=1.0, loss=0.0,
            lag=Ratio(), groups=[],
        )  # fmt: skip

    def train(self, step, *, attempt=1):
        """As rank 0 does: batch, then commit."""
        batch = self.core.next_batch(step, waited_s=0.0)
        if batch is None:
            for _ in itertools.repeat(None, 8):
                self.deliver(self.ask())
                batch = self.core.next_batch(step, waited_s=0.0)
                if batch is not None:
                    break
        assert batch is not None
        self.core.commit(self.record(step, attempt))
        return batch


@pytest.fixture
def bench_of(tmp_path):
    benches = []

    def make(**changes):
        bench = Bench(tmp_path, **changes)
        benches.append(bench)
        return bench

    yield make
    for bench in benches:
        bench.core.db.close()


@pytest.fixture
def bench(bench_of):
    """Two prompts of four samples a step; attempt 1 has begun at version 0."""
    bench = bench_of()
    bench.core.resume(Resume(step=0, durable=0))
    return bench
