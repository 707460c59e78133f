"""SamplerGroup: engines of one GPU type in one precision, sampling for one run."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from motley_api.resources.base import (
    MAX_NAME,
    Conditions,
    Count,
    CountOrZero,
    DecimalString,
    Message,
    Model,
    Name,
    PodOverrides,
    Text,
    Total,
    _alias,
    immutable,
    rules,
)
from motley_api.resources.gpus import GPU_TYPES, CapacityType, GpuTypeName, KvCachePrecision, Precision


class EngineType(StrEnum):
    SGLANG = "SGLang"
    REFERENCE = "Reference"


class Engine(Model):
    type: Annotated[
        EngineType,
        Field(
            description="type: SGLang (GPUs; also runs on a CPU) or Reference (torch on a CPU, the same HTTP API). Default: SGLang."
        ),
    ] = EngineType.SGLANG
    args: Annotated[
        list[Annotated[str, Field(max_length=256)]],
        Field(max_length=64, description="args: added to the engine's rendered arguments; the last of an option wins."),
    ] = []


def _precision_rules() -> tuple[tuple[str, str], ...]:
    """One CEL rule for each precision that some GPU type cannot run."""
    found = []
    for precision in Precision:
        able = [gpu.name.value for gpu in GPU_TYPES.values() if gpu.runs(precision)]
        if len(able) < len(GPU_TYPES):
            found.append(
                (
                    f"self.precision != '{precision.value}' || self.gpuType in {able}",
                    f"precision {precision.value} must be on one of {', '.join(able)}: the others' tensor cores cannot run it",
                )
            )
    return tuple(found)


# What the operator makes for a run itself is called <run>-<part>; a group's objects would get the same names.
RUN_PARTS = ("router", "rollout", "trainer", "gang")

TEMPLATE_RULES = (
    *_precision_rules(),
    (
        "!has(self.minReplicas) || !has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
        "minReplicas must be <= maxReplicas",
    ),
)


class SamplerGroupTemplate(Model):
    """What a group is, wherever it is declared: inline in an RLRun, or as a SamplerGroup of its own."""

    gpu_type: Annotated[
        GpuTypeName, Field(description="gpuType: the accelerator, matched on nodes by whole label values.")
    ]
    precision: Annotated[
        Precision,
        Field(description="precision: of the weights that the group serves; it decides the group's weight view."),
    ]
    kv_cache_precision: Annotated[
        KvCachePrecision, Field(description="kvCachePrecision: of the KV cache. Default: FP8.")
    ] = KvCachePrecision.FP8
    gpus_per_engine: Annotated[
        int, Field(ge=1, le=64, description="gpusPerEngine: GPUs of one engine (one pod). Default: 1.")
    ] = 1
    replicas: Annotated[int, Field(ge=0, le=4096, description="replicas: engines wanted. Default: 1.")] = 1
    min_replicas: (
        Annotated[
            int,
            Field(
                ge=0,
                le=4096,
                description="minReplicas: fewest engines that the operator may choose. Default: replicas.",
            ),
        ]
        | None
    ) = None
    max_replicas: (
        Annotated[
            int,
            Field(
                ge=0, le=4096, description="maxReplicas: most engines that the operator may choose. Default: replicas."
            ),
        ]
        | None
    ) = None
    sessions_per_engine: Annotated[
        int,
        Field(
            ge=1,
            le=4096,
            description="sessionsPerEngine: agent sessions that one engine serves at the latency bound, until measured.",
        ),
    ] = 16
    turns_per_engine_hour: (
        Annotated[
            int,
            Field(
                ge=1,
                le=100_000_000,
                description="turnsPerEngineHour: turns an engine serves in an hour at the latency bound; prices a turn. Default: measured.",
            ),
        ]
        | None
    ) = None
    capacity_type: Annotated[
        CapacityType, Field(description="capacityType: OnDemand or Spot; decides the price. Default: OnDemand.")
    ] = CapacityType.ON_DEMAND
    engine: Annotated[
        Engine, Field(description="engine: what serves the model. Default: SGLang without further arguments.")
    ] = Engine()
    queue_name: (
        Annotated[
            Name, Field(description="queueName: the Kueue LocalQueue that admits the group's pods. Default: none.")
        ]
        | None
    ) = None
    template: Annotated[PodOverrides, Field(description="template: overrides for the group's pods.")] = PodOverrides()
    drain_seconds: Annotated[
        int,
        Field(
            ge=0,
            le=86_400,
            description="drainSeconds: how long a leaving engine may finish its sessions, in seconds. Default: 600.",
        ),
    ] = 600


class RunRef(Model):
    name: Annotated[Name, Field(description="name: of an RLRun in the same namespace.")]


class SamplerGroupSpec(SamplerGroupTemplate):
    model_config = ConfigDict(
        json_schema_extra=rules(
            immutable("gpuType", "apply another SamplerGroup with the type wanted, then delete this one"),
            immutable("precision", "apply another SamplerGroup with the precision wanted, then delete this one"),
            immutable("runRef", "apply another SamplerGroup for the other run"),
            *TEMPLATE_RULES,
        ),
        alias_generator=_alias,
    )
    run_ref: Annotated[RunRef, Field(description="runRef: the run that the group samples for.")]


class SamplerGroupStatus(Model):
    """Observed; rebuilt at any time."""

    observed_generation: Annotated[int, Field(ge=0)] | None = None
    conditions: Conditions = []
    replicas: CountOrZero = 0
    ready_replicas: CountOrZero = 0
    selector: Annotated[
        str, Field(max_length=512, description="selector: of the group's pods, for the scale subresource.")
    ] = ""
    capacity_sessions: CountOrZero | None = None
    share_percent: DecimalString | None = None
    out_of_range_percent: DecimalString | None = None
    version: Annotated[int, Field(ge=-1)] | None = None
    usd_per_million_tokens: DecimalString | None = None
    status: Annotated[str, Field(max_length=64, description="status: the Ready condition's reason, for the table.")] = (
        ""
    )


class SamplerGroup(Model):
    """SamplerGroup adds engines of one GPU type in one precision to a run, from its first minute or half-way."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"size(self.metadata.name) <= {MAX_NAME}",
                f"metadata.name must be at most {MAX_NAME} characters: pods and labels are named after it",
            ),
            (
                "self.metadata.name != self.spec.runRef.name && "
                f"!(self.metadata.name in {[f'-{part}' for part in RUN_PARTS]}.map(part, self.spec.runRef.name + part))",
                f"metadata.name must not be the run's own, nor that with {', '.join(f'-{part}' for part in RUN_PARTS)}:"
                " the run's own parts are called so",
            ),
        ),
        alias_generator=_alias,
    )
    api_version: str = "motley.dev/v1alpha1"
    kind: str = "SamplerGroup"
    metadata: dict[str, Any] = {}
    spec: SamplerGroupSpec
    status: SamplerGroupStatus | None = None


__all__ = [
    "RUN_PARTS",
    "TEMPLATE_RULES",
    "Count",
    "Engine",
    "EngineType",
    "Message",
    "RunRef",
    "SamplerGroup",
    "SamplerGroupSpec",
    "SamplerGroupStatus",
    "SamplerGroupTemplate",
    "Text",
    "Total",
]
