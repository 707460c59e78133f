"""Asks a run's router and trainer how they are. Telemetry: no answer is a condition, and stops nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TypeVar

import aiohttp
import msgspec
from motley_api import records

from motley_operator.planner import capacity, scaling
from motley_operator.planner.model import Action, Object

TIMEOUT = aiohttp.ClientTimeout(total=3.0, sock_connect=1.0)
KEPT_LAST_STEPS = 64
KEPT_LOADS = 4  # windows of each group
T = TypeVar("T")


@dataclass(frozen=True)
class Refusal:
    """What the API server refused, and when it is worth another try."""

    action: Action
    tries: int
    until: datetime


@dataclass
class RunMemory:
    """What is remembered of one run between two looks; all of it can be asked for again."""

    token: str = ""
    router: records.RouterStatus | None = None
    router_error: str = ""
    trainer: records.TrainerStatus | None = None
    trainer_error: str = ""
    steps: dict[tuple[int, int], records.StepRecord] = field(default_factory=dict)  # (attempt, step)
    joined: dict[str, int] = field(default_factory=dict)  # group -> the first step with samples of it
    window: capacity.Window | None = None
    loads: dict[str, tuple[capacity.Load, ...]] = field(default_factory=dict)  # by group, oldest first
    sized_s: float = float("-inf")  # monotonic, when the number of engines was last thought about
    known_attempt: int = -1
    known_until: int = 0
    scaled: dict[tuple[str, str], scaling.Watched] = field(default_factory=dict)  # (kind, name) -> replicas
    errors: dict[tuple[str, str], str] = field(default_factory=dict)
    refusals: dict[tuple[str, str], Refusal] = field(default_factory=dict)
    failed_creates: dict[tuple[str, str], str] = field(default_factory=dict)

    def hear_router(
        self, status: records.RouterStatus | None, now_unix_s: float, window_s: float = capacity.WINDOW_S
    ) -> None:
        """What the router says, or that it does not answer."""
        self.router = status
        self.window, ended = capacity.seen(self.window, status, now_unix_s, window_s)
        for load in ended:
            self.loads[load.group] = (*self.loads.get(load.group, ()), load)[-KEPT_LOADS:]

    def notice(self, children: Mapping[tuple[str, str], Object], now: datetime) -> None:
        """Who changed the replicas of groups and their Deployments."""
        self.scaled = {
            key: scaling.noticed(self.scaled.get(key), obj, now)
            for key, obj in children.items()
            if key[0] in scaling.KINDS
        }

    def applied(self, manifest: Object) -> None:
        """We wrote its replicas: the next other value is somebody else's, also when this one was never looked at."""
        key, replicas = (manifest["kind"], manifest["metadata"]["name"]), manifest.get("spec", {}).get("replicas")
        if key in self.scaled and replicas is not None:
            self.scaled[key] = replace(self.scaled[key], replicas=int(replicas))

    def remember(self, steps: list[records.StepRecord], *, early: int, counted: tuple[int, int]) -> None:
        """Keeps the first steps of the run and of each group that joined later (the guard's early levels), the last ones, and
        everything not counted yet."""
        for record in steps:
            self.steps[record.attempt, record.step] = record
            for group in record.groups:
                self.joined[group.name] = min(record.step, self.joined.get(group.name, record.step))
        ordered = sorted(self.steps)
        last = set(ordered[-KEPT_LAST_STEPS:])
        starts = {1, *self.joined.values()}

        def first(step: int) -> bool:
            return any(start <= step < start + early for start in starts)

        self.steps = {key: self.steps[key] for key in ordered if key in last or key > counted or first(key[1])}

    def ask_after(self) -> int | None:
        """Which steps to ask for; None: none is new. A new attempt may repeat steps, so then all are asked for once."""
        if self.trainer is None:
            return None
        if self.trainer.attempt != self.known_attempt:
            return 0
        return self.known_until if self.trainer.step > self.known_until else None

    def heard(self, steps: list[records.StepRecord]) -> None:
        """The answer to that."""
        assert self.trainer is not None
        first_of_attempt = self.trainer.attempt != self.known_attempt
        own = [record.step for record in steps if record.attempt == self.trainer.attempt]
        self.known_attempt = self.trainer.attempt
        self.known_until = max(own, default=self.trainer.step if first_of_attempt else self.known_until)


class Telemetry:
    """One HTTP session for all runs."""

    def __init__(self, unix_s: Callable[[], float] = time.time, window_s: float = capacity.WINDOW_S) -> None:
        self._unix_s, self._window_s = unix_s, window_s
        self._session = aiohttp.ClientSession(timeout=TIMEOUT)

    async def close(self) -> None:
        await self._session.close()

    async def _get(self, url: str, token: str, kind: type[T], **params: str) -> T:
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        async with self._session.get(url, headers=headers, params=params) as answer:
            body = await answer.read()
            if answer.status != 200:
                raise TelemetryError(f"{url} answered {answer.status}: {body[:200].decode(errors='replace')}")
            return msgspec.json.decode(body, type=kind)

    async def look(
        self, memory: RunMemory, router_url: str, trainer_url: str, *, early: int, counted: tuple[int, int]
    ) -> None:
        """Refresh `memory` from both, at once."""
        await asyncio.gather(self._router(memory, router_url), self._trainer(memory, trainer_url, early, counted))

    async def _router(self, memory: RunMemory, url: str) -> None:
        try:
            heard = await self._get(f"{url}/v1/status", memory.token, records.RouterStatus)
            memory.hear_router(heard, self._unix_s(), self._window_s)
            memory.router_error = ""
        except (TelemetryError, aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
            memory.hear_router(None, self._unix_s())
            memory.router_error = describe(error)

    async def _trainer(self, memory: RunMemory, url: str, early: int, counted: tuple[int, int]) -> None:
        try:
            memory.trainer = await self._get(f"{url}/v1/status", memory.token, records.TrainerStatus)
            memory.trainer_error = ""
            after = memory.ask_after()
            if after is not None:
                steps = await self._get(f"{url}/v1/steps", memory.token, list[records.StepRecord], after=str(after))
                memory.heard(steps)
                memory.remember(steps, early=early, counted=counted)
        except (TelemetryError, aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
            memory.trainer, memory.trainer_error = None, describe(error)

    async def push(self, url: str, token: str, fleet: records.Fleet) -> str:
        """PUT /v1/fleet; "" or what went wrong. The ConfigMap brings the same a little later."""
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        try:
            async with self._session.put(f"{url}/v1/fleet", data=records.encode_json(fleet), headers=headers) as answer:
                return "" if answer.status < 300 else f"{answer.status}: {(await answer.text())[:200]}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return describe(error)


class TelemetryError(Exception):
    """An answer that is not one."""


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
