"""The loop: whatever changed, look at the whole run and do what the plan says. Level-triggered; nothing hangs on an event's kind."""

from __future__ import annotations

import asyncio
import heapq
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

import aiohttp
from motley_api import keys
from motley_api.resources import RLRunStatus

from motley_operator import apply, names, observe
from motley_operator.cache import RUN_KINDS, WATCHED, Cache, Json, RunKey
from motley_operator.kube import ApiError, Kube
from motley_operator.manifests import Urls
from motley_operator.measure import RunMemory, Telemetry
from motley_operator.metrics import Metrics
from motley_operator.nodes import Nodes, Seen
from motley_operator.planner import guard, ledger, resize, status
from motley_operator.planner.conditions import RUN_CONDITIONS, Finding, flips, merge
from motley_operator.planner.lifecycle import job_condition
from motley_operator.planner.model import EventOut, Plan, Settings, Snapshot
from motley_operator.planner.plan import plan, service_urls

log = logging.getLogger("motley.operator")
PLANS_AVERAGED = 50
FILL_PAGE = 100  # few objects in memory at once: what a process took, it keeps


@dataclass(frozen=True)
class Pace:
    """Seconds."""

    batch_s: float = 0.1  # changes that come together are looked at once
    calm_s: float = 2.0  # and not before so long after a look that found nothing to do,
    planning_share: float = 0.25  # nor before planning for all runs would take more than this of the time
    active_s: float = 3.0  # router and trainer of a run that moves by itself are asked this often
    quiet_looks: int = 5  # of those that hear nothing new, so many make one plan
    first_retry_s: float = 1.0
    last_retry_s: float = 60.0
    settle_s: float = 5.0  # from the start of a watch to the list that it is compared with
    resync_s: float = 3600.0  # such lists without any reason
    nodes_s: float = 30.0  # nodes are listed only while a pod finds no place, or engines are to be chosen
    resize_s: float = 60.0  # engines are chosen anew at most this often, while the choice before stands
    bills_per_minute: float = 12.0  # statuses in which only running totals moved, of all runs together
    workers: int = 32  # most of them wait for an answer


@dataclass(frozen=True)
class Quiet:
    """A look that found nothing to do, and what it was based on: while that stays, only router and trainer are asked."""

    version: int  # of the run in the cache
    heard: object
    until_s: float
    urls: Urls | None  # None: nobody is there to ask
    early_steps: int
    counted: tuple[int, int]


def heard(memory: RunMemory) -> object:
    """What router and trainer said, as far as a plan should follow at once: counters of the router's engines can wait."""
    router = memory.router
    engines = (
        [
            (one.id, one.group, one.view, one.version, one.ready, one.draining, one.reason, one.max_sessions)
            for one in router.engines
        ]
        if router is not None
        else None
    )
    generation = router.fleet_generation if router is not None else None
    return generation, engines, memory.router_error, memory.trainer, memory.trainer_error, dict(memory.loads)


