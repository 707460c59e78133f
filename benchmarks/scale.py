"""The operator at scale: many runs on a real API server, with virtual nodes and no process behind the pods.

make bench-operator RUNS=20 GROUPS=8 PODS=1000      the last line is JSON; docs/operations.md has the table

What is real: etcd, API server, scheduler, controller manager, the operator's process, every object. What is not: pods are Running by
status alone, and one process answers for all routers and trainers, always with the same step: nothing changes unless the benchmark does it.
Requests of the operator are counted by the API server's audit log, not by the operator.

(Not named after what it measures: a module `operator` in this folder would hide the standard library's from every other benchmark.)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web
from motley_api import GROUP_VERSION, keys, records
from motley_api.resources.gpus import GpuTypeName
from motley_local.cluster import LocalCluster
from motley_local.nodes import STUDY_GPU_TYPES, NodeSpec
from motley_operator.kube import Credentials, Kube, from_kubeconfig

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
SYSTEM, ACCOUNT = "motley-system", "motley-operator"
USER = f"system:serviceaccount:{SYSTEM}:{ACCOUNT}"
RUNS_PER_NAMESPACE = 20
PODS_PER_NODE = 10
GPUS_PER_NODE = 8
SAMPLERS_SHARE = (2, 3)  # of a run's pods beside router and trainer; the others are rollout workers
STEP_DONE, STEPS = 5, 1000
NODE_GRACE_S = 24 * 3600  # a machine at its limit must not lose nodes
AT_ONCE = 8  # requests of the benchmark in flight
TRAINER_GPU = GpuTypeName.H100
PRECISION = {GpuTypeName.A100_80GB: "BF16"}  # FP8 elsewhere


@dataclass(frozen=True)
class Size:
    runs: int
    groups: int
    pods: int

    @property
    def pods_per_run(self) -> int:
        return self.pods // self.runs

    @property
    def engines(self) -> int:
        """Of each group."""
        return max(1, (self.pods_per_run - 2) * SAMPLERS_SHARE[0] // SAMPLERS_SHARE[1] // self.groups)

    @property
    def workers(self) -> int:
        return max(1, self.pods_per_run - 2 - self.engines * self.groups)

    @property
    def all_pods(self) -> int:
        return self.runs * (2 + self.engines * self.groups + self.workers)

    def gpu_types(self) -> list[GpuTypeName]:
        """Of each group."""
        return [STUDY_GPU_TYPES[index % len(STUDY_GPU_TYPES)] for index in range(self.groups)]


def nodes(size: Size) -> list[NodeSpec]:
    """GPUs of every type with a tenth to spare, and room for all pods."""
    wanted = Counter({TRAINER_GPU: size.runs})
    for gpu in size.gpu_types():
        wanted[gpu] += size.runs * size.engines
    types = [gpu for gpu, count in sorted(wanted.items()) for _ in range(-(-count * 11 // 10 // GPUS_PER_NODE))]
    spare = max(0, -(-size.pods // PODS_PER_NODE) - len(types))
    return [
        *(NodeSpec(f"node-{i}", gpu, gpus=GPUS_PER_NODE, processless=True) for i, gpu in enumerate(types)),
        *(NodeSpec(f"cpu-{i}", processless=True) for i in range(spare)),
    ]


def namespace_of(number: int) -> str:
    return f"bench-{number // RUNS_PER_NAMESPACE}"


def manifest(size: Size, number: int) -> Json:
    groups = []
    for index, gpu in enumerate(size.gpu_types()):
        groups.append(
            {
                "name": f"g{index}",
                "gpuType": gpu.value,
                "precision": PRECISION.get(gpu, "FP8"),
                "replicas": size.engines,
                "sessionsPerEngine": 16,
            }
        )
    return {
        "apiVersion": GROUP_VERSION,
        "kind": "RLRun",
        "metadata": {"name": f"run-{number}", "namespace": namespace_of(number)},
        "spec": {
            "model": {"source": "/data/model", "contextLength": 512},
            "tasks": {"source": "/data/tasks"},
            "store": {"url": "file:///data/store"},
            "steps": STEPS,
            "trainer": {"gpusPerNode": 1, "gpuType": TRAINER_GPU.value},
            "rollout": {"workers": size.workers},
            "samplerGroups": groups,
            "prices": [
                {"gpuType": gpu.value, "usdPerGPUHour": price}
                for gpu, price in zip(STUDY_GPU_TYPES, ("2.50", "3.95", "4.54", "6.25", "7.10", "3.03"), strict=True)
            ],
        },
    }


# The cluster.


AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "users": [USER]}, {"level": "None"}],
}


def prepare(folder: Path) -> tuple[str, ...]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    policy = folder / "audit-policy.yaml"
    policy.write_text(yaml.safe_dump(AUDIT_POLICY))
    return (f"--audit-policy-file={policy}", f"--audit-log-path={folder / 'audit.log'}")


@dataclass
class Audit:
    """Requests of the operator as the API server logged them: (kind of request, resource) -> count since the last look."""

    path: Path
    offset: int = 0
    seen: set[str] = field(default_factory=set)  # a watch is logged when it starts and when it ends

    def count(self) -> Counter[tuple[str, str]]:
        found: Counter[tuple[str, str]] = Counter()
        if not self.path.exists():
            return found
        with self.path.open("rb") as log:
            log.seek(self.offset)
            data = log.read()
        data = data[: data.rfind(b"\n") + 1]
        self.offset += len(data)
        for line in data.splitlines():
            event = json.loads(line)
            if event["auditID"] in self.seen:
                continue
            if event["verb"] == "watch":
                self.seen.add(event["auditID"])
            thing = event.get("objectRef") or {}
            resource = "/".join(part for part in (thing.get("resource", ""), thing.get("subresource", "")) if part)
            found[event["verb"], resource] += 1
        return found


def idle(found: Counter[tuple[str, str]]) -> int:
    """Requests beyond leases and watches."""
    return sum(count for (verb, resource), count in found.items() if verb != "watch" and resource != "leases")


async def install(kube: Kube, cluster: LocalCluster, folder: Path) -> Path:
    """CRDs, namespaces, the operator's account; a kubeconfig of that account. Its exact rights are tested elsewhere."""
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        cluster.kubectl("apply", "--server-side", "-f", str(path))
    cluster.kubectl("wait", "--for=condition=Established", "crd/rlruns.motley.dev", "crd/samplergroups.motley.dev")
    cluster.kubectl("create", "namespace", SYSTEM)
    cluster.kubectl("create", "serviceaccount", ACCOUNT, "-n", SYSTEM)
    cluster.kubectl(
        "create", "clusterrolebinding", ACCOUNT, "--clusterrole=cluster-admin", f"--serviceaccount={SYSTEM}:{ACCOUNT}"
    )
    answer = await kube.call(
        "POST",
        f"/api/v1/namespaces/{SYSTEM}/serviceaccounts/{ACCOUNT}/token",
        body={
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": 24 * 3600},
        },
    )
    document = yaml.safe_load(cluster.kubeconfig_path.read_text())
    document["users"][0]["user"] = {"token": answer["status"]["token"]}
    path = folder / "operator.kubeconfig"
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(document))
    return path


