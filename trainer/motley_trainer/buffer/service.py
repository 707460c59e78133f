"""The buffer's two doors: HTTP for the cluster (bearer token), and a socket file for rank 0 (same pod only)."""

from __future__ import annotations

import asyncio
import hmac
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import zstandard
from aiohttp import web
from motley_api.records import Fleet, Trajectory, WorkRequest, encode_json

from motley_trainer.buffer.batch import Batch, Commit, Durable, Notice, Resume, Resumed
from motley_trainer.buffer.core import BufferCore
from motley_trainer.buffer.db import BufferBrokenError

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 512 << 20
POLL_S = 1.0  # deadlines are looked at this often while rank 0 waits
# aiohttp would refuse zstd bodies without a codec of its own choice: they are unpacked here, within bounds.
RUNNER_OPTIONS: dict[str, Any] = {"access_log": None, "auto_decompress": False, "shutdown_timeout": 5.0}
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

type Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class BufferService:
    """Runs every call of the core on one thread: SQLite has one writer, and the event loop never waits for a disk."""

    def __init__(self, core: BufferCore, *, token: str) -> None:
        self._core = core
        self._token = token
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="buffer")
        self._changed = asyncio.Event()
        self._broken = ""

    async def _do[T](self, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Errors: BufferBrokenError."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: call(*arguments, **named))
        except (BufferBrokenError, sqlite3.DatabaseError) as error:
            self._broken = str(error)
            log.error("event=buffer_broken error=%r", self._broken)
            raise BufferBrokenError(self._broken) from error

    async def _write[T](self, call: Callable[..., T], *arguments: Any) -> T:
        """A call that ends in a transaction: when it goes through, the disk is well again."""
        result = await self._do(call, *arguments)
        self._broken = ""
        return result

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    async def finished(self) -> bool:
        return await self._do(lambda: self._core.finished)

    # ------------------------------------------------------------------------------------------- the cluster's door
    def public_app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.add_routes(
            [
                web.post("/v1/work", self._work),
                web.post("/v1/trajectories", self._trajectories),
                web.put("/v1/fleet", self._fleet),
                web.get("/v1/status", self._status),
                web.get("/v1/steps", self._steps),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
            ]
        )
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in ("/health", "/metrics"):
            sent = request.headers.get("Authorization", "")
            if not hmac.compare_digest(sent.encode(), f"Bearer {self._token}".encode()):
                return _problem(401, "Authorization: want 'Bearer <the run's token>'")
        return await _answer_problems(request, handler)

    async def _work(self, request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read(), type=WorkRequest)
        works = await self._write(self._core.work, asked)
        return _json(works, headers={} if works else {"Retry-After": "1"})

    async def _trajectories(self, request: web.Request) -> web.Response:
        body = await request.read()
        if body[:4] == ZSTD_MAGIC:
            body = _decompress(body)
        trajectories = msgspec.msgpack.decode(body, type=list[Trajectory])
        ack = await self._write(self._core.deliver, trajectories)
        self._changed.set()
        return _json(ack)

    async def _fleet(self, request: web.Request) -> web.Response:
        await self._do(self._core.put_fleet, msgspec.json.decode(await request.read(), type=Fleet))
        return web.Response(status=204)

    async def _status(self, request: web.Request) -> web.Response:
        status = await self._do(self._core.status)
        if self._broken:
            status = msgspec.structs.replace(status, condition="BufferBroken", message=self._broken)
        return _json(status)

    async def _steps(self, request: web.Request) -> web.Response:
        after = request.query.get("after", "0")
        if not after.isdecimal():
            return _problem(400, f"after: is {after!r}, want a number >= 0")
        return _json(await self._do(self._core.db.steps_after, int(after)))

    async def _health(self, request: web.Request) -> web.Response:
        return _problem(503, self._broken) if self._broken else web.Response(text="ok")

    async def _metrics(self, request: web.Request) -> web.Response:
        status = await self._do(self._core.status)
        return web.Response(body=self._core.metrics.render(status), content_type="text/plain", charset="utf-8")

    # ------------------------------------------------------------------------------------------- rank 0's door
    def local_app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_problems_middleware])
        app.add_routes(
            [
                web.post("/local/resume", self._resume),
                web.get("/local/batch", self._batch),
                web.post("/local/commit", self._commit),
                web.post("/local/durable", self._durable),
                web.post("/local/notice", self._notice),
                web.get("/local/may-finish", self._may_finish),
            ]
        )
        return app

    async def _resume(self, request: web.Request) -> web.Response:
        resume = msgspec.msgpack.decode(await request.read(), type=Resume)
        return _msgpack(Resumed(attempt=await self._do(self._core.resume, resume)))

    async def _batch(self, request: web.Request) -> web.Response:
        """Waits for up to `wait` seconds; 204 when there is no batch yet, so that rank 0 can look at its signals."""
        step, wait_s, waited_s = (
            int(request.query["step"]),
            float(request.query["wait"]),
            float(request.query["waited"]),
        )
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        while True:
            self._changed.clear()
            spent_s = loop.time() - started_s
            batch: Batch | None = await self._do(self._core.next_batch, step, waited_s=waited_s + spent_s)
            if batch is not None:
                return _msgpack(batch)
            if spent_s >= wait_s:
                return web.Response(status=204)
            try:
                async with asyncio.timeout(min(POLL_S, wait_s)):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _commit(self, request: web.Request) -> web.Response:
        commit = msgspec.msgpack.decode(await request.read(), type=Commit)
        await self._write(self._core.commit, commit.record)
        return web.Response(status=204)

    async def _durable(self, request: web.Request) -> web.Response:
        durable = msgspec.msgpack.decode(await request.read(), type=Durable)
        await self._do(self._core.durable, durable.step, durable.oldest_kept)
        return web.Response(status=204)

    async def _notice(self, request: web.Request) -> web.Response:
        await self._do(self._core.notice, msgspec.msgpack.decode(await request.read(), type=Notice))
        return web.Response(status=204)

    async def _may_finish(self, request: web.Request) -> web.Response:
        return _msgpack(await self._do(self._core.may_finish))


@web.middleware
async def _problems_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    return await _answer_problems(request, handler)


async def _answer_problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except (msgspec.DecodeError, zstandard.ZstdError) as error:
        return _problem(400, f"body: {error}")
    except (BufferBrokenError, OSError) as error:
        return _problem(507, str(error))


def _decompress(body: bytes) -> bytes:
    """A frame says its size, or may grow to MAX_BODY_BYTES: a small body must not fill the memory."""
    size = zstandard.frame_content_size(body)
    if size > MAX_BODY_BYTES:
        raise zstandard.ZstdError(f"{size} bytes unpacked, at most {MAX_BODY_BYTES} are allowed")
    with zstandard.ZstdDecompressor().stream_reader(body) as reader:
        plain = reader.read(MAX_BODY_BYTES + 1)
    if len(plain) > MAX_BODY_BYTES:
        raise zstandard.ZstdError(f"more than {MAX_BODY_BYTES} bytes unpacked")
    return bytes(plain)


def _json(record: object, *, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=encode_json(record), content_type="application/json", headers=headers)


def _msgpack(record: object) -> web.Response:
    return web.Response(body=msgspec.msgpack.encode(record), content_type="application/msgpack")


def _problem(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)
