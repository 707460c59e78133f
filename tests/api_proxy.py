"""A proxy in front of the API server that can spoil watches: what a real one does rarely, and never when a test wants it."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import yaml
from aiohttp import web
from motley_local.testing import Cluster
from motley_operator.kube import from_kubeconfig
from yarl import URL

Json = dict[str, Any]
GONE = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}}
INTERNAL = {"type": "ERROR", "object": {"kind": "Status", "code": 500, "reason": "InternalError", "message": "etcd"}}


@dataclass(frozen=True)
class Asked:
    """One request that came by."""

    method: str
    path: str
    query: dict[str, str]

    @property
    def plural(self) -> str:
        return self.path.rsplit("/", 1)[1]

    @property
    def is_watch(self) -> bool:
        return self.query.get("watch") == "true"

    @property
    def is_list(self) -> bool:
        return self.method == "GET" and not self.is_watch and "limit" in self.query


@dataclass
class ApiProxy:
    """Serves on 127.0.0.1 without TLS, from a thread of its own. A context manager."""

    cluster: Cluster
    folder: Path
    asked: list[Asked] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)  # lines that watches passed on
    withheld: set[str] = field(default_factory=set)  # plurals whose watches pass nothing on
    _queues: dict[str, list[asyncio.Queue[bytes | None]]] = field(default_factory=dict)

    def __enter__(self) -> ApiProxy:
        self._credentials = from_kubeconfig(self.cluster.kubeconfig_path)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(30)
        document = yaml.safe_load(self.cluster.kubeconfig_path.read_text())
        document["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{self.port}"}
        self.kubeconfig_path = self.folder / "proxy.kubeconfig"
        self.kubeconfig_path.write_text(yaml.safe_dump(document))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    def of(self, plural: str) -> list[Asked]:
        return [one for one in self.asked if one.plural == plural]

    def end_watches(self, plural: str, event: Json) -> int:
        """Sends an event to every open watch, then closes it; to how many."""
        queues = list(self._queues.get(plural, ()))
        for queue in queues:
            for item in (json.dumps(event).encode(), None):
                self._loop.call_soon_threadsafe(queue.put_nowait, item)
        return len(queues)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        context = ssl.create_default_context(cadata=self._credentials.ca)
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{tail:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=context, limit=0), timeout=aiohttp.ClientTimeout(total=None)
        ) as self._session:
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.port = int(runner.addresses[0][1])
            self._ready.set()
            await self._stop.wait()
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        one = Asked(request.method, request.path, dict(request.query))
        self.asked.append(one)
        headers = {
            name: request.headers[name]
            for name in ("Authorization", "Content-Type", "Accept")
            if name in request.headers
        }
        async with self._session.request(
            request.method,
            URL(self._credentials.server + request.raw_path, encoded=True),
            data=await request.read() or None,
            headers=headers,
        ) as answer:
            if not one.is_watch or answer.status != 200:
                return web.Response(
                    status=answer.status, body=await answer.read(), content_type=answer.content_type or "text/plain"
                )
            return await self._pass_on(request, one.plural, answer)

    async def _pass_on(self, request: web.Request, plural: str, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "application/json"})
        await reply.prepare(request)
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._queues.setdefault(plural, []).append(queue)
        reading = asyncio.create_task(self._read(plural, answer, queue))
        try:
            while (line := await queue.get()) is not None:
                await reply.write(line + b"\n")
        except ConnectionError:
            pass
        finally:
            reading.cancel()
            self._queues[plural].remove(queue)
        return reply

    async def _read(self, plural: str, answer: aiohttp.ClientResponse, queue: asyncio.Queue[bytes | None]) -> None:
        rest = b""
        async for chunk in answer.content.iter_any():
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if line and plural not in self.withheld:
                    self.seen.append(line.decode())
                    queue.put_nowait(line)
        queue.put_nowait(None)
