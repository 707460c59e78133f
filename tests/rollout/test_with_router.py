"""Sessions against the router itself: leases, renewals and moves by its own rules."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import msgspec
import pytest_asyncio
from aiohttp import web
from motley_api.records import EndedBy, EngineState, Fleet, GroupShare, RouterStatus
from motley_sampler.router.placement import Limits
from motley_sampler.router.server import Router, build_app
from motley_sampler.router.server import Settings as RouterSettings

TOKEN = "run-token"


@dataclass
class RealRouter:
    url: str
    client: aiohttp.ClientSession

    async def hear(self, engine: str, url: str) -> None:
        state = EngineState(id=engine, group="h100-fp8", view="fp8", url=url, version=3, ready=True, max_sessions=4)
        async with self.client.put(f"{self.url}/v1/engines/{engine}", data=msgspec.json.encode(state)) as response:
            assert response.status == 204

    async def forget(self, engine: str) -> None:
        async with self.client.delete(f"{self.url}/v1/engines/{engine}") as response:
            assert response.status == 204

    async def status(self) -> RouterStatus:
        async with self.client.get(f"{self.url}/v1/status") as response:
            return msgspec.json.decode(await response.read(), type=RouterStatus)


@pytest_asyncio.fixture
async def router() -> AsyncIterator[RealRouter]:
    runner = web.AppRunner(
        build_app(
            Router(RouterSettings(token=TOKEN, limits=Limits(warm_up_s=0.0, engine_timeout_s=600), lease_ttl_s=1.0))
        ),
        access_log=None,
    )
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        fleet = Fleet(
            generation=1, groups=[GroupShare(name="h100-fp8", view="fp8", capacity_sessions=4, share_milli=1000)]
        )
        async with client.put(f"{url}/v1/fleet", data=msgspec.json.encode(fleet)) as response:
            assert response.status == 200
        yield RealRouter(url, client)
    await runner.cleanup()


async def test_an_episode_takes_a_place_and_gives_it_back(world: Any, settings: Any, start: Any, router: Any) -> None:
    await router.hear("engine-0", world.url)
    async with start(replace(settings, router_url=router.url)):
        world.deal(samples=4)
        episodes = await world.delivered("0/0", "0/1", "0/2", "0/3")
    assert {(episode.engine, episode.view, episode.ended_by) for episode in episodes} == {
        ("engine-0", "fp8", EndedBy.SUBMIT)
    }
    assert (await router.status()).sessions_active == 0


async def test_a_session_follows_its_engines_departure(world: Any, settings: Any, start: Any, router: Any) -> None:
    entered = asyncio.Event()

    async def script(session: str, turn: int, body: dict[str, Any]) -> str:
        if not entered.is_set():
            entered.set()
            await asyncio.sleep(60)
        return "<tool_call>submit</tool_call>"

    world.engine.script = script
    await router.hear("engine-0", world.url)
    async with start(replace(settings, router_url=router.url)):
        world.deal()
        await world.until(entered.is_set)
        await router.hear("engine-1", world.url)
        await router.forget("engine-0")
        [episode] = await world.delivered("0/0")
    assert (episode.engine, episode.ended_by) == ("engine-1", EndedBy.SUBMIT)


async def test_a_session_leaves_an_engine_that_nobody_reaches_before_its_heartbeats_stop(
    world: Any, settings: Any, start: Any, router: Any
) -> None:
    """Within a second: the engine's last heartbeat counts for ten."""
    await router.hear("engine-0", "http://127.0.0.1:9")  # nothing listens on the discard port
    async with start(replace(settings, router_url=router.url)) as running:
        world.deal()
        await world.until(lambda: running.metric("retries_total", reason="Unreachable") >= 1)
        await router.hear("engine-1", world.url)
        [episode] = await world.delivered("0/0")
        engines = {engine.id: engine.reason for engine in (await router.status()).engines}
    assert (episode.engine, episode.ended_by) == ("engine-1", EndedBy.SUBMIT)
    assert engines == {"engine-0": "Suspect", "engine-1": ""}


async def test_a_session_whose_engine_began_to_drain_before_its_first_turn_is_served_elsewhere(
    world: Any, settings: Any, start: Any, router: Any
) -> None:
    """The engine does not know the session and never will: it keeps only those that it has served."""
    draining = await _refusing()
    await router.hear("engine-0", draining.url)
    async with start(replace(settings, router_url=router.url)):
        world.deal()
        await world.until(lambda: draining.asked >= 1)
        await router.hear("engine-1", world.url)
        [episode] = await world.delivered("0/0")
    await draining.runner.cleanup()
    assert (episode.engine, episode.ended_by) == ("engine-1", EndedBy.SUBMIT)
    assert draining.asked <= 4


async def test_a_session_leaves_an_engine_that_stays_behind_its_version_while_a_peer_has_it(
    world: Any, settings: Any, start: Any, router: Any
) -> None:
    stuck = await _refusing(409)
    await router.hear("engine-0", stuck.url)
    async with start(replace(settings, router_url=router.url)):
        world.deal(min_version=3)
        await world.until(lambda: stuck.asked >= 2)
        await router.hear("engine-1", world.url)
        [episode] = await world.delivered("0/0")
    await stuck.runner.cleanup()
    assert (episode.engine, episode.ended_by) == ("engine-1", EndedBy.SUBMIT)


@dataclass
class _Refusing:
    """An engine that is up and refuses every turn."""

    runner: web.AppRunner
    url: str = ""
    asked: int = 0


async def _refusing(status: int = 503) -> _Refusing:
    async def generate(_: web.Request) -> web.Response:
        made.asked += 1
        return web.json_response({"error": {"message": "not here"}}, status=status, headers={"Retry-After": "0.1"})

    app = web.Application()
    app.router.add_post("/generate", generate)
    made = _Refusing(web.AppRunner(app, access_log=None))
    await made.runner.setup()
    await web.TCPSite(made.runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{made.runner.addresses[0][1]}"
    return made


async def test_a_session_whose_group_emptied_is_an_infrastructure_failure(
    world: Any, settings: Any, start: Any, router: Any
) -> None:
    entered = asyncio.Event()

    async def script(session: str, turn: int, body: dict[str, Any]) -> str:
        entered.set()
        await asyncio.sleep(60)
        return "<tool_call>submit</tool_call>"

    world.engine.script = script
    await router.hear("engine-0", world.url)
    async with start(replace(settings, router_url=router.url)):
        world.deal()
        await world.until(entered.is_set)
        await router.forget("engine-0")
        [episode] = await world.delivered("0/0")
    assert (episode.reward, episode.ended_by) == (None, EndedBy.INFRASTRUCTURE)
    assert "SessionLost" in episode.detail
