"""What virtual nodes look like, and how a fleet is declared."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from motley_api.resources.gpus import GPU_TYPES, CapacityType, GpuTypeName
from motley_local.agent import AgentConfig
from motley_local.nodes import (
    STUDY_GPU_TYPES,
    NodeSpec,
    default_nodes,
    heartbeat_interval_s,
    load_nodes,
    monitor_grace_s,
    node_labels,
    node_resources,
    node_status,
)


def test_the_default_fleet_has_every_gpu_type_of_the_study_and_a_node_without() -> None:
    fleet = default_nodes()
    assert {node.gpu_type for node in fleet} == {None, *STUDY_GPU_TYPES}
    # Two nodes of eight GPUs of each of six types.
    assert sum(node.gpus for node in fleet if node.gpu_type) == 96


@pytest.mark.parametrize("gpu_type", list(GpuTypeName))
def test_labels_name_the_gpu_as_its_feature_discovery_does(gpu_type: GpuTypeName) -> None:
    gpu = GPU_TYPES[gpu_type]
    labels = node_labels(NodeSpec("n", gpu_type, gpus=4))
    assert labels["nvidia.com/gpu.product"] in gpu.product
    assert (
        int(labels["nvidia.com/gpu.compute.major"]),
        int(labels["nvidia.com/gpu.compute.minor"]),
    ) == gpu.compute_capability
    assert labels["nvidia.com/gpu.count"] == "4"
    # nvidia-smi shows a little more or less than the nominal size, never another size.
    assert int(labels["nvidia.com/gpu.memory"]) / 1024 == pytest.approx(gpu.memory_gib, rel=0.07)


def test_a_cpu_node_carries_no_gpu_label_and_no_gpu() -> None:
    node = NodeSpec("cpu")
    assert not [label for label in node_labels(node) if label.startswith("nvidia.com/")]
    assert "nvidia.com/gpu" not in node_resources(node)


def test_a_healthy_status_is_ready_and_says_where_logs_are_served() -> None:
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    status = node_status(NodeSpec("n", GpuTypeName.B200), kubelet_port=1234, now=now, version="v1.36.3")
    (ready,) = [one for one in status["conditions"] if one["type"] == "Ready"]
    assert (ready["status"], ready["lastHeartbeatTime"]) == ("True", "2026-01-02T03:04:05Z")
    assert status["daemonEndpoints"]["kubeletEndpoint"]["Port"] == 1234
    assert status["allocatable"]["nvidia.com/gpu"] == "8"


def test_a_fleet_file_makes_numbered_nodes(tmp_path: Path) -> None:
    path = tmp_path / "nodes.yaml"
    path.write_text(
        "nodes:\n"
        "- {name: cpu, cpu: 8}\n"
        "- {name: spot, gpuType: RTX-PRO-6000, gpus: 2, count: 2, capacityType: Spot, labels: {pool: cheap}}\n"
    )
    fleet = load_nodes(path)
    assert [node.name for node in fleet] == ["cpu", "spot-0", "spot-1"]
    assert fleet[0].cpu == "8"
    assert fleet[2].capacity_type is CapacityType.SPOT
    labels = node_labels(fleet[2])
    assert (labels["karpenter.sh/capacity-type"], labels["pool"]) == ("spot", "cheap")


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("nodes: [{name: a, gpuType: A10}]", r"nodes\[0\].gpuType must be one of A100-40GB, .*, got 'A10'"),
        ("nodes: [{name: a, gpu: 3}]", r"nodes\[0\]: unknown field 'gpu'; allowed: name, gpus"),
        ("nodes: [{name: a}, {name: a}]", r"node names must differ, got \['a'\] twice"),
        ("fleet: []", "must be a mapping with a list `nodes`"),
    ],
)
def test_a_wrong_fleet_file_is_refused_with_the_field_named(tmp_path: Path, text: str, want: str) -> None:
    path = tmp_path / "nodes.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=want):
        load_nodes(path)


def test_heartbeats_stay_few_in_a_large_fleet_and_the_grace_follows() -> None:
    # 13 nodes: every 4 s. 1,000 nodes: 25 leases a second, so every 40 s.
    assert (heartbeat_interval_s(13), monitor_grace_s(13)) == (4.0, 40)
    assert (heartbeat_interval_s(1000), monitor_grace_s(1000)) == (40.0, 400)


def test_the_agents_configuration_survives_its_way_through_a_file() -> None:
    nodes = (NodeSpec("a", GpuTypeName.H200, labels={"x": "y"}), NodeSpec("b", capacity_type=CapacityType.SPOT))
    config = AgentConfig("k", "s", "c", "p", 64, "/repo", "v1.36.3", nodes)
    again = AgentConfig.from_json(config.to_json())
    assert again.nodes[0].gpu_type is GpuTypeName.H200
    assert again.nodes[1].capacity_type is CapacityType.SPOT
    assert again.to_json() == config.to_json()