async def many[T](work: list[Callable[[], Awaitable[T]]]) -> None:
    waiting = list(reversed(work))

    async def some() -> None:
        while waiting:
            await waiting.pop()()

    await asyncio.gather(*(some() for _ in range(AT_ONCE)))


async def until(look: Callable[[], Awaitable[bool]], what: str, deadline_s: float, every_s: float = 0.5) -> None:
    """Raises TimeoutError, saying what was awaited."""
    end = time.monotonic() + deadline_s

    async def seen() -> bool:
        try:
            return await look()
        except (aiohttp.ClientError, OSError, TimeoutError):  # a server at its limit
            return False

    while not await seen():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {deadline_s:.0f} s: {what}")
        await asyncio.sleep(every_s)


async def pods_there(kube: Kube) -> int:
    page = await kube.call("GET", "/api/v1/pods", params={"limit": "1"})
    return len(page["items"]) + int(page["metadata"].get("remainingItemCount", 0))


async def all_run(kube: Kube) -> bool:
    page = await kube.call(
        "GET", "/api/v1/pods", params={"fieldSelector": "status.phase!=Running", "resourceVersion": "0"}
    )
    return not page["items"]


# What answers for all routers and trainers.


class Parts:
    """Listens on the addresses of router and trainer pods. Engines are as many as the run has sampler pods."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._runners: dict[str, web.AppRunner] = {}
        self._engines: dict[str, list[records.EngineState]] = {}
        self._generation: dict[str, int] = {}
        self._ips: dict[tuple[str, str], str] = {}
        self.asked = 0

    async def serve(self) -> None:
        """For every router and trainer pod that has an address."""
        engines: dict[str, list[records.EngineState]] = {}
        ends = []
        async for pod in self._kube.list("Pod", labels=f"{keys.ROLE_LABEL} in (router,trainer,sampler)"):
            labels, ip = pod["metadata"]["labels"], pod.get("status", {}).get("podIP", "")
            run = labels[keys.RUN_LABEL]
            if labels[keys.ROLE_LABEL] == keys.ROLE_SAMPLER:
                engines.setdefault(run, []).append(engine(pod))
            elif ip:
                ends.append((ip, run, labels[keys.ROLE_LABEL]))
        self._engines = engines
        for ip in set(self._runners) - {ip for ip, _, _ in ends}:
            await self._runners.pop(ip).cleanup()
        for ip, run, role in ends:
            if ip not in self._runners:
                self._runners[ip] = await self._listen(ip, run, role)

    async def _listen(self, ip: str, run: str, role: str) -> web.AppRunner:
        router = role == keys.ROLE_ROUTER

        async def status(_: web.Request) -> web.Response:
            self.asked += 1
            body = self._router(run) if router else self._trainer(run)
            return web.Response(body=records.encode_json(body), content_type="application/json")

        async def steps(_: web.Request) -> web.Response:
            return web.json_response([])

        async def fleet(request: web.Request) -> web.Response:
            generation = int((await request.json())["generation"])
            self._generation[ip] = max(generation, self._generation.get(ip, 0))
            return web.json_response({})

        app = web.Application()
        app.add_routes([web.get("/v1/status", status), web.get("/v1/steps", steps), web.put("/v1/fleet", fleet)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, ip, keys.ROUTER_PORT if router else keys.TRAINER_PORT).start()
        self._generation.setdefault(ip, 0)
        self._ips[run, role] = ip
        return runner

    def _router(self, run: str) -> records.RouterStatus:
        return records.RouterStatus(
            fleet_generation=self._generation.get(self._ips[run, keys.ROLE_ROUTER], 0),
            sessions_active=0,
            sessions_total=0,
            groups=[],
            engines=self._engines.get(run, []),
        )

    def _trainer(self, run: str) -> records.TrainerStatus:
        return records.TrainerStatus(
            run=run,
            attempt=0,
            steps_total=STEPS,
            step=STEP_DONE,
            weights_version=STEP_DONE,
            durable_version=STEP_DONE,
            buffered=0,
            outstanding=0,
            fleet_generation=self._generation.get(self._ips[run, keys.ROLE_TRAINER], 0),
        )

    async def close(self) -> None:
        for runner in self._runners.values():
            await runner.cleanup()


def engine(pod: Json) -> records.EngineState:
    name, labels = pod["metadata"]["name"], pod["metadata"]["labels"]
    return records.EngineState(
        id=name,
        group=labels[keys.GROUP_LABEL],
        view="fp8",
        url=f"http://{pod.get('status', {}).get('podIP', '')}:{keys.SAMPLER_PORT}",
        version=STEP_DONE,
        ready=True,
        max_sessions=16,
    )


# The operator's process.


@dataclass
class Operator:
    kubeconfig: Path
    folder: Path
    pace_s: float
    profile: bool = False
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    @property
    def address(self) -> str:
        return f"127.60.{os.getpid() // 250 % 250}.{1 + os.getpid() % 250}"

    def start(self) -> None:
        self.starts += 1
        log = (self.folder / f"operator-{self.starts}.log").open("wb")
        program = ["-m", "motley_operator.main"]
        if self.profile:
            program = ["-m", "cProfile", "-o", str(self.folder / f"operator-{self.starts}.prof"), *program]
        self.process = subprocess.Popen(
            [sys.executable, *program],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("api", "operator")),
                "KUBECONFIG": str(self.kubeconfig),
                keys.ENV_NAMESPACE: SYSTEM,
                keys.ENV_POD_NAME: ACCOUNT,
                keys.ENV_POD_IP: self.address,
                "MOTLEY_RECONCILE_SECONDS": str(self.pace_s),
            },
            stdout=log,
            stderr=subprocess.STDOUT,
        )

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self.process is not None:
            if self.process.poll() is None:
                self.process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=30)
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()

    def memory_mib(self) -> tuple[int, int]:
        """Resident now, and at most so far."""
        assert self.process is not None
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        now, most = (int(re.findall(rf"{name}:\s+(\d+)", text)[0]) // 1024 for name in ("VmRSS", "VmHWM"))
        return now, most

    def cpu_s(self) -> float:
        assert self.process is not None
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def metrics(self) -> dict[str, float]:
        """Series by name with labels; empty while it does not answer."""
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session,
                session.get(f"http://{self.address}:{keys.OPERATOR_METRICS_PORT}/metrics") as answer,
            ):
                text = await answer.text()
        except (aiohttp.ClientError, OSError, TimeoutError):
            return {}
        return {
            name: float(value)
            for name, value in (line.rsplit(" ", 1) for line in text.splitlines() if line and line[0] != "#")
        }


def quantile_ms(before: dict[str, float], after: dict[str, float], name: str, share: float) -> float | None:
    """From a histogram's growth, interpolated inside the bucket."""
    grown = []
    for series, value in after.items():
        if match := re.fullmatch(rf'{name}_bucket{{le="([^"]+)"}}', series):
            grown.append((float(match[1]), value - before.get(series, 0.0)))
    grown.sort()
    if not grown or not grown[-1][1]:
        return None
    wanted = share * grown[-1][1]
    for (low, count_low), (high, count_high) in pairwise([(0.0, 0.0), *grown]):
        if count_high >= wanted:
            if high == float("inf"):
                return 1000 * low
            return 1000 * (low + (high - low) * (wanted - count_low) / (count_high - count_low))
    return None