class Controller:
    """Reconciles runs, one at a time each, several at once."""

    def __init__(
        self,
        kube: Kube,
        telemetry: Telemetry,
        metrics: Metrics,
        *,
        settings: Settings,
        namespace: str | None,
        clock: Callable[[], float],
        utc_now: Callable[[], datetime],
        pace: Pace | None = None,
    ) -> None:
        self.kube, self.telemetry, self.metrics, self.settings = kube, telemetry, metrics, settings
        self.namespace = namespace  # None: all of them
        self.clock, self.utc_now = clock, utc_now
        self.pace = pace or Pace()
        self.cache = Cache(self.mark, self._edited)
        self.memory: dict[RunKey, RunMemory] = {}
        self.last_progress_s = clock()
        self.last_event_s = clock()
        self._due: dict[RunKey, float] = {}
        self._queue: list[tuple[float, RunKey]] = []  # a heap; entries that `_due` contradicts do not count
        self._calm: dict[RunKey, float] = {}  # changes alone are not looked at before
        self._quiet: dict[RunKey, Quiet] = {}
        self._plan_s = 0.01  # what a plan takes, averaged
        self._retries: dict[RunKey, int] = {}
        self._busy: set[RunKey] = set()
        self._wake = asyncio.Event()
        self.nodes = Nodes(kube, clock, self.pace.nodes_s)
        self._resync_due: dict[str, float] = {}

    # What is due.

    def mark(self, key: RunKey, delay_s: float | None = None) -> None:
        """Look at this run soon."""
        now_s = self.clock()
        due = max(now_s + self.pace.batch_s, self._calm.get(key, 0.0)) if delay_s is None else now_s + delay_s
        if due < self._due.get(key, float("inf")):
            self._due[key] = due
            heapq.heappush(self._queue, (due, key))
            if self._queue[0] == (due, key):
                self._wake.set()

    def _edited(self, key: RunKey) -> None:
        """A person's change is not gathered with others."""
        self._calm.pop(key, None)
        self.mark(key)

    def _next_due(self) -> float:
        """When the nearest run is due that nobody looks at right now."""
        while self._queue:
            due, key = self._queue[0]
            if self._due.get(key) == due and key not in self._busy:
                return due
            heapq.heappop(self._queue)  # superseded; that of a busy one comes back when it is done
        return float("inf")

    async def run(self, is_leader: Callable[[], bool]) -> None:
        """For ever. While another replica leads, changes only gather."""
        tasks: set[asyncio.Task[None]] = set()
        led = False
        try:
            while True:
                self.last_progress_s = self.clock()
                leads = is_leader()
                if leads and not led:
                    self._quiet.clear()
                    for key in self.cache.runs():
                        self.mark(key)
                led = leads
                while leads and len(self._busy) < self.pace.workers and self._next_due() <= self.clock():
                    due, key = heapq.heappop(self._queue)
                    del self._due[key]
                    self.metrics.wait.observe(self.clock() - due)
                    self._busy.add(key)
                    task = asyncio.create_task(self._reconcile_once(key))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                await self._sleep(leads)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _sleep(self, leads: bool) -> None:
        full = len(self._busy) >= self.pace.workers
        wait_s = 0.5 if not leads else 1.0 if full else min(1.0, max(0.01, self._next_due() - self.clock()))
        self._wake.clear()
        try:
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _reconcile_once(self, key: RunKey) -> None:
        started = self.clock()
        result = "ok"
        try:
            again_s = await self.reconcile(key)
            self._retries.pop(key, None)
            if again_s is not None:
                self.mark(key, again_s)
        except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as error:
            result = "conflict" if isinstance(error, ApiError) and error.status == 409 else "error"
            self._again(key, error)
        except Exception as error:  # one run's trouble must not stop the others; it is told, counted and tried again
            result = "error"
            log.exception("event=reconcile_failed namespace=%s run=%s", *key)
            self._again(key, error)
        finally:
            self._busy.discard(key)
            if key in self._due:
                heapq.heappush(self._queue, (self._due[key], key))
            self._wake.set()
            self.metrics.reconciles.labels(result).inc()
            self.metrics.seconds.observe(self.clock() - started)

    def _again(self, key: RunKey, error: BaseException) -> None:
        tries = self._retries.get(key, 0)
        self._retries[key] = tries + 1
        delay_s = min(self.pace.last_retry_s, self.pace.first_retry_s * 2**tries)
        log.warning("event=retry namespace=%s run=%s in_s=%.1f error=%r", *key, delay_s, str(error)[:300])
        self.mark(key, delay_s)

    # One run.

    async def reconcile(self, key: RunKey) -> float | None:
        """Observe, plan, apply, once. Seconds until it should be looked at by itself again; None: when something changes."""
        memory = self.memory.setdefault(key, RunMemory())
        if await self._still_quiet(key, memory):
            return self.pace.active_s
        self._quiet.pop(key, None)
        self._calm.pop(key, None)
        version = self.cache.version(key)
        try:
            seen = await self._observe(key, memory)
        except observe.InvalidSpecError as error:
            await self._tell_invalid(key, str(error))
            return None
        if seen is None:
            await self._tell_orphans(key)
            for known in (self.memory, self._calm, self._retries):
                known.pop(key, None)
            self.metrics.forget(key)
            return None
        said = heard(memory)
        now = self.utc_now()
        decided = self._plan(seen, now)
        fine = await apply.act(
            decided.actions, key[0], kube=self.kube, telemetry=self.telemetry, cache=self.cache, memory=memory, now=now
        )
        wrote = await self._write(seen, decided, now)
        if not fine:
            return self.pace.active_s
        again_s = self.pace.active_s
        if not decided.actions:
            gather_s = self._gather_s()
            self._calm[key] = self.clock() + gather_s
            if wrote or self.cache.version(key) != version:
                again_s = max(again_s, gather_s)
            elif decided.active:
                self._quiet[key] = Quiet(
                    version=version,
                    heard=said,
                    until_s=self.clock() + max(gather_s, self.pace.quiet_looks * self.pace.active_s),
                    urls=self._to_ask(seen, memory),
                    early_steps=self._early_steps(seen),
                    counted=ledger.cursor(seen.status),
                )
        return again_s if decided.active else None

    def _plan(self, seen: Snapshot, now: datetime) -> Plan:
        started = time.perf_counter()
        decided = plan(seen, now)
        self._plan_s += (time.perf_counter() - started - self._plan_s) / PLANS_AVERAGED
        return decided

    def _gather_s(self) -> float:
        """For how long changes of a run that needs nothing are gathered: with many runs longer."""
        calm_s = min(self.pace.calm_s, self.pace.active_s)
        return max(calm_s, len(self.memory) * self._plan_s / self.pace.planning_share)

    async def _still_quiet(self, key: RunKey, memory: RunMemory) -> bool:
        """Whether nothing was seen or heard since a look that found nothing to do. Asks router and trainer."""
        quiet = self._quiet.get(key)
        if quiet is None or self.clock() >= quiet.until_s or self._news(key, quiet):
            return False
        if quiet.urls is not None:
            urls = quiet.urls
            await self.telemetry.look(memory, urls.router, urls.trainer, early=quiet.early_steps, counted=quiet.counted)
        return not self._news(key, quiet) and heard(memory) == quiet.heard

    def _news(self, key: RunKey, quiet: Quiet) -> bool:
        """Whether its objects changed, and changes have been gathered for long enough."""
        return self.cache.version(key) != quiet.version and self.clock() >= self._calm.get(key, 0.0)

    async def _observe(self, key: RunKey, memory: RunMemory) -> Snapshot | None:
        body = self.cache.get("RLRun", *key)
        if body is None:
            return None
        uid = body["metadata"]["uid"]
        secret = ("Secret", names.token(key[1]))
        if not memory.token:
            try:
                memory.token = await apply.read_token(self.kube, key[0], names.token(key[1]), uid)
                memory.errors.pop(secret, None)
            except apply.ForeignObjectError as error:
                memory.errors[secret] = str(error)
        first = observe.snapshot(self.cache, key, memory, settings=self.settings, nodes=None, fresh_token="")
        assert first is not None
        await self._measure(first, memory)
        await self._failed_creates(first, memory)
        due = self.clock() - memory.sized_s >= self.pace.resize_s and resize.due(first, self.utc_now())
        if due:
            memory.sized_s = self.clock()
        looked = await self._nodes_if_needed(first, due=due)
        return observe.snapshot(
            self.cache,
            key,
            memory,
            settings=self.settings,
            nodes=looked.nodes,
            nodes_error=looked.error,
            resize_due=due,
            now=self.utc_now(),
            fresh_token=secrets.token_urlsafe(32),
        )

    def _to_ask(self, seen: Snapshot, memory: RunMemory) -> Urls | None:
        up = any(pod.exists and pod.ready and pod.role in (keys.ROLE_ROUTER, keys.ROLE_TRAINER) for pod in seen.pods)
        return service_urls(seen) if memory.token and up and not seen.deleting else None

    def _early_steps(self, seen: Snapshot) -> int:
        return guard.LONGEST_RAMP_STEPS + seen.spec.guard.early_steps

    async def _measure(self, seen: Snapshot, memory: RunMemory) -> None:
        urls = self._to_ask(seen, memory)
        if urls is None:
            memory.router = memory.trainer = None
            memory.router_error = memory.trainer_error = "no pod is ready"
            return
        await self.telemetry.look(
            memory, urls.router, urls.trainer, early=self._early_steps(seen), counted=ledger.cursor(seen.status)
        )

    async def _failed_creates(self, seen: Snapshot, memory: RunMemory) -> None:
        """A Job's status does not say that its pods are refused, by a quota say; its events do."""
        name = names.trainer(seen.name)
        job = seen.child("Job", name)
        memory.failed_creates.pop(("Job", name), None)
        ended = job_condition(job, "Complete") or job_condition(job, "Failed")
        if (
            job is None
            or ended
            or job["spec"].get("suspend")
            or any(pod.role == keys.ROLE_TRAINER and pod.exists for pod in seen.pods)
        ):
            return
        if self.utc_now() - datetime.fromisoformat(job["metadata"]["creationTimestamp"]) < timedelta(seconds=5):
            return
        fields = f"involvedObject.kind=Job,involvedObject.name={name},reason=FailedCreate"
        found = [event async for event in self.kube.list("Event", seen.namespace, fields=fields)]
        if found:
            newest = max(found, key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "")
            memory.failed_creates["Job", name] = newest.get("message", "")

    async def _nodes_if_needed(self, seen: Snapshot, *, due: bool) -> Seen:
        """While a pod finds no place, and before the number of engines is decided."""
        waits = any(pod.unschedulable and pod.exists and not pod.node for pod in seen.pods)
        return await self.nodes.seen() if waits or due else Seen(None)

    async def _write(self, seen: Snapshot, decided: Plan, now: datetime) -> bool:
        """Statuses that differ, then events. Whether anything was written."""
        if decided.status is None:
            return False
        wrote = False
        for name, wanted in decided.group_statuses.items():
            live = self.cache.get("SamplerGroup", seen.namespace, name)
            wrote |= live is not None and await self._write_status(
                "SamplerGroup", live, wanted.to_json_dict(), now, last=not decided.active
            )
        key = (seen.namespace, seen.name)
        live = self.cache.get("RLRun", *key)
        if live is None or live["metadata"]["uid"] != seen.uid:
            return wrote
        if await self._write_status("RLRun", live, decided.status.to_json_dict(), now, last=not decided.active):
            wrote = True
            # After the status: what is told was also noted, so a restart does not tell it again.
            for event in decided.events:
                await apply.post_event(event, seen.namespace, kube=self.kube, now=now)
        self.metrics.show(key, decided.status)
        return wrote

    async def _write_status(self, kind: str, live: Json, wanted: Json, now: datetime, *, last: bool) -> bool:
        """last: nobody looks again by himself: what is not written now never is."""
        bills_s = 0.0 if last else max(apply.TOTALS_EVERY_S, 60.0 * len(self.memory) / self.pace.bills_per_minute)
        wrote = await apply.write_status(
            kind, live, wanted, kube=self.kube, cache=self.cache, now=now, totals_every_s=bills_s
        )
        if wrote:
            self.metrics.status_writes.labels(kind).inc()
        return wrote

    async def _tell_invalid(self, key: RunKey, message: str) -> None:
        """A spec that cannot be read: nothing is done but said."""
        live = self.cache.get("RLRun", *key)
        assert live is not None
        now, generation = self.utc_now(), live["metadata"]["generation"]
        old = observe.run_status(live)
        found = (
            Finding("ConfigurationValid", "False", "InvalidSpec", message),
            Finding("Succeeded", "False", "InvalidConfiguration", message),
        )
        wanted = old.model_copy(
            update={
                "observed_generation": generation,
                "conditions": merge(old.conditions, found, RUN_CONDITIONS, now, generation),
                "status": "InvalidConfiguration",
            }
        )
        assert isinstance(wanted, RLRunStatus)
        if await self._write_status("RLRun", live, wanted.to_json_dict(), now, last=True):
            for finding in flips(old.conditions, found):
                event = EventOut("RLRun", key[1], live["metadata"]["uid"], "Warning", finding.reason, finding.message)
                await apply.post_event(event, key[0], kube=self.kube, now=now)

    async def _tell_orphans(self, key: RunKey) -> None:
        """Groups whose run does not exist."""
        now = self.utc_now()
        for live in self.cache.of_run(key, "SamplerGroup"):
            metadata = live["metadata"]
            if "deletionTimestamp" in metadata:
                continue
            wanted, found = status.orphan_status(observe.group_status(live), key[1], metadata["generation"], now)
            if await self._write_status("SamplerGroup", live, wanted.to_json_dict(), now, last=True):
                for finding in found[1:]:
                    event = EventOut(
                        "SamplerGroup", metadata["name"], metadata["uid"], "Warning", finding.reason, finding.message
                    )
                    await apply.post_event(event, key[0], kube=self.kube, now=now)

    # What the watches have not told yet, and what they may have missed.

    async def fill(self) -> None:
        """Everything there is, once, into the cache. Before that no run may be looked at: pods that the watch has not shown yet
        would pass for gone, and after a restart shares and statuses would follow."""
        for kind in WATCHED:
            labels = "" if kind in RUN_KINDS else keys.RUN_LABEL
            async for item in self.kube.list(kind, self.namespace, labels=labels, page=FILL_PAGE):
                self.cache.put(item, self.utc_now())
                self.last_progress_s = self.clock()

    async def fill_and_run(self, is_leader: Callable[[], bool]) -> None:
        """For ever."""
        tries = 0
        while True:
            try:
                await self.fill()
                break
            except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as error:
                delay_s = min(self.pace.last_retry_s, self.pace.first_retry_s * 2**tries)
                tries += 1
                log.warning("event=fill_failed in_s=%.1f error=%r", delay_s, str(error)[:300])
                await asyncio.sleep(delay_s)
        log.info("event=filled objects=%d", self.cache.size())
        await self.run(is_leader)

    def watch_started(self, kind: str) -> None:
        """A watch began, or began again: deletions may have come to pass between its list and what was known before."""
        self._resync_due[kind] = self.clock() + self.pace.settle_s

    async def resync(self, kind: str) -> int:
        """Compare the cache with a list of names; how many ghosts were forgotten."""
        listed_at = self.utc_now()
        labels = "" if kind in RUN_KINDS else keys.RUN_LABEL
        there = [
            (item["metadata"]["namespace"], item["metadata"]["name"], item["metadata"]["uid"])
            async for item in self.kube.list(kind, self.namespace, labels=labels, names_only=True)
        ]
        return self.cache.reconcile_with(kind, there, listed_at, self.utc_now())

    async def resync_forever(self) -> None:
        for kind in WATCHED:
            self._resync_due.setdefault(kind, self.clock() + self.pace.resync_s)
        while True:
            await asyncio.sleep(1.0)
            for kind in [kind for kind, due in self._resync_due.items() if due <= self.clock()]:
                self._resync_due[kind] = self.clock() + self.pace.resync_s
                try:
                    if ghosts := await self.resync(kind):
                        log.warning("event=ghosts_forgotten kind=%s count=%d", kind, ghosts)
                except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as error:
                    self._resync_due[kind] = self.clock() + self.pace.last_retry_s
                    log.warning("event=resync_failed kind=%s error=%r", kind, str(error)[:300])
