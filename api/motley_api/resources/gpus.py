"""The accelerators that Motley knows, and which precision each can run.

Labels: facts of GPU Feature Discovery, GKE, Karpenter/EKS. Compute capability gates precision (FP8 needs SM 8.9, NVFP4 SM 10.0).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class GpuTypeName(StrEnum):
    A100_40GB = "A100-40GB"
    A100_80GB = "A100-80GB"
    H100 = "H100"
    H200 = "H200"
    B200 = "B200"
    B300 = "B300"
    RTX_PRO_6000 = "RTX-PRO-6000"


class Precision(StrEnum):
    BF16 = "BF16"
    FP8 = "FP8"
    NVFP4 = "NVFP4"


class KvCachePrecision(StrEnum):
    BF16 = "BF16"
    FP8 = "FP8"


class CapacityType(StrEnum):
    ON_DEMAND = "OnDemand"
    SPOT = "Spot"


MIN_COMPUTE_CAPABILITY: dict[Precision, tuple[int, int]] = {
    Precision.BF16: (8, 0),
    Precision.FP8: (8, 9),
    Precision.NVFP4: (10, 0),
}


@dataclass(frozen=True)
class GpuType:
    """One accelerator: whole label values that name it under each cloud's label key, and its compute capability."""

    name: GpuTypeName
    compute_capability: tuple[int, int]
    memory_gib: int
    product: tuple[str, ...]  # nvidia.com/gpu.product
    gke: tuple[str, ...]  # cloud.google.com/gke-accelerator
    karpenter: tuple[str, ...]  # karpenter.k8s.aws/instance-gpu-name, eks.amazonaws.com/instance-gpu-name
    azure: tuple[str, ...] = ()  # node.kubernetes.io/instance-type

    def runs(self, precision: Precision) -> bool:
        return self.compute_capability >= MIN_COMPUTE_CAPABILITY[precision]


GPU_TYPES: dict[GpuTypeName, GpuType] = {
    gpu.name: gpu
    for gpu in (
        GpuType(
            GpuTypeName.A100_40GB,
            (8, 0),
            40,
            ("NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-PCIE-40GB"),
            ("nvidia-tesla-a100",),
            ("a100",),
            ("Standard_ND96asr_v4",),
        ),
        GpuType(
            GpuTypeName.A100_80GB,
            (8, 0),
            80,
            ("NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-80GB-PCIe"),
            ("nvidia-a100-80gb",),
            ("a100",),
            (
                "Standard_ND96amsr_A100_v4",
                "Standard_NC24ads_A100_v4",
                "Standard_NC48ads_A100_v4",
                "Standard_NC96ads_A100_v4",
            ),
        ),
        GpuType(
            GpuTypeName.H100,
            (9, 0),
            80,
            ("NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-PCIe"),
            ("nvidia-h100-80gb", "nvidia-h100-mega-80gb"),
            ("h100",),
            ("Standard_ND96isr_H100_v5", "Standard_ND96is_H100_v5"),
        ),
        GpuType(
            GpuTypeName.H200,
            (9, 0),
            141,
            ("NVIDIA-H200", "NVIDIA-H200-NVL"),
            ("nvidia-h200-141gb",),
            ("h200",),
            ("Standard_ND96isr_H200_v5",),
        ),
        GpuType(GpuTypeName.B200, (10, 0), 180, ("NVIDIA-B200",), ("nvidia-b200",), ("b200",)),
        GpuType(GpuTypeName.B300, (10, 3), 288, ("NVIDIA-B300-SXM6-AC", "NVIDIA-B300"), (), ("b300",)),
        GpuType(
            GpuTypeName.RTX_PRO_6000,
            (12, 0),
            96,
            (
                "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition",
                "NVIDIA-RTX-PRO-6000-Blackwell-Workstation-Edition",
                "NVIDIA-RTX-PRO-6000-Blackwell-Max-Q-Workstation-Edition",
            ),
            ("nvidia-rtx-pro-6000",),
            ("rtx-pro-server-6000",),
        ),
    )
}
