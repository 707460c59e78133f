"""``kubectl logs``: the API server asks a node's kubelet endpoint, which is served here over HTTPS; and log rotation."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

MAX_LOG_BYTES = 10 * 1024 * 1024
TAIL_BLOCK_BYTES = 64 * 1024
FOLLOW_POLL_S = 0.5

FindLog = Callable[[str, str, str, bool], Path | None]  # namespace, pod, container, previous -> file
IsRunning = Callable[[str, str, Path], bool]  # namespace, pod, file -> whether more may come


@dataclass(frozen=True)
class LogOptions:
    """The part of PodLogOptions that plain files can serve."""

    follow: bool = False
    previous: bool = False
    tail_lines: int | None = None
    limit_bytes: int | None = None

    @classmethod
    def of(cls, query: web.Request) -> LogOptions:
        """Raises ValueError for what is not supported."""
        values = query.query
        if values.get("timestamps") == "true":
            raise ValueError(
                "--timestamps is not supported by the local cluster: logs are kept as the process wrote them"
            )
        tail, limit = values.get("tailLines"), values.get("limitBytes")
        return cls(
            follow=values.get("follow") == "true",
            previous=values.get("previous") == "true",
            tail_lines=None if tail is None else int(tail),
            limit_bytes=None if limit is None else int(limit),
        )


def tail_offset(path: Path, lines: int) -> int:
    """Byte offset at which the last ``lines`` lines of a file begin."""
    if lines <= 0:
        return path.stat().st_size
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        position, seen = end, 0
        while position > 0:
            start = max(0, position - TAIL_BLOCK_BYTES)
            file.seek(start)
            block = file.read(position - start)
            index = len(block)
            while (index := block.rfind(b"\n", 0, index)) >= 0:
                # The newline that ends the file ends its last line; it does not begin one more.
                if start + index == end - 1:
                    continue
                seen += 1
                if seen == lines:
                    return start + index + 1
            position = start
    return 0


def rotate(path: Path, max_bytes: int = MAX_LOG_BYTES) -> bool:
    """Move a long log's content aside and cut the file, which its writer keeps open in append mode; whether it was long."""
    try:
        if path.stat().st_size <= max_bytes:
            return False
        path.with_suffix(".old").write_bytes(path.read_bytes())
        os.truncate(path, 0)
    except OSError:
        return False
    return True


def _socket_owner(host: str, port: int, own_port: int) -> int | None:
    """User id of the local process that connected from ``host:port``; None when the kernel does not say."""
    packed = bytes(int(part) for part in host.split("."))[::-1].hex().upper()
    wanted = f"{packed}:{port:04X}"
    with open("/proc/net/tcp") as table:
        for line in table.readlines()[1:]:
            fields = line.split()
            if fields[1] == wanted and fields[2].endswith(f":{own_port:04X}"):
                return int(fields[7])
    return None


class LogServer:
    """The kubelet endpoint of all nodes. Only processes of this user may ask: the API server is one."""

    def __init__(self, find_log: FindLog, is_running: IsRunning) -> None:
        self._find_log = find_log
        self._is_running = is_running
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self, certificate: Path, key: Path) -> int:
        """Serve on a free port of 127.0.0.1; the port."""
        app = web.Application(middlewares=[self._own_user_only])
        app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._logs)
        app.router.add_get("/healthz", self._healthz)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, key)
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=context, shutdown_timeout=0.5)
        await site.start()
        self.port = int(self._runner.addresses[0][1])
        return self.port

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _own_user_only(
        self, request: web.Request, handler: Callable[[web.Request], object]
    ) -> web.StreamResponse:
        peer = request.transport.get_extra_info("peername") if request.transport else None
        if peer is None or _socket_owner(peer[0], peer[1], self.port) != os.getuid():
            raise web.HTTPForbidden(text="only processes of the user who runs this cluster may read its logs\n")
        return await handler(request)  # type: ignore[misc, no-any-return]

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        namespace, pod, container = (request.match_info[name] for name in ("namespace", "pod", "container"))
        try:
            options = LogOptions.of(request)
        except ValueError as error:
            return web.Response(status=400, text=f"{error}\n")
        path = self._find_log(namespace, pod, container, options.previous)
        if path is None or not path.exists():
            what = "previous terminated container" if options.previous else "container"
            return web.Response(
                status=400, text=f'{what} "{container}" in pod "{pod}" is not found or has no log yet\n'
            )
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        start = 0 if options.tail_lines is None else tail_offset(path, options.tail_lines)
        await self._send(response, path, start, options, lambda: self._is_running(namespace, pod, path))
        return response

    async def _send(
        self, response: web.StreamResponse, path: Path, start: int, options: LogOptions, may_grow: Callable[[], bool]
    ) -> None:
        left = options.limit_bytes
        with path.open("rb") as file:
            file.seek(start)
            while True:
                growing = options.follow and may_grow()
                while chunk := file.read(TAIL_BLOCK_BYTES if left is None else min(TAIL_BLOCK_BYTES, left)):
                    await response.write(chunk)
                    left = None if left is None else left - len(chunk)
                if not growing or left == 0:
                    return
                await asyncio.sleep(FOLLOW_POLL_S)
                if os.fstat(file.fileno()).st_size < file.tell():
                    file.seek(0)  # the log was rotated
