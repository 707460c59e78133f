"""Virtual nodes: what they look like to the scheduler. Pure; ``agent.py`` registers them and runs what lands on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from motley_api.keys import GPU_RESOURCE
from motley_api.resources.gpus import GPU_TYPES, CapacityType, GpuType, GpuTypeName

POWER_ANNOTATION = "local.motley.dev/power"  # "off": the node behaves as a machine that lost power
POWER_OFF = "off"
NODE_ADDRESS = "127.0.0.1"
HEARTBEAT_S = 4.0
NODES_PER_HEARTBEAT_S = 25.0  # many nodes beat less often, so that leases stay a small share of the writes
MISSED_BEATS = 10

# What `nvidia-smi` shows as memory on each, MiB, and the architecture's name.
_GPU_FACTS: Mapping[GpuTypeName, tuple[int, str]] = {
    GpuTypeName.A100_40GB: (40960, "ampere"),
    GpuTypeName.A100_80GB: (81920, "ampere"),
    GpuTypeName.H100: (81559, "hopper"),
    GpuTypeName.H200: (143771, "hopper"),
    GpuTypeName.B200: (183359, "blackwell"),
    GpuTypeName.B300: (275040, "blackwell"),
    GpuTypeName.RTX_PRO_6000: (97887, "blackwell"),
}
_CAPACITY_LABEL = {CapacityType.ON_DEMAND: "on-demand", CapacityType.SPOT: "spot"}
STUDY_GPU_TYPES = (
    GpuTypeName.A100_80GB,
    GpuTypeName.H100,
    GpuTypeName.H200,
    GpuTypeName.B200,
    GpuTypeName.B300,
    GpuTypeName.RTX_PRO_6000,
)


@dataclass(frozen=True)
class NodeSpec:
    """One virtual node."""

    name: str
    gpu_type: GpuTypeName | None = None  # None: a CPU node
    gpus: int = 8  # counts only with a gpu_type
    capacity_type: CapacityType = CapacityType.ON_DEMAND
    zone: str = "local-a"
    cpu: str = "192"
    memory: str = "2Ti"
    pods: int = 110
    processless: bool = False  # pods become Running and Ready at once, with nothing behind them
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: Sequence[Mapping[str, str]] = ()


def default_nodes(nodes_per_gpu_type: int = 2) -> list[NodeSpec]:
    """Two nodes of eight GPUs for each of the study's six types, and a CPU node for operator, router and rollout workers."""
    fleet = [NodeSpec("cpu-0")]
    for gpu_type in STUDY_GPU_TYPES:
        fleet += [NodeSpec(f"{gpu_type.lower()}-{index}", gpu_type) for index in range(nodes_per_gpu_type)]
    return fleet


def load_nodes(path: Path) -> list[NodeSpec]:
    """Nodes from a YAML file whose list ``nodes`` has one mapping for each node; ``NodeSpec`` says what the fields mean.

    Fields: name, gpuType, gpus, count, capacityType, zone, cpu, memory, pods, processless, labels, taints. With ``count`` there are
    that many of them, named name-0, name-1 and so on.

    Raises:
        ValueError: a field is unknown or its value is not allowed; the message names it.
    """
    document = yaml.safe_load(path.read_text())
    if not isinstance(document, dict) or not isinstance(document.get("nodes"), list):
        raise ValueError(f"{path}: must be a mapping with a list `nodes`")
    fleet: list[NodeSpec] = []
    for index, entry in enumerate(document["nodes"]):
        fleet += _parse_node(entry, f"{path}: nodes[{index}]")
    names = [node.name for node in fleet]
    if len(set(names)) != len(names):
        raise ValueError(
            f"{path}: node names must differ, got {sorted(name for name in set(names) if names.count(name) > 1)} twice"
        )
    return fleet


_FIELDS = {
    "name": "name",
    "gpus": "gpus",
    "zone": "zone",
    "cpu": "cpu",
    "memory": "memory",
    "pods": "pods",
    "processless": "processless",
    "labels": "labels",
    "taints": "taints",
}


def _parse_node(entry: Any, where: str) -> list[NodeSpec]:
    if not isinstance(entry, dict) or not entry.get("name"):
        raise ValueError(f"{where}: must be a mapping with a name")
    unknown = sorted(set(entry) - {*_FIELDS, "gpuType", "capacityType", "count"})
    if unknown:
        raise ValueError(
            f"{where}: unknown field {unknown[0]!r}; allowed: {', '.join([*_FIELDS, 'gpuType', 'capacityType', 'count'])}"
        )
    values: dict[str, Any] = {_FIELDS[key]: value for key, value in entry.items() if key in _FIELDS}
    for key in ("cpu", "memory"):
        if key in values:
            values[key] = str(values[key])
    if entry.get("gpuType") is not None:
        values["gpu_type"] = _member(GpuTypeName, entry["gpuType"], f"{where}.gpuType")
    if entry.get("capacityType") is not None:
        values["capacity_type"] = _member(CapacityType, entry["capacityType"], f"{where}.capacityType")
    node = NodeSpec(**values)
    count = entry.get("count")
    return [node] if count is None else [replace(node, name=f"{node.name}-{index}") for index in range(int(count))]


