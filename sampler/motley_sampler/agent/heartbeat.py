"""PUT /v1/engines/<id> on the router, while the engine makes progress; DELETE when the agent leaves."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import aiohttp
from motley_api import records

from motley_sampler.agent.agent import Agent

log = logging.getLogger("motley.sampler")
TIMEOUT = aiohttp.ClientTimeout(total=2.0)


async def beat(agent: Agent, session: aiohttp.ClientSession) -> bool:
    """One heartbeat. False when it was held back, because the engine hangs, or did not arrive."""
    if not agent.alive():
        return False
    return await _tell(agent, session, "PUT", records.encode_json(agent.state()))


async def goodbye(agent: Agent, session: aiohttp.ClientSession) -> bool:
    """The router moves the engine's sessions now, not after a time without heartbeats. False: it did not arrive."""
    return await _tell(agent, session, "DELETE", None)


async def run(agent: Agent, leaving: asyncio.Event) -> None:
    """Until `leaving`, then goodbye; says once when heartbeats begin and stop arriving.

    One after the other, so that no heartbeat comes after the goodbye and brings the engine back.
    """
    arriving: bool | None = None
    async with aiohttp.ClientSession() as session:
        while not leaving.is_set():
            arrived = await beat(agent, session)
            if arrived != arriving:
                log.info("event=heartbeat arriving=%s alive=%s", str(arrived).lower(), str(agent.alive()).lower())
                arriving = arrived
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(leaving.wait(), agent.settings.heartbeat_s)
        log.info("event=goodbye arrived=%s", str(await goodbye(agent, session)).lower())


async def _tell(agent: Agent, session: aiohttp.ClientSession, method: str, body: bytes | None) -> bool:
    settings = agent.settings
    url = f"{settings.router_url}/v1/engines/{settings.engine_id}"
    headers = {"Authorization": f"Bearer {settings.token}", "Content-Type": "application/json"}
    try:
        async with session.request(method, url, data=body, headers=headers, timeout=TIMEOUT) as answer:
            return answer.status < 300
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False  # a dead router learns of us when it is back
