"""Arguments of a real SGLang server, by hardware; and that SGLang's own parser takes them."""

from __future__ import annotations

import json
import os
import subprocess
from itertools import product
from pathlib import Path

import pytest
from motley_api.resources.gpus import GPU_TYPES, GpuTypeName, KvCachePrecision, Precision
from motley_sampler.engines.sglang.arguments import ATTENTION, CannotRun, Launch, on_cpu, render
from motley_sampler.engines.sglang.engine import STAND_INS

ROOT = Path(__file__).parents[2]
SGLANG_PYTHON = Path(os.environ.get("MOTLEY_SGLANG_PYTHON", ROOT / ".venv-sglang/bin/python"))


def _launch(
    gpu: GpuTypeName = GpuTypeName.H100,
    precision: Precision = Precision.BF16,
    kv: KvCachePrecision = KvCachePrecision.FP8,
    gpus: int = 1,
    more: tuple[str, ...] = (),
) -> Launch:
    return Launch(
        model_path=Path("/views/v000007"),
        host="10.0.0.7",
        port=8201,
        version=7,
        context_length=262_144,
        max_running=36,
        gpu_type=gpu,
        precision=precision,
        kv_cache_precision=kv,
        gpus=gpus,
        more=more,
    )


def _options(args: list[str]) -> dict[str, str]:
    """Option -> value; the last wins, as it does for SGLang."""
    found: dict[str, str] = {}
    for index, arg in enumerate(args):
        if arg.startswith("--"):
            name, equals, value = arg.partition("=")
            follows = args[index + 1] if index + 1 < len(args) and not args[index + 1].startswith("--") else ""
            found[name] = value if equals else follows
    return found


# The study's fleet: (GPU, precision, GPUs per engine) -> (attention, quantization).
FLEET = [
    (GpuTypeName.H100, Precision.FP8, 1, "fa3", "fp8"),
    (GpuTypeName.H200, Precision.FP8, 1, "fa3", "fp8"),
    (GpuTypeName.B200, Precision.NVFP4, 1, "trtllm_mha", "modelopt_fp4"),
    (GpuTypeName.B300, Precision.NVFP4, 1, "trtllm_mha", "modelopt_fp4"),
    (GpuTypeName.A100_80GB, Precision.BF16, 2, "flashinfer", None),
    (GpuTypeName.RTX_PRO_6000, Precision.BF16, 2, "flashinfer", None),
    (GpuTypeName.H100, Precision.BF16, 2, "fa3", None),
    (GpuTypeName.H200, Precision.BF16, 1, "fa3", None),
]


@pytest.mark.parametrize(("gpu", "precision", "gpus", "want_attention", "want_quantization"), FLEET)
def test_the_studys_groups_get_their_kernels(
    gpu: GpuTypeName, precision: Precision, gpus: int, want_attention: str, want_quantization: str | None
) -> None:
    got = _options(render(_launch(gpu, precision, gpus=gpus)))
    assert got["--attention-backend"] == want_attention
    assert got.get("--quantization") == want_quantization
    assert (got["--kv-cache-dtype"], got["--tp-size"]) == ("fp8_e4m3", str(gpus))
    assert (got["--weight-version"], got["--model-path"], got["--host"]) == ("7", "/views/v000007", "10.0.0.7")


def test_every_gpu_type_has_a_backend_and_an_fp8_cache_never_meets_a_kernel_that_cannot_read_it() -> None:
    assert set(ATTENTION) == set(GPU_TYPES)
    for gpu, backend in ATTENTION.items():
        capability = GPU_TYPES[gpu].compute_capability
        assert not (backend == "trtllm_mha" and capability[0] != 10), gpu
        assert not (backend == "fa3" and capability[0] != 9), gpu
        assert backend != "triton", gpu


@pytest.mark.parametrize(
    ("gpu", "precision", "want"),
    [
        (GpuTypeName.A100_80GB, Precision.FP8, "precision FP8 needs compute capability 8.9, A100-80GB has 8.0"),
        (GpuTypeName.H200, Precision.NVFP4, "precision NVFP4 needs compute capability 10.0, H200 has 9.0"),
    ],
)
def test_what_the_hardware_cannot_run_is_refused(gpu: GpuTypeName, precision: Precision, want: str) -> None:
    with pytest.raises(CannotRun, match=want):
        render(_launch(gpu, precision))


def test_the_groups_own_arguments_come_last() -> None:
    got = _options(render(_launch(more=("--attention-backend", "triton", "--max-running-requests=5"))))
    assert (got["--attention-backend"], got["--max-running-requests"]) == ("triton", "5")


@pytest.mark.parametrize(
    ("more", "want"),
    [
        ((), False),
        (("--device", "cpu"), True),
        (("--device=cpu",), True),
        (("--device=cpu", "--device", "cuda"), False),
    ],
)
def test_a_cpu_is_asked_for_by_the_groups_arguments(more: tuple[str, ...], want: bool) -> None:
    assert on_cpu(more) is want


def test_a_cpu_serves_bf16_views_only() -> None:
    got = _options(render(_launch(more=("--device=cpu",))))
    assert (got["--attention-backend"], got["--dtype"]) == ("torch_native", "float32")
    assert "--kv-cache-dtype" not in got
    with pytest.raises(CannotRun, match="precision must be BF16 with --device cpu, got FP8"):
        render(_launch(precision=Precision.FP8, more=("--device=cpu",)))


CHECK = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
for args in json.load(sys.stdin):
    parsed = ServerArgs.from_cli_args(parser.parse_args(args))
    print(json.dumps([parsed.attention_backend, parsed.quantization, parsed.kv_cache_dtype, parsed.tp_size, parsed.weight_version]))
"""


@pytest.mark.sglang
@pytest.mark.skipif(not SGLANG_PYTHON.exists(), reason="sglang is not installed (make venv-sglang)")
def test_sglangs_own_parser_takes_every_rendering() -> None:
    launches = [
        _launch(gpu, precision, kv, gpus=2)
        for gpu, precision, kv in product(GpuTypeName, Precision, KvCachePrecision)
        if GPU_TYPES[gpu].runs(precision)
    ]
    launches.append(_launch(more=("--device=cpu",)))
    env = {**os.environ, "PYTHONPATH": str(STAND_INS), "SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run(
        [str(SGLANG_PYTHON), "-c", CHECK],
        input=json.dumps([render(launch) for launch in launches]),
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    got = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(got) == len(launches)
    for launch, (attention, quantization, kv, tp, version) in zip(launches[:-1], got[:-1], strict=True):
        want = _options(render(launch))
        assert attention == want["--attention-backend"]
        assert quantization == want.get("--quantization")
        assert (kv, tp, version) == (want["--kv-cache-dtype"], 2, "7")