# The benchmark.


@dataclass(frozen=True)
class Found:
    seconds_to_all_pods: float = 0.0
    seconds_to_all_running: float = 0.0
    reconcile_p50_ms: float | None = None
    reconcile_p99_ms: float | None = None
    wait_p99_ms: float | None = None
    idle_requests_per_minute: float = 0.0
    rss_mib: int = 0
    peak_mib: int = 0
    churn_mib: tuple[int, ...] = ()
    cpu_percent: float = 0.0
    restart_seconds: float = 0.0

    def to_json_dict(self) -> Json:
        """camelCase, as the JSON of all benchmarks: rssMiB, reconcileP99Ms."""
        words = {name: name.replace("_mib", "_miB").split("_") for name in vars(self)}
        return {
            parts[0] + "".join(part[0].upper() + part[1:] for part in parts[1:]): vars(self)[name]
            for name, parts in words.items()
        }


def say(started_s: float, text: str) -> None:
    print(f"[{time.monotonic() - started_s:6.1f} s] {text}", flush=True)


@contextlib.asynccontextmanager
async def client(credentials: Credentials) -> AsyncIterator[Kube]:
    kube = Kube(credentials)
    try:
        yield kube
    finally:
        await kube.close()


async def caught_up(operator: Operator, runs: int) -> bool:
    found = await operator.metrics()
    return found.get("motley_leader") == 1.0 and found.get("motley_runs", 0.0) >= runs


