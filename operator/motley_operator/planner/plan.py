"""The whole decision about one run: plan(snapshot, now) -> Plan. Reads as its steps."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from motley_api import keys, records

from motley_operator import manifests, names
from motley_operator.planner import cost, lifecycle, resize, status
from motley_operator.planner.conditions import flips
from motley_operator.planner.decide import Decided, decide, usable
from motley_operator.planner.model import (
    Action,
    Apply,
    Create,
    Delete,
    EventOut,
    Object,
    Patch,
    Plan,
    PushFleet,
    Snapshot,
    parse_time,
)


def plan(seen: Snapshot, now: datetime) -> Plan:
    """What to do about the run, given what was seen. Deletion needs nothing: the garbage collector follows owner references."""
    if seen.deleting:
        return Plan()
    made = decide(seen, now)
    run_status, run_findings = status.run_status(seen, made)
    group_statuses, group_findings = status.group_statuses(seen, made)
    events = [
        EventOut("RLRun", seen.name, seen.uid, finding.event_type, finding.reason, f"{finding.type}: {finding.message}")
        for finding in flips(seen.status.conditions, run_findings)
    ]
    for group in seen.groups:
        events += [
            EventOut(
                "SamplerGroup",
                group.name,
                group.uid,
                finding.event_type,
                finding.reason,
                f"{finding.type}: {finding.message}",
            )
            for finding in flips(group.status.conditions, group_findings[group.name])
        ]
    events += [_guard_event(seen, subject, action, why) for subject, action, why in made.verdict.news]
    return Plan(
        actions=tuple(actions(seen, made)),
        status=run_status,
        group_statuses=group_statuses,
        events=tuple(events),
        active=not made.life.stopped
        or any(pod.exists and pod.finished is None for pod in seen.pods)
        or cost.unsettled(seen.pods, parse_time(made.totals.accounted_until), now),
    )


def _guard_event(seen: Snapshot, subject: str, action: str, why: str) -> EventOut:
    kind = "Normal" if action == "Lifted" else "Warning"
    text = f"guard, {subject or 'the run'}: {action}: {why}"
    return EventOut("RLRun", seen.name, seen.uid, kind, f"Guard{action}", text)


def actions(seen: Snapshot, made: Decided) -> list[Action]:
    """What differs between the objects wanted and those that live. Configuration first: pods wait for what they mount."""
    run = manifests.RunRef(seen.namespace, seen.name, seen.uid)
    found: list[Action] = []
    if not seen.has_token:
        found.append(Create(manifests.token_secret(run, seen.fresh_token)))
    wanted: list[Object] = [
        manifests.run_config_map(run, seen.spec),
        manifests.fleet_config_map(run, made.fleet, resize_data(made.resize)),
        manifests.router_service(run),
        manifests.trainer_service(run),
    ]
    if seen.spec.trainer.nodes > 1:
        wanted.append(manifests.gang_service(run))
    wanted += [
        manifests.inline_sampler_group(
            run, group, seen.child("SamplerGroup", names.inline_group(seen.name, group.name))
        )
        for group in seen.spec.sampler_groups
    ]
    found += [Apply(manifest) for manifest in wanted if _to_apply(seen, run, manifest)]
    for group in seen.groups:
        if not group.owned and not group.deleting:
            found.append(Apply(manifests.adopted_sampler_group(run, group.name, group.uid), "joins the run"))
    found += [_delete(seen, "SamplerGroup", name, "no longer in spec.samplerGroups") for name in seen.removed_groups]
    urls = service_urls(seen)
    if urls is not None:
        found += workloads(seen, made, run, urls)
        found += pushes(seen, made, urls)
    return found


def resize_data(sized: resize.Resize) -> dict[str, str]:
    """Beside the fleet, and only once something was decided."""
    return {resize.STATE_KEY: records.encode_json(sized.state).decode()} if sized.state.time else {}


def _to_apply(seen: Snapshot, run: manifests.RunRef, manifest: Object) -> bool:
    live = seen.child(manifest["kind"], manifest["metadata"]["name"])
    if live is None:
        return True
    return (
        not foreign(live, manifest)
        and "deletionTimestamp" not in live["metadata"]
        and manifests.differs(manifest, live)
    )


def foreign(live: Object, manifest: Object) -> bool:
    """Somebody else controls an object of that name: it is left alone, and a condition says so."""
    ours = {reference["uid"] for reference in manifest["metadata"]["ownerReferences"]}
    return not ours & {reference["uid"] for reference in live["metadata"].get("ownerReferences", [])}


def _delete(seen: Snapshot, kind: str, name: str, why: str) -> Delete:
    live = seen.children[kind, name]
    return Delete(live["apiVersion"], kind, name, live["metadata"]["uid"], why)


def service_urls(seen: Snapshot) -> manifests.Urls | None:
    """None until both Services have their address: pods are rendered with it."""
    hosts = []
    for name in (names.router(seen.name), names.trainer(seen.name)):
        address = (seen.child("Service", name) or {}).get("spec", {}).get("clusterIP", "")
        if not address:
            return None
        hosts.append(address)
    return manifests.Urls(
        router=names.url(hosts[0], keys.ROUTER_PORT),
        trainer=names.url(hosts[1], keys.TRAINER_PORT),
    )


def workloads(seen: Snapshot, made: Decided, run: manifests.RunRef, urls: manifests.Urls) -> list[Action]:
    up = 0 if made.life.stopped else 1
    wanted: list[Object] = [
        manifests.router_deployment(run, seen.spec, seen.settings, urls, up),
        manifests.rollout_deployment(run, seen.spec, seen.settings, urls, up * seen.spec.rollout.workers),
    ]
    for group in seen.groups:
        if not usable(group):
            continue
        wanted.append(manifests.group_config_map(run, group.name, group.uid, group.spec))
        wanted.append(
            manifests.sampler_deployment(
                run,
                seen.spec,
                seen.settings,
                urls,
                group.name,
                group.uid,
                group.spec,
                made.allotment.replicas[group.name],
            )
        )
    kept = [manifests.adopted(manifest, seen.child("Deployment", manifest["metadata"]["name"])) for manifest in wanted]
    found: list[Action] = [Apply(manifest) for manifest in kept if _to_apply(seen, run, manifest)]
    return found + gang(seen, made, run, urls)


def gang(seen: Snapshot, made: Decided, run: manifests.RunRef, urls: manifests.Urls) -> list[Action]:
    """The trainer's Job. Its template cannot change, so what needs another is made anew, once its pods have saved and gone: two gangs
    at once would write over each other."""
    name = names.trainer(seen.name)
    job, wanted = seen.child("Job", name), manifests.trainer_job(run, seen.spec, seen.settings, urls, suspend=False)
    left = lifecycle.gang_pods(seen)
    if job is None:
        return [] if made.life.stopped or left else [Apply(wanted)]
    if "deletionTimestamp" in job["metadata"] or foreign(job, wanted):
        return []
    if lifecycle.to_extend(seen):
        return [_delete(seen, "Job", name, f"complete, and spec.steps is {seen.spec.steps} now")]
    if lifecycle.to_retry(seen):
        changed = ", ".join(lifecycle.edited_since_start(seen)) or "suspend"
        return [_delete(seen, "Job", name, f"failed, and {changed} was edited since")]
    if lifecycle.job_condition(job, "Complete") or lifecycle.job_condition(job, "Failed") or made.life.ended:
        return []
    suspended, rests = bool(job["spec"].get("suspend", False)), made.life.resting
    if rests and not suspended:
        return [_suspend(name, True, f"{made.life.state}: {made.life.message}")]
    if edited := lifecycle.restarts_gang(seen, made.life):
        return [_suspend(name, True, f"saves and starts again: {', '.join(edited)} changed")]
    if not suspended or rests:
        return _noted(job, wanted)
    if left:
        return []  # they save
    if _annotation(job, keys.SPEC_HASH_ANNOTATION) != _annotation(wanted, keys.SPEC_HASH_ANNOTATION):
        return [_delete(seen, "Job", name, "to be made again as it is declared now")]
    return [_suspend(name, False, "goes on from the last checkpoint")]


def _suspend(name: str, suspend: bool, why: str) -> Patch:
    return Patch("batch/v1", "Job", name, {"spec": {"suspend": suspend}}, why)


def _annotation(obj: Object, key: str) -> str:
    return str(obj["metadata"].get("annotations", {}).get(key, ""))


def _noted(job: Object, wanted: Object) -> list[Action]:
    """A Job of an operator that did not note what it was made from."""
    if _annotation(job, keys.START_ANNOTATION):
        return []
    noted = {keys.START_ANNOTATION: _annotation(wanted, keys.START_ANNOTATION)}
    return [Patch("batch/v1", "Job", job["metadata"]["name"], {"metadata": {"annotations": noted}}, "adopted")]


def pushes(seen: Snapshot, made: Decided, urls: manifests.Urls) -> list[PushFleet]:
    heard: Sequence[tuple[str, str, int | None]] = (
        (keys.ROLE_ROUTER, urls.router, seen.router.fleet_generation if seen.router is not None else None),
        (keys.ROLE_TRAINER, urls.trainer, seen.trainer.fleet_generation if seen.trainer is not None else None),
    )
    return [
        PushFleet(role, url, made.fleet)
        for role, url, generation in heard
        if generation is not None and generation < made.fleet.generation
    ]
