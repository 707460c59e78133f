"""What the buffer does, without HTTP: one object that owns the database and decides by dealing.py and validate.py."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from motley_api.records import Fleet, StepRecord, TrainerStatus, Trajectory, TrajectoryAck, Work, WorkRequest
from motley_api.resources.rlrun import RLRunSpec, Switch

from motley_trainer.buffer.batch import Batch, Notice, Resume
from motley_trainer.buffer.db import BufferDb
from motley_trainer.buffer.dealing import Fate, Limits, groups_wanted, seed_of, task_of
from motley_trainer.buffer.ledger import Ledger
from motley_trainer.buffer.metrics import TrainerMetrics
from motley_trainer.buffer.validate import RefusedError, check

log = logging.getLogger(__name__)

WORKER_TIMEOUT_S = 120.0  # a worker that said nothing for this long is gone
DEADLINE_SLACK_S = 30.0  # beyond the episode's own limit: waiting for a session, grading, delivery


@dataclass
class BufferCore:
    """All methods run on one thread. `now` gives unix seconds."""

    run: str
    spec: RLRunSpec
    db: BufferDb
    ledger: Ledger
    train_tasks: list[str]
    heldout_tasks: list[str]
    fleet_file: Path | None = None
    now: Callable[[], float] = time.time
    metrics: TrainerMetrics = field(default_factory=TrainerMetrics)

    def __post_init__(self) -> None:
        self._fleet = Fleet(generation=-1, groups=[])
        self._fleet_mtime_ns = -1
        self._seen_s: dict[str, float] = {}
        self._started_s = self.now()
        self._notice = Notice()
        self._unwritten: list[StepRecord] = []
        cap = self.spec.staleness.max_steps
        self._limits = Limits(
            batch_prompts=self.spec.batch.prompts,
            samples_per_prompt=self.spec.batch.samples_per_prompt,
            max_lag_steps=cap,
            steps_total=self.spec.steps,
        )
        last = self.db.last_step()
        if last is not None:
            self.metrics.step(last)

    # ------------------------------------------------------------------------------------------- fleet
    def put_fleet(self, fleet: Fleet) -> None:
        if fleet.generation >= self._fleet.generation:
            self._fleet = fleet

    def _read_fleet_file(self) -> None:
        try:
            changed_ns = self.fleet_file.stat().st_mtime_ns if self.fleet_file else -1
        except OSError:
            return
        if self.fleet_file and changed_ns != self._fleet_mtime_ns:
            try:
                self.put_fleet(msgspec.json.decode(self.fleet_file.read_bytes(), type=Fleet))
                self._fleet_mtime_ns = changed_ns
            except (OSError, msgspec.DecodeError) as error:
                log.warning("event=fleet_unreadable path=%s error=%r", self.fleet_file, str(error))

    @property
    def quarantined(self) -> frozenset[str]:
        return frozenset(group.name for group in self._fleet.groups if group.quarantined)

    def sessions(self) -> int:
        """Concurrent episodes of the run: declared, or what the fleet's capacity is."""
        return self.spec.rollout.sessions or sum(group.capacity_sessions for group in self._fleet.groups)

    # ------------------------------------------------------------------------------------------- rollout workers
    def work(self, request: WorkRequest) -> list[Work]:
        self._heard(request.worker)
        self._read_fleet_file()
        self.settle()
        attempt = self.db.get("attempt")
        if self._fleet.paused or attempt == 0 or self.db.get("finished") or request.sessions <= 0:
            return []
        published = self.db.get("published")
        cap = self._limits.max_lag_steps
        floor = max(0, published - cap) if cap is not None else 0
        counts = self.db.counts()
        step = self.db.get("step")
        alive = counts.open_groups + counts.waiting_groups
        wanted = groups_wanted(self._limits, sessions=max(self.sessions(), request.sessions), step=step)
        fits = -(-request.sessions // self._limits.samples_per_prompt)
        for _ in range(min(fits, wanted - alive)):
            self.db.add_work(
                task_of=lambda number: task_of(number, self.train_tasks, self.spec.seed),
                seed_of=lambda work: seed_of(self.spec.seed, work),
                samples=self._limits.samples_per_prompt,
                min_version=floor,
            )
        deadline_s = self.now() + 2 * self.spec.tasks.limits.episode_timeout_seconds + DEADLINE_SLACK_S
        return self.db.deal(request.worker, sessions=request.sessions, deadline_s=deadline_s, min_version=floor)

    def _heard(self, worker: str) -> None:
        if worker not in self._seen_s:
            lost = self.db.release(worker)
            if lost:
                log.info("event=worker_replaced worker=%s groups_redealt=%d", worker, lost)
        self._seen_s[worker] = self.now()

    def _gone(self, worker: str) -> bool:
        return self.now() - self._seen_s.get(worker, self._started_s) > WORKER_TIMEOUT_S

    def settle(self) -> None:
        for work, fate in self.db.settle(now_s=self.now(), gone=self._gone):
            if fate is not Fate.COMPLETE:
                log.info("event=group_settled work=%d fate=%s", work, fate.value)
        self._write_evaluation()

    def _write_evaluation(self) -> None:
        evaluation = self.db.last_evaluation()
        if evaluation is None or evaluation.step == getattr(self, "_evaluation_written", None):
            return
        if self.ledger.write_evaluation(evaluation):
            self._evaluation_written = evaluation.step

    def deliver(self, trajectories: list[Trajectory]) -> TrajectoryAck:
        """Validates, keeps, acknowledges. Errors: BufferBrokenError, and then nothing is acknowledged."""
        published, quarantined = self.db.get("published", -1), self.quarantined
        algorithm = self.spec.algorithm
        needed = Switch.ENABLED in (algorithm.mask_replay, algorithm.score_centering)
        judged: list[tuple[Trajectory, str | None]] = []
        for trajectory in trajectories:
            try:
                check(trajectory, run=self.run, published=published, quarantined=quarantined, candidates_needed=needed)
            except RefusedError as refused:
                judged.append((trajectory, str(refused)))
            else:
                judged.append((trajectory, None))
        accepted, duplicates, refused_by = self.db.store(judged)
        for name, reason in refused_by.items():
            log.warning("event=trajectory_refused id=%s reason=%r", name, reason)
        self.metrics.refused(len(refused_by))
        self.settle()
        return TrajectoryAck(accepted=accepted, duplicates=duplicates, refused=refused_by)

    # ------------------------------------------------------------------------------------------- rank 0
    def resume(self, resume: Resume) -> int:
        attempt, lost = self.db.resume(resume.step, resume.durable)
        self.ledger.supersede(lost)
        self.ledger.mend(self.db.steps_after(0))
        self._notice = Notice()
        log.info("event=resumed attempt=%d step=%d steps_to_repeat=%d", attempt, resume.step, len(lost))
        if resume.step == 0:
            self._evaluate_after(0)
        return attempt

    def next_batch(self, step: int, *, waited_s: float) -> Batch | None:
        """The batch of `step`: the recorded one if it was given out before, else a new one; None while groups lack."""
        recorded = self.db.recorded_batch(step)
        if recorded is not None:
            return recorded
        self.settle()
        cap = self._limits.max_lag_steps
        # Step s trains the weights of version s - 1.
        oldest = step - 1 - cap if cap is not None else -1
        return self.db.assemble(
            step,
            prompts=self._limits.batch_prompts,
            waited_s=waited_s,
            oldest_version=oldest,
            quarantined=self.quarantined,
        )

    def commit(self, record: StepRecord) -> None:
        """A step whose file could not be written is written with a later one, or after a restart: the row is what counts."""
        self._write_ledger(record)
        self.db.commit_step(record)
        self.metrics.step(record)
        self._evaluate_after(record.step)

    def _write_ledger(self, *records: StepRecord) -> None:
        self._unwritten = [record for record in (*self._unwritten, *records) if not self.ledger.write(record)]

    def _evaluate_after(self, step: int) -> None:
        evaluation = self.spec.evaluation
        if evaluation is None or step % evaluation.every_steps or not self.heldout_tasks:
            return
        self.db.add_evaluation(
            step,
            tasks=self.heldout_tasks,
            samples=evaluation.samples_per_task,
            seed_of=lambda work: seed_of(self.spec.seed, work),
            min_version=step,
        )

    def durable(self, step: int, oldest_kept: int) -> None:
        self.db.commit_durable(step, oldest_kept)

    def notice(self, notice: Notice) -> None:
        if notice.finished:
            self.db.put(finished=1)
            self._write_ledger()
        self._notice = notice

    @property
    def finished(self) -> bool:
        return bool(self.db.get("finished"))

    def may_finish(self) -> bool:
        """No evaluation is under way that the final status would miss."""
        self.settle()
        return not self.db.pending_evaluation()

    def status(self) -> TrainerStatus:
        counts, published = self.db.counts(), self.db.get("published", -1)
        return TrainerStatus(
            run=self.run,
            attempt=self.db.get("attempt"),
            steps_total=self.spec.steps,
            step=self.db.get("step"),
            weights_version=published if self._notice.weights_version is None else self._notice.weights_version,
            durable_version=self.db.get("durable", -1),
            buffered=counts.buffered,
            outstanding=counts.outstanding,
            finished=self.finished,
            last=self.db.last_step(),
            evaluation=self.db.last_evaluation(),
            fleet_generation=self._fleet.generation,
            condition=self._notice.condition,
            message=self._notice.message,
        )
