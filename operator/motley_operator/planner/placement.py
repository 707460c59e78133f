"""GPU types on nodes, by whole label values, over the label keys of the clouds.

Never by substring: A100 is not A10, 40 GB is not 80 GB; an empty label on a CPU node names nothing; GFD's `-MIG-<profile>` and
`-SHARED` are other values and therefore do not match. Where GFD has named the GPU, its name rules over the clouds' labels: they name the
machine, not how its GPUs are cut. What the planner counts and what the scheduler is asked for are made from the same requirements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from motley_api import keys
from motley_api.resources import (
    GPU_TYPES,
    MIN_COMPUTE_CAPABILITY,
    CapacityType,
    GpuTypeName,
    Precision,
    SamplerGroupSpec,
)
from motley_api.resources.base import Toleration
from motley_api.resources.rlrun import Trainer

from motley_operator.planner.model import GroupView, NodeView

PRODUCT = "nvidia.com/gpu.product"
COMPUTE_MAJOR, COMPUTE_MINOR = "nvidia.com/gpu.compute.major", "nvidia.com/gpu.compute.minor"
SHARING = "nvidia.com/gpu.sharing-strategy"
GKE = "cloud.google.com/gke-accelerator"
GKE_PARTITION, GKE_SHARING = "cloud.google.com/gke-gpu-partition-size", "cloud.google.com/gke-gpu-sharing-strategy"
AZURE = "node.kubernetes.io/instance-type"
# label of the GPU's name -> label of one GPU's memory in MiB: AWS calls both A100 "a100".
AWS = {
    "karpenter.k8s.aws/instance-gpu-name": "karpenter.k8s.aws/instance-gpu-memory",
    "eks.amazonaws.com/instance-gpu-name": "eks.amazonaws.com/instance-gpu-memory",
}
NAME_LABELS = (PRODUCT, GKE, *AWS)  # what names a GPU; said of nodes when the type wanted is not among them
# label -> value of a spot node, by whose label it is
SPOT_AWS = {"karpenter.sh/capacity-type": "spot", "eks.amazonaws.com/capacityType": "SPOT"}
SPOT_GKE = {"cloud.google.com/gke-provisioning": "spot", "cloud.google.com/gke-spot": "true"}
SPOT_AZURE = {"kubernetes.azure.com/scalesetpriority": "spot"}
SPOT_LABELS = SPOT_AWS | SPOT_GKE | SPOT_AZURE
SPOT_TAINTS = (("cloud.google.com/gke-spot", "true"), ("kubernetes.azure.com/scalesetpriority", "spot"))
# Kubelets set these on a node in trouble; such a node is not ready, or will soon be again.
LIFECYCLE_TAINTS = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")
DRA_DRIVER = "gpu.nvidia.com"
SHOWN = 5  # names in a message


def supported(group: GroupView) -> bool:
    """Whether the group's GPU type computes in its precision at all."""
    return GPU_TYPES[group.spec.gpu_type].runs(group.spec.precision)


@dataclass(frozen=True)
class Requirement:
    """Of one label, as in a node affinity."""

    key: str
    operator: str  # In | NotIn | DoesNotExist
    values: tuple[str, ...] = ()

    def holds(self, labels: Mapping[str, str]) -> bool:
        """As kube-scheduler reads it: NotIn holds for an absent label."""
        if self.operator == "DoesNotExist":
            return self.key not in labels
        return (labels.get(self.key) in self.values) == (self.operator == "In")

    def to_json(self) -> dict[str, Any]:
        named = {"key": self.key, "operator": self.operator}
        return {**named, "values": list(self.values)} if self.values else named

    def __str__(self) -> str:
        return f"{self.key} in [{', '.join(self.values)}]"


@dataclass(frozen=True)
class Term:
    """All of it says that a node has a GPU type, whole GPUs of it, that can compute in a precision."""

    names: tuple[Requirement, ...]
    whole: tuple[Requirement, ...]
    spot: Mapping[str, str]  # labels of a spot node where these names are found

    def holds(self, labels: Mapping[str, str]) -> bool:
        return all(one.holds(labels) for one in (*self.names, *self.whole))

    def is_spot(self, labels: Mapping[str, str]) -> bool:
        return any(labels.get(key) == value for key, value in self.spot.items())


@dataclass(frozen=True)
class Ask:
    """What an engine, or a pod of the gang, needs of its node."""

    gpu_type: GpuTypeName
    capacity_type: CapacityType = CapacityType.ON_DEMAND
    precision: Precision = Precision.BF16
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()


def ask_of(spec: SamplerGroupSpec) -> Ask:
    overrides = spec.template
    return Ask(spec.gpu_type, spec.capacity_type, spec.precision, overrides.node_selector, tuple(overrides.tolerations))


