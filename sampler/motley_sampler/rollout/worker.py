"""The worker: asks the trainer for work, keeps its sessions busy, delivers what comes out, and stops in good order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp
import msgspec
from motley_api import records
from motley_api.records import EndedBy, RouterStatus, TrajectoryAck, Work, WorkRequest

from motley_sampler.rollout.delivery import Delivery, Spool
from motley_sampler.rollout.episode import Bench, Episode
from motley_sampler.rollout.language import fetch_model_files, load_language
from motley_sampler.rollout.log import log
from motley_sampler.rollout.metrics import Metrics
from motley_sampler.rollout.session import Fabric, backoff_s
from motley_sampler.rollout.settings import Settings
from motley_sampler.sandbox.host import SandboxHost, remove_tree
from motley_sampler.tasks.format import Task, load_tasks

ASK_TIMEOUT_S = 35.0
IDLE_WAIT_S = 1.0  # without a Retry-After
BUSY_ASK_S = (
    15.0  # a worker without a free session still shows that it lives: the trainer deals its work anew otherwise
)
CAPACITY_EVERY_S = 10.0
SPOOL_BYTES = 256 << 20  # past this, or four deliveries per session, no new work is asked for
_SCRATCH_LEFTOVERS = ("root-*", "episode-*", "grade-*", "probe-*")


@dataclass
class Worker:
    settings: Settings
    bench: Bench
    tasks: dict[tuple[str, str], Task]  # by split and name
    delivery: Delivery
    metrics: Metrics
    client: aiohttp.ClientSession
    sessions: int
    _pending: deque[tuple[Work, int]] = field(default_factory=deque)
    _running: set[asyncio.Task[None]] = field(default_factory=set)
    _freed: asyncio.Event = field(default_factory=asyncio.Event)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _stopped: asyncio.Event = field(default_factory=asyncio.Event)
    _capacity_read_s: float = float("-inf")
    _asked_s: float = float("-inf")
    _name: str = ""

    def __post_init__(self) -> None:
        # A restarted worker is another one: what its predecessor was dealt is not being worked on any more.
        self._name = f"{self.settings.worker}/{uuid.uuid4().hex[:8]}"

    async def run(self) -> None:
        """Works until `stop` has finished; cancelled, it drops everything."""
        sending = asyncio.create_task(self.delivery.run())
        try:
            failures = 0
            while not self._stopping.is_set():
                if sending.done():
                    sending.result()  # the disk failed under the spool: nothing may be finished and not kept
                self._fill()
                await self._learn_capacity()
                free = self.sessions - len(self._running)
                if self._pending or self._spool_is_full():
                    free = 0
                if free <= 0 and time.monotonic() - self._asked_s < BUSY_ASK_S:
                    await self._wait(IDLE_WAIT_S if self._spool_is_full() else BUSY_ASK_S)
                    continue
                works, wait_s = await self._ask(max(0, free))
                failures = failures + 1 if wait_s is None and not works else 0
                for work in works:
                    self._pending.extend((work, sample) for sample in work.samples)
                if not works:
                    await self._wait(wait_s if wait_s is not None else backoff_s(failures))
            await self._stopped.wait()
        finally:
            sending.cancel()
            for task in self._running:
                task.cancel()
            await asyncio.gather(sending, *self._running, return_exceptions=True)

    def _fill(self) -> None:
        while self._pending and len(self._running) < self.sessions:
            work, sample = self._pending.popleft()
            if time.time() >= work.deadline_unix_s:
                self.metrics.abandoned.labels("Expired").inc()
                continue
            task = asyncio.create_task(self._episode(work, sample))
            self._running.add(task)
            task.add_done_callback(self._ended)
        self.metrics.sessions.set(len(self._running))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._freed.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self.metrics.abandoned.labels("Bug").inc()
            log("episode-crashed", error=repr(error))

    async def _episode(self, work: Work, sample: int) -> None:
        task = self.tasks.get((work.split, work.task))
        if task is None:
            self.metrics.abandoned.labels("UnknownTask").inc()
            log("unknown-task", split=work.split, task=work.task, source=self.settings.tasks_source)
            return
        episode = Episode(self.bench, work, sample, task)
        trajectory = await episode.run()
        await self.delivery.add(trajectory)
        self.metrics.episodes.labels(trajectory.ended_by.value).inc()
        if trajectory.ended_by is EndedBy.INFRASTRUCTURE:
            self.metrics.failures.labels(episode.failure_kind).inc()
            log("infrastructure-failure", id=episode.id, group=trajectory.group, detail=trajectory.detail)

    def _spool_is_full(self) -> bool:
        spool = self.delivery.spool
        self.metrics.spool.set(len(spool))
        self.metrics.spool_bytes.set(spool.total_bytes)
        return len(spool) >= 4 * max(1, self.sessions) or spool.total_bytes >= SPOOL_BYTES

    async def _wait(self, timeout_s: float | None) -> None:
        """Until an episode ends, the worker stops, or so many seconds have passed."""
        waits = [asyncio.create_task(self._freed.wait()), asyncio.create_task(self._stopping.wait())]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        self._freed.clear()

    async def _ask(self, free: int) -> tuple[list[Work], float | None]:
        """Work, or how long the trainer wants to be left alone; (none, None) when it cannot be reached."""
        self._asked_s = time.monotonic()
        request = WorkRequest(worker=self._name, sessions=free)
        try:
            async with self.client.post(
                f"{self.settings.trainer_url}/v1/work",
                data=records.encode_json(request),
                headers={**self.bench.fabric.headers, "Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=ASK_TIMEOUT_S),
            ) as response:
                content = await response.read()
                if response.status != 200:
                    log("no-work", status=response.status, answer=content[:200].decode(errors="replace"))
                    return [], None
                works = msgspec.json.decode(content, type=list[Work])
                return works, _seconds(response.headers.get("Retry-After"))
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
            log("no-work", error=error or type(error).__name__)
            return [], None

    async def _learn_capacity(self) -> None:
        """Without sessions in the run's spec the fleet's capacity is shared between the workers."""
        now_s = time.monotonic()
        if self.settings.sessions is None and now_s - self._capacity_read_s >= CAPACITY_EVERY_S:
            self._capacity_read_s = now_s
            try:
                async with self.client.get(
                    f"{self.settings.router_url}/v1/status",
                    headers=self.bench.fabric.headers,
                    timeout=aiohttp.ClientTimeout(total=10),
                ) as response:
                    status = msgspec.json.decode(await response.read(), type=RouterStatus)
            except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
                log("no-capacity", error=error or type(error).__name__)
            else:
                capacity = sum(group.capacity_sessions for group in status.groups if group.share_milli > 0)
                self.sessions = -(-capacity // self.settings.workers)
        self.metrics.sessions_limit.set(self.sessions)

    async def stop(self, grace_s: float) -> None:
        """No new work; running episodes may finish for most of the grace; what is finished is delivered or stays on disk."""
        self._stopping.set()
        self.metrics.abandoned.labels("Stopping").inc(len(self._pending))
        self._pending.clear()
        if self._running:
            await asyncio.wait(set(self._running), timeout=0.7 * grace_s)
        self.metrics.abandoned.labels("Stopping").inc(len(self._running))
        abandoned = set(self._running)
        for task in abandoned:
            task.cancel()
        await asyncio.gather(*abandoned, return_exceptions=True)
        delivered = await self.delivery.flush(0.3 * grace_s)
        log("stopped", spooled=len(self.delivery.spool), delivered=delivered)
        self._stopped.set()


def _seconds(text: str | None) -> float:
    try:
        return min(30.0, max(0.05, float(text or "")))
    except ValueError:
        return IDLE_WAIT_S


@contextlib.asynccontextmanager
async def open_worker(settings: Settings, metrics: Metrics) -> AsyncIterator[Worker]:
    """A worker with all that it holds. Raises ValueError or SandboxError when model, tasks or sandboxes cannot be used."""
    scratch = settings.scratch
    for pattern in _SCRATCH_LEFTOVERS:
        for leftover in (scratch / "sandboxes").glob(pattern):
            await asyncio.to_thread(remove_tree, leftover)
    folder = await asyncio.to_thread(fetch_model_files, settings.model_source, scratch / "model")
    language = await asyncio.to_thread(load_language, folder)
    tasks = await asyncio.to_thread(load_tasks, settings.tasks_source, cache=scratch / "tasks")
    async with (
        await SandboxHost.start(scratch / "sandboxes", settings.isolation) as host,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30)) as client,
    ):
        metrics.isolation.labels(str(host.level)).set(1)
        log(
            "start",
            tasks=len(tasks),
            isolation=host.level,
            detail=host.detail or "none",
            sessions=settings.sessions or "fleet",
        )
        fabric = Fabric(
            client, settings.router_url, settings.token, settings.sampling, language.stop_ids, metrics.retried
        )
        slots = asyncio.Semaphore(2 * (os.cpu_count() or 2))
        bench = Bench(
            settings.run, fabric, language, host, settings.episode, settings.sandbox, settings.sampling, slots, metrics
        )

        def acked(ack: TrajectoryAck) -> None:
            metrics.acked(ack)
            for identity, reason in ack.refused.items():
                log("trajectory-refused", id=identity, reason=reason)

        def failed(error: str) -> None:
            metrics.delivery_failures.inc()
            log("delivery-failed", error=error)

        spool = Spool(scratch / "spool")
        delivery = Delivery(spool, client, settings.trainer_url, settings.token, acked=acked, failed=failed)
        by_name = {(task.split, task.name): task for task in tasks}
        yield Worker(settings, bench, by_name, delivery, metrics, client, settings.sessions or 0)
