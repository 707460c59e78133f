"""The router's HTTP API: sessions, engines, the fleet, status. The table decides; this file parses and answers.

POST   /v1/sessions             LeaseRequest -> Lease; 503 + Retry-After with the reason when no group takes it
PUT    /v1/sessions/<session>   Lease -> Lease (renewed; another engine of its group if the old one left); 404: lost
       ?unreachable=<engine>    nobody listens there: no new sessions for it until it is heard of, and this one moves
       ?refused=<engine>        it answers but does not serve (drains, loads, fails): this session moves
DELETE /v1/sessions/<session>   204 always: ending twice is no error
PUT    /v1/engines/<id>         EngineState (a heartbeat)      DELETE: goodbye, its sessions move at once
PUT    /v1/fleet                Fleet; 409 when older than the known one        GET: the document in force
GET    /v1/status               RouterStatus
GET    /health, /metrics        without a token
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import pathlib
import time
from collections.abc import AsyncIterator, Callable, Iterable

import aiohttp
import msgspec
from aiohttp import web
from motley_api import keys
from motley_api.records import EngineState, Fleet, Lease, LeaseRequest

from motley_sampler.keepalive import KEEP_ALIVE_S
from motley_sampler.router import wire
from motley_sampler.router.metrics import CONTENT_TYPE, Metrics
from motley_sampler.router.placement import Limits, Move, Refusal
from motley_sampler.router.table import LeaseConflictError, Table
from motley_sampler.router.wire import RequestError, decode, json_response, log, read_body

MAX_SESSION_CHARACTERS = 512


@dataclasses.dataclass(frozen=True)
class Settings:
    """How one router runs. Times in seconds."""

    token: str
    fleet_path: pathlib.Path | None = None
    limits: Limits = dataclasses.field(default_factory=Limits)
    lease_ttl_s: float = 30.0
    min_ttl_s: float = 1.0
    max_ttl_s: float = 600.0
    sweep_s: float = 1.0
    max_body_bytes: int = wire.MAX_BODY_BYTES
    # The proxy.
    proxy_ttl_s: float = 3600.0
    """A session known only by its routing key ends after this long without a request."""
    keep_alive_s: float = KEEP_ALIVE_S
    """A proxied reply that is silent for this long gets a byte, so that no middlebox drops it."""
    connect_s: float = 5.0
    watch_s: float = 1.0
    """How often a waiting proxied request looks whether its engine is still there."""
    model_source: str = ""
    """Folder or fsspec URL with tokenizer.json and a chat template; empty: no chat."""
    model_name: str = "motley"
    context_length: int = 0
    """Longest conversation in tokens, reply included; 0: not known, the engine decides."""


class Router:
    """The table with its clock, counters and client; handlers are methods."""

    def __init__(self, settings: Settings, *, clock: Callable[[], float] = time.monotonic) -> None:
        if not settings.token:
            raise ValueError(f"token must not be empty: set {keys.ENV_TOKEN}")
        self.settings = settings
        self.clock = clock
        self.table = Table(settings.limits, now_s=clock())
        self.metrics = Metrics(self.table, clock)
        # Sessions that lost their engine, and when. A lease's holder is told by its renewal; an agent that only knows a
        # URL by its next request, which must not start a session of the same name in another group.
        self.lost: dict[str, float] = {}
        self._fleet_seen: tuple[int, int, int] | None = None
        self._swept_s = math.inf  # on the event loop's clock
        self._client: aiohttp.ClientSession | None = None

    @property
    def client(self) -> aiohttp.ClientSession:
        """Connections to engines. Its only time limit is for connecting: a long reply is not a fault."""
        if self._client is None:
            self._client = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.settings.connect_s),
                auto_decompress=False,
            )
        return self._client

    # Sessions.

    def place(self, session: str, *, min_version: int, ttl_s: float) -> Lease:
        """A session's lease, or the RequestError that says why there is none."""
        if not 0 < len(session) <= MAX_SESSION_CHARACTERS:
            raise RequestError(400, "InvalidSession", f"session must have 1 to {MAX_SESSION_CHARACTERS} characters")
        known = self.table.pin(session) is not None
        with self.metrics.place_seconds.time():
            answer = self.table.place(session, min_version=min_version, ttl_s=ttl_s, now_s=self.clock())
        if isinstance(answer, Refusal):
            self.metrics.refusals.labels(answer.reason).inc()
            raise RequestError(
                503, answer.reason, answer.message, retry_after_s=answer.retry_after_s, groups=dict(answer.groups)
            )
        if not known:
            self.metrics.sessions.labels(answer.group).inc()
        return answer

    async def post_session(self, request: web.Request) -> web.Response:
        body = decode(await read_body(request, self.settings.max_body_bytes), LeaseRequest)
        self.lost.pop(body.session, None)
        return json_response(
            self.place(body.session, min_version=body.min_version, ttl_s=self.settings.lease_ttl_s), status=201
        )

    async def put_session(self, request: web.Request) -> web.Response:
        lease = decode(await read_body(request, self.settings.max_body_bytes), Lease)
        if lease.session != request.match_info["session"]:
            raise RequestError(400, "InvalidBody", "the lease's session must equal the one in the path")
        ttl_s = min(max(lease.ttl_s, self.settings.min_ttl_s), self.settings.max_ttl_s)
        known = self.table.pin(lease.session)
        try:
            renewed = self.table.renew(msgspec.structs.replace(lease, ttl_s=ttl_s), now_s=self.clock())
        except LeaseConflictError as error:
            raise RequestError(409, "LeaseConflict", str(error)) from error
        if renewed is None:
            if (ago_s := self.table.expired_s(lease.session, now_s=self.clock())) is not None:
                message = f"the lease of {lease.session!r} ran out {ago_s:.0f} s ago and its place was given away"
                raise RequestError(404, "LeaseExpired", message)
            if known is not None:
                self._tell_moves([Move(known, None)])
            raise RequestError(404, "SessionLost", f"group {lease.group!r} has no engine for session {lease.session!r}")
        if request.query.get("unreachable") == renewed.engine:
            self.table.suspect(renewed.engine, now_s=self.clock())
        if renewed.engine in (request.query.get("unreachable"), request.query.get("refused")):
            renewed = self.table.avoid(lease.session, now_s=self.clock()) or renewed
        self.metrics.renewals.inc()
        if known is None:
            self.metrics.relearned.labels(renewed.group).inc()
        if renewed.engine != (known.engine if known else lease.engine):
            self.metrics.repins.labels(renewed.group).inc()
        return json_response(renewed)

    async def delete_session(self, request: web.Request) -> web.Response:
        self.lost.pop(request.match_info["session"], None)
        self.table.end(request.match_info["session"], now_s=self.clock())
        return web.Response(status=204)

    # Engines and the fleet.

    async def put_engine(self, request: web.Request) -> web.Response:
        state = decode(await read_body(request, self.settings.max_body_bytes), EngineState)
        if state.id != request.match_info["engine"]:
            raise RequestError(400, "InvalidBody", "the state's id must equal the one in the path")
        before = self.table.engines.get(state.id)
        self._tell_moves(self.table.hear(state, now_s=self.clock()))
        if before is None or (before.state.ready, before.state.version) != (state.ready, state.version):
            log("engine", id=state.id, group=state.group, ready=state.ready, version=state.version, reason=state.reason)
        return web.Response(status=204)

    async def delete_engine(self, request: web.Request) -> web.Response:
        engine_id = request.match_info["engine"]
        log("engine-left", id=engine_id)
        self._tell_moves(self.table.forget_engine(engine_id, now_s=self.clock()))
        return web.Response(status=204)

    async def put_fleet(self, request: web.Request) -> web.Response:
        fleet = _checked(decode(await read_body(request, self.settings.max_body_bytes), Fleet))
        if not self.table.set_fleet(fleet):
            known = self.table.fleet.generation if self.table.fleet else -1
            raise RequestError(
                409, "StaleGeneration", f"generation {fleet.generation} must be greater than {known}", generation=known
            )
        return json_response(self.table.fleet)

    async def get_fleet(self, request: web.Request) -> web.Response:
        if self.table.fleet is None:
            raise RequestError(404, "NoFleet", "no fleet document has been given yet")
        return json_response(self.table.fleet)

    async def get_status(self, request: web.Request) -> web.Response:
        return json_response(self.table.status(self.clock()))

    async def get_health(self, request: web.Request) -> web.Response:
        """Not well when the sweep stopped: expiry and time-outs would, too. A restart is cheap, leases are
        relearned."""
        silent_s = asyncio.get_running_loop().time() - self._swept_s
        if silent_s > max(10.0, 10 * self.settings.sweep_s):
            raise RequestError(503, "SweepStopped", f"the last sweep was {silent_s:.0f} s ago")
        return web.Response(text="ok\n")

    async def get_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    # What happens by itself.

    def read_fleet(self) -> None:
        """Takes the fleet file when it changed. A missing or unreadable one leaves the known document in force."""
        path = self.settings.fleet_path
        if path is None:
            return
        try:
            stat = path.stat()
            seen = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            if seen == self._fleet_seen:
                return
            self._fleet_seen = seen
            fleet = _checked(decode(path.read_bytes(), Fleet))
        except FileNotFoundError:
            return
        except (OSError, RequestError) as error:
            log("fleet-file-refused", path=path, error=error)
            return
        if self.table.set_fleet(fleet):
            log("fleet", generation=fleet.generation, groups=len(fleet.groups), paused=fleet.paused)

    def sweep(self) -> None:
        self.read_fleet()
        swept = self.table.sweep(now_s=self.clock())
        for engine_id in swept.timed_out:
            log("engine-timed-out", id=engine_id, timeout_s=self.settings.limits.engine_timeout_s)
        if swept.expired:
            self.metrics.expired.inc(len(swept.expired))
            log("leases-expired", sessions=len(swept.expired))
        self._tell_moves(swept.moves)
        forgotten_s = self.clock() - self.settings.proxy_ttl_s
        while self.lost and next(iter(self.lost.values())) < forgotten_s:  # in the order of their loss
            del self.lost[next(iter(self.lost))]

    def _tell_moves(self, moves: Iterable[Move]) -> None:
        for move in moves:
            pin = move.pin
            if move.to_engine is None:
                self.lost.pop(pin.session, None)
                self.lost[pin.session] = self.clock()
                self.metrics.lost.labels(pin.group).inc()
                log("session-lost", session=pin.session, group=pin.group, engine=pin.engine)
            else:
                self.metrics.repins.labels(pin.group).inc()
                log("session-moved", session=pin.session, group=pin.group, engine=pin.engine, to=move.to_engine)

    async def background(self, app: web.Application) -> AsyncIterator[None]:
        """aiohttp's clean-up context: the sweep runs while the server does."""

        async def sweep_for_ever() -> None:
            while True:
                self.sweep()
                self._swept_s = asyncio.get_running_loop().time()
                await asyncio.sleep(self.settings.sweep_s)

        self._swept_s = asyncio.get_running_loop().time()
        task = asyncio.create_task(sweep_for_ever())
        task.add_done_callback(_tell_failure)
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if self._client is not None:
            await self._client.close()


