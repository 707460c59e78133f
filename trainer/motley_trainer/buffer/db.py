"""The buffer's SQLite file. Every public method is one transaction and returns after it is on the disk."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from motley_api.records import EvaluationRecord, Ratio, StepRecord, Trajectory, Work, encode

from motley_trainer.buffer.batch import Batch, GroupTally
from motley_trainer.buffer.dealing import Fate, fate_of_group, same_pod

log = logging.getLogger(__name__)

SCHEMA = """
create table if not exists meta (key text primary key, value integer not null) without rowid;
create table if not exists works (
    id integer primary key, task text not null, split text not null, seed integer not null, min_version integer not null,
    samples integer not null, eval_step integer, state text not null default 'open', worker text, deals integer not null default 0,
    deadline_s real not null default 0, closed_s real, step integer);
create index if not exists works_by_state on works (state, split);
create table if not exists trajectories (
    id text primary key, work integer not null, sample integer not null, grp text not null, view text not null,
    start_version integer not null, reward real, fate text, body blob);
create index if not exists trajectories_by_work on trajectories (work);
create table if not exists tallies (
    grp text primary key, view text not null, discarded integer not null, infrastructure integer not null,
    stale integer not null default 0) without rowid;
create table if not exists batches (step integer primary key, waited_s real not null, tallies blob not null);
create table if not exists steps (step integer primary key, record blob not null);
create table if not exists evaluations (step integer primary key, record blob not null);
"""


class BufferBrokenError(RuntimeError):
    """The file is damaged or full. Nothing was acknowledged."""


class ForeignBufferError(BufferBrokenError):
    """The file belongs to another run."""

    def __init__(self, path: Path, owner: str, run_uid: str) -> None:
        super().__init__(f"{path}: belongs to run uid {owner}, this run's is {run_uid}; move it away")
        self.owner = owner


@dataclass(frozen=True)
class Counts:
    open_groups: int  # train groups handed out or to be handed out
    waiting_groups: int  # complete, not yet in a batch
    buffered: int  # trajectories of train groups not yet in a batch
    outstanding: int  # episodes handed out and not delivered


class BufferDb:
    """One writer, one thread. `run_uid` binds the file to a run: a file of another is refused, unless it is taken over; then
    `run_uid` is that of the run which made it, as in its checkpoints."""

    def __init__(self, path: Path, *, run_uid: str, take_over: bool = False) -> None:
        self._path = path
        self.run_uid = run_uid
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5)
            self._db.execute("pragma journal_mode=wal")
            self._db.execute("pragma synchronous=full")
            problem = self._db.execute("pragma quick_check(1)").fetchone()[0]
            if problem != "ok":
                where = " ".join(problem.split())
                raise BufferBrokenError(f"{path}: the trajectory buffer is damaged ({where}); {_MEND}")
            self._db.executescript(SCHEMA)
            if "stale" not in {
                row[1] for row in self._db.execute("pragma table_info(tallies)")
            }:  # an earlier version's
                self._db.execute("alter table tallies add column stale integer not null default 0")
            self._db.execute("create table if not exists owner (run_uid text not null)")
            owner = self._db.execute("select run_uid from owner").fetchone()
            if owner is None:
                self._db.execute("insert into owner values (?)", (run_uid,))
            elif owner[0] != run_uid and not take_over:
                self._db.close()
                raise ForeignBufferError(path, owner[0], run_uid)
            else:
                self.run_uid = str(owner[0])
        except sqlite3.DatabaseError as error:
            raise BufferBrokenError(f"{path}: cannot open the trajectory buffer ({error}); {_MEND}") from error

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            self._db.execute("begin immediate")
            yield self._db
            self._db.execute("commit")
        except BaseException as error:
            if self._db.in_transaction:
                self._db.execute("rollback")
            if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.IntegrityError):
                raise BufferBrokenError(f"{self._path}: {error}; nothing was acknowledged") from error
            raise

    # ------------------------------------------------------------------------------------------- small state
    def get(self, key: str, default: int = 0) -> int:
        row = self._db.execute("select value from meta where key = ?", (key,)).fetchone()
        return default if row is None else int(row[0])

    def put(self, **values: int) -> None:
        with self._transaction() as db:
            _put(db, values)

    def counts(self) -> Counts:
        one = self._one
        return Counts(
            open_groups=one("select count(*) from works where state = 'open' and split = 'train'"),
            waiting_groups=one("select count(*) from works where state = 'complete' and split = 'train'"),
            buffered=one(
                "select count(*) from trajectories t join works w on w.id = t.work"
                " where t.fate is null and w.split = 'train' and w.state in ('open', 'complete')"
            ),
            outstanding=one(
                "select coalesce(sum(samples - (select count(*) from trajectories t where t.work = w.id)), 0)"
                " from works w where state = 'open' and worker is not null"
            ),
        )

    def _one(self, query: str, *arguments: object) -> int:
        return int(self._db.execute(query, arguments).fetchone()[0])

    # ------------------------------------------------------------------------------------------- dealing
    def add_work(
        self, *, task_of: Callable[[int], str], seed_of: Callable[[int], int], samples: int, min_version: int
    ) -> None:
        """One more train prompt, to be dealt."""
        with self._transaction() as db:
            number = self.get("dealt")
            _put(db, {"dealt": number + 1})
            work = db.execute(
                "insert into works (task, split, seed, min_version, samples) values (?, 'train', 0, ?, ?)",
                (task_of(number), min_version, samples),
            ).lastrowid
            assert work is not None
            db.execute("update works set seed = ? where id = ?", (seed_of(work), work))

    def add_evaluation(
        self, step: int, *, tasks: list[str], samples: int, seed_of: Callable[[int], int], min_version: int
    ) -> None:
        """Held-out prompts of the evaluation after `step`; a second call for a step does nothing."""
        with self._transaction() as db:
            if db.execute("select 1 from works where eval_step = ? limit 1", (step,)).fetchone():
                return
            for task in tasks:
                work = db.execute(
                    "insert into works (task, split, seed, min_version, samples, eval_step)"
                    " values (?, 'heldout', 0, ?, ?, ?)",
                    (task, min_version, samples, step),
                ).lastrowid
                assert work is not None
                db.execute("update works set seed = ? where id = ?", (seed_of(work), work))

    def deal(self, worker: str, *, sessions: int, deadline_s: float, min_version: int) -> list[Work]:
        """Prompts without a holder, held-out ones first, until the worker's free sessions are filled."""
        dealt: list[Work] = []
        with self._transaction() as db:
            rows = db.execute(
                "select id, task, split, seed, samples, min_version from works where state = 'open' and worker is null"
                " order by split = 'train', id"
            ).fetchall()
            for work, task, split, seed, samples, floor in rows:
                if sessions <= 0:
                    break
                there = {row[0] for row in db.execute("select sample from trajectories where work = ?", (work,))}
                missing = [sample for sample in range(samples) if sample not in there]
                db.execute(
                    "update works set worker = ?, deals = deals + 1, deadline_s = ? where id = ?",
                    (worker, deadline_s, work),
                )
                sessions -= len(missing)
                dealt.append(
                    Work(
                        id=str(work),
                        task=task,
                        split=split,
                        samples=missing,
                        seed=seed,
                        min_version=max(floor, min_version) if split == "train" else floor,
                        deadline_unix_s=deadline_s,
                    )
                )
        return dealt

    def settle(self, *, now_s: float, gone: Callable[[str], bool]) -> list[tuple[int, Fate]]:
        """Closes, redeals or drops what is due. Returns what was decided of train groups, for the log."""
        decided: list[tuple[int, Fate]] = []
        with self._transaction() as db:
            rows = db.execute(
                "select w.id, w.samples, w.deals, w.deadline_s, w.worker, count(t.id),"
                " coalesce(sum(t.fate is null and t.reward is not null), 0), w.split"
                " from works w left join trajectories t on t.work = w.id where w.state = 'open' group by w.id"
            ).fetchall()
            for work, samples, deals, deadline_s, worker, delivered, graded, split in rows:
                if worker is None and delivered < samples:
                    continue
                fate = fate_of_group(
                    wanted=samples,
                    delivered=delivered,
                    graded=graded,
                    deals=deals,
                    now_s=now_s,
                    deadline_s=deadline_s,
                    holder_gone=worker is not None and gone(worker),
                )
                if fate is not Fate.WAIT:
                    _settle_group(db, work, fate, now_s)
                    if split == "train":
                        decided.append((work, fate))
            _finish_evaluations(db)
        return decided

    def release(self, worker: str) -> int:
        """A new incarnation of a worker's pod asks for work: what the old one held is to be dealt again."""
        with self._transaction() as db:
            rows = db.execute("select id, worker from works where state = 'open' and worker is not null").fetchall()
            lost = [work for work, holder in rows if holder != worker and same_pod(holder, worker)]
            db.executemany("update works set worker = null where id = ?", [(work,) for work in lost])
        return len(lost)

    # ------------------------------------------------------------------------------------------- trajectories
    def store(self, trajectories: list[tuple[Trajectory, str | None]]) -> tuple[list[str], list[str], dict[str, str]]:
        """Keeps trajectories; a string beside one says why it is refused. Returns (accepted, duplicates, refused).

        A refused one leaves a mark in its group, so that the group does not wait for it.
        """
        accepted, duplicates, refused = [], [], {}
        with self._transaction() as db:
            for trajectory, reason in trajectories:
                if db.execute("select 1 from trajectories where id = ?", (trajectory.id,)).fetchone():
                    duplicates.append(trajectory.id)
                    continue
                known = _open_work(db, trajectory)
                reason = reason or known
                if reason:
                    refused[trajectory.id] = reason
                    if known is None:
                        _insert(db, trajectory, fate="refused")
                    continue
                _insert(db, trajectory, fate=None)
                accepted.append(trajectory.id)
        return accepted, duplicates, refused

    # ------------------------------------------------------------------------------------------- batches and steps
    def recorded_batch(self, step: int) -> Batch | None:
        """The batch that was given to `step` before, if any."""
        row = self._db.execute("select waited_s, tallies from batches where step = ?", (step,)).fetchone()
        if row is None:
            return None
        bodies = self._db.execute(
            "select t.body from trajectories t join works w on w.id = t.work"
            " where w.step = ? and t.fate = 'trained' order by w.id, t.sample",
            (step,),
        ).fetchall()
        return Batch(
            step=step,
            waited_s=row[0],
            replayed=True,
            trajectories=[msgspec.msgpack.decode(body, type=Trajectory) for (body,) in bodies],
            tallies=msgspec.msgpack.decode(row[1], type=list[GroupTally]),
        )

    def assemble(
        self, step: int, *, prompts: int, waited_s: float, oldest_version: int, quarantined: frozenset[str]
    ) -> Batch | None:
        """Takes the `prompts` oldest complete groups for `step`, or None while there are fewer.

        Samples older than `oldest_version` and those of quarantined groups leave their groups first; a group left with
        fewer than two graded samples is dropped.
        """
        with self._transaction() as db:
            _discard_unusable(db, oldest_version, quarantined)
            works = [
                row[0]
                for row in db.execute(
                    "select id from works where state = 'complete' and split = 'train' order by closed_s, id limit ?",
                    (prompts,),
                )
            ]
            if len(works) < prompts:
                return None
            for work in works:
                db.execute("update works set state = 'assigned', step = ? where id = ?", (step, work))
                db.execute(
                    "update trajectories set fate = case when reward is null then 'infrastructure' else 'trained' end"
                    " where work = ? and fate is null",
                    (work,),
                )
                _tally(db, work)
            tallies = [
                GroupTally(name=name, view=view, discarded=discarded, infrastructure_failures=failures, stale=stale)
                for name, view, discarded, failures, stale in db.execute(
                    "select grp, view, discarded, infrastructure, stale from tallies order by grp"
                )
            ]
            db.execute("delete from tallies")
            db.execute("insert into batches values (?, ?, ?)", (step, waited_s, encode(tallies)))
        batch = self.recorded_batch(step)
        assert batch is not None
        return msgspec.structs.replace(batch, replayed=False)

    def resume(self, step: int, durable: int) -> tuple[int, list[StepRecord]]:
        """A gang starts from `step`. Returns (its attempt, records of later steps, which no longer hold)."""
        with self._transaction() as db:
            attempt = self.get("attempt") + 1
            lost = db.execute("select record from steps where step > ? order by step", (step,)).fetchall()
            db.execute("delete from steps where step > ?", (step,))
            db.execute("delete from evaluations where step > ?", (step,))
            db.execute("delete from trajectories where work in (select id from works where eval_step > ?)", (step,))
            db.execute("delete from works where eval_step > ?", (step,))
            if step < self.get("pruned"):
                # Older than any checkpoint that was to be kept: the batches of these steps cannot be replayed any more.
                db.execute("delete from batches where step > ?", (step,))
                db.execute(
                    "update trajectories set fate = 'superseded' where fate = 'trained' and work in"
                    " (select id from works where step > ?)",
                    (step,),
                )
                db.execute("update works set state = 'dropped', step = null where step > ?", (step,))
            pruned = min(step, self.get("pruned"))  # what was older is gone with its batches
            _put(
                db,
                {
                    "attempt": attempt,
                    "step": step,
                    "published": step,
                    "durable": durable,
                    "finished": 0,
                    "pruned": pruned,
                },
            )
        return attempt, [msgspec.msgpack.decode(body, type=StepRecord) for (body,) in lost]

    def rewind(self, to_step: int) -> None:
        """The next resume trains on new batches from there, not on those of the steps that are undone."""
        self.put(rewound=to_step, pruned=max(self.get("step"), self.get("pruned")))

    def commit_step(self, record: StepRecord) -> None:
        with self._transaction() as db:
            db.execute("insert or replace into steps values (?, ?)", (record.step, encode(record)))
            _put(db, {"step": record.step, "published": record.step})

    def commit_durable(self, step: int, oldest_kept: int) -> None:
        """A checkpoint covers `step`; bodies of trajectories that no replay can need are dropped, their ids stay."""
        with self._transaction() as db:
            _put(db, {"durable": step, "pruned": max(oldest_kept, self.get("pruned"))})
            db.execute(
                "update trajectories set body = null where body is not null and work in"
                " (select id from works where step <= ? or state in ('dropped', 'evaluated'))",
                (oldest_kept,),
            )

    def steps_after(self, step: int) -> list[StepRecord]:
        rows = self._db.execute("select record from steps where step > ? order by step", (step,))
        return [msgspec.msgpack.decode(body, type=StepRecord) for (body,) in rows]

    def last_step(self) -> StepRecord | None:
        row = self._db.execute("select record from steps order by step desc limit 1").fetchone()
        return None if row is None else msgspec.msgpack.decode(row[0], type=StepRecord)

    def last_evaluation(self) -> EvaluationRecord | None:
        row = self._db.execute("select record from evaluations order by step desc limit 1").fetchone()
        return None if row is None else msgspec.msgpack.decode(row[0], type=EvaluationRecord)

    def pending_evaluation(self) -> bool:
        return self._one("select count(*) from works where eval_step is not null and state = 'open'") > 0

    def trained_ids(self) -> list[tuple[int, str]]:
        """(step, trajectory id) of everything in a batch, in order."""
        return [
            (int(step), str(name))
            for step, name in self._db.execute(
                "select w.step, t.id from trajectories t join works w on w.id = t.work"
                " where t.fate = 'trained' order by w.step, w.id, t.sample"
            )
        ]


