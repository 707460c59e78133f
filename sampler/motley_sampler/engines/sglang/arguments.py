"""SGLang's server arguments for a group. Pure.

Hardware traps that the table holds:
- FP8 weights need compute capability 8.9, NVFP4 10.x.
- trtllm_mha refuses an FP8 KV cache on compute capability 12.0 (RTX PRO 6000): FlashInfer there.
- A100's Triton attention cannot read an FP8 KV cache: FlashInfer there, too.
- FA3 is for Hopper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from motley_api.resources.gpus import GPU_TYPES, MIN_COMPUTE_CAPABILITY, GpuTypeName, KvCachePrecision, Precision

from motley_sampler.engines.protocol import SAMPLING_MASK_MAX_TOKENS


@dataclass(frozen=True)
class Launch:
    """What one server is started with."""

    model_path: Path
    host: str
    port: int
    version: int
    context_length: int
    max_running: int
    gpu_type: GpuTypeName
    precision: Precision
    kv_cache_precision: KvCachePrecision
    gpus: int = 1
    more: tuple[str, ...] = ()  # the group's own; the last of an option wins


class CannotRun(ValueError):  # noqa: N818 - reads as the sentence that it is
    """The hardware cannot do what the group asks for."""


ATTENTION: dict[GpuTypeName, str] = {
    GpuTypeName.A100_40GB: "flashinfer",
    GpuTypeName.A100_80GB: "flashinfer",
    GpuTypeName.H100: "fa3",
    GpuTypeName.H200: "fa3",
    GpuTypeName.B200: "trtllm_mha",
    GpuTypeName.B300: "trtllm_mha",
    GpuTypeName.RTX_PRO_6000: "flashinfer",
}
KV_DTYPE = {KvCachePrecision.BF16: "bf16", KvCachePrecision.FP8: "fp8_e4m3"}
QUANTIZATION = {Precision.FP8: "fp8", Precision.NVFP4: "modelopt_fp4"}
CPU_KV_TOKENS_PER_REQUEST = 2  # context lengths of KV cache for each running request


def on_cpu(more: Sequence[str]) -> bool:
    """Whether the group's own arguments ask for a CPU: --device cpu, or --device=cpu."""
    device = ""
    for index, arg in enumerate(more):
        if arg == "--device" and index + 1 < len(more):
            device = more[index + 1]
        elif arg.startswith("--device="):
            device = arg.removeprefix("--device=")
    return device == "cpu"


def render(launch: Launch) -> list[str]:
    """Arguments of `python -m sglang.launch_server`. Raises CannotRun, naming the field and what is allowed."""
    chosen = _cpu(launch) if on_cpu(launch.more) else _gpu(launch)
    return [*_common(launch), *chosen, *launch.more]


def _common(launch: Launch) -> list[str]:
    return [
        *("--model-path", str(launch.model_path)),
        *("--host", launch.host),
        *("--port", str(launch.port)),
        *("--weight-version", str(launch.version)),
        *("--context-length", str(launch.context_length)),
        *("--max-running-requests", str(launch.max_running)),
        *("--sampling-mask-max-tokens", str(SAMPLING_MASK_MAX_TOKENS)),
        "--skip-tokenizer-init",
        "--enable-metrics",
    ]


def _gpu(launch: Launch) -> list[str]:
    gpu = GPU_TYPES[launch.gpu_type]
    if not gpu.runs(launch.precision):
        need, have = MIN_COMPUTE_CAPABILITY[launch.precision], gpu.compute_capability
        raise CannotRun(
            f"precision {launch.precision.value} needs compute capability {need[0]}.{need[1]}, "
            f"{launch.gpu_type.value} has {have[0]}.{have[1]}"
        )
    args = [
        *("--tp-size", str(launch.gpus)),
        *("--attention-backend", ATTENTION[launch.gpu_type]),
        *("--kv-cache-dtype", KV_DTYPE[launch.kv_cache_precision]),
        *("--dtype", "bfloat16"),
    ]
    if launch.precision in QUANTIZATION:
        args += ["--quantization", QUANTIZATION[launch.precision]]
    return args


def _cpu(launch: Launch) -> list[str]:
    """For tests and laptops: float32 and torch-native attention, on a CPU without AMX. Only BF16 views have been tried."""
    if launch.precision is not Precision.BF16:
        raise CannotRun(f"precision must be BF16 with --device cpu, got {launch.precision.value}")
    if launch.gpus != 1:
        raise CannotRun(f"gpusPerEngine must be 1 with --device cpu, got {launch.gpus}")
    kv_tokens = launch.max_running * launch.context_length * CPU_KV_TOKENS_PER_REQUEST
    return [
        *("--attention-backend", "torch_native"),
        *("--sampling-backend", "pytorch"),
        *("--dtype", "float32"),
        *("--mem-fraction-static", "0.3"),
        *("--max-total-tokens", str(kv_tokens)),
        *("--grammar-backend", "none"),
        *("--random-seed", "1"),
        "--disable-overlap-schedule",
        "--disable-cuda-graph",
        "--skip-server-warmup",
    ]
