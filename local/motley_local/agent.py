"""The agent of all virtual nodes: registers them, runs their pods, serves logs and Services, and makes volumes. One process.

Started by ``cluster.LocalCluster`` as ``python -m motley_local.agent CONFIG``; ends when it is told to, with every pod it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from motley_api.resources.gpus import CapacityType, GpuTypeName

from motley_local import services as service_plan
from motley_local import storage
from motley_local.controlplane import AddressSlot
from motley_local.kube import Access, ApiError, Change, KubeClient, Object, Reflector
from motley_local.logs import LogServer, rotate
from motley_local.nodes import (
    POWER_ANNOTATION,
    POWER_OFF,
    NodeSpec,
    heartbeat_interval_s,
    lease_manifest,
    micro_timestamp,
    monitor_grace_s,
    node_manifest,
    node_resources,
    node_status,
    timestamp,
)
from motley_local.pods import FORCED_GRACE_S, FinishedPod, Pod, ProcesslessPod, ProcessPod, hostname_of, is_finished
from motley_local.podspec import IMAGE_ROOT, Image, Mount
from motley_local.podstatus import OWN_CONDITIONS
from motley_local.processes import become_subreaper, descendants, parent_of_each
from motley_local.runner import Isolation, Runner, best_isolation

HOUSEKEEPING_S = 2.0
SETTLE_S = 0.1  # changes that come together are handled together
STATUS_WRITERS = 32
REGISTRARS = 32
MOST_OF_TIME = 4  # Services are planned anew at most a fifth of the time
RETRY_S = 1.0
SHUTDOWN_GRACE_S = 3.0
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class AgentConfig:
    """What the agent is started with, as JSON."""

    kubeconfig: str
    state_dir: str
    certificate: str
    key: str
    slot_octet: int
    repo_root: str
    server_version: str
    nodes: tuple[NodeSpec, ...]
    isolation: str = "best"  # or "none"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> AgentConfig:
        values = json.loads(text)
        nodes = []
        for node in values.pop("nodes"):
            node["gpu_type"] = None if node["gpu_type"] is None else GpuTypeName(node["gpu_type"])
            node["capacity_type"] = CapacityType(node["capacity_type"])
            nodes.append(NodeSpec(**node))
        return cls(**values, nodes=tuple(nodes))


def log(**fields: object) -> None:
    """One key=value line to standard error."""
    pairs = (f"{key}={value!r}" if " " in str(value) else f"{key}={value}" for key, value in fields.items())
    log_line(" ".join(pairs))


class AddressPool:
    """Loopback addresses for pods: the next one that is free, round and round, so that an address is not reused at once."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._next = 1
        self._taken: set[int] = set()

    def take(self) -> str:
        for _ in range(65534):
            number, self._next = self._next, self._next % 65533 + 1
            # .0 and .255 look like network and broadcast addresses to some programs.
            if number not in self._taken and number % 256 not in (0, 255):
                self._taken.add(number)
                return f"{self._prefix}.{number // 256}.{number % 256}"
        raise RuntimeError("no loopback address is left for another pod")

    def give_back(self, ip: str) -> None:
        high, low = ip.rsplit(".", 2)[1:]
        self._taken.discard(int(high) * 256 + int(low))