_MEND = "restore it from a backup, or move it away to go on without the trajectories that were waiting"


def _put(db: sqlite3.Connection, values: dict[str, int]) -> None:
    db.executemany("insert or replace into meta values (?, ?)", list(values.items()))


def _open_work(db: sqlite3.Connection, trajectory: Trajectory) -> str | None:
    """Why no open group waits for this trajectory; None when one does."""
    if not trajectory.work.isdecimal():
        return f"work: {trajectory.work!r} was not dealt by this trainer"
    row = db.execute("select task, split, samples, state from works where id = ?", (int(trajectory.work),)).fetchone()
    if row is None:
        return f"work: {trajectory.work!r} was not dealt by this trainer"
    task, split, samples, state = row
    if (task, split) != (trajectory.task, trajectory.split):
        return f"task: is {trajectory.split}/{trajectory.task}, work {trajectory.work} is {split}/{task}"
    if not 0 <= trajectory.sample < samples:
        return f"sample: is {trajectory.sample}, work {trajectory.work} has {samples}"
    if state != "open":
        return f"work: the group of samples of {trajectory.work} is closed"
    return None


def _insert(db: sqlite3.Connection, trajectory: Trajectory, *, fate: str | None) -> None:
    db.execute(
        "insert into trajectories values (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            trajectory.id,
            int(trajectory.work),
            trajectory.sample,
            trajectory.group,
            trajectory.view,
            trajectory.start_version,
            trajectory.reward if trajectory.turns else None,
            fate,
            None if fate else encode(trajectory),
        ),
    )


