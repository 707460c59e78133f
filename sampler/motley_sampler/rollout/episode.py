"""One episode: the policy works on a task through bash until it submits or a limit ends it; then its files are graded.

Failures of engines, sandboxes and graders end an episode as `infrastructure` with no reward: they are nobody's merit or fault.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from motley_api.records import EndedBy, Lease, Trajectory, Work

from motley_sampler.rollout.language import Language, LanguageError
from motley_sampler.rollout.reply import Reply
from motley_sampler.rollout.session import Fabric, Session, SessionError, SessionFailure, open_session
from motley_sampler.rollout.settings import EpisodeLimits, Sampling
from motley_sampler.rollout.toolcall import Command, FormatError, Submit, parse_reply, tool_message
from motley_sampler.rollout.transcript import Transcript
from motley_sampler.sandbox.host import Limits, Mount, Sandbox, SandboxError, SandboxHost, remove_tree
from motley_sampler.tasks.files import make_workspace
from motley_sampler.tasks.format import Task
from motley_sampler.tasks.grading import GradingError, grade

HUNG_TURN_S = 30.0  # a turn in flight for this long, and for much longer than those before it, is the engine's fault
HUNG_TURN_FACTOR = 5.0


class Telling(Protocol):
    """What an episode reports while it runs."""

    def turn(self, group: str, latency_s: float) -> None: ...
    def sandbox(self, wall_s: float, cpu_s: float) -> None: ...


@dataclass(frozen=True)
class Bench:
    """What all episodes of a worker share."""

    run: str
    fabric: Fabric
    language: Language
    host: SandboxHost
    limits: EpisodeLimits
    sandbox_limits: Limits
    sampling: Sampling
    grading_slots: asyncio.Semaphore  # so that graders do not slow each other into their limits
    telling: Telling
    clock: Callable[[], float] = time.time


class InfrastructureError(Exception):
    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


@dataclass
class Episode:
    bench: Bench
    work: Work
    sample: int
    task: Task
    transcript: Transcript = field(default_factory=Transcript)
    lease: Lease | None = None
    failure_kind: str = ""
    _turn_started_s: float | None = None

    @property
    def id(self) -> str:
        return f"{self.work.id}/{self.sample}"

    async def run(self) -> Trajectory:
        """Plays and grades. Always returns a record; what broke is in its `ended_by` and `detail`."""
        started_unix_s = self.bench.clock()
        folder = self.bench.host.scratch / f"episode-{uuid.uuid4().hex[:12]}"
        reward: float | None = None
        detail = ""
        try:
            ended_by = await self._play(folder)
            reward = await self._reward(ended_by, folder / "app")
        except (InfrastructureError, SessionError, GradingError) as error:
            ended_by, detail, self.failure_kind = EndedBy.INFRASTRUCTURE, str(error), str(error.kind)
        except (SandboxError, OSError) as error:
            ended_by, detail, self.failure_kind = EndedBy.INFRASTRUCTURE, f"Sandbox: {error}", "Sandbox"
        finally:
            await asyncio.to_thread(remove_tree, folder)
        return self._record(reward, ended_by, detail, started_unix_s)

    async def _play(self, folder: Path) -> EndedBy:
        bench = self.bench
        timeout_s = min(bench.limits.episode_timeout_s, self.task.agent_timeout_s or bench.limits.episode_timeout_s)
        lease_deadline_s = time.monotonic() + max(0.0, self.work.deadline_unix_s - bench.clock())
        async with open_session(
            bench.fabric, self.id, self.work.min_version, lease_deadline_s=lease_deadline_s, timeout_s=timeout_s
        ) as session:
            self.lease = session.lease
            workbench = _Workbench(bench, self.task, folder)
            try:
                async with asyncio.timeout_at(_loop_time(session.deadline_s)) as timer:
                    return await self._turns(session, workbench)
            except TimeoutError:
                if not timer.expired():
                    raise
                return self._ended_by_deadline()
            finally:
                self.lease = session.lease
                await workbench.close()

    async def _turns(self, session: Session, workbench: _Workbench) -> EndedBy:
        bench, limits, transcript = self.bench, self.bench.limits, self.transcript
        try:
            transcript.add_context(bench.language.opening(self.task.instruction))
        except LanguageError as error:
            raise InfrastructureError("Template", str(error)) from error
        errors_in_row = 0
        for _ in range(limits.turns):
            if len(transcript.token_ids) + limits.tokens_per_turn > limits.context_tokens:
                return EndedBy.CONTEXT
            reply, action = await self._turn(session)
            match action:
                case Submit():
                    return EndedBy.SUBMIT
                case FormatError(message):
                    errors_in_row += 1
                    if errors_in_row >= limits.format_errors_in_row:
                        return EndedBy.FORMAT_ERRORS
                    result = message
                case Command(text):
                    errors_in_row = 0
                    result = await workbench.run(text)
            transcript.add_context(bench.language.after_reply(reply.token_ids, result))
        return EndedBy.MAX_TURNS

    async def _turn(self, session: Session) -> tuple[Reply, Command | Submit | FormatError]:
        self._turn_started_s = time.monotonic()
        reply, latency_s = await session.generate(self.transcript.token_ids, self.bench.limits.tokens_per_turn)
        self._turn_started_s = None
        action = parse_reply(self.bench.language.decode(reply.token_ids))
        self.transcript.add_reply(reply, latency_s=latency_s, tool_call=not isinstance(action, FormatError))
        self.bench.telling.turn(session.lease.group, latency_s)
        return reply, action

    def _ended_by_deadline(self) -> EndedBy:
        """A policy that takes too long is graded on what it did; one that waited for an engine that hangs is not."""
        if self._turn_started_s is not None:
            in_flight_s = time.monotonic() - self._turn_started_s
            longest_s = max((turn.latency_s for turn in self.transcript.turns), default=0.0)
            if not self.transcript.turns or in_flight_s > max(HUNG_TURN_S, HUNG_TURN_FACTOR * longest_s):
                raise SessionError(SessionFailure.DEADLINE, f"a turn had been in flight for {in_flight_s:.0f} s")
        return EndedBy.DEADLINE

    async def _reward(self, ended_by: EndedBy, workspace: Path) -> float:
        if ended_by is EndedBy.FORMAT_ERRORS:
            return 0.0
        if not workspace.exists():  # no command ever ran
            await asyncio.to_thread(make_workspace, self.task, workspace)
        async with self.bench.grading_slots:
            result = await grade(self.bench.host, self.task, workspace, _task_limits(self.bench, self.task))
        self.bench.telling.sandbox(result.wall_s, result.cpu_s)
        return result.reward

    def _record(self, reward: float | None, ended_by: EndedBy, detail: str, started_unix_s: float) -> Trajectory:
        bench, lease, transcript = self.bench, self.lease, self.transcript
        return Trajectory(
            id=self.id,
            run=bench.run,
            work=self.work.id,
            sample=self.sample,
            task=self.task.name,
            split=self.work.split,
            group=lease.group if lease else "",
            view=lease.view if lease else "",
            engine=lease.engine if lease else "",
            token_ids=transcript.token_bytes(),
            turns=transcript.turns,
            logprobs=transcript.logprob_bytes(),
            candidates=transcript.candidates(head=not bench.sampling.filtered),
            temperature=bench.sampling.temperature,
            top_p=bench.sampling.top_p,
            top_k=bench.sampling.top_k,
            reward=reward,
            ended_by=ended_by,
            started_unix_s=started_unix_s,
            finished_unix_s=bench.clock(),
            detail=detail[:1000],
        )


class _Workbench:
    """The policy's workspace and sandbox, made when its first command comes: many an episode has none."""

    def __init__(self, bench: Bench, task: Task, folder: Path) -> None:
        self._bench, self._task, self._folder = bench, task, folder
        self._sandbox: Sandbox | None = None

    async def run(self, command: str) -> str:
        if self._sandbox is None:
            self._sandbox = await self._open()
        timeout_s = self._bench.limits.command_timeout_s
        result = await self._sandbox.run(command, timeout_s=timeout_s)
        self._bench.telling.sandbox(result.wall_s, result.cpu_s)
        return tool_message(result, timeout_s)

    async def _open(self) -> Sandbox:
        app, logs = self._folder / "app", self._folder / "logs"
        await asyncio.to_thread(make_workspace, self._task, app)
        await asyncio.to_thread(logs.mkdir)  # Harbor's images have it; nothing reads this one
        mounts = [Mount(app, "/app", writable=True), Mount(logs, "/logs", writable=True)]
        return await self._bench.host.create(mounts, _task_limits(self._bench, self._task))

    async def close(self) -> None:
        if self._sandbox is not None:
            await self._sandbox.close()


def _task_limits(bench: Bench, task: Task) -> Limits:
    """The run's limits; a task's own only tighten them."""
    limits = bench.sandbox_limits
    return replace(
        limits,
        memory_bytes=min(limits.memory_bytes, task.memory_bytes or limits.memory_bytes),
        disk_bytes=min(limits.disk_bytes, task.storage_bytes or limits.disk_bytes),
    )


def _loop_time(monotonic_s: float) -> float:
    return asyncio.get_running_loop().time() + monotonic_s - time.monotonic()
