"""The study's fleet and prices, and builders for snapshots. Values from the public study of 2026-10-13."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from motley_api import keys, records
from motley_api.resources import RLRunSpec, RLRunStatus, SamplerGroupSpec, SamplerGroupStatus
from motley_operator.planner.model import GroupView, PodView, Snapshot

# name: GPU type, precision, GPUs per engine, engines, sessions per engine
FLEET: Mapping[str, tuple[str, str, int, int, int]] = {
    "h100-fp8": ("H100", "FP8", 1, 8, 16),
    "h200-fp8": ("H200", "FP8", 1, 8, 32),
    "b200-nvfp4": ("B200", "NVFP4", 1, 8, 32),
    "b300-nvfp4": ("B300", "NVFP4", 1, 8, 48),
    "a100-bf16": ("A100-80GB", "BF16", 2, 4, 12),
    "rtx6000-bf16": ("RTX-PRO-6000", "BF16", 2, 4, 12),
    "h100-bf16": ("H100", "BF16", 2, 4, 32),
    "h200-bf16": ("H200", "BF16", 1, 8, 16),
}
PRICES = {"B300": "7.10", "B200": "6.25", "H200": "4.54", "H100": "3.95", "RTX-PRO-6000": "3.03", "A100-80GB": "2.50"}
START = datetime(2026, 10, 13, 12, 0, 0, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def run_spec(**more: Any) -> RLRunSpec:
    return RLRunSpec.model_validate(
        {
            "model": {"source": "/model", "contextLength": 4096},
            "tasks": {"source": "/tasks"},
            "store": {"url": "file:///store"},
            "steps": 100,
            "trainer": {"gpuType": "B200", "nodes": 1, "gpusPerNode": 8},
            "prices": [{"gpuType": gpu, "usdPerGPUHour": price} for gpu, price in PRICES.items()],
            "baseline": {"gpuType": "B200", "precision": "BF16", "engines": 42, "sessionsPerEngine": 32},
            **more,
        }
    )


def group_spec(name: str, **more: Any) -> SamplerGroupSpec:
    gpu, precision, gpus, engines, sessions = FLEET[name]
    return SamplerGroupSpec.model_validate(
        {
            "runRef": {"name": "study"},
            "gpuType": gpu,
            "precision": precision,
            "gpusPerEngine": gpus,
            "replicas": engines,
            "sessionsPerEngine": sessions,
            **more,
        }
    )


def group(name: str, **more: Any) -> GroupView:
    return GroupView(
        name=name,
        uid=f"uid-{name}",
        generation=1,
        spec=group_spec(name, **more),
        status=SamplerGroupStatus(),
        inline=False,
        owned=True,
    )


def engine_pod(name: str, number: int, *, scheduled_s: float = 0.0, **more: Any) -> PodView:
    gpu, _, gpus, _, _ = FLEET[name]
    values: dict[str, Any] = {
        "namespace": "ns",
        "name": f"{name}-{number}",
        "uid": f"uid-{name}-{number}",
        "run": "study",
        "role": keys.ROLE_SAMPLER,
        "group": name,
        "gpu_type": gpu,
        "gpus": gpus,
        "node": "node",
        "phase": "Running",
        "ready": True,
        "created": at(scheduled_s),
        "scheduled": at(scheduled_s),
    }
    return PodView(**(values | more))


def trainer_pod(*, scheduled_s: float = 0.0, **more: Any) -> PodView:
    values: dict[str, Any] = {
        "namespace": "ns",
        "name": "study-trainer-0",
        "uid": "uid-trainer",
        "run": "study",
        "role": keys.ROLE_TRAINER,
        "gpu_type": "B200",
        "gpus": 8,
        "node": "node",
        "phase": "Running",
        "ready": True,
        "created": at(scheduled_s),
        "scheduled": at(scheduled_s),
    }
    return PodView(**(values | more))


def all_engines() -> list[PodView]:
    return [engine_pod(name, number) for name, (_, _, _, engines, _) in FLEET.items() for number in range(engines)]


def step(
    number: int,
    *,
    attempt: int = 0,
    finished_s: float | None = None,
    groups: Sequence[records.GroupStep] = (),
    kl: float = 0.01,
    **more: Any,
) -> records.StepRecord:
    end = at(60.0 * number if finished_s is None else finished_s).timestamp()
    values: dict[str, Any] = {
        "run": "study",
        "step": number,
        "attempt": attempt,
        "started_unix_s": end - 60.0,
        "finished_unix_s": end,
        "wait_s": 40.0,
        "train_s": 15.0,
        "publish_s": 5.0,
        "reward": records.Ratio(0.5, 1.0),
        "kl": records.Ratio(kl, 1.0),
        "out_of_range": records.Ratio(0.001, 1.0),
        "entropy": records.Ratio(0.8, 1.0),
        "grad_norm": 0.2,
        "loss": 0.1,
        "lag": records.Ratio(min(4.0, (number - 1) / 2), 1.0),  # no staler than half the run: not the guard's ramp
        "groups": list(groups),
    }
    return records.StepRecord(**(values | more))


def snapshot(
    groups: Sequence[GroupView] = (),
    pods: Sequence[PodView] = (),
    *,
    spec: RLRunSpec | None = None,
    status: RLRunStatus | None = None,
    **more: Any,
) -> Snapshot:
    values: dict[str, Any] = {
        "namespace": "ns",
        "name": "study",
        "uid": "uid-run",
        "generation": 1,
        "deleting": False,
        "spec": spec or run_spec(),
        "raw_spec": {},
        "status": status or RLRunStatus(),
        "groups": tuple(groups),
        "pods": tuple(pods),
        "has_token": True,
    }
    return Snapshot(**(values | more))