async def measure(options: argparse.Namespace, cluster: LocalCluster, folder: Path, began_s: float) -> Found:
    size = Size(options.runs, options.groups, options.pods)
    async with client(from_kubeconfig(cluster.kubeconfig_path)) as kube:
        operator = Operator(await install(kube, cluster, folder), folder, options.pace, options.profile)
        audit, parts = Audit(folder / "audit.log"), Parts(kube)
        operator.start()
        try:
            await until(lambda: caught_up(operator, 0), "the operator leads", 60)
            say(began_s, f"the operator leads, {operator.memory_mib()[0]} MiB")
            found = await start(kube, operator, size, options, began_s)
            await parts.serve()
            say(began_s, f"requests so far: {describe(audit.count())}")
            found = await steady(operator, audit, parts, options, found, began_s)
            found = await churn(kube, operator, parts, size, options, found, began_s)
            return await restart(operator, audit, size, found, began_s)
        finally:
            operator.stop()
            await parts.close()


async def start(kube: Kube, operator: Operator, size: Size, options: argparse.Namespace, began_s: float) -> Found:
    for number in range(0, size.runs, RUNS_PER_NAMESPACE):
        await kube.call(
            "POST",
            "/api/v1/namespaces",
            body={"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace_of(number)}},
        )
    applied_s = time.monotonic()
    await many([lambda number=number: kube.create(manifest(size, number)) for number in range(size.runs)])
    say(began_s, f"{size.runs} runs applied in {time.monotonic() - applied_s:.1f} s")
    last_s = time.monotonic()

    async def created() -> bool:
        nonlocal last_s
        there = await pods_there(kube)
        if time.monotonic() - last_s > 20:
            last_s = time.monotonic()
            say(began_s, f"{there} pods, operator {operator.memory_mib()[0]} MiB, {operator.cpu_s():.0f} s of CPU")
        return there >= size.all_pods

    await until(created, f"{size.all_pods} pods", options.deadline)
    to_pods_s = time.monotonic() - applied_s
    say(began_s, f"{size.all_pods} pods after {to_pods_s:.1f} s; operator used {operator.cpu_s():.1f} s of CPU")
    await until(lambda: all_run(kube), "all pods run", options.deadline, every_s=2.0)
    to_running_s = time.monotonic() - applied_s
    say(began_s, f"all run after {to_running_s:.1f} s")
    return Found(seconds_to_all_pods=round(to_pods_s, 1), seconds_to_all_running=round(to_running_s, 1))


def describe(found: Counter[tuple[str, str]]) -> str:
    return ", ".join(f"{verb} {resource}: {count}" for (verb, resource), count in found.most_common(14)) or "none"


async def steady(
    operator: Operator, audit: Audit, parts: Parts, options: argparse.Namespace, found: Found, began_s: float
) -> Found:
    await asyncio.sleep(options.settle)
    say(began_s, f"while settling: {describe(audit.count())}")
    before, cpu_s, asked, at_s = await operator.metrics(), operator.cpu_s(), parts.asked, time.monotonic()
    audit.count()
    await asyncio.sleep(options.steady)
    took_s = time.monotonic() - at_s
    counted, after = audit.count(), await operator.metrics()
    rss, most = operator.memory_mib()
    found = replace(
        found,
        reconcile_p50_ms=rounded(quantile_ms(before, after, "motley_reconcile_seconds", 0.5)),
        reconcile_p99_ms=rounded(quantile_ms(before, after, "motley_reconcile_seconds", 0.99)),
        wait_p99_ms=rounded(quantile_ms(before, after, "motley_reconcile_wait_seconds", 0.99)),
        idle_requests_per_minute=round(60 * idle(counted) / took_s, 1),
        rss_mib=rss,
        peak_mib=most,
        cpu_percent=round(100 * (operator.cpu_s() - cpu_s) / took_s, 1),
    )
    reconciles = sum(
        after[name] - before.get(name, 0.0) for name in after if name.startswith("motley_reconciles_total")
    )
    say(began_s, f"{took_s:.0f} s with nothing changing: {describe(counted)}; {reconciles:.0f} reconciles,")
    say(
        began_s,
        f"  {parts.asked - asked} questions to routers and trainers, {found.cpu_percent} % of a core, {rss} MiB",
    )
    return found


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


async def churn(
    kube: Kube,
    operator: Operator,
    parts: Parts,
    size: Size,
    options: argparse.Namespace,
    found: Found,
    began_s: float,
) -> Found:
    """Some runs deleted and applied again, round after round, a while for each; memory after each."""
    memory = []
    some = max(1, size.runs // 10)
    for turn in range(options.churn):
        numbers = [(turn * some + offset) % size.runs for offset in range(some)]
        await many([lambda n=n: kube.delete("RLRun", namespace_of(n), f"run-{n}") for n in numbers])
        per_run = size.all_pods // size.runs
        most = size.all_pods - some * per_run

        async def gone(most: int = most) -> bool:
            return await pods_there(kube) <= most

        await until(gone, "their pods go", options.deadline)
        await many([lambda n=n: kube.create(manifest(size, n)) for n in numbers])

        async def back() -> bool:
            return await pods_there(kube) >= size.all_pods and await all_run(kube)

        await until(back, "their pods come", options.deadline, every_s=1.0)
        await parts.serve()
        memory.append(operator.memory_mib()[0])
        say(began_s, f"churn {turn + 1}: {some} runs replaced, {memory[-1]} MiB")
    return replace(found, churn_mib=tuple(memory), peak_mib=operator.memory_mib()[1])


async def restart(operator: Operator, audit: Audit, size: Size, found: Found, began_s: float) -> Found:
    """Killed, and started as a kubelet would: the same name, so the lease is its own."""
    operator.stop(signal.SIGINT if operator.profile else signal.SIGKILL)
    audit.count()
    at_s = time.monotonic()
    operator.start()
    await until(lambda: caught_up(operator, size.runs), "every run was looked at again", 300)
    took_s = time.monotonic() - at_s
    say(began_s, f"caught up {took_s:.1f} s after a restart, {operator.memory_mib()[0]} MiB: {describe(audit.count())}")
    return replace(found, restart_seconds=round(took_s, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--groups", type=int, default=8, help="of each run")
    parser.add_argument("--pods", type=int, default=1000, help="of all runs")
    parser.add_argument("--steady", type=float, default=30.0, help="seconds of watching while nothing changes")
    parser.add_argument(
        "--settle", type=float, default=70.0, help="seconds before that: a window of measured capacity ends in them"
    )
    parser.add_argument("--churn", type=int, default=2, help="rounds in which a tenth of the runs is replaced")
    parser.add_argument("--pace", type=float, default=3.0, help="MOTLEY_RECONCILE_SECONDS")
    parser.add_argument("--deadline", type=float, default=1200.0, help="seconds to wait for pods")
    parser.add_argument("--qps", type=int, default=400, help="of controller manager and scheduler, each")
    parser.add_argument("--profile", action="store_true", help="the operator under cProfile")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that nothing is left behind
    began_s = time.monotonic()
    folder = ROOT / "build" / "bench-operator"
    size = Size(options.runs, options.groups, options.pods)
    flags = prepare(folder)
    fleet = nodes(size)
    with LocalCluster(
        folder / "cluster",
        fleet,
        isolation="none",
        node_grace_s=NODE_GRACE_S,
        more_apiserver_flags=flags,
        client_qps=options.qps,
    ) as cluster:
        say(began_s, f"control plane and {len(fleet)} nodes are up")
        found = asyncio.run(measure(options, cluster, folder, began_s))
        memory = cluster.memory()
        say(began_s, f"control plane {memory.control_plane_mib:.0f} MiB, node agent {memory.agent_mib:.0f} MiB")
    print(
        json.dumps(
            {
                "runs": size.runs,
                "groups": size.groups,
                "pods": size.all_pods,
                "nodes": len(fleet),
                **found.to_json_dict(),
            }
        )
    )


if __name__ == "__main__":
    main()
