"""Services on loopback: which pods a Service stands for, the hosts file in place of DNS, and a TCP proxy on each ClusterIP.

EndpointSlices refuse loopback addresses, so selectors are resolved here from Services and pods.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from motley_local.podspec import ConfigError, named_port

Object = Mapping[str, Any]
CLUSTER_DOMAIN = "cluster.local"
CONNECT_TIMEOUT_S = 5.0
PAUSE_ABOVE_BYTES = 1 << 20


@dataclass(frozen=True, order=True)
class Address:
    ip: str
    port: int


def is_ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


class PodIndex:
    """Pods by namespace and label, so that thousands of pods and hundreds of Services meet quickly."""

    def __init__(self, pods: Iterable[Object]) -> None:
        self._by_label: dict[tuple[str, str, str], list[Object]] = {}
        for pod in pods:
            metadata = pod["metadata"]
            for key, value in (metadata.get("labels") or {}).items():
                self._by_label.setdefault((metadata["namespace"], key, value), []).append(pod)

    def candidates(self, namespace: str, selector: Mapping[str, str]) -> Sequence[Object]:
        """All pods that the selector could select: those with its rarest label."""
        return min((self._by_label.get((namespace, *pair), []) for pair in selector.items()), key=len)


def selected_pods(service: Object, pods: PodIndex) -> list[Object]:
    """Pods that a Service sends to: selected, with an address, and ready unless it publishes others too; by name."""
    selector = service["spec"].get("selector")
    if not selector:
        return []
    namespace = service["metadata"]["namespace"]
    unready_too = bool(service["spec"].get("publishNotReadyAddresses"))
    chosen = []
    for pod in pods.candidates(namespace, selector):
        metadata = pod["metadata"]
        labels = metadata.get("labels") or {}
        status = pod.get("status") or {}
        if metadata["namespace"] != namespace or any(labels.get(key) != value for key, value in selector.items()):
            continue
        if not status.get("podIP") or status.get("phase") in ("Succeeded", "Failed"):
            continue
        if unready_too or (is_ready(pod) and not metadata.get("deletionTimestamp")):
            chosen.append(pod)
    return sorted(chosen, key=lambda pod: str(pod["metadata"]["name"]))


def target_port(port: Object, pod: Object) -> int | None:
    """Port of the pod behind a Service port; None when the pod has no port of that name."""
    wanted = port.get("targetPort", port["port"])
    for container in pod["spec"]["containers"]:
        try:
            return named_port(container, wanted)
        except ConfigError:
            continue
    return None


def has_cluster_ip(service: Object) -> bool:
    return service["spec"].get("clusterIP") not in (None, "", "None") and service["spec"].get("type") != "ExternalName"


def plan_proxies(services: Iterable[Object], pods: Iterable[Object]) -> dict[Address, tuple[Address, ...]]:
    """Backends of every ClusterIP and port that has at least one. Without backends nothing listens, so connections are refused."""
    index = PodIndex(pods)
    plan: dict[Address, tuple[Address, ...]] = {}
    for service in services:
        if not has_cluster_ip(service):
            continue
        chosen = selected_pods(service, index)
        for port in service["spec"].get("ports") or ():
            if port.get("protocol", "TCP") != "TCP":
                continue
            backends = [
                Address(pod["status"]["podIP"], number)
                for pod in chosen
                if (number := target_port(port, pod)) is not None
            ]
            if backends:
                plan[Address(service["spec"]["clusterIP"], int(port["port"]))] = tuple(sorted(backends))
    return plan


def plan_names(services: Iterable[Object], pods: Iterable[Object]) -> list[tuple[str, str, str]]:
    """(address, namespace, name inside the namespace) of everything that cluster DNS would answer for."""
    index = PodIndex(pods)
    names: set[tuple[str, str, str]] = set()
    for service in services:
        namespace, name = service["metadata"]["namespace"], service["metadata"]["name"]
        if has_cluster_ip(service):
            names.add((service["spec"]["clusterIP"], namespace, name))
        elif service["spec"].get("clusterIP") == "None":
            for pod in selected_pods(service, index):
                names.add((pod["status"]["podIP"], namespace, name))
                spec = pod["spec"]
                if spec.get("subdomain") == name and spec.get("hostname"):
                    names.add((pod["status"]["podIP"], namespace, f"{spec['hostname']}.{name}"))
    return sorted(names, key=lambda one: (one[1], one[2], one[0]))


def hosts_text(
    names: Sequence[tuple[str, str, str]], namespace: str, own: tuple[str, str], aliases: Sequence[Object] = ()
) -> str:
    """A pod's /etc/hosts: its own name, the pod's hostAliases, and every Service under the names that DNS would accept."""
    lines = [
        "# Kept by the local cluster, in place of DNS.",
        "127.0.0.1 localhost",
        "::1 localhost",
        f"{own[0]} {own[1]}",
    ]
    lines += [f"{alias['ip']} {' '.join(alias.get('hostnames') or ())}" for alias in aliases]
    for address, of_namespace, name in names:
        full = f"{name}.{of_namespace}"
        short = [name] if of_namespace == namespace else []
        lines.append(" ".join([address, *short, full, f"{full}.svc", f"{full}.svc.{CLUSTER_DOMAIN}"]))
    return "\n".join(lines) + "\n"


class _Splice(asyncio.Protocol):
    """One direction pair of a proxied connection: what one side says, the other hears."""

    def __init__(self, peer: _Splice | None = None) -> None:
        self.peer = peer
        self.transport: asyncio.Transport | None = None
        self.early: list[bytes] = []
        self.ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=PAUSE_ABOVE_BYTES)

    def data_received(self, data: bytes) -> None:
        if self.peer is None or self.peer.transport is None:
            self.early.append(data)
        else:
            self.peer.transport.write(data)

    def eof_received(self) -> bool:
        self.ended = True
        if self.peer is not None and self.peer.transport is not None and self.peer.transport.can_write_eof():
            self.peer.transport.write_eof()
        return True

    def pause_writing(self) -> None:
        if self.peer is not None and self.peer.transport is not None:
            self.peer.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.peer is not None and self.peer.transport is not None:
            self.peer.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = True
        if self.peer is not None and self.peer.transport is not None:
            self.peer.transport.close()

    def join(self, peer: _Splice) -> None:
        """Start passing data to the peer, beginning with what came before there was one."""
        self.peer = peer
        if peer.transport is None:
            return
        for data in self.early:
            peer.transport.write(data)
        self.early.clear()
        if self.ended:
            if self.transport is None or self.transport.is_closing():
                peer.transport.close()
            else:
                peer.transport.write_eof()


class _Listener:
    """A ClusterIP and port, and where its connections go, in turn."""

    def __init__(self, backends: tuple[Address, ...]) -> None:
        self.backends = backends
        self.server: asyncio.Server | None = None
        self._turn = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, address: Address) -> None:
        loop = asyncio.get_running_loop()
        self.server = await loop.create_server(self._accept, address.ip, address.port, reuse_address=True)

    def _accept(self) -> _Splice:
        front = _Splice()
        task = asyncio.ensure_future(self._connect(front))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return front

    async def _connect(self, front: _Splice) -> None:
        loop = asyncio.get_running_loop()
        backends = self.backends
        first = next(self._turn)
        for offset in range(len(backends)):
            backend = backends[(first + offset) % len(backends)]
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    _, back = await loop.create_connection(lambda: _Splice(front), backend.ip, backend.port)
            except (OSError, TimeoutError):
                continue
            front.join(back)
            return
        if front.transport is not None:
            front.transport.abort()
        front.ended = True


class ServiceProxy:
    """Listens where the plan says, and stops where it no longer does."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._listeners: dict[Address, _Listener] = {}
        self._refused: set[Address] = set()
        self._report = report

    async def apply(self, plan: Mapping[Address, tuple[Address, ...]]) -> None:
        """Make the listeners fit the plan. Connections that exist stay."""
        for address in [address for address in self._listeners if address not in plan]:
            listener = self._listeners.pop(address)
            if listener.server is not None:
                listener.server.close()
        for address, backends in plan.items():
            if address in self._listeners:
                self._listeners[address].backends = backends
                continue
            listener = _Listener(backends)
            try:
                await listener.open(address)
            except OSError as error:
                if address not in self._refused:
                    self._refused.add(address)
                    self._report(
                        f"level=warning event=service_not_reachable address={address.ip}:{address.port} error={error.strerror!r}"
                    )
                continue
            self._listeners[address] = listener

    async def close(self) -> None:
        await self.apply({})
