"""Which pods a Service means, and the names that stand in for DNS."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from motley_local.services import Address, ServiceProxy, hosts_text, plan_names, plan_proxies


def pod(name: str, ip: str, *, ready: bool = True, **more: Any) -> dict[str, Any]:
    metadata = {
        "name": name,
        "namespace": more.pop("namespace", "ns"),
        "labels": {"app": "web"},
        **more.pop("metadata", {}),
    }
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    container = {"name": "c", "ports": [{"name": "http", "containerPort": 8080}]}
    status = {"podIP": ip, "phase": "Running", "conditions": conditions}
    return {"metadata": metadata, "spec": {"containers": [container], **more}, "status": status}


def service(name: str, ip: str, **more: Any) -> dict[str, Any]:
    spec = {"clusterIP": ip, "selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": "http"}], **more}
    return {"metadata": {"name": name, "namespace": "ns"}, "spec": spec}


def test_only_ready_living_pods_of_the_namespace_are_backends() -> None:
    pods = [
        pod("b", "127.65.0.2"),
        pod("a", "127.65.0.1"),
        pod("unready", "127.65.0.3", ready=False),
        pod("leaving", "127.65.0.4", metadata={"deletionTimestamp": "x"}),
        pod("foreign", "127.65.0.5", namespace="other"),
        pod("other-app", "127.65.0.6", metadata={"labels": {"app": "db"}}),
    ]
    plan = plan_proxies([service("web", "127.64.0.9")], pods)
    assert plan == {Address("127.64.0.9", 80): (Address("127.65.0.1", 8080), Address("127.65.0.2", 8080))}


def test_a_service_without_backends_or_address_is_not_listened_for() -> None:
    unready = [pod("a", "127.65.0.1", ready=False)]
    services = [service("web", "127.64.0.9"), service("headless", "None")]
    assert plan_proxies(services, unready) == {}
    published = service("early", "127.64.0.8", publishNotReadyAddresses=True)
    assert plan_proxies([published], unready) == {Address("127.64.0.8", 80): (Address("127.65.0.1", 8080),)}


def test_names_are_those_that_cluster_dns_answers_for() -> None:
    gang = [
        pod("g-0", "127.65.0.1", hostname="g-0", subdomain="gang"),
        pod("g-1", "127.65.0.2", hostname="g-1", subdomain="gang"),
    ]
    names = plan_names([service("web", "127.64.0.9"), service("gang", "None")], gang)
    text = hosts_text(names, "ns", ("127.65.0.1", "g-0"))
    lines = text.splitlines()
    assert "127.64.0.9 web web.ns web.ns.svc web.ns.svc.cluster.local" in lines
    assert "127.65.0.2 g-1.gang g-1.gang.ns g-1.gang.ns.svc g-1.gang.ns.svc.cluster.local" in lines
    assert "127.65.0.1 gang gang.ns gang.ns.svc gang.ns.svc.cluster.local" in lines
    # From another namespace only names that say where.
    assert (
        "127.64.0.9 web.ns web.ns.svc web.ns.svc.cluster.local"
        in hosts_text(names, "other", ("127.65.0.9", "p")).splitlines()
    )


async def test_the_proxy_passes_large_bodies_both_ways_and_half_closed_connections() -> None:
    async def echo_after_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = await reader.read()
        writer.write(body[::-1])
        await writer.drain()
        writer.close()

    backend = await asyncio.start_server(echo_after_end, "127.0.0.1", 0)
    number = backend.sockets[0].getsockname()[1]
    proxy = ServiceProxy(lambda line: None)
    front = Address("127.0.0.1", _free_port())
    await proxy.apply({front: (Address("127.0.0.1", _free_port()), Address("127.0.0.1", number))})
    body = bytes(range(256)) * 20_000  # 5 MB: more than any buffer on the way
    reader, writer = await asyncio.open_connection(front.ip, front.port)

    async def send() -> None:
        writer.write(body)
        await writer.drain()
        writer.write_eof()

    _, answer = await asyncio.gather(send(), reader.read())
    assert answer == body[::-1]
    writer.close()
    await proxy.apply({})
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(front.ip, front.port)
    await proxy.close()
    backend.close()


def _free_port() -> int:
    from motley_local.controlplane import free_ports

    return free_ports(1)[0]