def trainer_ask(trainer: Trainer) -> Ask:
    overrides = trainer.template
    tolerations_ = tuple(overrides.tolerations)
    return Ask(trainer.gpu_type, trainer.capacity_type, Precision.BF16, overrides.node_selector, tolerations_)


def too_old(precision: Precision) -> tuple[str, ...]:
    """Major compute capabilities that cannot run it. No known type shares a major with one that can and one that cannot."""
    major, minor = MIN_COMPUTE_CAPABILITY[precision]
    return tuple(str(number) for number in range(3, major + (1 if minor else 0)))


def type_terms(gpu_type: GpuTypeName, precision: Precision = Precision.BF16) -> tuple[Term, ...]:
    """Any one of these."""
    gpu = GPU_TYPES[gpu_type]
    able = Requirement(COMPUTE_MAJOR, "NotIn", too_old(precision))
    unshared = Requirement(SHARING, "NotIn", ("time-slicing", "mps"))
    terms = [Term((Requirement(PRODUCT, "In", gpu.product),), (unshared, able), SPOT_LABELS)]
    unnamed = Requirement(PRODUCT, "DoesNotExist")
    if gpu.gke:
        whole = (unnamed, Requirement(GKE_PARTITION, "DoesNotExist"), Requirement(GKE_SHARING, "DoesNotExist"))
        terms.append(Term((Requirement(GKE, "In", gpu.gke),), whole, SPOT_GKE))
    shared = {other.name for other in GPU_TYPES.values() if set(other.karpenter) & set(gpu.karpenter)} - {gpu.name}
    for name_key, memory_key in AWS.items():
        if gpu.karpenter:
            memory = (Requirement(memory_key, "In", (str(gpu.memory_gib * 1024),)),) if shared else ()
            terms.append(Term((Requirement(name_key, "In", gpu.karpenter), *memory), (unnamed,), SPOT_AWS))
    if gpu.azure:
        terms.append(Term((Requirement(AZURE, "In", gpu.azure),), (unnamed,), SPOT_AZURE))
    return tuple(terms)


def is_type(labels: Mapping[str, str], gpu_type: GpuTypeName, precision: Precision = Precision.BF16) -> bool:
    return any(term.holds(labels) for term in type_terms(gpu_type, precision))


def is_spot(labels: Mapping[str, str], gpu_type: GpuTypeName) -> bool:
    return any(term.holds(labels) and term.is_spot(labels) for term in type_terms(gpu_type))