class Agent:
    """See the module. Implements ``pods.Host``."""

    def __init__(self, config: AgentConfig, client: KubeClient, runner: Runner, http: aiohttp.ClientSession) -> None:
        self.config = config
        self.client = client
        self.runner = runner
        self.http = http
        self.folder = Path(config.state_dir)
        self.nodes = {node.name: node for node in config.nodes}
        self.dark: set[str] = set()  # nodes without power, or whose object was deleted
        self.running: dict[str, Pod] = {}  # by uid
        self.addresses = AddressPool(AddressSlot(config.slot_octet).pod_prefix)
        where = urlsplit(client.access.server)
        self.api_server = (str(where.hostname), int(where.port or 443))
        self.proxy = service_plan.ServiceProxy(log_line)
        self.log_server = LogServer(self._find_log, self._log_may_grow)
        self.pods = Reflector(client, "/api/v1/pods", self._on_pod)
        self.node_objects = Reflector(client, "/api/v1/nodes", self._on_node)
        self.service_objects = Reflector(client, "/api/v1/services", lambda _: self._services_changed.set())
        self.config_maps = Reflector(client, "/api/v1/configmaps", self._on_source)
        self.secrets = Reflector(client, "/api/v1/secrets", self._on_source)
        self.claims = Reflector(client, "/api/v1/persistentvolumeclaims", lambda _: self._storage_changed.set())
        self.volumes = Reflector(client, "/api/v1/persistentvolumes", lambda _: self._storage_changed.set())
        self.storage_classes = Reflector(
            client, "/apis/storage.k8s.io/v1/storageclasses", lambda _: self._storage_changed.set()
        )
        self._services_changed = asyncio.Event()
        self._storage_changed = asyncio.Event()
        self._stale_namespaces: set[str] = set()
        self._sources_changed = asyncio.Event()
        self._dirty: asyncio.Queue[Pod] = asyncio.Queue()
        self._queued: set[str] = set()
        self._written: dict[str, Object] = {}  # last status written, by uid
        self._writing: dict[str, asyncio.Lock] = {}  # by uid: two writers must not overtake each other
        self._names: list[tuple[str, str, str]] = []
        self._told: set[tuple[str, str, str]] = set()  # events already recorded
        self._tasks: set[asyncio.Task[None]] = set()
        self._fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._node_uids: dict[str, str] = {}

    # Life.

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop``; then end every pod."""
        await self.log_server.start(Path(self.config.certificate), Path(self.config.key))
        await self._create_storage_class()
        watchers = (
            self.node_objects,
            self.service_objects,
            self.config_maps,
            self.secrets,
            self.claims,
            self.volumes,
            self.storage_classes,
        )
        for reflector in watchers:
            self._spawn(reflector.run())
        await asyncio.gather(*(reflector.synced.wait() for reflector in watchers))
        await self._register_all()
        self._spawn(self.pods.run())
        await self.pods.synced.wait()
        for work in (
            self._heartbeats(),
            self._services_loop(),
            self._sources_loop(),
            self._storage_loop(),
            self._housekeeping(),
            *(self._status_writer() for _ in range(STATUS_WRITERS)),
        ):
            self._spawn(work)
        (self.folder / "agent.ready").write_text(str(os.getpid()))
        log(level="info", event="ready", nodes=len(self.nodes), isolation=self.runner.isolation.summary)
        stopped = asyncio.create_task(stop.wait())
        try:
            ends: list[asyncio.Future[Any]] = [stopped, self._fatal]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._fatal.done():
                self._fatal.result()
        finally:
            stopped.cancel()
            await self._shut_down()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """A loop that ends by an error is a fault of ours: end the agent rather than go on without it."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._fatal.done():
            self._fatal.set_exception(error)

    async def _shut_down(self) -> None:
        pods = list(self.running.values())
        await asyncio.gather(*(pod.terminate(SHUTDOWN_GRACE_S, report=False) for pod in pods), return_exceptions=True)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.proxy.close()
        await self.log_server.stop()
        kill_all_descendants()

    # What pods ask for.

    def lookup(self, kind: str, namespace: str, name: str) -> Mapping[str, Any] | None:
        return (self.config_maps if kind == "ConfigMap" else self.secrets).get(namespace, name)

    def services(self) -> Sequence[Mapping[str, Any]]:
        return list(self.service_objects.items.values())

    def current(self, namespace: str, name: str) -> Object | None:
        return self.pods.get(namespace, name)

    def allocatable(self, node: str) -> Mapping[str, str]:
        return node_resources(self.nodes[node])

    def claim_path(self, namespace: str, claim: str) -> Path | None:
        volumes = {name: volume for (_, name), volume in self.volumes.items.items()}
        return storage.claim_folder(self.claims.get(namespace, claim), volumes)

    def take_ip(self) -> str:
        return self.addresses.take()

    def give_back_ip(self, ip: str) -> None:
        self.addresses.give_back(ip)

    def image_env(self, image: Image, pod_folder: Path) -> dict[str, str]:
        """What a container image would set. Home and scratch are the pod's own, so that nothing is left behind."""
        env = {"PATH": SYSTEM_PATH, "HOME": str(pod_folder / "home"), "LANG": "C.UTF-8"}
        if not self._private_tmp:
            env["TMPDIR"] = str(pod_folder / "tmp")
        if image.known:
            programs = str(Path(sys.executable).parent)
            env |= {"PATH": f"{programs}:{SYSTEM_PATH}", "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
            if sys.prefix != sys.base_prefix:
                env["VIRTUAL_ENV"] = sys.prefix
        else:
            # Host programs are what the image is missing: those of whoever started the cluster.
            env["PATH"] = os.environ.get("PATH", SYSTEM_PATH)
        return env

    def image_mounts(self, image: Image, pod_folder: Path) -> list[Mount]:
        mounts = [Mount(self.config.repo_root, IMAGE_ROOT)] if image.known else []
        if self._private_tmp:
            mounts.append(Mount(str(pod_folder / "tmp"), "/tmp"))
        return mounts

    @property
    def _private_tmp(self) -> bool:
        """Whether a pod gets a /tmp of its own: not where that would hide Python, the repository or this cluster's state."""
        needed = (sys.prefix, sys.base_prefix, self.config.repo_root, self.config.state_dir)
        return self.runner.isolation.mounts and not any(os.path.realpath(path).startswith("/tmp/") for path in needed)

    def hosts_text(self, pod: Object, pod_ip: str) -> str:
        own = (pod_ip, hostname_of(pod))
        return service_plan.hosts_text(
            self._names, pod["metadata"]["namespace"], own, pod["spec"].get("hostAliases") or ()
        )

    def publish(self, pod: Pod) -> None:
        uid = pod.pod["metadata"]["uid"]
        if uid not in self._queued:
            self._queued.add(uid)
            self._dirty.put_nowait(pod)

    def record(self, pod: Object, kind: str, reason: str, message: str) -> None:
        key = (pod["metadata"]["uid"], reason, message)
        if key in self._told:
            return
        self._told.add(key)
        log(level="info" if kind == "Normal" else "warning", event=reason, pod=pod["metadata"]["name"], message=message)
        self._spawn(self._create_event(pod, kind, reason, message))

    async def request_token(self, pod: Object, audience: str, seconds: int) -> str:
        namespace, account = pod["metadata"]["namespace"], pod["spec"].get("serviceAccountName", "default")
        reference = {"apiVersion": "v1", "kind": "Pod", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
        spec: Object = {"expirationSeconds": max(seconds, 600), "boundObjectRef": reference}
        if audience:
            spec["audiences"] = [audience]
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        answer = await self.client.create(
            path, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        )
        return str(answer["status"]["token"])

    async def finish(self, pod: Pod) -> None:
        """Write a pod's last status, then remove its object."""
        metadata = pod.pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        with contextlib.suppress(ApiError, aiohttp.ClientError, OSError, TimeoutError):
            await self._write_status(pod)
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}}
        while True:
            try:
                await self.client.delete(path, options)
                return
            except ApiError as error:
                if error.status in (404, 409):
                    return
            except (aiohttp.ClientError, OSError, TimeoutError):
                pass
            await asyncio.sleep(RETRY_S)

    # Pods.

    async def _on_pod(self, change: Change) -> None:
        if _visible_to_services(change.old) != _visible_to_services(change.new):
            self._services_changed.set()
        if change.old is not None and (
            change.new is None or change.new["metadata"]["uid"] != change.old["metadata"]["uid"]
        ):
            self._pod_gone(change.old)
        if change.new is not None:
            self._pod_seen(change.new)

    def _pod_seen(self, pod: Object) -> None:
        uid, node = pod["metadata"]["uid"], pod["spec"].get("nodeName")
        if node not in self.nodes or node in self.dark:
            return
        mine = self.running.get(uid)
        if mine is None:
            mine = self._make(pod, self.nodes[node])
            self.running[uid] = mine
            mine.start()
        mine.update(pod)
        if pod["metadata"].get("deletionTimestamp"):
            grace_s = float(pod["metadata"].get("deletionGracePeriodSeconds") or 0)
            self._spawn(self._terminate(mine, grace_s, report=True))

    def _make(self, pod: Object, node: NodeSpec) -> Pod:
        if is_finished(pod) or pod["metadata"].get("deletionTimestamp"):
            return FinishedPod(pod, self)
        return ProcesslessPod(pod, self) if node.processless else ProcessPod(pod, self)

    def _pod_gone(self, pod: Object) -> None:
        """The object is gone: at the end of our own doing, or by force, which leaves processes to end."""
        mine = self.running.get(pod["metadata"]["uid"])
        if mine is not None:
            self._spawn(self._terminate(mine, FORCED_GRACE_S, report=False))

    async def _terminate(self, pod: Pod, grace_s: float, *, report: bool) -> None:
        await pod.terminate(grace_s, report=report)
        self._forget(pod)

    def _forget(self, pod: Pod) -> None:
        uid = pod.pod["metadata"]["uid"]
        self.running.pop(uid, None)
        self._written.pop(uid, None)
        self._writing.pop(uid, None)
        if self._told:
            self._told = {key for key in self._told if key[0] != uid}

    async def _status_writer(self) -> None:
        while True:
            pod = await self._dirty.get()
            self._queued.discard(pod.pod["metadata"]["uid"])
            try:
                await self._write_status(pod)
            except ApiError as error:
                # 404 and 409: the pod is gone, or another one has its name. Anything else must not be dropped.
                if error.status not in (404, 409):
                    log(level="warning", event="status_refused", pod=pod.pod["metadata"]["name"], error=str(error))
                    await asyncio.sleep(RETRY_S)
                    self.publish(pod)
            except (aiohttp.ClientError, OSError, TimeoutError):
                await asyncio.sleep(RETRY_S)
                self.publish(pod)

    async def _write_status(self, pod: Pod) -> None:
        metadata, uid = pod.pod["metadata"], pod.pod["metadata"]["uid"]
        if pod.pod["spec"].get("nodeName") in self.dark:
            return
        async with self._writing.setdefault(uid, asyncio.Lock()):
            known = self.current(metadata["namespace"], metadata["name"]) or pod.pod
            status = pod.status(_previous_status(known, self._written.get(uid)))
            if status == self._written.get(uid):
                return
            path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/status"
            await self.client.merge_patch(path, {"metadata": {"uid": uid}, "status": status})
            self._written[uid] = status

    async def _create_event(self, pod: Object, kind: str, reason: str, message: str) -> None:
        metadata = pod["metadata"]
        now = timestamp(datetime.now(UTC))
        event = {
            "metadata": {"generateName": f"{metadata['name'][:50]}-", "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Pod",
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": metadata["uid"],
            },
            "type": kind,
            "reason": reason,
            "message": message[:1024],
            "source": {"component": "motley-local", "host": pod["spec"].get("nodeName", "")},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        with contextlib.suppress(ApiError, aiohttp.ClientError, OSError, TimeoutError):
            await self.client.create(f"/api/v1/namespaces/{metadata['namespace']}/events", event)

    # Nodes.

    async def _register_all(self) -> None:
        waiting = list(reversed(self.config.nodes))

        async def register_some() -> None:
            while waiting:
                await self._register(waiting.pop())

        await asyncio.gather(*(register_some() for _ in range(REGISTRARS)))

    async def _register(self, node: NodeSpec) -> None:
        """Make (or take over) a node's object, report it healthy, and give it a lease."""
        try:
            answer = await self.client.create("/api/v1/nodes", node_manifest(node))
        except ApiError as error:
            if error.status != 409:
                raise
            answer = await self.client.merge_patch(
                f"/api/v1/nodes/{node.name}", {"metadata": node_manifest(node)["metadata"]}
            )
        self._node_uids[node.name] = answer["metadata"]["uid"]
        await self._report_healthy(node)
        duration_s = monitor_grace_s(len(self.nodes))
        lease = lease_manifest(node.name, self._node_uids[node.name], duration_s, datetime.now(UTC))
        try:
            await self.client.create("/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases", lease)
        except ApiError as error:
            if error.status != 409:
                raise

    async def _report_healthy(self, node: NodeSpec) -> None:
        status = node_status(
            node, kubelet_port=self.log_server.port, now=datetime.now(UTC), version=self.config.server_version
        )
        await self.client.merge_patch(f"/api/v1/nodes/{node.name}/status", {"status": status})

    async def _heartbeats(self) -> None:
        interval_s = heartbeat_interval_s(len(self.nodes))
        while True:
            await asyncio.sleep(interval_s)
            for name in self.nodes:
                if name in self.dark:
                    continue
                path = f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{name}"
                with contextlib.suppress(ApiError, aiohttp.ClientError, OSError, TimeoutError):
                    await self.client.merge_patch(path, {"spec": {"renewTime": micro_timestamp(datetime.now(UTC))}})

    async def _on_node(self, change: Change) -> None:
        """Power follows the node's annotation; a deleted node is a machine that is gone."""
        name = change.key[1]
        if name not in self.nodes or (change.new is None and change.old is None):
            return
        annotations = {} if change.new is None else change.new["metadata"].get("annotations") or {}
        off = change.new is None or annotations.get(POWER_ANNOTATION) == POWER_OFF
        if off and name not in self.dark:
            self.dark.add(name)
            log(level="info", event="node_lost", node=name)
            lost = [pod for pod in self.running.values() if pod.pod["spec"].get("nodeName") == name]
            await asyncio.gather(*(pod.lose_power() for pod in lost))
            for pod in lost:
                self._forget(pod)
        elif not off and name in self.dark:
            self.dark.discard(name)
            log(level="info", event="node_back", node=name)
            self._spawn(self._bring_back(self.nodes[name]))

    async def _bring_back(self, node: NodeSpec) -> None:
        await self._register(node)
        for pod in list(self.pods.items.values()):
            if pod["spec"].get("nodeName") == node.name:
                self._pod_seen(pod)

    # Services, mounted sources, storage.

    async def _services_loop(self) -> None:
        took_s = 0.0
        while True:
            await self._services_changed.wait()
            await asyncio.sleep(max(SETTLE_S, MOST_OF_TIME * took_s))
            self._services_changed.clear()
            started_s = time.monotonic()
            services, pods = self.service_objects.items.values(), self.pods.items.values()
            plan = service_plan.plan_proxies(services, pods)
            if (kubernetes := self.service_objects.get("default", "kubernetes")) is not None and os.getuid() == 0:
                address = service_plan.Address(
                    kubernetes["spec"]["clusterIP"], int(kubernetes["spec"]["ports"][0]["port"])
                )
                plan[address] = (service_plan.Address(*self.api_server),)
            await self.proxy.apply(plan)
            names = service_plan.plan_names(services, pods)
            if names != self._names:
                self._names = names
                for pod in list(self.running.values()):
                    pod.refresh()
            took_s = time.monotonic() - started_s

    def _on_source(self, change: Change) -> None:
        self._stale_namespaces.add(change.key[0])
        self._sources_changed.set()

    async def _sources_loop(self) -> None:
        while True:
            await self._sources_changed.wait()
            await asyncio.sleep(SETTLE_S)
            self._sources_changed.clear()
            stale, self._stale_namespaces = self._stale_namespaces, set()
            for pod in list(self.running.values()):
                if pod.pod["metadata"]["namespace"] in stale:
                    pod.refresh()

    async def _create_storage_class(self) -> None:
        try:
            await self.client.create("/apis/storage.k8s.io/v1/storageclasses", storage.storage_class_manifest())
        except ApiError as error:
            if error.status != 409:
                raise

    async def _storage_loop(self) -> None:
        root = self.folder / "volumes"
        while True:
            await self._storage_changed.wait()
            await asyncio.sleep(SETTLE_S)
            self._storage_changed.clear()
            classes = {
                name: one
                for (_, name), one in self.storage_classes.items.items()
                if one["provisioner"] == storage.PROVISIONER
            }
            plan = storage.plan_storage(self.claims.items.values(), self.volumes.items.values(), classes, root)
            for volume in plan.create:
                Path(volume["spec"]["hostPath"]["path"]).mkdir(parents=True, exist_ok=True)
                await self._best_effort(self.client.create("/api/v1/persistentvolumes", volume))
            for gone in plan.remove:
                await asyncio.to_thread(shutil.rmtree, gone["spec"]["hostPath"]["path"], True)
                await self._best_effort(self.client.delete(f"/api/v1/persistentvolumes/{gone['metadata']['name']}"))

    async def _best_effort(self, request: Coroutine[Any, Any, Object]) -> None:
        """A request whose failure the next look at the same objects will mend."""
        try:
            await request
        except (ApiError, aiohttp.ClientError, OSError, TimeoutError) as error:
            if not isinstance(error, ApiError) or error.status not in (404, 409):
                log(level="warning", event="storage_retry", error=str(error))
                await asyncio.sleep(RETRY_S)
                self._storage_changed.set()

    # Logs and upkeep.

    def _pod_named(self, namespace: str, name: str) -> Pod | None:
        known = self.current(namespace, name)
        return None if known is None else self.running.get(known["metadata"]["uid"])

    def _find_log(self, namespace: str, pod: str, container: str, previous: bool) -> Path | None:
        mine = self._pod_named(namespace, pod)
        return None if mine is None else mine.log_path(container, previous)

    def _log_may_grow(self, namespace: str, pod: str, path: Path) -> bool:
        mine = self._pod_named(namespace, pod)
        if mine is None or not path.exists():
            return False
        states = mine.status({}).get("containerStatuses") or []
        container = path.parent.name
        mains = [one for one in states if one["name"] == container]
        running = any("running" in one["state"] for one in mains) if mains else True
        return running and mine.log_path(container, False) == path

    async def _housekeeping(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            self.runner.reap_orphans()
            for path in (self.folder / "pods").glob("*/logs/*/*.log"):
                rotate(path)


def _previous_status(known: Object, written: Object | None) -> Object:
    """What a new status builds on: our last one, which the watch may not have shown yet, and conditions that others set."""
    seen: Object = known.get("status") or {}
    if written is None:
        return seen
    foreign = [one for one in seen.get("conditions") or () if one["type"] not in OWN_CONDITIONS]
    own = [one for one in written.get("conditions") or () if one["type"] in OWN_CONDITIONS]
    return {**written, "conditions": own + foreign}


def _visible_to_services(pod: Object | None) -> object:
    """The parts of a pod that decide which Services reach it."""
    if pod is None:
        return None
    metadata, status = pod["metadata"], pod.get("status") or {}
    return (
        metadata["uid"],
        metadata.get("labels"),
        status.get("podIP"),
        status.get("phase"),
        service_plan.is_ready(pod),
        metadata.get("deletionTimestamp"),
    )


def log_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def kill_all_descendants() -> None:
    """End whatever is still below us."""
    for pid in descendants(os.getpid(), parent_of_each()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def serve(config: AgentConfig) -> None:
    """Run the agent until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    folder = Path(config.state_dir)
    none = Isolation(mounts=False, pids=False, user=False)
    isolation = none if config.isolation == "none" else await best_isolation(folder / "probe")
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with (
        KubeClient(Access.from_kubeconfig(Path(config.kubeconfig))) as client,
        aiohttp.ClientSession(connector=connector, trust_env=False) as http,
    ):
        await Agent(config, client, Runner(isolation), http).run(stop)


def main() -> None:
    config = AgentConfig.from_json(Path(sys.argv[1]).read_text())
    become_subreaper()
    # Proxied connections take two files each.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        asyncio.run(serve(config))
    finally:
        kill_all_descendants()


if __name__ == "__main__":
    main()
