"""Readiness, liveness and startup probes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from motley_local.podspec import ConfigError, named_port

Object = Mapping[str, Any]
Execute = Callable[[list[str], float], Awaitable[tuple[int, str]]]


@dataclass(frozen=True)
class Timing:
    """When a probe runs and how many results in a row count; Kubernetes' defaults."""

    initial_delay_s: float
    period_s: float
    timeout_s: float
    success_threshold: int
    failure_threshold: int

    @classmethod
    def of(cls, probe: Object) -> Timing:
        return cls(
            initial_delay_s=float(probe.get("initialDelaySeconds") or 0),
            period_s=float(probe.get("periodSeconds") or 10),
            timeout_s=float(probe.get("timeoutSeconds") or 1),
            success_threshold=int(probe.get("successThreshold") or 1),
            failure_threshold=int(probe.get("failureThreshold") or 3),
        )


@dataclass(frozen=True)
class Tally:
    """Results so far; ``verdict`` is None until a threshold was reached."""

    verdict: bool | None = None
    in_a_row: int = 0
    last: bool | None = None

    def add(self, ok: bool, timing: Timing) -> Tally:
        in_a_row = self.in_a_row + 1 if self.last == ok else 1
        needed = timing.success_threshold if ok else timing.failure_threshold
        return Tally(ok if in_a_row >= needed else self.verdict, in_a_row, ok)


@dataclass(frozen=True)
class Target:
    """What a probe looks at."""

    container: Object
    pod_ip: str
    execute: Execute
    session: aiohttp.ClientSession


async def check(action: Object, target: Target, timeout_s: float) -> tuple[bool, str]:
    """One look, for a probe or a lifecycle hook: whether it went well, and what to tell when it did not."""
    try:
        if "exec" in action:
            code, output = await target.execute(list(action["exec"].get("command") or ()), timeout_s)
            return code == 0, output.strip()
        async with asyncio.timeout(timeout_s):
            if "httpGet" in action:
                return await _http_get(action["httpGet"], target)
            if "tcpSocket" in action:
                return await _tcp_connect(action["tcpSocket"], target)
    except (ConfigError, OSError, aiohttp.ClientError) as error:
        return False, str(error)
    except TimeoutError:
        return False, f"no answer within {timeout_s:g} s"
    kinds = [key for key in ("grpc", "sleep") if key in action]
    if kinds == ["sleep"]:
        await asyncio.sleep(float(action["sleep"].get("seconds", 0)))
        return True, ""
    return False, f"the local cluster has no {', '.join(kinds) or 'such'} probes; use httpGet, tcpSocket or exec"


async def _http_get(action: Object, target: Target) -> tuple[bool, str]:
    scheme = str(action.get("scheme") or "HTTP").lower()
    host = action.get("host") or target.pod_ip
    path = str(action.get("path") or "/")
    url = f"{scheme}://{host}:{named_port(target.container, action['port'])}{path if path.startswith('/') else '/' + path}"
    headers = {one["name"]: one["value"] for one in action.get("httpHeaders") or ()}
    unverified: ssl.SSLContext | bool = False
    async with target.session.get(url, headers=headers, ssl=unverified) as response:
        if 200 <= response.status < 400:
            return True, ""
        return False, f"HTTP probe failed with statuscode: {response.status}"


async def _tcp_connect(action: Object, target: Target) -> tuple[bool, str]:
    _, writer = await asyncio.open_connection(
        action.get("host") or target.pod_ip, named_port(target.container, action["port"])
    )
    writer.close()
    return True, ""


async def watch(
    probe: Object,
    target: Target,
    on_verdict: Callable[[bool, str], Awaitable[None]],
    *,
    stop_after_success: bool = False,
) -> None:
    """Probe until cancelled; tell every verdict that differs from the one before, and each repeated failure."""
    timing = Timing.of(probe)
    await asyncio.sleep(timing.initial_delay_s)
    tally = Tally()
    while True:
        ok, message = await check(probe, target, timing.timeout_s)
        before = tally.verdict
        tally = tally.add(ok, timing)
        if tally.verdict is not None and tally.verdict != before:
            await on_verdict(tally.verdict, message)
            if tally.verdict and stop_after_success:
                return
        await asyncio.sleep(timing.period_s)
