"""Nodes by whole label values, and what keeps an engine from each; the planner's word and the scheduler's must agree."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from motley_api.resources import GPU_TYPES, CapacityType, GpuTypeName, Precision
from motley_api.resources.base import Toleration
from motley_operator.planner import placement
from motley_operator.planner.model import NodeView
from motley_operator.planner.placement import Ask, availability
from planner import study

ON_DEMAND, SPOT = CapacityType.ON_DEMAND, CapacityType.SPOT
A100_80, A100_40, H100, B200 = GpuTypeName.A100_80GB, GpuTypeName.A100_40GB, GpuTypeName.H100, GpuTypeName.B200
PRODUCT = "nvidia.com/gpu.product"
AWS, AWS_MEMORY = "karpenter.k8s.aws/instance-gpu-name", "karpenter.k8s.aws/instance-gpu-memory"
GKE, AZURE = "cloud.google.com/gke-accelerator", "node.kubernetes.io/instance-type"

# GPU: every value of the clouds' labels that names it
PRODUCTS = {
    "A100-40GB": ["NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-PCIE-40GB"],
    "A100-80GB": ["NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-80GB-PCIe"],
    "H100": ["NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-PCIe"],
    "H200": ["NVIDIA-H200", "NVIDIA-H200-NVL"],
    "B200": ["NVIDIA-B200"],
    "B300": ["NVIDIA-B300-SXM6-AC", "NVIDIA-B300"],
    "RTX-PRO-6000": [
        "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition",
        "NVIDIA-RTX-PRO-6000-Blackwell-Max-Q-Workstation-Edition",
    ],
}
GKE_NAMES = {
    "A100-40GB": ["nvidia-tesla-a100"],
    "A100-80GB": ["nvidia-a100-80gb"],
    "H100": ["nvidia-h100-80gb", "nvidia-h100-mega-80gb"],
    "H200": ["nvidia-h200-141gb"],
    "B200": ["nvidia-b200"],
    "RTX-PRO-6000": ["nvidia-rtx-pro-6000"],
}
AWS_NAMES = {
    "H100": ["h100"],
    "H200": ["h200"],
    "B200": ["b200"],
    "B300": ["b300"],
    "RTX-PRO-6000": ["rtx-pro-server-6000"],
}
EVERY_LABEL = [
    *((PRODUCT, value, gpu) for gpu, values in PRODUCTS.items() for value in values),
    *((GKE, value, gpu) for gpu, values in GKE_NAMES.items() for value in values),
    *((key, value, gpu) for key in placement.AWS for gpu, values in AWS_NAMES.items() for value in values),
]


@pytest.mark.parametrize(("key", "value", "gpu"), EVERY_LABEL)
def test_every_label_value_names_its_type_and_no_other(key: str, value: str, gpu: str) -> None:
    found = [name.value for name in GPU_TYPES if placement.is_type({key: value}, name)]
    assert found == [gpu]


@pytest.mark.parametrize(
    ("labels", "gpu_type", "want"),
    [
        # Case 28: 80 GB is not 40 GB, A100 is not A10.
        ({PRODUCT: "NVIDIA-A100-SXM4-40GB"}, A100_80, False),
        ({PRODUCT: "NVIDIA-A10"}, A100_80, False),
        ({PRODUCT: "NVIDIA-A10"}, A100_40, False),
        # Parts of a GPU, and shared ones, are other values.
        ({PRODUCT: "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb"}, A100_80, False),
        ({PRODUCT: "NVIDIA-H100-80GB-HBM3-SHARED"}, H100, False),
        ({PRODUCT: "NVIDIA-H100-PCIe", "nvidia.com/gpu.sharing-strategy": "time-slicing"}, H100, False),
        ({PRODUCT: "NVIDIA-H100-PCIe", "nvidia.com/gpu.sharing-strategy": "none"}, H100, True),
        ({GKE: "nvidia-h100-80gb", "cloud.google.com/gke-gpu-partition-size": "1g.10gb"}, H100, False),
        ({GKE: "nvidia-h100-80gb", "cloud.google.com/gke-gpu-sharing-strategy": "time-sharing"}, H100, False),
        # The cloud names the machine, GFD the GPU as it is cut: GFD rules.
        ({AWS: "h100", PRODUCT: "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb"}, H100, False),
        ({AWS: "h100", PRODUCT: "NVIDIA-H100-80GB-HBM3"}, H100, True),
        # Case 29: CPU nodes of some clouds carry the labels, empty.
        ({PRODUCT: ""}, H100, False),
        ({PRODUCT: "", GKE: "", AWS: ""}, H100, False),
        # AWS calls both A100 "a100": its memory tells them apart, and without it neither is sure.
        ({AWS: "a100", AWS_MEMORY: "81920"}, A100_80, True),
        ({AWS: "a100", AWS_MEMORY: "40960"}, A100_80, False),
        ({AWS: "a100", AWS_MEMORY: "40960"}, A100_40, True),
        ({AWS: "a100"}, A100_80, False),
        ({AZURE: "Standard_ND96amsr_A100_v4"}, A100_80, True),
        ({AZURE: "Standard_ND96asr_v4"}, A100_40, True),
        ({AZURE: "Standard_ND96isr_H100_v5"}, H100, True),
        ({}, H100, False),
    ],
)
def test_a_type_is_found_by_whole_labels_only(labels: dict[str, str], gpu_type: GpuTypeName, want: bool) -> None:
    assert placement.is_type(labels, gpu_type) is want


@pytest.mark.parametrize(
    ("major", "minor", "precision", "want"),
    [
        ("9", "0", Precision.FP8, True),
        ("8", "0", Precision.FP8, False),
        ("8", "0", Precision.BF16, True),
        ("10", "0", Precision.NVFP4, True),
        ("12", "0", Precision.NVFP4, True),
        ("9", "0", Precision.NVFP4, False),
    ],
)
def test_compute_capability_gates_the_precision(major: str, minor: str, precision: Precision, want: bool) -> None:
    """Whatever the name says: a driver that names a GPU wrongly does not make it able."""
    labels = {PRODUCT: "NVIDIA-B200", placement.COMPUTE_MAJOR: major, placement.COMPUTE_MINOR: minor}
    assert placement.is_type(labels, B200, precision) is want
    if not want:
        text = availability([NodeView("n", labels, 8)], Ask(B200, precision=precision)).describe()
        assert f"of compute capability {major}.{minor}, which cannot run {precision.value}: n" in text


LABELS: list[dict[str, str]] = [
    {PRODUCT: "NVIDIA-H100-PCIe"},
    {PRODUCT: "NVIDIA-H200"},
    {PRODUCT: ""},
    {GKE: "nvidia-h100-80gb"},
    {AWS: "h100"},
    {AZURE: "Standard_ND96isr_H100_v5"},
    {AWS: "h100", PRODUCT: "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb"},
]
MORE: list[dict[str, str]] = [
    {},
    *({key: value} for key, value in placement.SPOT_LABELS.items()),
    {"karpenter.sh/capacity-type": "on-demand"},
    {placement.COMPUTE_MAJOR: "8"},
    {placement.COMPUTE_MAJOR: "9"},
    {placement.SHARING: "mps"},
    {placement.GKE_PARTITION: "1g.10gb"},
]


@pytest.mark.parametrize("capacity_type", [ON_DEMAND, SPOT])
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP8])
def test_affinity_says_the_same_as_the_planner(capacity_type: CapacityType, precision: Precision) -> None:
    """The scheduler reads the affinity, the planner reads labels: both must agree on every node."""
    affinity = placement.node_affinity(H100, capacity_type, precision)["nodeAffinity"]
    terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    asked = Ask(H100, capacity_type, precision)
    agreed = 0
    for base, more in itertools.product(LABELS, MORE):
        labels = base | more
        scheduler = any(all(_matches(one, labels) for one in term["matchExpressions"]) for term in terms)
        assert scheduler == placement.suits(NodeView("n", labels, 8), asked), labels
        agreed += scheduler
    assert agreed >= 4


def _matches(expression: dict[str, Any], labels: dict[str, str]) -> bool:
    """As kube-scheduler reads them; NotIn holds for an absent label."""
    key = expression["key"]
    match expression["operator"]:
        case "DoesNotExist":
            return key not in labels
        case "In":
            return labels.get(key) in expression["values"]
        case "NotIn":
            return labels.get(key) not in expression["values"]
    raise AssertionError(expression)


def node(name: str, product: str, gpus: int, held: int | None = 0, **more: Any) -> NodeView:
    return NodeView(name, {PRODUCT: product, **more.pop("labels", {})}, gpus, held, **more)


def test_engines_fit_into_what_others_leave_on_one_node() -> None:
    nodes = [
        node("a", "NVIDIA-H100-PCIe", 8, held=5),
        node("b", "NVIDIA-H100-PCIe", 8, held=7),
        node("c", "NVIDIA-H200", 8),
    ]
    found = availability(nodes, Ask(H100))
    assert found.free_by_node == (("a", 3), ("b", 1))
    assert found.engines(1) == 4
    assert found.engines(2) == 1  # the GPUs of one engine lie on one node


def test_what_others_hold_is_not_known_so_nothing_is_free() -> None:
    """Case 33: unknown is neither zero held nor everything allowed."""
    found = availability([node("a", "NVIDIA-H100-PCIe", 8, held=None)], Ask(H100))
    assert (found.engines(1), found.unknown) == (0, ("a",))
    assert "what pods of other namespaces hold is not known" in found.describe()


def test_a_labelled_node_without_allocatable_gpus_is_not_counted_and_is_named() -> None:
    """Case 29."""
    found = availability([node("empty", "NVIDIA-H100-PCIe", 0)], Ask(H100))
    assert found.engines(1) == 0
    assert "labelled but without an allocatable GPU, so not counted: empty" in found.describe()


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"ready": False}, "not ready, or cordoned: n"),
        ({"labels": {"karpenter.sh/capacity-type": "spot"}}, "spot, and the group is OnDemand: n"),
        ({"labels": {"zone": "b"}}, "outside template.nodeSelector zone=a: n"),
        (
            {"labels": {"zone": "a"}, "taints": (("team", "x", "NoSchedule"),)},
            "tainted team=x:NoSchedule and not tolerated: n",
        ),
        ({"labels": {"zone": "a"}, "taints": (("team", "x", "PreferNoSchedule"),)}, ""),
        ({"labels": {"zone": "a"}, "taints": (("nvidia.com/gpu", "present", "NoSchedule"),)}, ""),
        ({"labels": {"zone": "a"}, "taints": (("mine", "", "NoExecute"),)}, ""),
    ],
)
def test_what_keeps_an_engine_from_a_node_of_its_type_is_said(more: dict[str, Any], why: str) -> None:
    zone = {} if not more.get("ready", True) else {"zone": "a"}
    asked = Ask(H100, node_selector=zone, tolerations=(Toleration(key="mine", operator="Exists"),))
    found = availability([node("n", "NVIDIA-H100-PCIe", 8, **more)], asked)
    assert found.engines(1) == (0 if why else 8)
    assert why in found.describe()


def test_spot_groups_go_to_spot_nodes_and_tolerate_the_clouds_taints() -> None:
    taint = ("cloud.google.com/gke-spot", "true", "NoSchedule")
    spot = NodeView("s", {GKE: "nvidia-h100-80gb", "cloud.google.com/gke-spot": "true"}, 8, taints=(taint,))
    assert availability([spot], Ask(H100, SPOT)).engines(1) == 8
    assert availability([spot], Ask(H100)).engines(1) == 0
    assert (
        "on demand, and the group is Spot"
        in availability([node("d", "NVIDIA-H100-PCIe", 8)], Ask(H100, SPOT)).describe()
    )


@pytest.mark.parametrize(
    ("toleration", "want"),
    [
        ({"operator": "Exists"}, True),
        ({"key": "k", "operator": "Exists"}, True),
        ({"key": "k", "value": "v"}, True),
        ({"key": "k", "value": "w"}, False),
        ({"key": "k", "value": "v", "effect": "NoExecute"}, False),
        ({"key": "l", "operator": "Exists"}, False),
        ({"value": "v"}, False),
    ],
)
def test_tolerations_are_read_as_the_scheduler_reads_them(toleration: dict[str, str], want: bool) -> None:
    assert placement.tolerates(toleration, ("k", "v", "NoSchedule")) is want


def test_gpus_that_are_offered_through_dra_alone_are_named_and_not_counted() -> None:
    labelled = node("a", "NVIDIA-H100-80GB-HBM3", 0, dra_gpus=(("NVIDIA H100 80GB HBM3", 8),))
    bare = NodeView("b", {}, 0, dra_gpus=(("NVIDIA H100 80GB HBM3", 8),))
    other = NodeView("c", {}, 0, dra_gpus=(("NVIDIA H200", 8),))
    found = availability([labelled, bare, other], Ask(H100))
    assert (found.engines(1), found.nodes) == (0, ("a", "b"))
    assert "offered only through DRA, for which Motley does not ask, so not counted: a, b" in found.describe()


def test_a_missing_type_names_the_labels_that_were_looked_for_and_those_that_are_there() -> None:
    nodes = [
        node("a", "NVIDIA-H200", 8),
        node("b", "NVIDIA-H200", 8),
        NodeView("c", {AWS: "h100"}, 8),
        NodeView("d", {}, 0),
    ]
    text = availability(nodes, Ask(B200)).describe()
    assert text.startswith("no node is labelled B200")
    assert "nvidia.com/gpu.product in [NVIDIA-B200]" in text
    assert text.endswith(
        "labels of GPUs seen: nvidia.com/gpu.product=NVIDIA-H200 (2 node(s)), karpenter.k8s.aws/instance-gpu-name=h100 (1 node(s))"
    )
    assert availability([], Ask(B200)).describe().endswith("labels of GPUs seen: none")


def test_many_nodes_make_a_short_message() -> None:
    nodes = [node(f"n{number:03d}", "NVIDIA-H100-PCIe", 8) for number in range(100)]
    nodes += [node(f"x{number:03d}", "NVIDIA-H100-PCIe", 0) for number in range(100)]
    text = availability(nodes, Ask(H100)).describe()
    assert "n004 (8 free) and 95 more" in text
    assert "x004 and 95 more" in text
    assert len(text) < 500


def test_a_node_that_flips_its_labels_changes_what_is_there_and_no_more() -> None:
    now = node("a", "NVIDIA-H100-PCIe", 8)
    for labels in ({}, {PRODUCT: ""}, {PRODUCT: "NVIDIA-H100-PCIe-SHARED"}):
        assert availability([replace(now, labels=labels)], Ask(H100)).engines(1) == 0
    assert availability([now], Ask(H100)).engines(1) == 8


def test_an_ask_is_read_from_the_groups_template() -> None:
    template = {"nodeSelector": {"zone": "a"}, "tolerations": [{"key": "t", "operator": "Exists"}]}
    asked = placement.ask_of(study.group_spec("h100-fp8", capacityType="Spot", template=template))
    assert asked == Ask(H100, SPOT, Precision.FP8, {"zone": "a"}, (Toleration(key="t", operator="Exists"),))
