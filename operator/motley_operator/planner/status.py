"""Snapshot and decisions -> status of the run and of its groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

from motley_api import keys, records
from motley_api.resources import GPU_TYPES, MIN_COMPUTE_CAPABILITY, RLRunStatus, SamplerGroupStatus
from motley_api.resources.base import Condition
from motley_api.resources.rlrun import Cost, Decision, GroupCost, GroupStatus, GuardAction, Mismatch

from motley_operator import manifests, names
from motley_operator.planner import budget, guard, ledger, measured, placement, scaling, stock
from motley_operator.planner.conditions import GROUP_CONDITIONS, RUN_CONDITIONS, Finding, merge
from motley_operator.planner.decide import Decided
from motley_operator.planner.lifecycle import (
    State,
    edited_since_start,
    gang_pods,
    invalid_configuration,
    last_words,
    restarts_gang,
)
from motley_operator.planner.model import GroupView, PodView, Snapshot, format_time, view_of

KEPT_DECISIONS = 10
MAX_GROUPS = 256


def decimal(value: float | None, digits: int = 4) -> str | None:
    """As DecimalString: plain, not negative, `digits` significant digits at most 9 after the point."""
    if value is None or value != value or value in (float("inf"), float("-inf")):
        return None
    rounded = Decimal(f"%.{digits - 1}e" % max(0.0, value))
    text = format(rounded.quantize(Decimal("0.000000001")), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(ratio: records.Ratio) -> str | None:
    value = guard.mean(ratio)
    return decimal(100 * value) if value is not None else None


def share_percent(milli: int) -> str:
    return format(Decimal(milli) / 10, "f")


def summary(findings: Sequence[Finding], kind: str) -> Finding:
    return next(finding for finding in findings if finding.type == kind)


# The run.


def run_status(seen: Snapshot, made: Decided) -> tuple[RLRunStatus, tuple[Finding, ...]]:
    old = seen.status
    findings = run_findings(seen, made)
    newest = made.new_steps[-1] if made.new_steps else None
    trainer = seen.trainer
    last = newest or (trainer.last if trainer is not None else None)
    step_costs = [*old.step_costs, *(ledger.step_cost(bill) for bill in made.bills)][-ledger.KEPT_STEP_COSTS :]
    groups = run_groups(seen, made)
    measured = _measured(last, old)
    evaluation = trainer.evaluation if trainer is not None else None
    found = RLRunStatus(
        observed_generation=seen.generation,
        conditions=merge(old.conditions, findings, RUN_CONDITIONS, made.now, seen.generation),
        status=summary(findings, "Succeeded").reason,
        step=max(trainer.step, newest.step if newest else 0)
        if trainer is not None
        else newest.step
        if newest
        else old.step,
        attempt=trainer.attempt if trainer is not None else newest.attempt if newest else old.attempt,
        weights_version=trainer.weights_version if trainer is not None else old.weights_version,
        evaluation_reward=decimal(guard.mean(evaluation.pass_at_1))
        if evaluation is not None
        else old.evaluation_reward,
        mismatch=_mismatch(seen, made, last),
        groups_ready=_groups_ready(seen, groups),
        groups=groups,
        step_costs=step_costs,
        cost_per_step=Cost(**ledger.mean_cost(step_costs)) if step_costs else None,
        totals=made.totals,
        guard=made.verdict.status,
        decisions=[*old.decisions, *decisions(seen, made)][-KEPT_DECISIONS:],
        **measured,
    )
    return found, findings


def _groups_ready(seen: Snapshot, rows: Sequence[GroupStatus]) -> str:
    there = {group.name for group in seen.groups}
    live = [row for row in rows if row.name in there]
    return f"{sum(row.engines > 0 and row.ready >= row.engines for row in live)}/{len(there)}"


def _measured(last: records.StepRecord | None, old: RLRunStatus) -> dict[str, str | None]:
    if last is None:
        return {"reward": old.reward, "entropy": old.entropy, "grad_norm": old.grad_norm}
    return {
        "reward": decimal(guard.mean(last.reward)),
        "entropy": decimal(guard.mean(last.entropy)),
        "grad_norm": decimal(last.grad_norm),
    }


def _mismatch(seen: Snapshot, made: Decided, last: records.StepRecord | None) -> Mismatch | None:
    if last is None:
        return seen.status.mismatch
    grown = guard.growth(made.series.run, seen.spec.guard.early_steps)
    return Mismatch(
        kl=decimal(guard.mean(last.kl)),
        out_of_range_percent=percent(last.out_of_range),
        growth=format(grown, "f") if grown is not None and grown < 10**9 else None,
    )


def run_groups(seen: Snapshot, made: Decided) -> list[GroupStatus]:
    old = {group.name: group for group in seen.status.groups}
    share = {group.name: group for group in made.fleet.groups}
    latest: dict[str, tuple[records.GroupStep, records.StepRecord]] = {}
    for record in sorted(seen.steps, key=lambda record: (record.attempt, record.step)):
        for item in record.groups:
            if item.samples or item.turns:
                latest[item.name] = (item, record)
    found = []
    for group in sorted(seen.groups, key=lambda group: group.name):
        if group.error:
            continue
        before = old.get(group.name)
        rate, per_turn = made.rates[group.name].turns_per_hour, made.rates[group.name].usd_per_turn
        placed = share.get(group.name)
        found.append(
            GroupStatus(
                name=group.name,
                gpu_type=group.spec.gpu_type,
                precision=group.spec.precision,
                engines=made.allotment.replicas.get(group.name, 0),
                ready=sum(pod.serves for pod in _pods(seen, group.name)),
                capacity_sessions=placed.capacity_sessions if placed else 0,
                share_percent=share_percent(placed.share_milli if placed else 0),
                **measured.row_fields(made.capacity[group.name]),
                samples=(before.samples if before else 0) + _trained(made, group.name),
                usd_per_turn=decimal(float(per_turn), 6) if per_turn is not None else None,
                turns_per_engine_hour=int(rate) if rate is not None and rate >= 1 else None,
                usd_per_million_tokens=_usd_per_million(group.name, made)
                or (before.usd_per_million_tokens if before else None),
                step_cost=_group_cost(group.name, made) or (before.step_cost if before else None),
                **_group_measures(latest.get(group.name), before),
            )
        )
    return sorted([*found, *_left(seen, made, old)], key=lambda group: group.name)[:MAX_GROUPS]


def _left(seen: Snapshot, made: Decided, old: Mapping[str, GroupStatus]) -> list[GroupStatus]:
    """Groups that left stay in the table with what they did; their last samples may still arrive."""
    there = {group.name for group in seen.groups}
    nothing = {"engines": 0, "ready": 0, "capacity_sessions": 0, "share_percent": "0"}
    return [
        row.model_copy(update={**nothing, "samples": row.samples + _trained(made, name)})
        for name, row in old.items()
        if name not in there
    ]


def _trained(made: Decided, group: str) -> int:
    return sum(item.samples for record in made.new_steps for item in record.groups if item.name == group)


def _group_measures(
    latest: tuple[records.GroupStep, records.StepRecord] | None, before: GroupStatus | None
) -> dict[str, Any]:
    """From the newest step that the group had samples in; else as they were."""
    if latest is None:
        names_ = ("kl", "kl_ratio", "out_of_range_percent", "ess_percent", "lag", "version")
        return {name: getattr(before, name) for name in names_} if before else {}
    item, record = latest
    own, whole = guard.mean(item.kl), guard.mean(record.kl)
    return {
        "kl": decimal(own),
        "kl_ratio": decimal(own / whole) if own is not None and whole else None,
        "out_of_range_percent": percent(item.out_of_range),
        "ess_percent": percent(item.ess),
        "lag": decimal(guard.mean(item.lag)),
        "version": item.version,
    }


def _usd_per_million(group: str, made: Decided) -> str | None:
    """Billed dollars of the group over the tokens that it generated, in the newest step that it has both for."""
    for bill, record in zip(reversed(made.bills), reversed(made.new_steps), strict=True):
        tokens = sum(item.generated_tokens for item in record.groups if item.name == group)
        part = bill.groups.get(group)
        paid = part.billed if part is not None else None
        if tokens and paid:
            return decimal(float(paid / tokens * 1_000_000))
    return None


def _group_cost(group: str, made: Decided) -> GroupCost | None:
    return ledger.group_cost(made.bills[-1], group) if made.bills else None


def _pods(seen: Snapshot, group: str) -> list[PodView]:
    return [pod for pod in seen.pods if pod.role == keys.ROLE_SAMPLER and pod.group == group and pod.exists]


def _role(seen: Snapshot, role: str) -> list[PodView]:
    return [pod for pod in seen.pods if pod.role == role and pod.exists]


def run_findings(seen: Snapshot, made: Decided) -> tuple[Finding, ...]:
    return (
        _succeeded(made),
        _configuration(seen, made),
        _samplers(seen, made),
        _trainer(seen, made),
        _router(seen, made),
        _capacity(seen),
        _price(seen, made),
        _store(seen),
        _budget(seen, made),
        _mismatch_healthy(seen, made),
        _quota(seen),
        _suspended(seen, made),
    )


def _succeeded(made: Decided) -> Finding:
    state = made.life.state
    status: Any = "True" if state is State.COMPLETED else "False" if made.life.ended else "Unknown"
    return Finding("Succeeded", status, state.value, made.life.message)


def _configuration(seen: Snapshot, made: Decided) -> Finding:
    if made.life.state is State.INVALID:
        return Finding("ConfigurationValid", "False", State.INVALID, made.life.message)
    if conflicts := name_conflicts(seen):
        return Finding("ConfigurationValid", "False", "NameConflict", "; ".join(conflicts))
    if words := invalid_configuration(seen):
        return Finding("ConfigurationValid", "False", State.INVALID, words)
    refused = [
        f"{kind} {name}: {error}"
        for (kind, name), error in sorted(seen.errors.items())
        if "exceeded quota" not in error
    ]
    if refused:
        return Finding("ConfigurationValid", "False", "Refused", "the API server refuses " + "; ".join(refused))
    if seen.trainer is not None:
        return Finding("ConfigurationValid", "True", "Accepted", "model, tasks and store were read")
    old = next((item for item in seen.status.conditions if item.type == "ConfigurationValid"), None)
    if old is not None and old.status == "True":
        return Finding("ConfigurationValid", "True", old.reason, old.message)
    return Finding("ConfigurationValid", "Unknown", "Pending", "the trainer has not read model, tasks and store yet")


def name_conflicts(seen: Snapshot) -> list[str]:
    """Objects that should be ours by name and belong to somebody else."""
    run = {seen.uid} | {group.uid for group in seen.groups}
    wanted = [
        ("Deployment", names.router(seen.name)),
        ("Deployment", names.rollout(seen.name)),
        ("Job", names.trainer(seen.name)),
    ]
    wanted += [("Service", names.router(seen.name)), ("Service", names.trainer(seen.name))]
    wanted += [("ConfigMap", names.run_config(seen.name)), ("ConfigMap", names.fleet(seen.name))]
    wanted += [("SamplerGroup", names.inline_group(seen.name, group.name)) for group in seen.spec.sampler_groups]
    for group in seen.groups:
        wanted += [("Deployment", group.name), ("ConfigMap", names.group_config(group.name))]
    found = []
    for kind, name in wanted:
        live = seen.child(kind, name)
        if live is not None and not run & {owner["uid"] for owner in live["metadata"].get("ownerReferences", [])}:
            found.append(f"{kind} {name} exists and is not this run's: rename one of them, or delete it")
    return found


def _samplers(seen: Snapshot, made: Decided) -> Finding:
    if made.life.stopped:
        return Finding("SamplersReady", "False", made.life.state, "no engine is wanted now")
    wanted = sum(made.allotment.replicas.values())
    ready = {group.name: sum(pod.serves for pod in _pods(seen, group.name)) for group in seen.groups}
    late = [
        f"{name} {ready[name]}/{replicas}"
        for name, replicas in sorted(made.allotment.replicas.items())
        if ready[name] < replicas
    ]
    if wanted == 0:
        return Finding(
            "SamplersReady",
            "False",
            "NoEngines",
            "no group may have an engine: apply a SamplerGroup, or see WithinBudget",
        )
    if late:
        return Finding(
            "SamplersReady",
            "False",
            "Waiting",
            f"{sum(ready.values())} of {wanted} engines are ready; {', '.join(late)}",
        )
    return Finding("SamplersReady", "True", "Ready", f"all {wanted} engines are ready")


def _trainer(seen: Snapshot, made: Decided) -> Finding:
    if made.life.stopped:
        return Finding("TrainerReady", "False", made.life.state, "no trainer is wanted now")
    pods = gang_pods(seen)
    if edited := edited_since_start(seen):
        text = f"{', '.join(f'spec.{name}' for name in edited)} changed: it saves, leaves, and goes on as declared now"
        return Finding("TrainerReady", "False", "Restarting", text)
    ready = sum(pod.serves for pod in pods)
    nodes = seen.spec.trainer.nodes
    if ready < nodes:
        ended = [pod for pod in _role(seen, keys.ROLE_TRAINER) if pod.exit_code]
        words = (
            f"; the last attempt ended with {ended[-1].exit_code}: {ended[-1].message.strip()[-300:]}" if ended else ""
        )
        return Finding("TrainerReady", "False", "Waiting", f"{ready} of {nodes} pods are ready{words}")
    if seen.trainer is None:
        return Finding("TrainerReady", "False", "Unreachable", seen.trainer_error or "no answer yet")
    if seen.trainer.condition:
        return Finding("TrainerReady", "False", seen.trainer.condition, seen.trainer.message)
    return Finding("TrainerReady", "True", "Ready", f"{nodes} pod(s) ready, attempt {seen.trainer.attempt}")


def _router(seen: Snapshot, made: Decided) -> Finding:
    if made.life.stopped:
        return Finding("RouterReady", "False", made.life.state, "no router is wanted now")
    if not any(pod.serves for pod in _role(seen, keys.ROLE_ROUTER)):
        return Finding(
            "RouterReady", "False", "Waiting", "the router's pod is not ready: new sessions wait, those that run go on"
        )
    if seen.router is None:
        return Finding("RouterReady", "False", "Unreachable", seen.router_error or "no answer yet")
    return Finding("RouterReady", "True", "Ready", "new sessions are placed")


def _capacity(seen: Snapshot) -> Finding:
    pods = [pod for pod in seen.pods if pod.exists and pod.finished is None]
    if not pods:
        return Finding("CapacityAvailable", "Unknown", "NoPods", "no pod asks for a place")
    stuck = [pod for pod in pods if pod.unschedulable and not pod.node]
    if not stuck:
        return Finding("CapacityAvailable", "True", "Scheduled", "every pod has a node, or is about to get one")
    by_part: dict[str, list[PodView]] = {}
    for pod in stuck:
        by_part.setdefault(pod.group or pod.role, []).append(pod)
    parts = [
        f"{part}: {len(found)} pod(s) wait: {found[0].unschedulable}{_seen_nodes(seen, found[0])}"
        for part, found in sorted(by_part.items())
    ]
    return Finding("CapacityAvailable", "False", "Unschedulable", "; ".join(parts))


def _seen_nodes(seen: Snapshot, pod: PodView) -> str:
    """The nodes and labels that were looked at, for a pod with GPUs."""
    if seen.nodes_error and pod.gpu_type:
        return f" ({seen.nodes_error})"
    if seen.nodes is None or not pod.gpu_type:
        return ""
    group = next((group for group in seen.groups if group.name == pod.group), None)
    ask = placement.trainer_ask(seen.spec.trainer) if group is None else placement.ask_of(group.spec)
    return f" ({placement.availability(seen.nodes, ask).describe()})"


def _price(seen: Snapshot, made: Decided) -> Finding:
    used = {(group.spec.gpu_type.value, group.spec.capacity_type.value) for group in seen.groups if not group.error}
    used.add((seen.spec.trainer.gpu_type.value, seen.spec.trainer.capacity_type.value))
    if seen.spec.baseline is not None:
        used.add((seen.spec.baseline.gpu_type.value, "OnDemand"))
    missing = sorted(used - made.prices.keys())
    if missing:
        listed = ", ".join(f"{gpu} {capacity}" for gpu, capacity in missing)
        return Finding(
            "PriceKnown",
            "False",
            "PriceMissing",
            f"no price for {listed}: add it to spec.prices; until then cost is not known",
        )
    return Finding("PriceKnown", "True", "Known", "every GPU type in use has a price")


def _store(seen: Snapshot) -> Finding:
    store = seen.spec.store
    if names.store_mount(store.url) is not None and not store.claim_name:
        text = f"{store.url} is a path and store.claimName is not set: it must be one folder in all pods, as nothing is mounted there"
        return Finding("StoreDurable", "Unknown", "NoClaim", text)
    if names.store_mount(store.url) is not None:
        text = f"checkpoints, trajectories, weights and ledger lie under {store.url}"
        return Finding("StoreDurable", "True", "FileSystem", text)
    text = (
        f"checkpoints and trajectories lie on the trainer pod's own disk and go with it: only weights and ledger are in {store.url}. "
        "A run whose trainer is evicted, suspended or paused starts again from model.source: for one that matters use a file system as"
        " store.url"
    )
    return Finding("StoreDurable", "False", "PodScratch", text)


def _budget(seen: Snapshot, made: Decided) -> Finding:
    if made.life.state is State.BUDGET_SPENT:
        return Finding("WithinBudget", "False", "BudgetSpent", made.life.message)
    if made.allotment.short:
        parts = "; ".join(f"{name}: {why}" for name, why in sorted(made.allotment.short.items()))
        return Finding("WithinBudget", "False", "BudgetLimits", parts)
    limits = seen.spec.budget
    if limits.usd_total is not None and made.totals.billed_usd is None:
        return Finding("WithinBudget", "Unknown", "PriceMissing", "budget.usdTotal cannot be held to without prices")
    spent = budget.spent_share(limits.usd_total, made.totals.billed_usd)
    if spent is not None and spent >= budget.TOLD_AT:
        held = spent >= budget.HELD_AT
        text = (
            f"over {100 * (budget.HELD_AT if held else budget.TOLD_AT):.0f}% of budget.usdTotal ${limits.usd_total} is spent; "
            + ("no engine is added" if held else f"from {100 * budget.HELD_AT:.0f}% on no engine is added")
            + ", and at the whole of it the run saves and its pods go: raise it in time"
        )
        return Finding("WithinBudget", "False", "NoGrowth" if held else "NearlySpent", text)
    if limits.usd_total is None and limits.usd_per_hour is None:
        return Finding("WithinBudget", "True", "NoBudget", "spec.budget sets no cap")
    return Finding("WithinBudget", "True", "Within", "under every cap of spec.budget")


def _mismatch_healthy(seen: Snapshot, made: Decided) -> Finding:
    verdict = made.verdict
    actions = [item.action for item in verdict.status.groups]
    actions += [verdict.status.action] if verdict.status.action is not None else []
    if not actions and verdict.healthy is None:
        return Finding("MismatchHealthy", "Unknown", "TooEarly", "the early level is not known yet")
    if not actions:
        return Finding("MismatchHealthy", "True", "Steady", "nothing grew past its threshold")
    action = verdict.status.action or max(actions, key=guard.ORDER.index)
    reason = {GuardAction.WARN: "Warned", GuardAction.THROTTLE: "Throttled", GuardAction.QUARANTINE: "Quarantined"}
    # Of a run that rests nobody tells the steps any more: what was said when it was decided stays.
    said = next((item.message for item in seen.status.conditions if item.type == "MismatchHealthy"), "")
    before = said if seen.status.guard == verdict.status else ""
    text = verdict.message or before or "held by an earlier decision"
    if verdict.message and verdict.status.action is GuardAction.PAUSE:
        text += _way_back(seen, made)
    return Finding("MismatchHealthy", "False", reason.get(action, "Paused"), text)


def _way_back(seen: Snapshot, made: Decided) -> str:
    """The last checkpoint from before it grew."""
    held, every = made.verdict.status.since_step, seen.spec.checkpoint.every_steps
    grown = guard.streak(made.series.run, guard.Thresholds.of(seen.spec.guard), held).above
    if not grown:
        return ""
    before = (made.series.run[-1].step - grown) // every * every
    if before < 1:
        return "; no checkpoint is from before it grew"
    return f"; the last checkpoint from before it grew is of step {before}: checkpoint.rewindToStep goes back to it"


def _quota(seen: Snapshot) -> Finding:
    refused = {**seen.errors, **seen.failed_creates}
    found = [f"{kind} {name}: {text}" for (kind, name), text in sorted(refused.items()) if "exceeded quota" in text]
    if found:
        return Finding("QuotaExceeded", "True", "QuotaExceeded", "; ".join(found))
    return Finding("QuotaExceeded", "False", "NotExceeded", "no quota refused anything")


def _suspended(seen: Snapshot, made: Decided) -> Finding:
    left = sorted(pod.name for pod in seen.pods if pod.exists and pod.finished is None)
    if not made.life.resting:
        return Finding("Suspended", "False", "NotSuspended", "")
    if left:
        return Finding("Suspended", "False", "Suspending", f"{len(left)} pod(s) are still there: {', '.join(left[:5])}")
    return Finding("Suspended", "True", made.life.state, "no pod is left")


def decisions(seen: Snapshot, made: Decided) -> list[Decision]:
    """What was decided anew, why, and with which numbers."""
    time = format_time(made.now)
    found = []
    if made.fleet_before is not None and made.fleet is not made.fleet_before:
        if moved := _moved_shares(seen, made):
            found.append(Decision(time=time, what=f"shares: {moved[0]}"[:1024], why=moved[1][:4096]))
        if made.fleet.paused != made.fleet_before.paused:
            what = "no new work or sessions" if made.fleet.paused else "new work and sessions again"
            found.append(Decision(time=time, what=what, why=f"{made.life.state}: {made.life.message}"[:4096]))
    for subject, action, why in made.verdict.news:
        found.append(Decision(time=time, what=f"guard: {action} {subject or 'the run'}", why=why[:4096]))
    if edited := restarts_gang(seen, made.life):
        what = "the trainer saves and starts again"
        found.append(Decision(time=time, what=what, why=f"changed: {', '.join(f'spec.{name}' for name in edited)}"))
    for name, now in sorted(made.capacity.items()):
        if now.why:
            was = measured.text(measured.remembered_of(seen, name).sessions)
            what = f"capacity: {name} {was} -> {measured.text(now.sessions)} sessions an engine"
            found.append(Decision(time=time, what=what[:1024], why=now.why[:4096]))
    now_shares = ", ".join(f"{row.name} {share_percent(row.share_milli)}%" for row in made.fleet.groups)
    for what, why in stock.news(seen, made.now, now_shares):
        found.append(Decision(time=time, what=what[:1024], why=why[:4096]))
    if made.resize.news is not None:
        what, why = made.resize.news
        found.append(Decision(time=time, what=what[:1024], why=why[:4096]))
    if made.allotment.short:
        old = next((item for item in seen.status.conditions if item.type == "WithinBudget"), None)
        text = "; ".join(f"{name}: {why}" for name, why in sorted(made.allotment.short.items()))
        if old is None or old.message != text:
            found.append(Decision(time=time, what="fewer engines than asked for", why=text[:4096]))
    return found


def _moved_shares(seen: Snapshot, made: Decided) -> tuple[str, str] | None:
    before = {group.name: group for group in made.fleet_before.groups} if made.fleet_before is not None else {}
    moved, why = [], []
    for group in made.fleet.groups:
        old = before.get(group.name)
        was = old.share_milli if old is not None else 0
        if was != group.share_milli:
            moved.append(f"{group.name} {share_percent(was)} -> {share_percent(group.share_milli)}%")
        if old is None or old.capacity_sessions != group.capacity_sessions:
            why.append(
                f"{group.name} serves {group.capacity_sessions} sessions, was {old.capacity_sessions if old else 0}"
            )
    why += [f"{name} left" for name in sorted(before.keys() - {group.name for group in made.fleet.groups})]
    return (", ".join(moved), "; ".join(why) or "the guard's decision") if moved else None


# Groups.


def group_statuses(
    seen: Snapshot, made: Decided
) -> tuple[Mapping[str, SamplerGroupStatus], Mapping[str, tuple[Finding, ...]]]:
    rows = {group.name: group for group in run_groups(seen, made)}
    statuses, findings = {}, {}
    for group in seen.groups:
        found = group_findings(seen, made, group)
        row = rows.get(group.name)
        pods = _pods(seen, group.name)
        findings[group.name] = found
        statuses[group.name] = SamplerGroupStatus(
            observed_generation=group.generation,
            conditions=merge(group.status.conditions, found, GROUP_CONDITIONS, made.now, group.generation),
            replicas=sum(pod.deletion is None for pod in pods),
            ready_replicas=sum(pod.serves for pod in pods),
            selector=selector(seen.name, group.name),
            capacity_sessions=row.capacity_sessions if row else None,
            share_percent=row.share_percent if row else None,
            out_of_range_percent=row.out_of_range_percent if row else None,
            version=row.version if row and row.version >= 0 else None,
            usd_per_million_tokens=row.usd_per_million_tokens if row else None,
            status=summary(found, "Ready").reason,
        )
    return statuses, findings


def selector(run: str, group: str) -> str:
    return ",".join(f"{key}={value}" for key, value in manifests.labels(run, keys.ROLE_SAMPLER, group).items())


def group_findings(seen: Snapshot, made: Decided, group: GroupView) -> tuple[Finding, ...]:
    if group.error:
        return (
            Finding("Ready", "False", "InvalidSpec", group.error),
            Finding("RunFound", "True", "Found", f"RLRun {seen.name}"),
        )
    conformant = _conformant(seen, group)
    placed = _placed(seen, made, group)
    return (
        _group_ready(seen, made, group, conformant, placed),
        Finding("RunFound", "True", "Found", f"RLRun {seen.name}"),
        _precision(group),
        placed,
        conformant,
        measured.finding(seen, group),
        scaling.finding(made.conflicts.get(group.name), group.name),
    )


def _precision(group: GroupView) -> Finding:
    gpu = GPU_TYPES[group.spec.gpu_type]
    need = MIN_COMPUTE_CAPABILITY[group.spec.precision]
    have, want = (".".join(map(str, version)) for version in (gpu.compute_capability, need))
    if placement.supported(group):
        text = f"{gpu.name.value} has compute capability {have}; {group.spec.precision.value} needs {want}"
        return Finding("PrecisionSupported", "True", "Supported", text)
    able = ", ".join(other.name.value for other in GPU_TYPES.values() if other.runs(group.spec.precision))
    text = f"precision {group.spec.precision.value} must be on one of {able}: {gpu.name.value} has compute capability {have}, not {want}"
    return Finding("PrecisionSupported", "False", "NotSupported", text)


def _placed(seen: Snapshot, made: Decided, group: GroupView) -> Finding:
    pods = [pod for pod in _pods(seen, group.name) if pod.deletion is None]
    wanted = made.allotment.replicas.get(group.name, 0)
    if stuck := stock.without_node(seen, group.name):
        found = stock.placed(seen, group, made.now, _seen_nodes(seen, stuck[0]))
        assert found is not None
        return found
    refused = seen.failed_creates.get(("Deployment", group.name)) or seen.errors.get(("Deployment", group.name))
    if refused:
        return Finding("Placed", "False", "QuotaExceeded" if "exceeded quota" in refused else "Refused", refused)
    placed = sum(bool(pod.node) for pod in pods)
    if wanted == 0:
        return Finding("Placed", "Unknown", "NoEngines", "no engine is wanted now")
    if placed < wanted:
        return Finding("Placed", "Unknown", "Pending", f"{placed} of {wanted} pods have a node")
    return Finding(
        "Placed", "True", "Scheduled", f"{placed} pod(s) on {', '.join(sorted({pod.node for pod in pods})[:5])}"
    )


def _conformant(seen: Snapshot, group: GroupView) -> Finding:
    engines = (
        [engine for engine in seen.router.engines if engine.group == group.name] if seen.router is not None else []
    )
    failed = {
        engine.id: (engine.reason, f"{engine.message or engine.reason} (log-prob mode {engine.logprob_mode})")
        for engine in engines
        if engine.reason in records.NOT_CONFORMANT
    }
    # One that gave up starts again and reports nothing of it; its last words stay until it serves.
    for pod in _pods(seen, group.name):
        reason = last_words(pod).partition(":")[0]
        if pod.exit_code == keys.EXIT_GAVE_UP and reason in records.NOT_CONFORMANT and not pod.serves:
            failed.setdefault(pod.name, (reason, f"gave up: {last_words(pod)}"))
    if failed:
        text = "; ".join(f"{name}: {words}" for name, (_, words) in sorted(failed.items())[:3])
        return Finding("Conformant", "False", failed[min(failed)][0], text)
    if not engines:
        return Finding("Conformant", "Unknown", "NoEngines", "no engine of the group reports to the router")
    proven = [engine for engine in engines if engine.ready]
    if not proven:
        return Finding(
            "Conformant", "Unknown", engines[0].reason or "Loading", engines[0].message or "no engine is proven yet"
        )
    # No number here: it moves with every version, and a status that moves is written.
    return Finding("Conformant", "True", "Proven", f"{len(proven)} engine(s), log-prob mode {proven[0].logprob_mode}")


def _group_ready(seen: Snapshot, made: Decided, group: GroupView, conformant: Finding, placed: Finding) -> Finding:
    wanted = made.allotment.replicas.get(group.name, 0)
    ready = sum(pod.serves for pod in _pods(seen, group.name))
    if made.life.stopped:
        return Finding("Ready", "False", made.life.state, f"the run is {made.life.state}")
    if not placement.supported(group):
        return Finding("Ready", "False", "NotSupported", _precision(group).message)
    if group.deleting:
        return Finding("Ready", "False", "Deleting", "its engines drain")
    if made.verdict.action(group.name) is GuardAction.QUARANTINE:
        return Finding(
            "Ready", "False", "Quarantined", made.verdict.message or "its mismatch grew past the guard's thresholds"
        )
    words = next((last_words(pod) for pod in _pods(seen, group.name) if pod.exit_code == keys.EXIT_CONFIG), None)
    if words is not None:
        return Finding("Ready", "False", State.INVALID, words)
    if conformant.status == "False":
        return Finding("Ready", "False", conformant.reason, conformant.message)
    if placed.status == "False":
        return Finding("Ready", "False", placed.reason, placed.message)
    if group.name in made.allotment.short and wanted == 0:
        return Finding("Ready", "False", "BudgetLimits", made.allotment.short[group.name])
    if wanted == 0:
        return Finding("Ready", "False", "NoEngines", "replicas is 0")
    if ready < wanted:
        waiting = next((pod.waiting for pod in _pods(seen, group.name) if pod.waiting), "")
        return Finding("Ready", "False", waiting or "Loading", f"{ready} of {wanted} engines are ready")
    return Finding("Ready", "True", "Ready", f"{ready} engine(s), view {view_of(group.spec)}")


def orphan_status(
    group: SamplerGroupStatus, run: str, generation: int, now: datetime
) -> tuple[SamplerGroupStatus, tuple[Finding, ...]]:
    """A group whose run is not there: a condition, not a crash."""
    text = f"spec.runRef names RLRun {run}, which is not in this namespace: apply it, or delete this group"
    found = (Finding("Ready", "False", "RunNotFound", text), Finding("RunFound", "False", "RunNotFound", text))
    conditions: list[Condition] = merge(group.conditions, found, GROUP_CONDITIONS, now, generation)
    return SamplerGroupStatus(observed_generation=generation, conditions=conditions, status="RunNotFound"), found
