"""When a run is looked at, and how closely: without an API server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from motley_api import records
from motley_operator import controller as module
from motley_operator.cache import WATCHED, RunKey
from motley_operator.controller import Controller, Pace
from motley_operator.manifests import Urls
from motley_operator.measure import RunMemory
from motley_operator.metrics import Metrics
from motley_operator.planner.model import Plan, Settings, Snapshot
from planner import study

KEY = ("ns", "demo")
NOW = datetime(2026, 10, 13, 12, 0, 0, tzinfo=UTC)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def engine(**values: Any) -> records.EngineState:
    return records.EngineState(id="e", group="g", view="fp8", url="", version=5, ready=True, **values)


class Answers:
    """What router and trainer say when they are asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.trainer = records.TrainerStatus(
            run="demo",
            attempt=0,
            steps_total=9,
            step=5,
            weights_version=5,
            durable_version=5,
            buffered=0,
            outstanding=0,
        )
        self.engines = [engine()]

    async def look(
        self, memory: RunMemory, router_url: str, trainer_url: str, *, early: int, counted: tuple[int, int]
    ) -> None:
        self.asked += 1
        memory.trainer = self.trainer
        memory.router = records.RouterStatus(
            fleet_generation=1, sessions_active=0, sessions_total=0, groups=[], engines=self.engines
        )


