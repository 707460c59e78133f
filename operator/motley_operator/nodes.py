"""Nodes, with what everybody's pods hold on them and what is offered through DRA. Read only when a decision needs it.

What may not be looked at is not known, and said so: without a look at all pods no GPU counts as free, without a look at nodes no group
grows by the operator's choice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from motley_api import keys

from motley_operator.kube import ApiError, Kube
from motley_operator.planner.model import NodeView
from motley_operator.planner.placement import DRA_DRIVER

Json = dict[str, Any]
PAGE = 100  # nodes are large: their images alone are kilobytes
LIVE_PODS = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
WORK_SHARE = 20  # in a large cluster looking takes its time: it waits this many times as long before it looks again


@dataclass(frozen=True)
class Seen:
    """nodes None: they may not be looked at; `error` says why."""

    nodes: tuple[NodeView, ...] | None
    error: str = ""


def count(quantity: object) -> int:
    """Of an extended resource, which is whole. What cannot be read is no GPU."""
    try:
        return max(0, int(str(quantity)))
    except ValueError:
        return 0


def pod_gpus(pod: Mapping[str, Any]) -> int:
    """That a pod holds: its containers' and sidecars' together, or an init container's if that asks for more."""

    def asked(container: Mapping[str, Any]) -> int:
        resources = container.get("resources") or {}
        return max(count((resources.get(part) or {}).get(keys.GPU_RESOURCE, 0)) for part in ("limits", "requests"))

    spec = pod.get("spec", {})
    inits = spec.get("initContainers") or []
    sidecars = sum(asked(one) for one in inits if one.get("restartPolicy") == "Always")
    running = sum(asked(one) for one in spec.get("containers") or []) + sidecars
    return max([running, *(asked(one) for one in inits if one.get("restartPolicy") != "Always")])


def node_view(
    node: Mapping[str, Any], held_gpus: int | None = 0, dra_gpus: Mapping[str, int] | None = None
) -> NodeView:
    status, spec = node.get("status", {}), node.get("spec", {})
    conditions = {item["type"]: item["status"] for item in status.get("conditions") or []}
    return NodeView(
        name=node["metadata"]["name"],
        labels=node["metadata"].get("labels") or {},
        allocatable_gpus=count((status.get("allocatable") or {}).get(keys.GPU_RESOURCE, 0)),
        held_gpus=held_gpus,
        ready=conditions.get("Ready", "Unknown") == "True" and not spec.get("unschedulable", False),
        taints=tuple((item["key"], item.get("value", ""), item["effect"]) for item in spec.get("taints") or []),
        dra_gpus=tuple(sorted((dra_gpus or {}).items())),
    )


def slice_gpus(resource_slice: Mapping[str, Any]) -> tuple[str, dict[str, int]]:
    """(node, whole GPUs by product) of a ResourceSlice of NVIDIA's driver; ("", {}) for anything else."""
    spec = resource_slice.get("spec", {})
    if spec.get("driver") != DRA_DRIVER or not spec.get("nodeName"):
        return "", {}
    found: dict[str, int] = {}
    for device in spec.get("devices") or []:
        attributes = device.get("attributes") or (device.get("basic") or {}).get("attributes") or {}
        product = (attributes.get("productName") or {}).get("string", "")
        if product and (attributes.get("type") or {}).get("string", "gpu") == "gpu":
            found[product] = found.get(product, 0) + 1
    return spec["nodeName"], found


def nobody(pod: Mapping[str, Any]) -> bool:
    return False


async def held_gpus(kube: Kube, ours: Callable[[Mapping[str, Any]], bool]) -> dict[str, int] | None:
    """By node, of pods that are not `ours`; None when not every pod may be seen."""
    found: dict[str, int] = {}
    try:
        async for pod in kube.list("Pod", fields=LIVE_PODS):
            if (gpus := pod_gpus(pod)) and not ours(pod):
                node = pod["spec"]["nodeName"]
                found[node] = found.get(node, 0) + gpus
    except ApiError as error:
        if error.status != 403:
            raise
        return None
    return found


async def offered_by_dra(kube: Kube) -> dict[str, dict[str, int]]:
    """By node and product."""
    offered: dict[str, dict[str, int]] = {}
    try:
        async for item in kube.list("ResourceSlice"):
            node, products = slice_gpus(item)
            known = offered.setdefault(node, {})
            for product, gpus in products.items():
                known[product] = known.get(product, 0) + gpus
    except ApiError as error:
        if error.status not in (403, 404):  # not allowed, or a server without DRA: nodes alone speak
            raise
    return offered


async def look(kube: Kube, *, ours: Callable[[Mapping[str, Any]], bool] = nobody) -> Seen:
    """All nodes. Raises ApiError on what is neither a refusal nor an API that this server does not have."""
    held, offered = await held_gpus(kube, ours), await offered_by_dra(kube)
    nodes = []
    try:
        async for node_ in kube.list("Node", page=PAGE):
            name = node_["metadata"]["name"]
            nodes.append(node_view(node_, None if held is None else held.get(name, 0), offered.get(name)))
    except ApiError as error:
        if error.status != 403:
            raise
        return Seen(None, f"nodes cannot be looked at: {error.message}")
    return Seen(tuple(nodes))


class Nodes:
    """One look for all runs, again after a while."""

    def __init__(self, kube: Kube, clock: Callable[[], float], every_s: float) -> None:
        self._kube, self._clock, self._every_s = kube, clock, every_s
        self._seen, self._due = Seen(None), float("-inf")
        self._lock = asyncio.Lock()

    async def seen(self) -> Seen:
        async with self._lock:
            began = self._clock()
            if began >= self._due:
                self._seen = await look(self._kube)
                now = self._clock()
                self._due = now + max(self._every_s, WORK_SHARE * (now - began))
            return self._seen