def _member[E: (GpuTypeName, CapacityType)](kind: type[E], value: object, where: str) -> E:
    try:
        return kind(str(value))
    except ValueError:
        raise ValueError(f"{where} must be one of {', '.join(kind)}, got {value!r}") from None


def gpu_labels(gpu: GpuType, count: int) -> dict[str, str]:
    """Labels as GPU Feature Discovery writes them."""
    memory_mib, family = _GPU_FACTS[gpu.name]
    major, minor = gpu.compute_capability
    return {
        "nvidia.com/gpu.present": "true",
        "nvidia.com/gpu.product": gpu.product[0],
        "nvidia.com/gpu.count": str(count),
        "nvidia.com/gpu.replicas": "1",
        "nvidia.com/gpu.memory": str(memory_mib),
        "nvidia.com/gpu.family": family,
        "nvidia.com/gpu.compute.major": str(major),
        "nvidia.com/gpu.compute.minor": str(minor),
    }


def node_labels(node: NodeSpec) -> dict[str, str]:
    labels = {
        "kubernetes.io/hostname": node.name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        "topology.kubernetes.io/region": "local",
        "topology.kubernetes.io/zone": node.zone,
        "karpenter.sh/capacity-type": _CAPACITY_LABEL[node.capacity_type],
        "node.kubernetes.io/instance-type": f"local.{node.gpu_type.lower()}x{node.gpus}"
        if node.gpu_type
        else "local.cpu",
    }
    if node.gpu_type is not None:
        labels |= gpu_labels(GPU_TYPES[node.gpu_type], node.gpus)
    return labels | dict(node.labels)


def node_manifest(node: NodeSpec) -> dict[str, Any]:
    """The Node object as it is registered."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": node.name, "labels": node_labels(node)},
        "spec": {"taints": [dict(taint) for taint in node.taints]} if node.taints else {},
    }


def node_resources(node: NodeSpec) -> dict[str, str]:
    resources = {"cpu": node.cpu, "memory": node.memory, "pods": str(node.pods), "ephemeral-storage": "1Ti"}
    if node.gpu_type is not None:
        resources[GPU_RESOURCE] = str(node.gpus)
    return resources


def timestamp(now: datetime) -> str:
    """RFC 3339 to the second, as the API server stores times."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_timestamp(now: datetime) -> str:
    """RFC 3339 with microseconds, as leases hold them."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def node_status(node: NodeSpec, *, kubelet_port: int, now: datetime, version: str) -> dict[str, Any]:
    """The status that a healthy kubelet reports."""
    healthy = {
        "MemoryPressure": ("False", "KubeletHasSufficientMemory"),
        "DiskPressure": ("False", "KubeletHasNoDiskPressure"),
        "PIDPressure": ("False", "KubeletHasSufficientPID"),
        "Ready": ("True", "KubeletReady"),
    }
    stamp = timestamp(now)
    conditions = [
        {"type": kind, "status": status, "reason": reason, "lastHeartbeatTime": stamp, "lastTransitionTime": stamp}
        for kind, (status, reason) in healthy.items()
    ]
    return {
        "capacity": node_resources(node),
        "allocatable": node_resources(node),
        "conditions": conditions,
        "addresses": [{"type": "InternalIP", "address": NODE_ADDRESS}, {"type": "Hostname", "address": node.name}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": kubelet_port}},
        "nodeInfo": {
            "machineID": node.name,
            "systemUUID": node.name,
            "bootID": node.name,
            "kernelVersion": "",
            "osImage": "motley local",
            "containerRuntimeVersion": "process://1",
            "kubeletVersion": version,
            "kubeProxyVersion": version,
            "operatingSystem": "linux",
            "architecture": "amd64",
        },
    }


def heartbeat_interval_s(node_count: int) -> float:
    """Seconds between two renewals of a node's lease."""
    return max(HEARTBEAT_S, node_count / NODES_PER_HEARTBEAT_S)


def monitor_grace_s(node_count: int) -> int:
    """How long the node controller waits for a heartbeat before a node is lost."""
    return round(MISSED_BEATS * heartbeat_interval_s(node_count))


def lease_manifest(node_name: str, node_uid: str, duration_s: int, now: datetime) -> dict[str, Any]:
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {
            "name": node_name,
            "namespace": "kube-node-lease",
            "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": node_name, "uid": node_uid}],
        },
        "spec": {"holderIdentity": node_name, "leaseDurationSeconds": duration_s, "renewTime": micro_timestamp(now)},
    }