class Looked(Controller):
    """Counts its plans; they find nothing to do."""

    def __init__(self, clock: Clock, answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(
            None,  # type: ignore[arg-type]
            answers,  # type: ignore[arg-type]
            Metrics(),
            settings=Settings(),
            namespace=None,
            clock=clock,
            utc_now=lambda: NOW,
            pace=Pace(active_s=3.0, quiet_looks=5),
        )
        self.plans = 0

        def plan(seen: Snapshot, now: datetime) -> Plan:
            self.plans += 1
            return Plan(active=True)

        monkeypatch.setattr(module, "plan", plan)

    async def _observe(self, key: RunKey, memory: RunMemory) -> Snapshot | None:
        await self.telemetry.look(memory, "", "", early=0, counted=(0, 0))
        return study.snapshot()

    def _to_ask(self, seen: Snapshot, memory: RunMemory) -> Urls | None:
        return Urls("", "")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def looked(clock: Clock, answers: Answers, monkeypatch: pytest.MonkeyPatch) -> Looked:
    made = Looked(clock, answers, monkeypatch)
    made.cache.put(
        {"kind": "RLRun", "metadata": {"namespace": "ns", "name": "demo", "uid": "r", "resourceVersion": "1"}}, NOW
    )
    return made


async def test_while_nothing_is_new_router_and_trainer_are_asked_and_no_plan_is_made(
    looked: Looked, answers: Answers, clock: Clock
) -> None:
    for _ in range(4):
        assert await looked.reconcile(KEY) == 3.0
        clock.now_s += 3.0
    assert (looked.plans, answers.asked) == (1, 4)


async def test_after_some_quiet_looks_time_itself_is_reason_for_a_plan(looked: Looked, clock: Clock) -> None:
    await looked.reconcile(KEY)
    clock.now_s += 5 * 3.0  # quiet_looks * active_s
    await looked.reconcile(KEY)
    assert looked.plans == 2


async def test_a_word_of_the_trainer_is_planned_for_at_once(looked: Looked, answers: Answers) -> None:
    await looked.reconcile(KEY)
    answers.trainer = msgspec.structs.replace(answers.trainer, step=6)
    await looked.reconcile(KEY)
    assert looked.plans == 2


async def test_an_engine_that_is_not_ready_is_planned_for_at_once_and_its_counters_are_not(
    looked: Looked, answers: Answers
) -> None:
    await looked.reconcile(KEY)
    answers.engines = [engine(turns=70, running=3)]
    await looked.reconcile(KEY)
    assert looked.plans == 1
    answers.engines = [msgspec.structs.replace(answers.engines[0], ready=False)]
    await looked.reconcile(KEY)
    assert looked.plans == 2


async def test_an_object_that_changed_is_planned_for_soon(looked: Looked, clock: Clock) -> None:
    await looked.reconcile(KEY)
    seen = {"namespace": "ns", "name": "demo", "uid": "r", "resourceVersion": "2"}
    looked.cache.put({"kind": "RLRun", "metadata": seen}, NOW)
    await looked.reconcile(KEY)
    assert looked.plans == 1  # gathered with what may follow
    clock.now_s += looked.pace.calm_s
    await looked.reconcile(KEY)
    assert looked.plans == 2


async def test_changes_that_only_show_our_own_doing_are_gathered(looked: Looked, clock: Clock) -> None:
    """A group of fifty pods that come up is a hundred events; after a look that found nothing to do they wait a moment."""
    await looked.reconcile(KEY)
    looked._due.clear()
    looked.mark(KEY)
    assert looked._next_due() == clock.now_s + looked.pace.calm_s
    looked.mark(KEY, 0.0)  # a retry, or a leader's first look
    assert looked._next_due() == clock.now_s


async def test_an_edit_is_not_gathered(looked: Looked, clock: Clock) -> None:
    await looked.reconcile(KEY)
    looked._due.clear()
    edited = {"namespace": "ns", "name": "demo", "uid": "r", "resourceVersion": "2", "generation": 2}
    looked.cache.put({"kind": "RLRun", "metadata": edited}, NOW)
    assert looked._next_due() == clock.now_s + looked.pace.batch_s


async def test_with_many_runs_changes_are_gathered_for_longer(looked: Looked) -> None:
    looked._plan_s = 0.01
    assert looked._gather_s() == looked.pace.calm_s
    looked.memory = {("ns", f"run-{number}"): RunMemory() for number in range(200)}
    assert looked._gather_s() == pytest.approx(200 * 0.01 / 0.25)  # all of them: a quarter of the time


class Busy(Looked):
    """A run that is always due, and others."""

    seen: list[str]
    time: Clock

    async def reconcile(self, key: RunKey) -> float | None:
        self.seen.append(key[1])
        self.time.now_s += 0.01
        await asyncio.sleep(0)
        return 0.0 if key[1] == "always-due" else None


async def test_a_run_that_is_always_due_starves_none(
    clock: Clock, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = Busy(clock, answers, monkeypatch)
    busy.seen, busy.time, busy.pace = [], clock, Pace(workers=1)
    busy.mark(("ns", "always-due"), 0.0)
    busy.mark(("ns", "zzz"), 0.0)
    running = asyncio.create_task(busy.run(lambda: True))
    while len(busy.seen) < 6:
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert busy.seen[:3] == ["always-due", "zzz", "always-due"]


class Gone(Looked):
    async def _observe(self, key: RunKey, memory: RunMemory) -> Snapshot | None:
        return None if self.cache.get("RLRun", *key) is None else await super()._observe(key, memory)


async def test_nothing_is_kept_of_a_run_that_went(
    clock: Clock, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = Gone(clock, answers, monkeypatch)
    run = {"kind": "RLRun", "metadata": {"namespace": "ns", "name": "demo", "uid": "r", "resourceVersion": "1"}}
    gone.cache.put(run, NOW)
    await gone.reconcile(KEY)
    assert (KEY in gone.memory, KEY in gone._quiet, KEY in gone._calm) == (True, True, True)
    gone.cache.drop(run, NOW)
    gone._due.clear()
    assert await gone.reconcile(KEY) is None
    kept = {name: value for name, value in vars(gone).items() if isinstance(value, dict) and KEY in value}
    assert kept == {}


class Lists:
    """An API server that fails once, and then has one run."""

    def __init__(self) -> None:
        self.listed: list[str] = []

    async def list(self, kind: str, namespace: str | None, **options: Any) -> AsyncIterator[dict[str, Any]]:
        self.listed.append(kind)
        if len(self.listed) == 2:
            raise OSError("no route")
        if kind == "RLRun":
            yield {
                "kind": "RLRun",
                "metadata": {"namespace": "ns", "name": "demo", "uid": "r", "resourceVersion": "1"},
            }


async def test_no_run_is_looked_at_before_everything_there_is_is_known(
    clock: Clock, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart the watches bring thousands of objects one by one: pods that they have not shown yet are not gone."""
    busy = Busy(clock, answers, monkeypatch)
    lists = Lists()
    busy.kube = lists  # type: ignore[assignment]
    busy.seen, busy.time, busy.pace = [], clock, Pace(first_retry_s=0.0)
    running = asyncio.create_task(busy.fill_and_run(lambda: True))
    while not busy.seen:
        clock.now_s += 0.1
        await asyncio.sleep(0.001)
    assert lists.listed == ["RLRun", WATCHED[1], *WATCHED]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert busy.seen == ["demo"]


async def test_a_run_in_trouble_is_tried_again_ever_less_often(looked: Looked, clock: Clock) -> None:
    waits = []
    for _ in range(9):
        looked._due.clear()
        looked._again(KEY, OSError("no route"))
        waits.append(looked._due[KEY] - clock.now_s)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


class Broken(Looked):
    async def _observe(self, key: RunKey, memory: RunMemory) -> Snapshot | None:
        raise OSError("no route")


async def test_a_failed_look_is_counted_and_stops_nothing(
    clock: Clock, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Broken(clock, answers, monkeypatch)
    await broken._reconcile_once(KEY)
    assert broken.metrics.registry.get_sample_value("motley_reconciles_total", {"result": "error"}) == 1
    assert KEY in broken._due


def test_a_watch_that_began_is_followed_by_a_list_and_then_by_none_for_an_hour(looked: Looked, clock: Clock) -> None:
    looked.watch_started("Pod")
    assert looked._resync_due == {"Pod": clock.now_s + looked.pace.settle_s}
    assert looked.pace.resync_s >= 3600


@pytest.mark.parametrize(("runs", "want_s"), [(1, 15.0), (200, 1000.0)])
def test_bills_alone_are_written_at_a_rate_that_holds_for_all_runs_together(runs: int, want_s: float) -> None:
    from motley_operator.apply import status_due

    # 12 a minute of all runs together: one every 200 * 60 / 12 = 1000 s each; never more often than every 15 s.
    every_s = max(15.0, 60.0 * runs / Pace().bills_per_minute)
    assert every_s == want_s
    old = {"totals": {"accountedUntil": "2026-10-13T12:00:00Z", "billedUSD": "1"}}
    for late_s, due in ((want_s - 1, False), (want_s, True)):
        until = (NOW + timedelta(seconds=late_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
        assert status_due(old, {"totals": {"accountedUntil": until, "billedUSD": "2"}}, every_s) is due
        assert status_due(old, {"step": 1, "totals": {"accountedUntil": until}}, every_s)
