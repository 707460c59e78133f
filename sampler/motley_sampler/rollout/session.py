"""One agent session's place: a lease from the router, turns sent to its engine, and what to do when either fails.

Transient trouble (an engine that is behind, restarting, gone, or answers nonsense) is waited out and the same turn is sent
again with the same tokens, until the session's deadline. What cannot be mended raises SessionError, an infrastructure failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
from motley_api import keys
from motley_api.records import Lease, LeaseRequest
from yarl import URL

from motley_sampler.keepalive import late_failure
from motley_sampler.rollout.reply import Reply, ReplyError, parse_generate
from motley_sampler.rollout.settings import Sampling

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.2, 5.0
MAX_FAILURES_IN_ROW = 12  # of one turn, behind-the-version answers (409) left out
REFUSALS_BEFORE_MOVE = 2  # in a row: one may pass, and moving costs the session its cached prefix
BEHIND_BEFORE_MOVE = 10  # 409 in a row, a second apart: an engine that cannot load what its peers serve
CONTROL_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 5.0


class SessionFailure(StrEnum):
    NO_LEASE = "NoLease"
    SESSION_LOST = "SessionLost"
    ENGINE_REFUSED = "EngineRefused"
    ENGINE_FAILED = "EngineFailed"
    DEADLINE = "DeadlineWaitingForEngine"


class SessionError(Exception):
    def __init__(self, kind: SessionFailure, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


class _RetryError(Exception):
    """This attempt failed; the turn may be sent again."""

    def __init__(
        self, detail: str, *, engine: str, wait_s: float | None = None, counts: bool = True, reached: bool = True
    ) -> None:
        super().__init__(detail)
        self.engine = engine  # that was asked; empty: it did nothing wrong, and the router need not hear of it
        self.wait_s = wait_s  # the server's own wish
        self.counts = counts  # towards MAX_FAILURES_IN_ROW
        self.reached = reached  # False: nobody listens there


@dataclass(frozen=True)
class Fabric:
    """What sessions share: the way to the router and the engines."""

    client: aiohttp.ClientSession
    router_url: str
    token: str
    sampling: Sampling
    stop_ids: tuple[int, ...]
    retried: Callable[[str], None]  # counts: reason

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}


def backoff_s(failures: int) -> float:
    """Doubling, with jitter so that many sessions do not return at once."""
    return float(min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(failures, 10)) * random.uniform(0.5, 1.0))


def _complaint(error: _RetryError, failures: int, behind: int) -> dict[str, str] | None:
    """What the router is told of the engine when the lease is renewed. None: it need not be asked."""
    if not error.reached:
        return {"unreachable": error.engine}
    if not error.counts:
        return {"refused": error.engine} if behind and behind % BEHIND_BEFORE_MOVE == 0 else None
    return {"refused": error.engine} if failures >= REFUSALS_BEFORE_MOVE else {}


def _retry_after_s(response: aiohttp.ClientResponse) -> float | None:
    try:
        return min(LONGEST_BACKOFF_S, max(0.05, float(response.headers["Retry-After"])))
    except (KeyError, ValueError):
        return None


@dataclass
class Session:
    fabric: Fabric
    lease: Lease
    min_version: int
    deadline_s: float  # on the monotonic clock
    _moved: asyncio.Event = field(default_factory=asyncio.Event)
    _lost: str = ""
    _turn: int = 0

    @property
    def _url(self) -> URL:
        return URL(f"{self.fabric.router_url}/v1/sessions/{self._quoted}", encoded=True)

    @property
    def _quoted(self) -> str:
        return quote(self.lease.session, safe="")

    @property
    def _engine_url(self) -> str:
        return self.lease.url.rstrip("/")

    # Turns.

    async def generate(self, token_ids: list[int], max_tokens: int) -> tuple[Reply, float]:
        """The policy's next reply after exactly `token_ids`, and the seconds that it took from request to last token."""
        self._turn += 1
        failures, behind, attempt = 0, 0, 0
        while True:
            self._check_alive()
            attempt += 1
            started_s = time.monotonic()
            try:
                reply = await self._attempt(token_ids, max_tokens, f"{self.lease.session}.{self._turn}.{attempt}")
                return reply, time.monotonic() - started_s
            except _RetryError as error:
                failures += error.counts
                behind = 0 if error.counts else behind + 1
                if failures >= MAX_FAILURES_IN_ROW:
                    raise SessionError(
                        SessionFailure.ENGINE_FAILED, f"{failures} failures in a row: {error}"
                    ) from error
                wait_s = error.wait_s if error.wait_s is not None else backoff_s(failures)
                if time.monotonic() + wait_s >= self.deadline_s:
                    raise SessionError(SessionFailure.DEADLINE, str(error)) from error
                await asyncio.sleep(wait_s)
                complaint = _complaint(error, failures, behind) if error.engine else None
                if complaint is not None:
                    await self._renew(complaint)

    def _check_alive(self) -> None:
        if self._lost:
            raise SessionError(SessionFailure.SESSION_LOST, self._lost)

    def _request(self, token_ids: list[int], max_tokens: int, rid: str) -> dict[str, Any]:
        sampling = self.fabric.sampling
        wanted: dict[str, Any] = {"return_logprob": True}
        if sampling.filtered:
            wanted = {"return_sampling_mask": True, "sampling_logprobs_mode": "support"}
        elif sampling.top_logprobs:
            wanted["top_logprobs_num"] = sampling.top_logprobs
        return {
            "input_ids": token_ids,
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "max_new_tokens": max_tokens,
                "stop_token_ids": list(self.fabric.stop_ids),
                "skip_special_tokens": False,
            },
            "rid": rid,
            "session_id": self.lease.session,
            "routing_key": self.lease.session,
            **wanted,
        }

    async def _attempt(self, token_ids: list[int], max_tokens: int, rid: str) -> Reply:
        """One request. Given up when the router moves the session meanwhile: its old engine is gone or hangs."""
        self._moved.clear()
        engine = self.lease.engine
        request = asyncio.create_task(self._post(self._request(token_ids, max_tokens, rid)))
        moved = asyncio.create_task(self._moved.wait())
        try:
            await asyncio.wait({request, moved}, return_when=asyncio.FIRST_COMPLETED)
            if not request.done():
                raise _RetryError("the session moved while its turn ran", engine="", wait_s=0.0)
            body = await request
        finally:
            for task in (request, moved):
                task.cancel()
            await asyncio.gather(request, moved, return_exceptions=True)
        try:
            sampling = self.fabric.sampling
            return parse_generate(
                body, filtered=sampling.filtered, max_tokens=max_tokens, top_logprobs=sampling.top_logprobs
            )
        except ReplyError as error:
            self.fabric.retried("BadReply")
            raise _RetryError(str(error), engine=engine) from error

    async def _post(self, body: dict[str, Any]) -> bytes:
        headers = {
            **self.fabric.headers,
            keys.MIN_VERSION_HEADER: str(self.min_version),
            keys.ROUTING_KEY_HEADER: self.lease.session,
            "Content-Type": "application/json",
        }
        # No limit on the whole: a long reply is no fault. Hung engines are found by the fleet, which moves the session.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        engine = self.lease.engine
        try:
            async with self.fabric.client.post(
                f"{self._engine_url}/generate", data=msgspec.json.encode(body), headers=headers, timeout=timeout
            ) as response:
                content = await response.read()
                status, told = response.status, content[:300].decode(errors="replace")
                if status == 200:
                    failure = late_failure(content)
                    if failure is None:
                        return content
                    status, told = failure
                wait_s = _retry_after_s(response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.fabric.retried("Unreachable")
            reached = not isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError))
            detail = f"{engine}: {error or type(error).__name__}"
            raise _RetryError(detail, engine=engine, reached=reached) from error
        detail = f"{engine} answered {status}: {told}"
        if status == 409:  # it has not loaded the wanted weights yet, and will
            self.fabric.retried("VersionBehind")
            raise _RetryError(detail, engine=engine, wait_s=wait_s or 1.0, counts=False)
        if status in (408, 429) or status >= 500:
            self.fabric.retried("Unavailable")
            raise _RetryError(detail, engine=engine, wait_s=wait_s)
        raise SessionError(SessionFailure.ENGINE_REFUSED, detail)

    # The lease.

    async def _renew(self, complaint: Mapping[str, str] = MappingProxyType({})) -> None:
        """Tells the router that the session lives, and learns where. A router that is down changes nothing."""
        try:
            async with self.fabric.client.put(
                self._url.with_query(complaint),
                data=msgspec.json.encode(self.lease),
                headers=self.fabric.headers,
                timeout=aiohttp.ClientTimeout(total=CONTROL_TIMEOUT_S),
            ) as response:
                content = await response.read()
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError):
            return
        if status == 200:
            with contextlib.suppress(msgspec.DecodeError):
                self._take(msgspec.json.decode(content, type=Lease))
        elif status in (404, 409):
            self._lost = f"the router answered {status}: {content[:200].decode(errors='replace')}"
            self._moved.set()

    def _take(self, lease: Lease) -> None:
        if (lease.group, lease.view) != (self.lease.group, self.lease.view):
            self._lost = f"the router moved the session from group {self.lease.group} to {lease.group}"
            self._moved.set()
            return
        changed = (lease.engine, lease.url) != (self.lease.engine, self.lease.url)
        self.lease = lease
        if changed:
            self._moved.set()

    async def keep_renewing(self) -> None:
        while not self._lost:
            await asyncio.sleep(max(0.05, self.lease.ttl_s / 3))
            await self._renew()

    async def end(self) -> None:
        """Gives the place back, and frees the prefix on the engine, which may be waiting to drain. If that fails, the lease
        runs out by itself, and the engine forgets."""
        engine = URL(f"{self._engine_url}/motley/sessions/{self._quoted}", encoded=True)
        await asyncio.gather(self._delete(self._url), self._delete(engine))

    async def _delete(self, url: URL) -> None:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            timeout = aiohttp.ClientTimeout(total=CONTROL_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
            async with self.fabric.client.delete(url, headers=self.fabric.headers, timeout=timeout):
                pass


@contextlib.asynccontextmanager
async def open_session(
    fabric: Fabric, session_id: str, min_version: int, *, lease_deadline_s: float, timeout_s: float
) -> AsyncIterator[Session]:
    """A session with its lease kept alive. Its `timeout_s` counts from the lease; waiting for one ends at `lease_deadline_s`."""
    lease = await _obtain(fabric, session_id, min_version, lease_deadline_s)
    session = Session(fabric, lease, min_version, min(time.monotonic() + timeout_s, lease_deadline_s))
    renewing = asyncio.create_task(session.keep_renewing())
    try:
        yield session
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
        await session.end()


async def _obtain(fabric: Fabric, session_id: str, min_version: int, deadline_s: float) -> Lease:
    failures = 0
    while True:
        wait_s: float | None = None
        try:
            async with fabric.client.post(
                f"{fabric.router_url}/v1/sessions",
                data=msgspec.json.encode(LeaseRequest(session=session_id, min_version=min_version)),
                headers=fabric.headers,
                timeout=aiohttp.ClientTimeout(total=CONTROL_TIMEOUT_S),
            ) as response:
                content = await response.read()
                if response.status in (200, 201):
                    return msgspec.json.decode(content, type=Lease)
                detail = f"the router answered {response.status}: {content[:300].decode(errors='replace')}"
                if response.status not in (408, 429) and response.status < 500:
                    raise SessionError(SessionFailure.NO_LEASE, detail)
                wait_s = _retry_after_s(response)
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
            detail = f"router: {error or type(error).__name__}"
        failures += 1
        fabric.retried("NoLease")
        wait_s = wait_s if wait_s is not None else backoff_s(failures)
        if time.monotonic() + wait_s >= deadline_s:
            raise SessionError(SessionFailure.NO_LEASE, detail)
        await asyncio.sleep(wait_s)