def node_affinity(gpu_type: GpuTypeName, capacity_type: CapacityType, precision: Precision) -> dict[str, Any]:
    """Required node affinity: any label of the type, and spot nodes only for spot groups (they are priced apart)."""
    found = []
    for term in type_terms(gpu_type, precision):
        same = [one.to_json() for one in (*term.names, *term.whole)]
        if capacity_type is CapacityType.ON_DEMAND:
            found.append([*same, *(Requirement(key, "NotIn", (value,)).to_json() for key, value in term.spot.items())])
        else:
            found += [[*same, Requirement(key, "In", (value,)).to_json()] for key, value in term.spot.items()]
    terms = [{"matchExpressions": expressions} for expressions in found]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def tolerations(capacity_type: CapacityType) -> list[dict[str, str]]:
    found = [{"key": keys.GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"}]
    if capacity_type is CapacityType.SPOT:
        found += [
            {"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"} for key, value in SPOT_TAINTS
        ]
    return found


def tolerates(toleration: Mapping[str, Any], taint: tuple[str, str, str]) -> bool:
    """As the scheduler reads them: no key tolerates every key, no effect every effect; Equal is the default."""
    key, value, effect = taint
    if toleration.get("effect") and toleration["effect"] != effect:
        return False
    exists = toleration.get("operator") == "Exists"
    if not toleration.get("key"):
        return exists
    return toleration["key"] == key and (exists or toleration.get("value", "") == value)


def untolerated(node: NodeView, ask: Ask) -> list[str]:
    """Taints that keep the pod away."""
    ours = [*tolerations(ask.capacity_type), *(one.to_json_dict() for one in ask.tolerations)]
    return [
        f"{key}={value}:{effect}"
        for key, value, effect in node.taints
        if effect in ("NoSchedule", "NoExecute")
        and not key.startswith(LIFECYCLE_TAINTS)
        and not any(tolerates(one, (key, value, effect)) for one in ours)
    ]


def why_not(node: NodeView, ask: Ask) -> str | None:
    """Why no engine can come to this node, "" when one can; None when the node is of another type and says nothing."""
    terms = [term for term in type_terms(ask.gpu_type, ask.precision) if term.holds(node.labels)]
    if not terms:
        return near_miss(node, ask)
    if node.allocatable_gpus <= 0:
        if dra_gpus(node, ask.gpu_type):
            return "offered only through DRA, for which Motley does not ask, so not counted"
        return "labelled but without an allocatable GPU, so not counted"
    if any(term.is_spot(node.labels) for term in terms) != (ask.capacity_type is CapacityType.SPOT):
        return (
            "on demand, and the group is Spot"
            if ask.capacity_type is CapacityType.SPOT
            else "spot, and the group is OnDemand"
        )
    missing = [key for key, value in ask.node_selector.items() if node.labels.get(key) != value]
    if missing:
        return (
            f"outside template.nodeSelector {', '.join(f'{key}={ask.node_selector[key]}' for key in sorted(missing))}"
        )
    if taints := untolerated(node, ask):
        return f"tainted {', '.join(taints)} and not tolerated"
    return "" if node.ready else "not ready, or cordoned"


def near_miss(node: NodeView, ask: Ask) -> str | None:
    """A node that has the type's GPUs in a shape that is not counted."""
    gpu, product = GPU_TYPES[ask.gpu_type], node.labels.get(PRODUCT, "")
    if any(product.startswith((f"{name}-MIG-", f"{name}-SHARED")) for name in gpu.product):
        return f"partitioned or shared ({product}), so not counted"
    if dra_gpus(node, ask.gpu_type):
        return "offered only through DRA, for which Motley does not ask, so not counted"
    if not any(all(one.holds(node.labels) for one in term.names) for term in type_terms(ask.gpu_type)):
        return None
    if node.labels.get(COMPUTE_MAJOR) in too_old(ask.precision):
        capability = f"{node.labels[COMPUTE_MAJOR]}.{node.labels.get(COMPUTE_MINOR, '?')}"
        return f"of compute capability {capability}, which cannot run {ask.precision.value}"
    return "partitioned or shared, so not counted" if not product or node.labels.get(SHARING) else None


def dra_gpus(node: NodeView, gpu_type: GpuTypeName) -> int:
    """Whole GPUs of the type that the node's ResourceSlices offer. They write a product's name with blanks."""
    names = GPU_TYPES[gpu_type].product
    return sum(count for product, count in node.dra_gpus if "-".join(product.split()) in names)


def suits(node: NodeView, ask: Ask) -> bool:
    """Whether an engine may come to this node; how many GPUs are free there is another matter."""
    return why_not(node, ask) in ("", "not ready, or cordoned")


@dataclass(frozen=True)
class Availability:
    """What there is for an ask."""

    ask: Ask
    nodes: tuple[str, ...]  # of the type, in whatever shape
    free_by_node: tuple[tuple[str, int], ...]  # of those that can be had
    left_out: Mapping[str, tuple[str, ...]]  # why -> nodes of the type that are not counted
    unknown: tuple[str, ...]  # nodes on which others may hold any number of GPUs
    labels_seen: tuple[str, ...]  # what names GPUs, on all nodes

    def engines(self, gpus_per_engine: int) -> int:
        """Engines that fit; an engine's GPUs lie on one node."""
        return sum(free // gpus_per_engine for _, free in self.free_by_node)

    def describe(self) -> str:
        name = self.ask.gpu_type.value
        if not self.nodes:
            terms = " or ".join(" and ".join(map(str, term.names)) for term in type_terms(self.ask.gpu_type))
            labels = ", ".join(self.labels_seen[:8]) or "none"
            return f"no node is labelled {name} ({terms}); labels of GPUs seen: {labels}"
        counted = ", ".join(f"{node} ({free} free)" for node, free in self.free_by_node[:SHOWN])
        if len(self.free_by_node) > SHOWN:
            counted += f" and {len(self.free_by_node) - SHOWN} more"
        text = f"{len(self.free_by_node)} node(s) of {name}" + (f": {counted}" if counted else "")
        for why, names in sorted(self.left_out.items()):
            text += f"; {why}: {', '.join(names[:SHOWN])}"
            text += f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        if self.unknown:
            text += "; what pods of other namespaces hold is not known, so no GPU is counted as free"
        return text


def labels_seen(nodes: Iterable[NodeView]) -> tuple[str, ...]:
    """Values that name GPUs, commonest first."""
    counts = Counter(f"{key}={node.labels[key]}" for node in nodes for key in NAME_LABELS if node.labels.get(key))
    return tuple(
        f"{label} ({count} node(s))" for label, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    )


def availability(nodes: Sequence[NodeView], ask: Ask) -> Availability:
    found = [
        (node, why) for node in sorted(nodes, key=lambda node: node.name) if (why := why_not(node, ask)) is not None
    ]
    left_out: dict[str, list[str]] = {}
    for node, why in found:
        if why:
            left_out.setdefault(why, []).append(node.name)
    return Availability(
        ask=ask,
        nodes=tuple(node.name for node, _ in found),
        free_by_node=tuple((node.name, node.free_gpus) for node, why in found if not why),
        left_out={why: tuple(names) for why, names in left_out.items()},
        unknown=tuple(node.name for node, why in found if not why and node.held_gpus is None),
        labels_seen=labels_seen(nodes),
    )
