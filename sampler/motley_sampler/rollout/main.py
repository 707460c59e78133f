"""`motley rollout`: one worker process, configured by its environment (see motley_api.keys)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from aiohttp import web
from motley_api import keys

from motley_sampler.rollout.log import log
from motley_sampler.rollout.metrics import CONTENT_TYPE, Metrics
from motley_sampler.rollout.settings import ConfigError, Settings, settings_from
from motley_sampler.rollout.worker import Worker, open_worker
from motley_sampler.sandbox.host import SandboxError

GRACE_S = 20.0  # of the 30 s that Kubernetes gives


async def serve(settings: Settings, stopping: asyncio.Event) -> None:
    """Runs a worker and its /health and /metrics until `stopping` is set."""
    metrics = Metrics()
    async with open_worker(settings, metrics) as worker:
        runner = web.AppRunner(_app(metrics), access_log=None, handle_signals=False)
        await runner.setup()
        await web.TCPSite(runner, settings.address, keys.ROLLOUT_PORT).start()
        try:
            await _work(worker, stopping)
        finally:
            await runner.cleanup()


async def _work(worker: Worker, stopping: asyncio.Event) -> None:
    working = asyncio.create_task(worker.run())
    told = asyncio.create_task(stopping.wait())
    await asyncio.wait({working, told}, return_when=asyncio.FIRST_COMPLETED)
    if working.done():
        told.cancel()
        await working  # it ends by itself only by an error
        return
    await worker.stop(GRACE_S)
    await working


def _app(metrics: Metrics) -> web.Application:
    async def health(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def numbers(_: web.Request) -> web.Response:
        return web.Response(body=metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_get("/metrics", numbers)
    return app


async def _run(settings: Settings) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    await serve(settings, stopping)


def main() -> None:
    try:
        settings = settings_from(os.environ)
        asyncio.run(_run(settings))
    except ConfigError as error:
        log("config-error", error=error)
        sys.exit(keys.EXIT_CONFIG)
    except (ValueError, SandboxError) as error:  # model folder, tasks or sandboxes: the text names what is wrong
        log("cannot-start", error=error)  # alone and last: it becomes the run's condition
        sys.exit(keys.EXIT_CONFIG)


if __name__ == "__main__":
    main()
