"""A router and small engines, each a real server on a loopback address of its own; time is set by hand."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pathlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from motley_api.records import EngineState, Fleet, GroupShare
from motley_sampler.router.main import build
from motley_sampler.router.placement import Limits
from motley_sampler.router.server import Router, Settings

TOKEN = "a-token-for-tests"
_addresses = (f"127.77.{high}.{low}" for high in range(1, 250) for low in range(1, 250))


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


async def serve(app: web.Application) -> tuple[web.AppRunner, str]:
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    address = next(_addresses)
    site = web.TCPSite(runner, address, 0)
    await site.start()
    port = runner.addresses[0][1]
    return runner, f"http://{address}:{port}"


Script = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


class FakeEngine:
    """Speaks SGLang's /generate as recorded: replies to input_ids [a, b] with output_ids [b + 1, b + 2, ...].

    `script`, when set, answers instead. `seen` holds bodies and headers as they arrived.
    """

    def __init__(self, name: str, group: str) -> None:
        self.name, self.group = name, group
        self.script: Script | None = None
        self.seen: list[tuple[bytes, dict[str, str]]] = []
        self.arrived = asyncio.Event()
        self.output_ids: list[int] | None = None
        self.finish_reason: dict[str, Any] = {"type": "length", "length": 3}
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=0)
        app.router.add_post("/generate", self._generate)
        self._runner, self.url = await serve(app)

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def state(self, **more: object) -> EngineState:
        given = {"view": "bf16", "version": 1, "ready": True, "max_sessions": 4} | more
        return EngineState(id=self.name, group=self.group, url=self.url, **given)  # type: ignore[arg-type]

    def reply(self, body: dict[str, Any], count: int | None = None) -> dict[str, Any]:
        """What SGLang 0.5.23 answers, cut to the fields that matter here; `count` outputs so far when streaming."""
        last = body["input_ids"][-1]
        ids = self.output_ids or [last + 1, last + 2, last + 3]
        ids = ids if count is None else ids[:count]
        done = count is None or len(ids) == len(self.output_ids or ids)
        meta = {
            "id": "rid",
            "finish_reason": self.finish_reason if done else None,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 1,
            "weight_version": "v7",
        }
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[-0.5, token, None] for token in ids]
            top = int(body.get("top_logprobs_num", 0))
            meta["output_top_logprobs"] = [[[-0.5, token, None], [-1.5, token + 1, None]][:top] for token in ids]
        return {"text": "", "output_ids": ids, "meta_info": meta}

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        self.seen.append((raw, dict(request.headers)))
        self.arrived.set()
        body = msgspec.json.decode(raw)
        if self.script is not None:
            return await self.script(request, body)
        if not body.get("stream"):
            return web.json_response(self.reply(body))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for count in range(1, len(self.reply(body)["output_ids"]) + 1):
            await response.write(b"data: " + msgspec.json.encode(self.reply(body, count)) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


class Stage:
    """One router, its engines, its clock, and a client that holds the token."""

    def __init__(self, router: Router, clock: Clock, url: str, client: aiohttp.ClientSession) -> None:
        self.router, self.clock, self.url, self.client = router, clock, url, client
        self.engines: dict[str, FakeEngine] = {}

    async def engine(self, name: str, group: str = "g", **state: object) -> FakeEngine:
        one = FakeEngine(name, group)
        await one.start()
        self.engines[name] = one
        await self.beat(name, **state)
        return one

    async def beat(self, *names: str, **state: object) -> None:
        for name in names or tuple(self.engines):
            body = self.engines[name].state(**state)
            status, answer = await self.call("PUT", f"/v1/engines/{name}", body)
            assert status == 204, answer

    async def fleet(self, generation: int = 1, *, paused: bool = False, **shares: int) -> None:
        groups = [GroupShare(name=n, view="bf16", capacity_sessions=4, share_milli=s) for n, s in shares.items()]
        document = Fleet(generation=generation, groups=groups, paused=paused)
        status, answer = await self.call("PUT", "/v1/fleet", document)
        assert status == 200, answer

    async def call(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
        """Status, and the body as JSON where it is JSON."""
        data = body if isinstance(body, bytes) else msgspec.json.encode(body) if body is not None else None
        async with self.client.request(method, self.url + path, data=data, headers=headers) as response:
            raw = await response.read()
            is_json = response.content_type == "application/json" and raw.strip()
            return response.status, msgspec.json.decode(raw) if is_json else raw.decode()


@pytest.fixture
async def stage_of(tmp_path: pathlib.Path) -> AsyncIterator[Callable[..., Awaitable[Stage]]]:
    """Makes routers; settings are given by name. All stop with the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(clock: Clock | None = None, **changes: Any) -> Stage:
            limits = Limits(engine_timeout_s=10, warm_up_s=15, recovery_s=0)
            settings = dataclasses.replace(Settings(token=TOKEN, limits=limits, watch_s=0.02), **changes)
            clock = clock or Clock()
            router = Router(settings, clock=clock)
            runner, url = await serve(build(router))
            stack.push_async_callback(runner.cleanup)
            client = aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"})
            stack.push_async_callback(client.close)
            stage = Stage(router, clock, url, client)

            async def stop_engines() -> None:
                for one in stage.engines.values():
                    await one.stop()

            stack.push_async_callback(stop_engines)
            return stage

        yield make


@pytest.fixture
async def stage(stage_of: Callable[..., Awaitable[Stage]]) -> Stage:
    return await stage_of()
