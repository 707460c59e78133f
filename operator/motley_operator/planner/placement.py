"""GPU types on nodes, by whole label values, over the label keys of the clouds.

Never by substring: A100 is not A10, 40 GB is not 80 GB; an empty label on a CPU node names nothing; GFD's `-MIG-<profile>` and
`-SHARED` are other values and therefore do not match.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from motley_api import keys
from motley_api.resources import GPU_TYPES, CapacityType, GpuTypeName

from motley_operator.planner.model import NodeView

PRODUCT = "nvidia.com/gpu.product"
GKE = "cloud.google.com/gke-accelerator"
# label of the GPU's name -> label of one GPU's memory in MiB: AWS calls both A100 "a100".
AWS = {
    "karpenter.k8s.aws/instance-gpu-name": "karpenter.k8s.aws/instance-gpu-memory",
    "eks.amazonaws.com/instance-gpu-name": "eks.amazonaws.com/instance-gpu-memory",
}
SPOT_LABELS = {
    "karpenter.sh/capacity-type": "spot",
    "eks.amazonaws.com/capacityType": "SPOT",
    "cloud.google.com/gke-provisioning": "spot",
    "cloud.google.com/gke-spot": "true",
    "kubernetes.azure.com/scalesetpriority": "spot",
}
SPOT_TAINTS = (("cloud.google.com/gke-spot", "true"), ("kubernetes.azure.com/scalesetpriority", "spot"))

Term = tuple[tuple[str, tuple[str, ...]], ...]  # label key -> allowed values, all of them


def type_terms(gpu_type: GpuTypeName) -> tuple[Term, ...]:
    """Any one of these says that a node has this GPU type."""
    gpu = GPU_TYPES[gpu_type]
    terms: list[Term] = [((PRODUCT, gpu.product),)]
    if gpu.gke:
        terms.append(((GKE, gpu.gke),))
    shared = {other.name for other in GPU_TYPES.values() if set(other.karpenter) & set(gpu.karpenter)} - {gpu.name}
    for name_key, memory_key in AWS.items():
        if gpu.karpenter:
            memory: Term = ((memory_key, (str(gpu.memory_gib * 1024),)),) if shared else ()
            terms.append(((name_key, gpu.karpenter), *memory))
    return tuple(terms)


def is_type(labels: Mapping[str, str], gpu_type: GpuTypeName) -> bool:
    return any(all(labels.get(key) in values for key, values in term) for term in type_terms(gpu_type))


def is_spot(labels: Mapping[str, str]) -> bool:
    return any(labels.get(key) == value for key, value in SPOT_LABELS.items())


def suits(node: NodeView, gpu_type: GpuTypeName, capacity_type: CapacityType) -> bool:
    return is_type(node.labels, gpu_type) and is_spot(node.labels) == (capacity_type is CapacityType.SPOT)


def node_affinity(gpu_type: GpuTypeName, capacity_type: CapacityType) -> dict[str, Any]:
    """Required node affinity: any label of the type, and spot nodes only for spot groups (they are priced apart)."""
    expressions = [
        [{"key": key, "operator": "In", "values": list(values)} for key, values in term]
        for term in type_terms(gpu_type)
    ]
    if capacity_type is CapacityType.ON_DEMAND:
        not_spot = [{"key": key, "operator": "NotIn", "values": [value]} for key, value in SPOT_LABELS.items()]
        terms = [{"matchExpressions": [*term, *not_spot]} for term in expressions]
    else:
        terms = [
            {"matchExpressions": [*term, {"key": key, "operator": "In", "values": [value]}]}
            for term in expressions
            for key, value in SPOT_LABELS.items()
        ]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def tolerations(capacity_type: CapacityType) -> list[dict[str, str]]:
    found = [{"key": keys.GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"}]
    if capacity_type is CapacityType.SPOT:
        found += [
            {"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"} for key, value in SPOT_TAINTS
        ]
    return found


@dataclass(frozen=True)
class Availability:
    """What there is of one GPU type."""

    nodes: tuple[str, ...]  # with the type's labels
    empty: tuple[str, ...]  # of them, those without an allocatable GPU: labelled, not counted
    free_by_node: tuple[tuple[str, int], ...]

    def engines(self, gpus_per_engine: int) -> int:
        """Engines that fit; an engine's GPUs lie on one node."""
        return sum(free // gpus_per_engine for _, free in self.free_by_node)

    def describe(self, gpu_type: GpuTypeName) -> str:
        if not self.nodes:
            terms = " or ".join(
                " and ".join(f"{key} in [{', '.join(values)}]" for key, values in term) for term in type_terms(gpu_type)
            )
            return f"no node is labelled {gpu_type.value} ({terms})"
        text = f"{len(self.nodes)} node(s) of {gpu_type.value}: " + ", ".join(
            f"{name} ({free} free)" for name, free in self.free_by_node[:5]
        )
        if len(self.free_by_node) > 5:
            text += f" and {len(self.free_by_node) - 5} more"
        if self.empty:
            text += f"; labelled but without an allocatable GPU, so not counted: {', '.join(self.empty[:5])}"
        return text


def availability(nodes: Iterable[NodeView], gpu_type: GpuTypeName, capacity_type: CapacityType) -> Availability:
    matching = sorted((node for node in nodes if suits(node, gpu_type, capacity_type)), key=lambda node: node.name)
    counted = [node for node in matching if node.allocatable_gpus > 0]
    return Availability(
        nodes=tuple(node.name for node in matching),
        empty=tuple(node.name for node in matching if node.allocatable_gpus == 0),
        free_by_node=tuple((node.name, node.free_gpus) for node in counted),
    )
