"""Conditions: what is known of a run and of a group, each with a reason and a message that says what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from motley_api.resources.base import Condition

from motley_operator.planner.model import format_time

Status = Literal["True", "False", "Unknown"]

RUN_CONDITIONS = (
    "Succeeded",
    "ConfigurationValid",
    "SamplersReady",
    "TrainerReady",
    "RouterReady",
    "CapacityAvailable",
    "PriceKnown",
    "StoreDurable",
    "WithinBudget",
    "MismatchHealthy",
    "QuotaExceeded",
    "Suspended",
)
GROUP_CONDITIONS = ("Ready", "RunFound", "PrecisionSupported", "Placed", "Conformant", "Saturated", "ScaleConflict")
# What a flip to True means, for the type of its Event.
BAD_WHEN_TRUE = frozenset({"QuotaExceeded", "Saturated", "ScaleConflict"})
NEUTRAL = frozenset({"Suspended"})
# Of these a person wants to hear even when they are wrong from the start; the others begin as False and come up.
TOLD_AT_FIRST_SIGHT = frozenset(
    {
        "ConfigurationValid",
        "PriceKnown",
        "StoreDurable",
        "WithinBudget",
        "PrecisionSupported",
        "RunFound",
        "QuotaExceeded",
    }
)
# Whose reasons are stages, each of them worth an Event.
TOLD_BY_REASON = frozenset({"Succeeded", "WithinBudget"})
MAX_MESSAGE = 2000


@dataclass(frozen=True)
class Finding:
    """A condition without its history."""

    type: str
    status: Status
    reason: str
    message: str = ""

    @property
    def event_type(self) -> str:
        if self.type in NEUTRAL or self.status == "Unknown":
            return "Normal"
        return "Warning" if (self.status == "True") == (self.type in BAD_WHEN_TRUE) else "Normal"


def merge(
    before: Sequence[Condition], found: Iterable[Finding], known: Sequence[str], now: datetime, generation: int
) -> list[Condition]:
    """Every known condition, Unknown when nothing was found; lastTransitionTime moves only when the status flips.

    Conditions of types that are not ours stay as they are.
    """
    old = {condition.type: condition for condition in before}
    by_type = {finding.type: finding for finding in found}
    result = []
    for kind in known:
        finding = by_type.get(kind, Finding(kind, "Unknown", "Pending", "not looked at yet"))
        previous = old.get(kind)
        flipped = previous is None or previous.status != finding.status
        result.append(
            Condition(
                type=kind,
                status=finding.status,
                reason=finding.reason,
                message=finding.message[:MAX_MESSAGE],
                last_transition_time=format_time(now) if flipped or previous is None else previous.last_transition_time,
                observed_generation=generation,
            )
        )
    return result


def flips(before: Sequence[Condition], found: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings worth an Event: the status flipped, or the reason where reasons are stages; nothing about becoming Unknown at first."""
    old = {condition.type: condition for condition in before}
    changed = []
    for finding in found:
        previous = old.get(finding.type)
        if previous is None:
            if finding.event_type == "Warning" and finding.type in TOLD_AT_FIRST_SIGHT:
                changed.append(finding)
        elif (previous.status != finding.status and finding.status != "Unknown") or (
            finding.type in TOLD_BY_REASON and previous.reason != finding.reason
        ):
            changed.append(finding)
    return tuple(changed)
