"""Cache and memory -> Snapshot: what the planner may know."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from motley_api.resources import GpuTypeName, Precision, RLRunSpec, RLRunStatus, SamplerGroupSpec, SamplerGroupStatus
from motley_api.resources.samplergroup import RunRef
from pydantic import ValidationError

from motley_operator import names
from motley_operator.cache import CHILD_KINDS, Cache, RunKey
from motley_operator.measure import RunMemory
from motley_operator.planner.model import GroupView, NodeView, Settings, Snapshot, parse_time

Json = dict[str, Any]


class InvalidSpecError(Exception):
    """A spec that these models cannot read: made under another version of the CRD."""


def explain(error: ValidationError) -> str:
    return "; ".join(f"spec.{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()[:5])


def run_spec(body: Json) -> RLRunSpec:
    try:
        return RLRunSpec.model_validate(body.get("spec", {}))
    except ValidationError as error:
        raise InvalidSpecError(explain(error)) from error


def run_status(body: Json) -> RLRunStatus:
    """As it was written last; what cannot be read is rebuilt."""
    try:
        return RLRunStatus.model_validate(body.get("status") or {})
    except ValidationError:
        return RLRunStatus()


def group_status(body: Json) -> SamplerGroupStatus:
    try:
        return SamplerGroupStatus.model_validate(body.get("status") or {})
    except ValidationError:
        return SamplerGroupStatus()


def controlled_by(body: Json, uid: str) -> bool:
    return any(owner["uid"] == uid and owner.get("controller") for owner in body["metadata"].get("ownerReferences", []))


def owned_by(body: Json, uid: str) -> bool:
    return any(owner["uid"] == uid for owner in body["metadata"].get("ownerReferences", []))


def group_view(body: Json, run_uid: str) -> GroupView:
    metadata = body["metadata"]
    error = ""
    try:
        spec = SamplerGroupSpec.model_validate(body["spec"])
    except ValidationError as invalid:
        error = explain(invalid)
        # Stands in so that the rest of the run is planned; it asks for no engine.
        spec = SamplerGroupSpec(
            gpu_type=GpuTypeName.H100,
            precision=Precision.BF16,
            replicas=0,
            run_ref=RunRef(name=body["spec"]["runRef"]["name"]),
        )
    return GroupView(
        name=metadata["name"],
        uid=metadata["uid"],
        generation=metadata["generation"],
        spec=spec,
        status=group_status(body),
        inline=controlled_by(body, run_uid),
        owned=owned_by(body, run_uid),
        deleting="deletionTimestamp" in metadata,
        error=error,
    )


def replica_failures(deployments: list[Json]) -> dict[tuple[str, str], str]:
    """What the ReplicaSet controller could not create, in the API server's words."""
    found = {}
    for deployment in deployments:
        for condition in deployment.get("status", {}).get("conditions") or []:
            if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
                found["Deployment", deployment["metadata"]["name"]] = condition.get("message", "")
    return found


def snapshot(
    cache: Cache,
    key: RunKey,
    memory: RunMemory,
    *,
    settings: Settings,
    nodes: tuple[NodeView, ...] | None,
    nodes_error: str = "",
    resize_due: bool = True,
    fresh_token: str,
    now: datetime | None = None,
) -> Snapshot | None:
    """None when there is no such run. Raises InvalidSpecError."""
    body = cache.get("RLRun", *key)
    if body is None:
        return None
    metadata = body["metadata"]
    uid = metadata["uid"]
    spec = run_spec(body)
    group_bodies = cache.of_run(key, "SamplerGroup")
    inline = {names.inline_group(key[1], group.name) for group in spec.sampler_groups}
    removed = {
        item["metadata"]["name"]
        for item in group_bodies
        if controlled_by(item, uid) and item["metadata"]["name"] not in inline
    }
    children = {
        (item["kind"], item["metadata"]["name"]): item for kind in CHILD_KINDS for item in cache.of_run(key, kind)
    } | {("SamplerGroup", item["metadata"]["name"]): item for item in group_bodies}
    if now is not None:  # a plan follows, whose own writes must not be taken for another's
        memory.notice(children, now)
    return Snapshot(
        namespace=key[0],
        name=key[1],
        uid=uid,
        generation=metadata["generation"],
        deleting="deletionTimestamp" in metadata,
        spec=spec,
        raw_spec=body.get("spec", {}),
        status=run_status(body),
        groups=tuple(group_view(item, uid) for item in group_bodies if item["metadata"]["name"] not in removed),
        removed_groups=tuple(
            sorted(
                item["metadata"]["name"]
                for item in group_bodies
                if item["metadata"]["name"] in removed and "deletionTimestamp" not in item["metadata"]
            )
        ),
        children=children,
        pods=cache.pods(key),
        nodes=nodes,
        nodes_error=nodes_error,
        resize_due=resize_due,
        has_token=bool(memory.token),
        fresh_token=fresh_token,
        router=memory.router,
        router_error=memory.router_error,
        loads=tuple(load for name in sorted(memory.loads) for load in memory.loads[name]),
        trainer=memory.trainer,
        trainer_error=memory.trainer_error,
        steps=tuple(memory.steps[step] for step in sorted(memory.steps)),
        errors=dict(memory.errors),
        replicas_writes={key: watched.writes for key, watched in memory.scaled.items() if watched.writes},
        failed_creates={**replica_failures(cache.of_run(key, "Deployment")), **memory.failed_creates},
        settings=settings,
        created=parse_time(metadata.get("creationTimestamp")),
    )