def _settle_group(db: sqlite3.Connection, work: int, fate: Fate, now_s: float) -> None:
    split = db.execute("select split from works where id = ?", (work,)).fetchone()[0]
    if fate is Fate.REDEAL:
        db.execute("update works set worker = null where id = ?", (work,))
    elif split != "train":  # even one graded sample is worth counting in an evaluation
        db.execute("update works set state = 'evaluated', closed_s = ? where id = ?", (now_s, work))
    elif fate is Fate.COMPLETE:
        db.execute("update works set state = 'complete', closed_s = ? where id = ?", (now_s, work))
    else:
        _drop_group(db, work)


def _drop_group(db: sqlite3.Connection, work: int) -> None:
    db.execute("update works set state = 'dropped' where id = ?", (work,))
    db.execute(
        "update trajectories set fate = case when reward is null then 'infrastructure' else 'dropped' end"
        " where work = ? and fate is null",
        (work,),
    )
    _tally(db, work)


def _tally(db: sqlite3.Connection, work: int) -> None:
    """Counts what of a closed group is not trained on."""
    db.execute(
        "insert into tallies (grp, view, discarded, infrastructure, stale) select grp, view, sum(fate != 'trained'),"
        " sum(fate = 'infrastructure'), sum(fate = 'stale') from trajectories"
        " where work = ? and fate != 'trained' group by grp on conflict (grp) do update set"
        " discarded = discarded + excluded.discarded, infrastructure = infrastructure + excluded.infrastructure,"
        " stale = stale + excluded.stale",
        (work,),
    )


