"""`motley sampler`: one engine behind its agent, configured by the environment (motley_api.keys.ENV_*)."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

from aiohttp import web
from motley_api import keys

from motley_sampler.agent import heartbeat
from motley_sampler.agent.agent import Agent
from motley_sampler.agent.build import build_agent
from motley_sampler.agent.http import make_app
from motley_sampler.agent.settings import Settings, SettingsError, from_env

log = logging.getLogger("motley.sampler")


async def serve(agent: Agent) -> int:
    """Serves, beats and follows the view until the agent's loop ends; returns its exit code."""
    settings = agent.settings
    # handler_cancellation: a client that goes away frees its slot.
    runner = web.AppRunner(make_app(agent), handler_cancellation=True, access_log=None, shutdown_timeout=5.0)
    await runner.setup()
    await web.TCPSite(runner, settings.address, settings.port).start()
    log.info("event=serving url=%s group=%s view=%s", settings.url, settings.group, settings.view)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.leave)
    leaving = asyncio.Event()
    beating = asyncio.create_task(heartbeat.run(agent, leaving))

    async def goodbye() -> None:
        leaving.set()
        await asyncio.wait([beating])

    try:
        return await agent.run(goodbye)
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        await runner.cleanup()


def run(settings: Settings) -> int:
    async def main() -> int:
        agent = build_agent(settings)
        code = await serve(agent)
        if code == keys.EXIT_GAVE_UP:  # alone and last: it becomes the group's condition
            print(f"{agent.standing.reason}: {agent.standing.message}", file=sys.stderr, flush=True)
        return code

    return asyncio.run(main())


def main() -> None:
    """Entry point of `motley sampler`."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="time=%(asctime)s level=%(levelname)s logger=%(name)s %(message)s"
    )
    try:
        settings = from_env(os.environ)
        code = run(settings)
    except SettingsError as error:
        print(error, file=sys.stderr, flush=True)  # alone and last: it becomes the group's condition
        code = keys.EXIT_CONFIG
    raise SystemExit(code)


if __name__ == "__main__":
    main()
