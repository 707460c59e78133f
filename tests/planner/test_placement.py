from __future__ import annotations

import pytest
from motley_api.resources import CapacityType, GpuTypeName
from motley_operator.planner import placement
from motley_operator.planner.model import NodeView

ON_DEMAND, SPOT = CapacityType.ON_DEMAND, CapacityType.SPOT
A100_80, A100_40, H100 = GpuTypeName.A100_80GB, GpuTypeName.A100_40GB, GpuTypeName.H100


@pytest.mark.parametrize(
    ("labels", "gpu_type", "want"),
    [
        ({"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}, A100_80, True),
        ({"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB"}, A100_80, False),
        ({"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB"}, A100_40, True),
        ({"nvidia.com/gpu.product": "NVIDIA-A10"}, A100_80, False),
        ({"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb"}, A100_80, False),
        ({"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-SHARED"}, H100, False),
        ({"nvidia.com/gpu.product": ""}, H100, False),
        ({"cloud.google.com/gke-accelerator": "nvidia-h100-mega-80gb"}, H100, True),
        ({"karpenter.k8s.aws/instance-gpu-name": "h100"}, H100, True),
        ({"eks.amazonaws.com/instance-gpu-name": "h200"}, H100, False),
        # AWS calls both A100 "a100": its memory tells them apart, and without it neither is sure.
        (
            {"karpenter.k8s.aws/instance-gpu-name": "a100", "karpenter.k8s.aws/instance-gpu-memory": "81920"},
            A100_80,
            True,
        ),
        (
            {"karpenter.k8s.aws/instance-gpu-name": "a100", "karpenter.k8s.aws/instance-gpu-memory": "40960"},
            A100_80,
            False,
        ),
        ({"karpenter.k8s.aws/instance-gpu-name": "a100"}, A100_80, False),
        ({}, H100, False),
    ],
)
def test_a_type_is_found_by_whole_labels_only(labels: dict[str, str], gpu_type: GpuTypeName, want: bool) -> None:
    assert placement.is_type(labels, gpu_type) is want


def test_affinity_says_the_same_as_the_planner() -> None:
    """The scheduler reads the affinity, the planner reads labels: both must agree on every node."""
    samples = [
        {"nvidia.com/gpu.product": "NVIDIA-H100-PCIe"},
        {"nvidia.com/gpu.product": "NVIDIA-H100-PCIe", "karpenter.sh/capacity-type": "spot"},
        {"nvidia.com/gpu.product": "NVIDIA-H100-PCIe", "karpenter.sh/capacity-type": "on-demand"},
        {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb", "cloud.google.com/gke-spot": "true"},
        {"nvidia.com/gpu.product": "NVIDIA-H200"},
        {"nvidia.com/gpu.product": ""},
    ]
    for capacity_type in (ON_DEMAND, SPOT):
        affinity = placement.node_affinity(H100, capacity_type)["nodeAffinity"]
        terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        for labels in samples:
            scheduler = any(all(_matches(one, labels) for one in term["matchExpressions"]) for term in terms)
            assert scheduler == placement.suits(NodeView("n", labels, 8), H100, capacity_type), (capacity_type, labels)


def _matches(expression: dict[str, object], labels: dict[str, str]) -> bool:
    """As kube-scheduler reads In and NotIn; NotIn holds for an absent label."""
    value, values = labels.get(str(expression["key"])), expression["values"]
    assert isinstance(values, list)
    return (value in values) if expression["operator"] == "In" else (value not in values)


def node(name: str, product: str, gpus: int, held: int = 0, *, ready: bool = True) -> NodeView:
    return NodeView(name, {"nvidia.com/gpu.product": product}, gpus, held, ready)


def test_engines_fit_into_what_others_leave_on_one_node() -> None:
    nodes = [
        node("a", "NVIDIA-H100-PCIe", 8, held=5),
        node("b", "NVIDIA-H100-PCIe", 8, held=7),
        node("c", "NVIDIA-H200", 8),
    ]
    found = placement.availability(nodes, H100, ON_DEMAND)
    assert found.free_by_node == (("a", 3), ("b", 1))
    assert found.engines(1) == 4
    assert found.engines(2) == 1  # the GPUs of one engine lie on one node


def test_a_labelled_node_without_allocatable_gpus_is_not_counted_and_is_named() -> None:
    found = placement.availability([node("empty", "NVIDIA-H100-PCIe", 0)], H100, ON_DEMAND)
    assert found.engines(1) == 0
    assert "labelled but without an allocatable GPU, so not counted: empty" in found.describe(H100)


def test_a_node_that_is_not_ready_has_no_free_gpu() -> None:
    assert placement.availability([node("down", "NVIDIA-H100-PCIe", 8, ready=False)], H100, ON_DEMAND).engines(1) == 0


def test_a_missing_type_names_the_labels_that_were_looked_for() -> None:
    text = placement.availability([], GpuTypeName.B200, ON_DEMAND).describe(GpuTypeName.B200)
    assert text.startswith("no node is labelled B200")
    assert "nvidia.com/gpu.product in [NVIDIA-B200]" in text
