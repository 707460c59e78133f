"""What the router costs and keeps: latency added per turn, new sessions per second, shares, movement, and its own death.

    python benchmarks/router.py [--turns 300] [--sessions 400]

Sixteen dummy engines in eight groups answer at once; every router is a process of its own. In the same run, turn by turn beside
ours: sglang-router 0.3.2 and smg 1.13.0, when ROUTERS_BIN (default .venv-routers/bin) holds them:

    uv venv .venv-routers && uv pip install --python .venv-routers/bin/python sglang-router==0.3.2 smg==1.13.0

The last line of the output is JSON. Medians are over turns sent alternately to all, so that a busy machine is unfair to nobody.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
from aiohttp import web

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOKEN = "benchmark"
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}
CAPACITIES = {"a": 40, "b": 32, "c": 24, "d": 20, "e": 16, "f": 12, "g": 8, "h": 5}  # sessions, of a mixed fleet
ENGINES_PER_GROUP = 2
ENGINE_PORT, ROUTER_PORT = 8200, 8000
KEY_HEADER = "X-SMG-Routing-Key"
PROMPT_IDS = [index % 1000 for index in range(2000)]


@dataclasses.dataclass(frozen=True)
class DummyEngine:
    name: str
    group: str
    address: str

    @property
    def url(self) -> str:
        return f"http://{self.address}:{ENGINE_PORT}"


ENGINES = [
    DummyEngine(f"{group}{number}", group, f"127.88.0.{1 + index * ENGINES_PER_GROUP + number}")
    for index, group in enumerate(CAPACITIES)
    for number in range(ENGINES_PER_GROUP)
]


@dataclasses.dataclass(frozen=True)
class Target:
    """Somewhere to send turns: `url_of` takes a session's key."""

    name: str
    url_of: Callable[[str], str]


# The engines, in a process of their own.


async def serve_engines() -> None:
    """SGLang's schema with an instant reply that names the engine; POST /stop ends one, as if its pod had died."""
    runners: dict[str, web.AppRunner] = {}

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        meta = {"id": engine_of(request), "finish_reason": {"type": "length", "length": 1}, "weight_version": "v1"}
        meta |= {"prompt_tokens": len(PROMPT_IDS), "completion_tokens": 1, "cached_tokens": 0}
        return web.json_response({"text": "", "output_ids": [1], "meta_info": meta})

    async def stop(request: web.Request) -> web.Response:
        runner = runners[engine_of(request)]
        task = asyncio.get_running_loop().create_task(runner.cleanup())
        tasks.append(task)
        return web.Response()

    async def about(request: web.Request) -> web.Response:
        """What other routers ask a worker before they trust it."""
        info = {"model_path": "", "served_model_name": "dummy", "is_generation": True, "version": "0.5.23"}
        return web.json_response(info | {"object": "list", "data": [{"id": "dummy", "object": "model"}], "loads": []})

    def engine_of(request: web.Request) -> str:
        return by_address[request.transport.get_extra_info("sockname")[0]]  # type: ignore[union-attr]

    by_address = {engine.address: engine.name for engine in ENGINES}
    tasks: list[asyncio.Task[None]] = []
    for engine in ENGINES:
        app = web.Application(client_max_size=0)
        app.router.add_post("/generate", generate)
        app.router.add_post("/stop", stop)
        app.router.add_get("/{path:.*}", about)
        runners[engine.name] = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        await runners[engine.name].setup()
        await web.TCPSite(runners[engine.name], engine.address, ENGINE_PORT).start()
    await asyncio.Event().wait()


# Processes.


