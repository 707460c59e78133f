"""Heartbeats, hanging, and leaving."""

from __future__ import annotations

import ast
import asyncio
import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from agent.rig import TOKEN, Clock, Rig, publish
from aiohttp import web
from aiohttp.test_utils import TestServer
from engine import tiny
from motley_api import keys
from motley_api.records import NOT_CONFORMANT, EngineState, Fleet, GroupShare
from motley_sampler import main
from motley_sampler.agent import agent as agent_module
from motley_sampler.agent import conformance, heartbeat
from motley_sampler.agent.retirement import Retirement
from motley_sampler.agent.sessions import SessionBook
from motley_sampler.engines.protocol import EngineError
from motley_sampler.engines.reference.engine import ReferenceEngine
from motley_sampler.main import serve
from motley_sampler.router.server import Router as RealRouter
from motley_sampler.router.server import Settings as RouterSettings
from motley_sampler.router.server import build_app


class Router:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.states: list[EngineState] = []
        self.heard: list[str] = []  # methods, in order
        app = web.Application()
        app.add_routes([web.put("/v1/engines/{id}", self._put), web.delete("/v1/engines/{id}", self._delete)])
        self.server = TestServer(app)

    async def _delete(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {TOKEN}"
        self.heard.append(f"DELETE {request.match_info['id']}")
        return web.Response(status=204)

    async def _put(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {TOKEN}"
        self.heard.append("PUT")
        self.states.append(msgspec.json.decode(await request.read(), type=EngineState))
        assert self.states[-1].id == request.match_info["id"]
        return web.Response()


async def test_heartbeats_tell_the_router_and_outlive_its_death(make_rig: Callable[..., Rig]) -> None:
    router = Router()
    await router.server.start_server()
    rig = make_rig(router_url=str(router.server.make_url("")).rstrip("/"))
    async with aiohttp.ClientSession() as session:
        assert await heartbeat.beat(rig.agent, session)
        assert (router.states[-1].ready, router.states[-1].reason) == (False, "Loading")
        publish(rig, 1)
        await rig.agent.look()
        assert await heartbeat.beat(rig.agent, session)
        assert router.states[-1] == rig.state
        assert (router.states[-1].ready, router.states[-1].version, router.states[-1].view) == (True, 1, "bf16")
        await router.server.close()
        assert not await heartbeat.beat(rig.agent, session)  # and raises nothing


async def test_a_hung_engine_stops_beating_and_is_not_alive(make_rig: Callable[..., Rig], monkeypatch: Any) -> None:
    router = Router()
    await router.server.start_server()
    clock = Clock()
    rig = make_rig(router_url=str(router.server.make_url("")).rstrip("/"), clock=clock)
    publish(rig, 1)
    await rig.agent.look()
    client = await rig.client()
    entered, let_go = threading.Event(), threading.Event()
    real = rig.engine._turn

    def hang(scheduler: Any) -> None:
        entered.set()
        let_go.wait(30)
        real(scheduler)

    monkeypatch.setattr(rig.engine, "_turn", hang)
    rig.engine._wake.set()
    await tiny.until(entered.is_set)
    async with aiohttp.ClientSession() as session:
        clock.now += 29
        assert await heartbeat.beat(rig.agent, session)
        beats = len(router.states)
        clock.now += 2  # 31 s without progress: over hang_s
        assert not await heartbeat.beat(rig.agent, session)
        assert len(router.states) == beats
        assert (await client.get("/motley/alive")).status == 503
        assert (await client.get("/health")).status == 503
        assert (await client.post("/generate", json=tiny.body(tiny.prompt(5)))).status == 503
        assert (rig.state.ready, rig.state.reason) == (False, "Hung")
        let_go.set()
        await tiny.until(rig.agent.alive)
        assert await heartbeat.beat(rig.agent, session)
    await client.close()
    await router.server.close()


async def test_draining_keeps_known_sessions_and_takes_no_new_ones(make_rig: Callable[..., Rig]) -> None:
    clock = Clock()
    rig = make_rig(clock=clock, drain_seconds=600)
    publish(rig, 1)
    running = asyncio.create_task(rig.agent.run())
    await tiny.until(lambda: rig.state.ready)
    client = await rig.client()

    async def turn(session: str) -> int:
        return (await client.post("/generate", json=tiny.body(tiny.prompt(5), 2, session_id=session))).status

    assert await turn("known") == 200
    assert (await client.post("/motley/drain")).status == 202
    assert (rig.state.ready, rig.state.draining, rig.state.reason) == (False, True, "Draining")
    assert (await client.get("/health")).status == 503
    assert await turn("new") == 503
    assert (await client.post("/generate", json=tiny.body(tiny.prompt(5), 2))).status == 503
    clock.now += 29
    assert await turn("known") == 200
    publish(rig, 2)  # a drain may take long: new weights still come
    await tiny.until(lambda: rig.state.version == 2)
    clock.now += 29
    assert not running.done()
    clock.now += 2  # 31 s since the known session was heard of
    assert await asyncio.wait_for(running, 30) == 0
    await client.close()


async def test_a_session_that_says_goodbye_ends_the_drain(make_rig: Callable[..., Rig]) -> None:
    clock = Clock()
    rig = make_rig(clock=clock)
    publish(rig, 1)
    running = asyncio.create_task(rig.agent.run())
    await tiny.until(lambda: rig.state.ready)
    client = await rig.client()
    await client.post("/generate", json=tiny.body(tiny.prompt(5), 2), headers={"X-SMG-Routing-Key": "s"})
    rig.agent.leave()
    assert rig.agent.sessions.active(clock(), 30) == 1
    await client.delete("/motley/sessions/s")
    assert await asyncio.wait_for(running, 30) == 0
    await client.close()


async def test_a_drain_ends_at_its_deadline_whatever_still_runs(make_rig: Callable[..., Rig]) -> None:
    clock = Clock()
    rig = make_rig(clock=clock, drain_seconds=60)
    publish(rig, 1)
    running = asyncio.create_task(rig.agent.run())
    await tiny.until(lambda: rig.state.ready)
    client = await rig.client()
    await client.post("/pause_generation")
    stuck = asyncio.create_task(client.post("/generate", json=tiny.body(tiny.prompt(5), 2, session_id="s")))
    await tiny.until(lambda: rig.agent.in_flight == 1)
    rig.agent.leave()
    clock.now += 59
    await asyncio.sleep(0.05)
    assert not running.done()
    clock.now += 2
    assert await asyncio.wait_for(running, 30) == 0
    assert (await (await stuck).json())["meta_info"]["finish_reason"]["type"] == "abort"
    await client.close()


async def test_a_drained_agent_says_goodbye_after_its_last_heartbeat_and_before_its_engine_stops(
    make_rig: Callable[..., Rig], monkeypatch: Any
) -> None:
    router = Router()
    await router.server.start_server()
    rig = make_rig(router_url=str(router.server.make_url("")).rstrip("/"), port=0)
    publish(rig, 1)
    stopped: list[list[str]] = []  # what the router had heard by then
    stop = rig.engine.stop

    async def stopping() -> None:
        stopped.append(list(router.heard))
        await stop()

    monkeypatch.setattr(rig.engine, "stop", stopping)
    serving = asyncio.create_task(serve(rig.agent))
    await tiny.until(lambda: bool(router.states) and router.states[-1].ready)
    rig.agent.leave()
    assert await asyncio.wait_for(serving, 30) == 0
    assert router.heard[-1] == "DELETE run-h100-0"
    assert router.heard.count("PUT") == len(router.heard) - 1
    assert stopped == [router.heard]
    await router.server.close()


async def test_leaving_does_not_wait_for_a_router_that_is_gone(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(router_url="http://127.0.0.1:9", port=0)
    publish(rig, 1)
    serving = asyncio.create_task(serve(rig.agent))
    await tiny.until(lambda: rig.state.ready)
    rig.agent.leave()
    assert await asyncio.wait_for(serving, 30) == 0


async def test_an_agent_that_gives_up_says_goodbye_too(make_rig: Callable[..., Rig], monkeypatch: Any) -> None:
    rig = make_rig()
    publish(rig, 1)
    monkeypatch.setattr(rig.engine, "failed", lambda: "out of memory")
    said: list[str] = []

    async def goodbye() -> None:
        said.append("goodbye")

    assert await asyncio.wait_for(rig.agent.run(goodbye), 30) == keys.EXIT_GAVE_UP
    assert said == ["goodbye"]


def test_what_an_agent_gave_up_on_is_its_last_line(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    rig = Rig(tmp_path, port=0)
    publish(rig, 1)
    monkeypatch.setattr(rig.engine, "failed", lambda: "out of memory")
    monkeypatch.setattr(main, "build_agent", lambda settings: rig.agent)
    assert main.run(rig.settings) == keys.EXIT_GAVE_UP
    assert capsys.readouterr().err.splitlines()[-1] == "EngineFailed: out of memory"


async def test_sessions_of_a_drained_engine_move_at_once_with_no_timeout_having_passed(
    make_rig: Callable[..., Rig],
) -> None:
    """The real router, whose clock stands still: what moves is moved by the goodbye."""
    router = RealRouter(RouterSettings(token=TOKEN), clock=Clock())
    server = TestServer(build_app(router))
    await server.start_server()
    rig = make_rig(router_url=str(server.make_url("")).rstrip("/"), port=0)
    publish(rig, 1)
    serving = asyncio.create_task(serve(rig.agent))
    await tiny.until(lambda: rig.settings.engine_id in router.table.engines and rig.state.ready)
    await tiny.until(lambda: router.table.engines[rig.settings.engine_id].state.ready)
    share = GroupShare(name="run-h100", view="bf16", capacity_sessions=8, share_milli=1000)
    router.table.set_fleet(Fleet(generation=1, groups=[share]))
    lease = router.place("s", min_version=0, ttl_s=30)
    assert lease.engine == rig.settings.engine_id
    other = msgspec.structs.replace(rig.state, id="run-h100-1", url="http://127.0.0.1:8")
    router.table.hear(other, now_s=router.clock())
    rig.agent.leave()
    assert await asyncio.wait_for(serving, 30) == 0
    moved = router.table.lease("s")
    assert moved is not None
    assert (moved.group, moved.engine) == ("run-h100", "run-h100-1")
    assert list(router.table.engines) == ["run-h100-1"]
    await server.close()


class NeverLoads(ReferenceEngine):
    loads = 0

    def _load(self, folder: Path) -> Any:
        type(self).loads += 1
        raise EngineError("no such device")


async def test_an_engine_that_ended_three_times_is_retired_and_its_pod_says_so(make_rig: Callable[..., Rig]) -> None:
    NeverLoads.loads = 0
    router = Router()
    await router.server.start_server()
    options = {"engine_type": NeverLoads, "router_url": str(router.server.make_url("")).rstrip("/")}
    publish(make_rig(), 1)
    for _ in range(3):  # one process after the other, in one pod
        assert await asyncio.wait_for(make_rig(**options).agent.run(), 30) == 3
    assert NeverLoads.loads == 9  # three looks each
    rig = make_rig(**options)
    running = asyncio.create_task(rig.agent.run())
    await tiny.until(lambda: rig.state.reason == "Retired")
    assert (rig.state.ready, rig.agent.alive()) == (False, True)  # no traffic, and no further start
    assert rig.state.message == "ended 3 times within 60 minutes: not started again in this pod"
    async with aiohttp.ClientSession() as session:
        assert await heartbeat.beat(rig.agent, session)
    assert router.states[-1].reason == "Retired"
    client = await rig.client()
    assert (await client.post("/generate", json=tiny.body(tiny.prompt(5)))).status == 503
    rig.agent.leave()
    assert await asyncio.wait_for(running, 30) == 0
    assert NeverLoads.loads == 9
    await client.close()
    await router.server.close()


def test_only_ends_of_the_last_hour_count(tmp_path: Path) -> None:
    now = [10_000.0]
    retirement = Retirement(tmp_path / "scratch", most=3, within_s=3600, clock=lambda: now[0])
    assert [retirement.gave_up() for _ in range(2)] == [1, 2]
    now[0] += 3601
    assert retirement.gave_up() == 1  # the first two are forgotten
    assert not retirement.due()
    now[0] += 10
    assert [retirement.gave_up() for _ in range(2)] == [2, 3]
    assert retirement.due()
    (tmp_path / "scratch/gave-up.json").write_text("[1, 2")
    assert not retirement.due()


@pytest.mark.parametrize("session", ["", "known"])
async def test_a_pull_that_takes_long_holds_up_nobody_who_leaves(
    make_rig: Callable[..., Rig], monkeypatch: Any, session: str
) -> None:
    """Without sessions the agent leaves at once, with one at the drain's deadline."""
    clock = Clock()
    rig = make_rig(clock=clock, drain_seconds=60)
    publish(rig, 1)
    pulling, let_go = threading.Event(), threading.Event()
    pull = rig.source.pull

    def slow(version: int, *, fresh: bool = False) -> Any:
        if version == 2:
            pulling.set()
            let_go.wait(30)
        return pull(version, fresh=fresh)

    monkeypatch.setattr(rig.source, "pull", slow)
    said: list[str] = []

    async def goodbye() -> None:
        said.append("goodbye")

    running = asyncio.create_task(rig.agent.run(goodbye))
    await tiny.until(lambda: rig.state.ready)
    rig.agent.sessions.touch(session, clock() + 1000)  # as if it were heard of all the time
    publish(rig, 2)
    await tiny.until(pulling.is_set)
    rig.agent.leave()
    if session:
        await asyncio.sleep(0.05)
        assert not running.done()
        clock.now += 61
    assert await asyncio.wait_for(running, 30) == 0
    assert said == ["goodbye"]
    let_go.set()


def test_every_reason_that_the_agent_refuses_a_version_with_is_one_that_the_operator_reads() -> None:
    """Verdict's first argument, wherever it is made: the operator shows NOT_CONFORMANT in the group's condition."""
    made: set[str] = set()
    for module in (agent_module, conformance):
        for call in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Verdict":
                assert isinstance(call.args[0], ast.Constant)
                made.add(call.args[0].value)
    assert made == {""} | NOT_CONFORMANT


def test_the_session_book_is_bounded_and_forgets_the_oldest() -> None:
    book = SessionBook(limit=2)
    for now, session in enumerate(["a", "b", "a", "c"]):
        book.touch(session, float(now))
    assert [book.knows(session) for session in "abc"] == [True, False, True]
    assert book.active(now=4.0, idle_s=2.0) == 1  # c at 3; a at 2 is exactly 2 s ago
    book.touch("", 9.0)
    assert not book.knows("")
