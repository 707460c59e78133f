"""What both resources are made of: naming, bounded scalars, conditions, references, pod overrides."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

MAX_NAME = (
    45  # "-<replica set hash>-<pod suffix>" adds 17 characters to a Deployment's name; pods and label values end at 63
)


def _alias(name: str) -> str:
    """camelCase with Kubernetes' acronyms kept: usd_per_gpu_hour -> usdPerGPUHour, billed_usd -> billedUSD."""
    if name.startswith("usd_"):
        head, rest = "usd", name[4:]
        return head + _acronyms("".join(part.capitalize() for part in rest.split("_")))
    return _acronyms(to_camel(name))


def _acronyms(name: str) -> str:
    return name.replace("Gpu", "GPU") if name.startswith("Per") else name.replace("Usd", "USD")


class Model(BaseModel):
    """Frozen; JSON names in camelCase; unknown fields are ignored on reading (the API server prunes them)."""

    model_config = ConfigDict(
        alias_generator=_alias, populate_by_name=True, frozen=True, extra="ignore", use_enum_values=False
    )

    def to_json_dict(self) -> dict[str, Any]:
        """As Kubernetes stores it: JSON names, nothing that is unset."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def rules(*pairs: tuple[str, str]) -> dict[str, Any]:
    """CEL validations for a model's or field's json_schema_extra: (rule, message)."""
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in pairs]}


def immutable(field: str, instead: str) -> tuple[str, str]:
    return (f"self.{field} == oldSelf.{field}", f"{field} is immutable; {instead}")


LIST_MAP_BY_NAME = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}

# Decimal numbers travel as strings: no floats in a resource.
DecimalString = Annotated[str, Field(pattern=r"^[0-9]{1,9}(\.[0-9]{1,9})?$", max_length=19)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", min_length=1, max_length=MAX_NAME)]
Url = Annotated[str, Field(min_length=1, max_length=1024)]
Text = Annotated[str, Field(max_length=1024)]
Message = Annotated[str, Field(max_length=32768)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
CountOrZero = Annotated[int, Field(ge=0, le=1_000_000)]
Seconds = Annotated[int, Field(ge=1, le=604_800)]
Total = Annotated[int, Field(ge=0, le=9_007_199_254_740_991)]


class Condition(Model):
    """metav1.Condition."""

    type: Annotated[str, Field(max_length=316)]
    status: Annotated[str, Field(json_schema_extra={"enum": ["True", "False", "Unknown"]})]
    reason: Annotated[str, Field(max_length=1024)]
    message: Message
    last_transition_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    observed_generation: Annotated[int, Field(ge=0)] | None = None


Conditions = Annotated[
    list[Condition],
    Field(
        max_length=32,
        description="conditions: the current state, one entry a type.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    ),
]


class EnvVar(Model):
    name: Annotated[str, Field(min_length=1, max_length=253)]
    value: Annotated[str, Field(max_length=4096)] = ""


class Toleration(Model):
    key: Annotated[str, Field(max_length=316)] | None = None
    operator: Annotated[str, Field(json_schema_extra={"enum": ["Exists", "Equal"]})] | None = None
    value: Annotated[str, Field(max_length=63)] | None = None
    effect: (
        Annotated[str, Field(json_schema_extra={"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]})] | None
    ) = None
    toleration_seconds: Annotated[int, Field(ge=0, le=604_800)] | None = None


class PodOverrides(Model):
    """What a user may change about the pods that the operator renders."""

    image: (
        Annotated[
            str,
            Field(
                max_length=512, description="image: container image; default: the operator's own choice for the role."
            ),
        ]
        | None
    ) = None
    env: Annotated[
        list[EnvVar],
        Field(max_length=64, description="env: more environment variables.", json_schema_extra=LIST_MAP_BY_NAME),
    ] = []
    labels: Annotated[
        dict[str, Annotated[str, Field(max_length=63)]],
        Field(description="labels: more pod labels.", json_schema_extra={"maxProperties": 32}),
    ] = {}
    node_selector: Annotated[
        dict[str, Annotated[str, Field(max_length=63)]],
        Field(
            description="nodeSelector: more node labels that pods must find, e.g. a zone.",
            json_schema_extra={"maxProperties": 32},
        ),
    ] = {}
    tolerations: Annotated[
        list[Toleration], Field(max_length=32, description="tolerations: added to the one for nvidia.com/gpu.")
    ] = []