@contextlib.asynccontextmanager
async def process(
    arguments: list[str], ready_url: str, log: pathlib.Path, **environment: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that is up once `ready_url` answers 200."""
    with log.open("wb") as out:
        started = await asyncio.create_subprocess_exec(*arguments, stdout=out, stderr=out, env=os.environ | environment)
    try:
        async with aiohttp.ClientSession() as client, asyncio.timeout(60):
            while not await answers(client, ready_url):
                if started.returncode is not None:
                    raise RuntimeError(f"{arguments[0]} ended with {started.returncode}:\n{log.read_text()[-2000:]}")
                await asyncio.sleep(0.1)
        yield started
    finally:
        if started.returncode is None:
            started.terminate()
            await started.wait()


async def answers(client: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with client.get(url) as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


def motley_router(address: str, folder: pathlib.Path) -> contextlib.AbstractAsyncContextManager[Any]:
    path = os.pathsep.join(str(ROOT / part) for part in ("api", "weights", "sampler"))
    return process(
        [sys.executable, "-m", "motley_sampler.router.main"],
        f"http://{address}:{ROUTER_PORT}/health",
        folder / "motley.log",
        PYTHONPATH=path,
        MOTLEY_TOKEN=TOKEN,
        MOTLEY_POD_IP=address,
    )


def other_router(
    program: str, address: str, folder: pathlib.Path, *options: str
) -> contextlib.AbstractAsyncContextManager[Any]:
    binary = pathlib.Path(os.environ.get("ROUTERS_BIN", ROOT / ".venv-routers" / "bin")) / program
    arguments = [str(binary), "launch", "--host", address, "--port", str(ROUTER_PORT), "--log-level", "warn"]
    arguments += ["--prometheus-host", address, "--prometheus-port", "9000", *options]
    arguments += ["--worker-urls", *(engine.url for engine in ENGINES)]
    nowhere = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": f"http://{address}:9"}  # no tokenizer from anywhere
    return process(arguments, f"http://{address}:{ROUTER_PORT}/health", folder / f"{program}.log", **nowhere)


OTHERS = {
    "sglangRouter": ("sglang-router", "127.88.1.2", ("--policy", "manual")),
    "smg": (
        "smg",
        "127.88.1.3",
        ("--policy", "consistent_hashing", "--routing-key-headers", "x-smg-routing-key"),
    ),
}
MOTLEY_ADDRESS = "127.88.1.1"
MOTLEY_URL = f"http://{MOTLEY_ADDRESS}:{ROUTER_PORT}"


# Our router's API.


async def call(client: aiohttp.ClientSession, method: str, path: str, body: object = None) -> Any:
    async with client.request(method, MOTLEY_URL + path, json=body, headers=AUTHORIZED) as response:
        if response.status >= 400:
            raise RuntimeError(f"{method} {path}: {response.status} {await response.text()}")
        return await response.json() if response.status != 204 else None


gone: set[str] = set()  # engines that stopped reporting


async def beat_for_ever(client: aiohttp.ClientSession) -> None:
    while True:
        await asyncio.sleep(2)
        with contextlib.suppress(aiohttp.ClientError):  # the router may be dead just now
            await beat(client)


async def beat(client: aiohttp.ClientSession) -> None:
    for engine in ENGINES:
        if engine.name not in gone:
            state = {"id": engine.name, "group": engine.group, "view": "bf16", "url": engine.url, "version": 1}
            await call(client, "PUT", f"/v1/engines/{engine.name}", state | {"ready": True, "max_sessions": 100_000})


def shares_milli() -> dict[str, int]:
    """Proportional to capacity, in thousandths that sum to 1000: largest remainders first."""
    total = sum(CAPACITIES.values())
    floors = {name: capacity * 1000 // total for name, capacity in CAPACITIES.items()}
    by_remainder = sorted(CAPACITIES, key=lambda name: (-(CAPACITIES[name] * 1000 % total), name))
    for name in by_remainder[: 1000 - sum(floors.values())]:
        floors[name] += 1
    return floors


async def introduce_fleet(client: aiohttp.ClientSession) -> None:
    groups = [
        {"name": name, "view": "bf16", "capacity_sessions": CAPACITIES[name], "share_milli": share}
        for name, share in shares_milli().items()
    ]
    await call(client, "PUT", "/v1/fleet", {"generation": 1, "groups": groups})
    await beat(client)


# Measurements.


async def turn(client: aiohttp.ClientSession, url: str, key: str) -> str:
    """The name of the engine that answered."""
    body = {"input_ids": PROMPT_IDS, "sampling_params": {"max_new_tokens": 1}, "model": "dummy"}
    async with client.post(f"{url}/generate", json=body, headers=AUTHORIZED | {KEY_HEADER: key}) as response:
        if response.status != 200:
            raise RuntimeError(f"{url}: {response.status} {await response.text()}")
        reply: str = (await response.json())["meta_info"]["id"]
        return reply


async def latencies_ms(client: aiohttp.ClientSession, targets: list[Target], turns: int) -> dict[str, float]:
    """Median milliseconds of a turn, each target in its turn."""
    order = random.Random(0)
    taken: dict[str, list[float]] = {target.name: [] for target in targets}
    for number in range(turns + 20):
        for target in order.sample(targets, len(targets)):  # nobody always follows the same neighbour
            started_s = time.perf_counter()
            await turn(client, target.url_of("latency"), "latency")
            if number >= 20:  # connections and caches are warm
                taken[target.name].append((time.perf_counter() - started_s) * 1e3)
    return {name: statistics.median(values) for name, values in taken.items()}


async def sessions_per_second(client: aiohttp.ClientSession, count: int, at_once: int = 32) -> float:
    names = iter(range(count))

    async def worker() -> None:
        for number in names:
            await call(client, "POST", "/v1/sessions", {"session": f"rate/{number}"})

    started_s = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(at_once)))
    elapsed_s = time.perf_counter() - started_s
    for number in range(count):
        await call(client, "DELETE", f"/v1/sessions/rate/{number}")
    return count / elapsed_s


def worst_deviation(order: list[str]) -> float:
    """Largest distance, in sessions, of any group from its exact share, after any arrival."""
    shares, counts, worst = shares_milli(), dict.fromkeys(CAPACITIES, 0), 0.0
    for total, group in enumerate(order, start=1):
        counts[group] += 1
        worst = max(worst, *(abs(counts[name] - total * share / 1000) for name, share in shares.items()))
    return worst


GROUP_OF = {engine.name: engine.group for engine in ENGINES}
LEAVING = ENGINES[0]


async def others_keep_shares(client: aiohttp.ClientSession, url: str, sessions: int) -> dict[str, str]:
    return {f"s{number}": await turn(client, url, f"s{number}") for number in range(sessions)}


async def others_moved(client: aiohttp.ClientSession, url: str, before: dict[str, str]) -> dict[str, int]:
    """After the leaving engine died: sessions whose next turn came from another engine, and turns that failed."""
    moved = failed = 0
    for key, engine in before.items():
        try:
            moved += await turn(client, url, key) != engine
        except (RuntimeError, aiohttp.ClientError):
            failed += 1
    minimum = sum(engine == LEAVING.name for engine in before.values())
    return {"movedOnLeave": moved, "minimumMoved": minimum, "failedTurns": failed}


async def run(turns: int, sessions: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        async with contextlib.AsyncExitStack() as stack:
            engines = [sys.executable, __file__, "--engines"]
            await stack.enter_async_context(process(engines, f"{ENGINES[-1].url}/health", folder / "engines.log"))
            client = await stack.enter_async_context(aiohttp.ClientSession())
            ours = await stack.enter_async_context(motley_router(MOTLEY_ADDRESS, folder))
            await introduce_fleet(client)
            beats = asyncio.create_task(beat_for_ever(client))
            stack.callback(beats.cancel)
            others = await start_others(stack, folder)
            return await measure(client, ours, folder, others, stack, turns=turns, sessions=sessions)


async def start_others(stack: contextlib.AsyncExitStack, folder: pathlib.Path) -> dict[str, str]:
    """Name -> URL of those that are installed and start."""
    started = {}
    for name, (program, address, options) in OTHERS.items():
        try:
            await stack.enter_async_context(other_router(program, address, folder, *options))
        except FileNotFoundError:
            print(f"{name}: not installed, left out")
            continue
        except (RuntimeError, TimeoutError) as error:
            print(f"{name}: does not start, left out: {error}")
            continue
        started[name] = f"http://{address}:{ROUTER_PORT}"
    return started


async def measure(
    client: aiohttp.ClientSession,
    ours: asyncio.subprocess.Process,
    folder: pathlib.Path,
    others: dict[str, str],
    stack: contextlib.AsyncExitStack,
    *,
    turns: int,
    sessions: int,
) -> dict[str, Any]:
    lease = await call(client, "POST", "/v1/sessions", {"session": "latency"})
    bare = next(engine.url for engine in ENGINES if engine.name == lease["engine"])
    targets = [Target("engine", lambda _: bare), Target("lease", lambda _: lease["url"])]
    targets += [Target("proxy", lambda _: MOTLEY_URL)]
    targets += [Target(name, lambda _, url=url: url) for name, url in others.items()]
    medians = await latencies_ms(client, targets, turns)
    await call(client, "DELETE", "/v1/sessions/latency")
    print(f"median ms a turn of {len(PROMPT_IDS)} prompt tokens, {turns} turns each, alternating:")
    for name, value in medians.items():
        print(f"  {name:<13} {value:7.3f}   added {value - medians['engine']:+.3f}")
    added = {name: round(value - medians["engine"], 3) for name, value in medians.items() if name != "engine"}

    rate = await sessions_per_second(client, 2 * sessions)
    print(f"new sessions per second: {rate:.0f} (32 at once)")

    leases = [await call(client, "POST", "/v1/sessions", {"session": f"s{n}"}) for n in range(sessions)]
    deviation = worst_deviation([one["group"] for one in leases])
    theirs = {name: await others_keep_shares(client, url, sessions) for name, url in others.items()}
    their_results: dict[str, dict[str, Any]] = {
        name: {"maxShareDeviationSessions": round(worst_deviation([GROUP_OF[e] for e in seen.values()]), 3)}
        for name, seen in theirs.items()
    }
    print(f"largest deviation from {sessions} sessions' exact shares, in sessions: motley {deviation:.3f}")

    death = await router_dies(client, ours, folder, leases, stack)
    moved, minimum = await one_engine_leaves(client, leases)
    print(f"one engine leaves: {moved} sessions move, {minimum} were on it")
    for name, url in others.items():
        their_results[name] |= await others_moved(client, url, theirs[name])
        print(f"{name}: {their_results[name]}")
    return {
        "addedMsPerTurn": added,
        "newSessionsPerSecond": round(rate),
        "maxShareDeviationSessions": round(deviation, 3),
        "movedOnLeave": moved,
        "minimumMoved": minimum,
        "routerDeath": death,
        "others": their_results,
    }


async def router_dies(
    client: aiohttp.ClientSession,
    ours: asyncio.subprocess.Process,
    folder: pathlib.Path,
    leases: list[dict[str, Any]],
    stack: contextlib.AsyncExitStack,
) -> dict[str, int]:
    """Killed while sessions are under way: turns served meanwhile, and leases that a new process relearned as they were."""
    ours.kill()
    await ours.wait()
    served = 0
    for lease in leases:
        served += await turn(client, lease["url"], lease["session"]) == lease["engine"]
    await stack.enter_async_context(motley_router(MOTLEY_ADDRESS, folder))
    relearned = 0
    for lease in leases:
        relearned += await call(client, "PUT", f"/v1/sessions/{lease['session']}", lease) == lease
    await introduce_fleet(client)
    print(f"router killed: {served} of {len(leases)} turns served without it, {relearned} leases relearned")
    return {"leases": len(leases), "turnsServedMeanwhile": served, "leasesRelearned": relearned}


async def one_engine_leaves(client: aiohttp.ClientSession, leases: list[dict[str, Any]]) -> tuple[int, int]:
    """Sessions that moved, and the fewest that had to."""
    minimum = sum(lease["engine"] == LEAVING.name for lease in leases)
    gone.add(LEAVING.name)
    await call(client, "DELETE", f"/v1/engines/{LEAVING.name}")
    async with client.post(f"{LEAVING.url}/stop"):
        pass
    moved = 0
    for lease in leases:
        renewed = await call(client, "PUT", f"/v1/sessions/{lease['session']}", lease)
        if renewed["group"] != lease["group"]:
            raise RuntimeError(f"session {lease['session']} changed its group: {lease} -> {renewed}")
        moved += renewed["engine"] != lease["engine"]
    return moved, minimum


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=300, help="turns for each latency (default 300)")
    parser.add_argument("--sessions", type=int, default=400, help="sessions for shares and movement (default 400)")
    parser.add_argument("--engines", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engines:
        asyncio.run(serve_engines())
        return
    print(json.dumps(asyncio.run(run(arguments.turns, arguments.sessions))))


if __name__ == "__main__":
    main()
