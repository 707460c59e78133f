"""The proxy, for agents that know only a URL: POST /generate as SGLang speaks it, POST /v1/chat/completions as OpenAI
does.

A request belongs to a session by its X-SMG-Routing-Key header, else by `session_id` (a string), `routing_key` or
`user` in its body; the key is the session's id, so that a lease and a key name the same session. Without any the
request is a session of its own. Bodies for /generate pass through byte for byte, replies too.

While an engine thinks, the agent gets a byte every `keep_alive_s`: whitespace before a JSON body, a comment in an
event stream. The first such byte commits the status to 200, so a later failure is told in the body, as {"error": …}.
Nothing but keep-alive bytes sent means that the request may go again to another engine of the group; that is what
happens when an engine dies.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import aiohttp
import msgspec
from aiohttp import web
from motley_api import keys
from motley_api.records import Lease

from motley_sampler.keepalive import late_failure
from motley_sampler.router import placement
from motley_sampler.router.server import Router
from motley_sampler.router.wire import RequestError, decode, log, read_body

MAX_ATTEMPTS = 4
PASSED_REQUEST_HEADERS = ("Content-Type", keys.MIN_VERSION_HEADER, keys.ROUTING_KEY_HEADER)
PASSED_REPLY_HEADERS = ("Content-Type", "Retry-After", "Content-Encoding")
OWN_HEADERS = "X-Motley-"  # passed on from the engine's agent, too
GROUP_HEADER, VIEW_HEADER, ENGINE_HEADER = f"{OWN_HEADERS}Group", f"{OWN_HEADERS}View", f"{OWN_HEADERS}Engine"
EVENT_STREAM = "text/event-stream"


class Peek(msgspec.Struct, frozen=True):
    """What the proxy reads of a body; all else passes unread."""

    stream: bool = False
    session_id: Any = None
    routing_key: Any = None
    user: Any = None


class Translator(Protocol):
    """Turns an engine's reply into the agent's. One for each attempt."""

    def whole(self, body: bytes) -> bytes: ...
    def piece(self, chunk: bytes) -> bytes: ...
    def end(self) -> bytes: ...


MakeTranslator = Callable[[str, str], Translator]  # group, view


class Verbatim:
    """/generate: as it came."""

    def __init__(self, group: str, view: str) -> None:
        del group, view  # the engine's own reply says all

    def whole(self, body: bytes) -> bytes:
        return body

    def piece(self, chunk: bytes) -> bytes:
        return chunk

    def end(self) -> bytes:
        return b""


class EngineLeftError(Exception):
    """The engine that serves a request has left, as far as the router knows, while the request waits."""


class AgentGoneError(Exception):
    """The agent closed its connection: nobody waits for the reply."""


class Reply:
    """The answer to an agent. It begins as late as it can, so that quick failures keep their own status."""

    def __init__(self, request: web.Request, lease: Lease, *, stream: bool) -> None:
        self._request, self._stream = request, stream
        # For life, so they may be told before an engine has answered: whoever grades or trains on the reply needs them.
        self._place = {GROUP_HEADER: lease.group, VIEW_HEADER: lease.view}
        self._response: web.StreamResponse | None = None
        self._tail = b"\n\n"
        self.content_sent = False  # more than keep-alive bytes: no retry any more

    @property
    def begun(self) -> bool:
        return self._response is not None

    def agent_gone(self) -> bool:
        transport = self._request.transport
        return transport is None or transport.is_closing()

    async def keep_alive(self) -> bool:
        """Writes a byte that means nothing where the format allows one. False: not in the middle of an event."""
        if self._stream and not self._tail.endswith((b"\n\n", b"\r\n\r\n")):
            return False
        await self._begin(200, {"Content-Type": EVENT_STREAM if self._stream else "application/json"})
        await self._send(b": keep-alive\n\n" if self._stream else b" ")
        return True

    async def write(self, chunk: bytes, *, status: int, headers: dict[str, str]) -> None:
        await self._begin(status, headers)
        self.content_sent = True
        self._tail = (self._tail + chunk)[-4:]
        await self._send(chunk)

    async def finish(self, body: bytes, *, status: int, headers: dict[str, str]) -> web.StreamResponse:
        """The rest of the reply, or all of it."""
        if self._response is None:
            self.content_sent = True
            self._response = web.Response(body=body, status=status, headers=self._place | headers)
            return self._response
        if body:
            await self.write(body, status=status, headers=headers)
        return await self._end()

    async def fail(self, error: RequestError) -> web.StreamResponse:
        """Tells a failure: by status if nothing was sent, in the body if it can, else by breaking off."""
        if self._response is None:
            return error.response()
        body = msgspec.json.encode(error.body())
        if self._stream:
            lead = b"" if self._tail.endswith((b"\n\n", b"\r\n\r\n")) else b"\n\n"
            body = lead + b"data: " + body + b"\n\n"
        elif self.content_sent:  # half a JSON body cannot be mended
            if self._request.transport is not None:
                self._request.transport.abort()
            return self._response
        await self._send(body)
        return await self._end()

    # A failed write is the agent's doing; as an error of aiohttp it would look like the engine's.

    async def _send(self, data: bytes) -> None:
        assert self._response is not None
        try:
            await self._response.write(data)
        except ConnectionError as error:
            raise AgentGoneError from error

    async def _end(self) -> web.StreamResponse:
        assert self._response is not None
        try:
            await self._response.write_eof()
        except ConnectionError as error:
            raise AgentGoneError from error
        return self._response

    async def _begin(self, status: int, headers: dict[str, str]) -> None:
        if self._response is None:
            # No proxy in between may hold events back.
            headers = {**self._place, **headers, "X-Accel-Buffering": "no"}
            self._response = web.StreamResponse(status=status, headers=headers)
            try:
                await self._response.prepare(self._request)
            except ConnectionError as error:
                raise AgentGoneError from error


class Proxy:
    """Relays requests to the engines of their sessions."""

    def __init__(self, router: Router) -> None:
        self.router = router

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request, self.router.settings.max_body_bytes)
        peek = decode(body, Peek)
        return await self.relay(
            request, body, key=session_key(request, peek), stream=peek.stream, translator=Verbatim, label="/generate"
        )

    async def relay(
        self,
        request: web.Request,
        body: bytes,
        *,
        key: str | None,
        stream: bool,
        translator: MakeTranslator,
        label: str,
    ) -> web.StreamResponse:
        """Sends `body` to /generate of the session's engine and the translated reply to the agent."""
        table, settings = self.router.table, self.router.settings
        session = key if key is not None else f"once/{secrets.token_hex(8)}"
        if session in self.router.lost:
            raise RequestError(410, "SessionLost", f"session {session!r} lost its engine; its group has no other")
        lease = self.router.place(session, min_version=_min_version(request), ttl_s=settings.proxy_ttl_s)
        reply = Reply(request, lease, stream=stream)
        outcome = "failed"
        try:
            try:
                response = await self._attempts(request, body, lease, reply, translator)
                outcome = "ok" if response.status < 400 else str(response.status)
                return response
            except RequestError as error:
                outcome = error.reason
                return await reply.fail(error)
        except AgentGoneError:
            outcome = "AgentGone"
            return web.Response(status=499)
        finally:
            self.router.metrics.proxied.labels(label, outcome).inc()
            if key is None:
                table.end(session, now_s=self.router.clock())

    async def _attempts(
        self,
        request: web.Request,
        body: bytes,
        lease: Lease,
        reply: Reply,
        translator: MakeTranslator,
    ) -> web.StreamResponse:
        headers = {name: request.headers[name] for name in PASSED_REQUEST_HEADERS if name in request.headers}
        headers |= {"Authorization": f"Bearer {self.router.settings.token}", "Accept-Encoding": "identity"}
        dropped_by = ""
        for _ in range(MAX_ATTEMPTS):
            try:
                return await self._attempt(lease, body, headers, reply, translator(lease.group, lease.view))
            except EngineLeftError:
                failure = "left"
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                failure = f"cannot be reached: {error}"
                self.router.table.suspect(lease.engine, now_s=self.router.clock())
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                failure = f"broke off: {error!r}"
                # A pooled connection may have gone stale: the same engine gets one more try before it is suspected.
                if dropped_by == lease.engine:
                    self.router.table.suspect(lease.engine, now_s=self.router.clock())
                dropped_by = lease.engine
            except aiohttp.ClientError as error:
                failure = f"broke off: {error!r}"
                self.router.table.suspect(lease.engine, now_s=self.router.clock())
            log("relay-failed", session=lease.session, engine=lease.engine, failure=failure)
            if reply.content_sent:
                raise RequestError(502, "EngineFailed", f"engine {lease.engine} {failure} in mid-reply")
            lease = self._next_engine(lease, failure)
            self.router.metrics.proxy_retries.inc()
        raise RequestError(503, "EngineFailed", f"engine {lease.engine} {failure}", retry_after_s=2)

    def _next_engine(self, lease: Lease, failure: str) -> Lease:
        """Where the session's request goes now: where it was moved already, or another engine of its group."""
        router = self.router
        pin = router.table.pin(lease.session)
        if pin is None:
            raise RequestError(410, "SessionLost", f"session {lease.session!r} lost its engine; its group has no other")
        engine = router.table.engines.get(lease.engine)
        if pin.engine == lease.engine and (engine is None or engine.suspect):
            moved = router.table.avoid(lease.session, now_s=router.clock())
            if moved is None:
                raise RequestError(503, "EngineFailed", f"engine {lease.engine} {failure}", retry_after_s=2)
            router.metrics.repins.labels(lease.group).inc()
            log("session-moved", session=lease.session, group=lease.group, engine=lease.engine, to=moved.engine)
        now = router.table.lease(lease.session)
        assert now is not None
        return now

    def _moved_off(self, lease: Lease) -> bool:
        """Moves a session off an engine that refused it and, by its own word, will go on doing so: it drains, loads or failed
        its proof. False: it serves, or the group has no other."""
        router, now_s = self.router, self.router.clock()
        engine = router.table.engines.get(lease.engine)
        if engine is None or placement.not_serving(engine, now_s, router.settings.limits) is None:
            return False
        moved = router.table.avoid(lease.session, now_s=now_s)
        if moved is None:
            return False
        router.metrics.repins.labels(lease.group).inc()
        log("session-moved", session=lease.session, group=lease.group, engine=lease.engine, to=moved.engine)
        return True

    async def _attempt(
        self, lease: Lease, body: bytes, headers: dict[str, str], reply: Reply, translator: Translator
    ) -> web.StreamResponse:
        upstream, raw = await self._watched(self._send(lease, body, headers), lease, reply)
        async with upstream:
            passed = {ENGINE_HEADER: lease.engine}
            passed |= {name: value for name, value in upstream.headers.items() if _is_passed(name)}
            if raw is None:
                while chunk := await self._watched(upstream.content.readany(), lease, reply):
                    if piece := translator.piece(chunk):
                        await reply.write(piece, status=200, headers=passed)
                return await reply.finish(translator.end(), status=200, headers=passed)
            failure = late_failure(raw) if upstream.status == 200 else None
            status = failure[0] if failure else upstream.status
            if status == 200:
                return await reply.finish(translator.whole(raw), status=200, headers=passed)
            if status == 503 and self._moved_off(lease):
                raise EngineLeftError
            if reply.begun or failure:
                message = failure[1] if failure else raw[:2000].decode("utf-8", "replace")
                raise RequestError(status, "EngineRefused", f"engine {lease.engine}: {message}")
            return await reply.finish(raw, status=status, headers=passed)

    async def _send(
        self, lease: Lease, body: bytes, headers: dict[str, str]
    ) -> tuple[aiohttp.ClientResponse, bytes | None]:
        """The engine's answer and its whole body, so that half a body can be asked for again; None: an event stream."""
        upstream = await self.router.client.post(f"{lease.url}/generate", data=body, headers=headers)
        if upstream.status == 200 and upstream.content_type == EVENT_STREAM:
            return upstream, None
        try:
            return upstream, await upstream.read()
        except BaseException:
            upstream.close()
            raise

    async def _watched[T](self, work: Awaitable[T], lease: Lease, reply: Reply) -> T:
        """Waits for an engine, keeping session and connection alive; gives up when the engine left."""
        settings, table = self.router.settings, self.router.table
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        spoke_s = loop.time()
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=min(settings.watch_s, settings.keep_alive_s))
                table.touch(lease.session, now_s=self.router.clock())
                if done:
                    return task.result()
                if reply.agent_gone():
                    raise AgentGoneError
                pin = table.pin(lease.session)
                if pin is None or pin.engine != lease.engine:
                    raise EngineLeftError
                if loop.time() - spoke_s >= settings.keep_alive_s and await reply.keep_alive():
                    self.router.metrics.keep_alives.inc()
                    spoke_s = loop.time()
        finally:
            if not task.done():
                task.cancel()


def _is_passed(name: str) -> bool:
    return name.title() in PASSED_REPLY_HEADERS or name.title().startswith(OWN_HEADERS)


def session_key(request: web.Request, peek: Peek) -> str | None:
    """The agent's own name for its session; None when it gave none."""
    header = request.headers.get(keys.ROUTING_KEY_HEADER)
    for candidate in (header, peek.session_id, peek.routing_key, peek.user):
        if isinstance(candidate, str) and candidate:
            return candidate
    return None


def _min_version(request: web.Request) -> int:
    given = request.headers.get(keys.MIN_VERSION_HEADER, "0")
    try:
        return int(given)
    except ValueError:
        raise RequestError(
            400, "InvalidHeader", f"{keys.MIN_VERSION_HEADER} must be an integer, got {given!r}"
        ) from None


def add_routes(app: web.Application, proxy: Proxy) -> None:
    app.router.add_post("/generate", proxy.generate)
