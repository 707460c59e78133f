"""RLRun and SamplerGroup, group motley.dev, version v1alpha1. The CRDs under crds/ are generated from these models."""

from motley_api.resources.gpus import (
    GPU_TYPES,
    MIN_COMPUTE_CAPABILITY,
    CapacityType,
    GpuType,
    GpuTypeName,
    KvCachePrecision,
    Precision,
)
from motley_api.resources.rlrun import RLRun, RLRunSpec, RLRunStatus
from motley_api.resources.samplergroup import SamplerGroup, SamplerGroupSpec, SamplerGroupStatus, SamplerGroupTemplate

__all__ = [
    "GPU_TYPES",
    "MIN_COMPUTE_CAPABILITY",
    "CapacityType",
    "GpuType",
    "GpuTypeName",
    "KvCachePrecision",
    "Precision",
    "RLRun",
    "RLRunSpec",
    "RLRunStatus",
    "SamplerGroup",
    "SamplerGroupSpec",
    "SamplerGroupStatus",
    "SamplerGroupTemplate",
]
