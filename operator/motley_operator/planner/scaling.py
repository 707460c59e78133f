"""One owner of replicas.

spec.replicas of a SamplerGroup belongs to whoever writes it: its author, `kubectl scale`, an autoscaler on the scale subresource. The
operator follows it, and for a group with minReplicas or maxReplicas it is where the operator's own choice begins. spec.replicas of the
group's Deployment belongs to the operator: what another hand writes there is put right.

When another manager sets either again and again, two decide about one number. Then the operator stops: it leaves what the other one
wrote, under the budget, and says so in ScaleConflict until the other one has been quiet for `HOLD`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from motley_api import keys

from motley_operator.planner.conditions import Finding
from motley_operator.planner.model import GroupView, Object, ReplicasWrite, Snapshot, parse_time

LIMIT = 3  # writes by others ...
WITHIN = timedelta(minutes=10)  # ... this near to each other are a conflict
HOLD = timedelta(hours=1)
KINDS = ("SamplerGroup", "Deployment")
KEPT_WRITES = 8


def set_by_others(metadata: Mapping[str, Any]) -> list[dict[str, str]]:
    """Managers other than the operator that own spec.replicas, from managedFields. Entries of a scale subresource bear no time."""
    found = [
        {"manager": entry.get("manager", ""), "subresource": entry.get("subresource", "")}
        for entry in metadata.get("managedFields") or []
        if "f:replicas" in entry.get("fieldsV1", {}).get("f:spec", {}) and entry.get("manager") != keys.FIELD_MANAGER
    ]
    return sorted(found, key=lambda entry: (entry["manager"], entry["subresource"]))


@dataclass(frozen=True)
class Watched:
    """Replicas of one object as they were seen last, and writes of others that changed them."""

    replicas: int
    writes: tuple[ReplicasWrite, ...] = ()


def noticed(before: Watched | None, obj: Object, now: datetime) -> Watched:
    """With this look at the object. What a group had at first sight is nobody's change; a Deployment's replicas are the operator's."""
    replicas = int(obj.get("spec", {}).get("replicas", 1))
    owners = obj["metadata"].get("replicasSetBy") or []
    if before is None:
        before = Watched(replicas if obj["kind"] == "SamplerGroup" else -1)
    if replicas == before.replicas or not owners:
        return Watched(replicas, before.writes)
    write = ReplicasWrite(obj["kind"], ", ".join(map(_name, owners)), now, replicas)
    return Watched(replicas, (*before.writes, write)[-KEPT_WRITES:])


def _name(by: Mapping[str, str]) -> str:
    return f"{by['manager']} ({by['subresource']})" if by.get("subresource") else by["manager"]


@dataclass(frozen=True)
class Conflict:
    """Somebody else decides about the replicas of a group."""

    kind: str  # of the object that is written
    managers: tuple[str, ...]
    writes: int
    replicas: int  # as the other one wrote them last


def conflicts(seen: Snapshot, now: datetime) -> dict[str, Conflict]:
    """Groups whose replicas are contested."""
    found = {}
    for group in seen.groups:
        for kind in KINDS:
            if kind == "SamplerGroup" and group.spec.min_replicas is None and group.spec.max_replicas is None:
                continue  # the operator only follows: nobody can be in its way
            if conflict := _conflict(seen, group, kind, now):
                found[group.name] = conflict
                break
    return found


def _conflict(seen: Snapshot, group: GroupView, kind: str, now: datetime) -> Conflict | None:
    live = seen.child(kind, group.name)
    if live is None:
        return None
    writes = seen.replicas_writes.get((kind, group.name), ())
    newest = max((write.time for write in writes), default=None)
    near = tuple(write for write in writes if newest is not None and newest - write.time <= WITHIN)
    old = next((item for item in group.status.conditions if item.type == "ScaleConflict"), None)
    held = old is not None and old.status == "True" and old.reason == f"{kind}Contested"
    owners = live["metadata"].get("replicasSetBy") or []
    if held and not near and owners:  # restarted: what was seen is forgotten, who wrote last is not
        assert old is not None
        newest = parse_time(old.last_transition_time)
        assert newest is not None
        near = (ReplicasWrite(kind, ", ".join(map(_name, owners)), newest, 0),)
    if newest is None or now - newest >= HOLD or (len(near) < LIMIT and not held):
        return None
    replicas = int(live.get("spec", {}).get("replicas", 1))
    return Conflict(kind, tuple(sorted({write.manager for write in near})), len(near), replicas)


def finding(conflict: Conflict | None, group: str) -> Finding:
    """ScaleConflict."""
    if conflict is None:
        return Finding("ScaleConflict", "False", "OneOwner", "nobody else decides about its engines")
    who = ", ".join(conflict.managers)
    if conflict.kind == "Deployment":
        what, instead = "the Deployment's spec.replicas", f"scale SamplerGroup {group} instead, whose engines these are"
    else:
        what = "spec.replicas, which the operator chooses between minReplicas and maxReplicas"
        instead = "take out minReplicas and maxReplicas to leave the choice to it, or stop it"
    text = (
        f"{who} and {keys.FIELD_MANAGER} both set {what}; {keys.FIELD_MANAGER} stopped and follows {conflict.replicas},"
        f" under the budget, until the other one has been quiet for {HOLD.seconds // 3600} h: {instead}"
    )
    return Finding("ScaleConflict", "True", f"{conflict.kind}Contested", text)