def _discard_unusable(db: sqlite3.Connection, oldest_version: int, quarantined: frozenset[str]) -> None:
    complete = "(select id from works where state = 'complete' and split = 'train')"
    db.execute(
        f"update trajectories set fate = 'stale' where fate is null and reward is not null and start_version < ?"
        f" and work in {complete}",
        (oldest_version,),
    )
    db.executemany(
        f"update trajectories set fate = 'quarantined' where fate is null and grp = ? and work in {complete}",
        [(name,) for name in sorted(quarantined)],
    )
    short = db.execute(
        "select w.id from works w where w.state = 'complete' and w.split = 'train' and 2 > (select count(*) from"
        " trajectories t where t.work = w.id and t.fate is null and t.reward is not null)"
    ).fetchall()
    for (work,) in short:
        _drop_group(db, work)


def _finish_evaluations(db: sqlite3.Connection) -> None:
    rows = db.execute(
        "select eval_step, count(*) from works where eval_step is not null"
        " and eval_step not in (select step from evaluations) group by eval_step having sum(state = 'open') = 0"
    ).fetchall()
    for step, tasks in rows:
        total, graded = db.execute(
            "select coalesce(sum(t.reward), 0), count(t.reward) from trajectories t join works w on w.id = t.work"
            " where w.eval_step = ? and t.fate is null",
            (step,),
        ).fetchone()
        record = EvaluationRecord(step=step, tasks=tasks, pass_at_1=Ratio(float(total), float(graded)))
        db.execute("insert into evaluations values (?, ?)", (step, encode(record)))
