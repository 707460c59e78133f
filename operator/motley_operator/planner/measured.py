"""Measured capacity between plans: read from the last status and the loads seen since, and written back as fields of a status row."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any

from motley_api import keys
from motley_api.resources.rlrun import GroupStatus

from motley_operator.planner.capacity import Capacity, Load, declared_capacity, measured_capacity, pressures
from motley_operator.planner.conditions import Finding
from motley_operator.planner.model import GroupView, Snapshot, format_time, parse_time


def remembered(group: GroupView, row: GroupStatus | None) -> Capacity:
    """As it was measured last. A new declaration begins anew."""
    declared = group.spec.sessions_per_engine
    if row is None or row.declared_sessions_per_engine != declared or row.sessions_per_engine is None:
        return declared_capacity(declared)
    until = parse_time(row.measured_until)
    return Capacity(
        sessions=Fraction(row.sessions_per_engine),
        source="Measured" if row.capacity_source == "Measured" else "Declared",
        declared=declared,
        until_unix_s=until.timestamp() if until is not None else 0.0,
        tokens_per_second=None if row.tokens_per_engine_second is None else float(row.tokens_per_engine_second),
        p90_s=None if row.turn_seconds is None else float(row.turn_seconds),
    )


def of(seen: Snapshot) -> dict[str, Capacity]:
    """Of one engine of each group, now."""
    rows = {row.name: row for row in seen.status.groups}
    bound_s = float(seen.spec.rollout.turn_latency_seconds)
    return {
        group.name: measured_capacity(remembered(group, rows.get(group.name)), loads_of(seen, group.name), bound_s)
        for group in seen.groups
    }


def remembered_of(seen: Snapshot, name: str) -> Capacity:
    group = next(group for group in seen.groups if group.name == name)
    return remembered(group, next((row for row in seen.status.groups if row.name == name), None))


def loads_of(seen: Snapshot, group: str) -> list[Load]:
    return [load for load in seen.loads if load.group == group]


def saturation(seen: Snapshot, group: str) -> list[str] | None:
    """What presses on the group in its newest window; None: no window is known."""
    loads = loads_of(seen, group)
    if not loads:
        return None
    newest = max(loads, key=lambda load: load.until_unix_s)
    return [text for text, _ in pressures(newest, float(seen.spec.rollout.turn_latency_seconds))]


def text(sessions: Fraction) -> str:
    return _text(sessions, 3) or "0"


def finding(seen: Snapshot, group: GroupView) -> Finding:
    """Saturated: as the newest window says, else as it was said last."""
    if not any(pod.serves for pod in seen.pods if pod.role == keys.ROLE_SAMPLER and pod.group == group.name):
        return Finding("Saturated", "False", "NoEngines", "no engine of the group is ready")
    wrong = saturation(seen, group.name)
    if wrong:
        return Finding("Saturated", "True", "Saturated", f"gets fewer new sessions: {'; '.join(wrong)}")
    if wrong is not None:
        return Finding(
            "Saturated", "False", "Room", "turns are within spec.rollout.turnLatencySeconds, and nothing waits"
        )
    old = next((item for item in group.status.conditions if item.type == "Saturated"), None)
    if old is not None and old.reason in ("Saturated", "Room"):  # an operator that restarted knows no window yet
        return Finding("Saturated", "True" if old.status == "True" else "False", old.reason, old.message)
    return Finding("Saturated", "False", "NotMeasured", "no minute under load was seen lately")


def _text(value: float | Fraction | None, digits: int) -> str | None:
    if value is None:
        return None
    text = f"{float(value):.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def row_fields(found: Capacity) -> Mapping[str, Any]:
    """Of GroupStatus. Rounded, so that a status that says the same is the same."""
    until = datetime.fromtimestamp(found.until_unix_s, UTC) if found.until_unix_s else None
    return {
        "capacity_source": found.source,
        "sessions_per_engine": _text(found.sessions, 3),
        "declared_sessions_per_engine": found.declared,
        "measured_until": format_time(until) if until is not None and found.source == "Measured" else None,
        "tokens_per_engine_second": _text(found.tokens_per_second, 0),
        "turn_seconds": _text(found.p90_s, 1),
    }