def _tell_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log("sweep-failed", error=repr(error))  # /health tells the rest


def _checked(fleet: Fleet) -> Fleet:
    names = [group.name for group in fleet.groups]
    if len(set(names)) != len(names):
        raise RequestError(400, "InvalidFleet", "groups must have unique names")
    for group in fleet.groups:
        if not 0 <= group.share_milli <= 1000:
            raise RequestError(
                400,
                "InvalidFleet",
                f"share_milli of group {group.name!r} must be between 0 and 1000, got {group.share_milli}",
            )
    return fleet


def build_app(router: Router) -> web.Application:
    # The size limit is ours (read_body): it answers in our shape, and without reading 100 MB first.
    app = web.Application(middlewares=[wire.guard(router.settings.token)], client_max_size=0)
    app.add_routes(
        [
            web.post("/v1/sessions", router.post_session),
            web.put("/v1/sessions/{session:.+}", router.put_session),
            web.delete("/v1/sessions/{session:.+}", router.delete_session),
            web.put("/v1/engines/{engine}", router.put_engine),
            web.delete("/v1/engines/{engine}", router.delete_engine),
            web.put("/v1/fleet", router.put_fleet),
            web.get("/v1/fleet", router.get_fleet),
            web.get("/v1/status", router.get_status),
            web.get("/health", router.get_health),
            web.get("/metrics", router.get_metrics),
        ]
    )
    app.cleanup_ctx.append(router.background)
    return app
