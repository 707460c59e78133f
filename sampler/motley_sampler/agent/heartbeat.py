"""PUT /v1/engines/<id> on the router, while the engine makes progress."""

from __future__ import annotations

import asyncio
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
    settings = agent.settings
    url = f"{settings.router_url}/v1/engines/{settings.engine_id}"
    headers = {"Authorization": f"Bearer {settings.token}", "Content-Type": "application/json"}
    try:
        async with session.put(
            url, data=records.encode_json(agent.state()), headers=headers, timeout=TIMEOUT
        ) as answer:
            return answer.status < 300
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False  # a dead router learns of us when it is back


async def run(agent: Agent) -> None:
    """For ever; says once when heartbeats begin and stop arriving."""
    arriving: bool | None = None
    async with aiohttp.ClientSession() as session:
        while True:
            arrived = await beat(agent, session)
            if arrived != arriving:
                log.info("event=heartbeat arriving=%s alive=%s", str(arrived).lower(), str(agent.alive()).lower())
                arriving = arrived
            await asyncio.sleep(agent.settings.heartbeat_s)
