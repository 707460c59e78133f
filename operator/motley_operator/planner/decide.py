"""What is decided about one run, before a single object or a line of status is made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal

import msgspec
from motley_api import keys, records
from motley_api.resources.rlrun import GuardAction, Totals

from motley_operator import names
from motley_operator.planner import budget, cost, guard, ledger, lifecycle, measured, placement, resize, scaling, shares
from motley_operator.planner.capacity import Capacity
from motley_operator.planner.lifecycle import Life
from motley_operator.planner.model import (
    GroupView,
    Snapshot,
    view_of,
)


@dataclass(frozen=True)
class Decided:
    """Everything that the objects and the status are made from."""

    now: datetime
    life: Life
    verdict: guard.Verdict
    series: guard.Series
    prices: Mapping[cost.PriceKey, Decimal]
    rates: Mapping[str, cost.EngineRate]
    capacity: Mapping[str, Capacity]
    new_steps: tuple[records.StepRecord, ...]
    bills: tuple[cost.StepBill, ...]
    totals: Totals
    allotment: budget.Allotment
    fleet_before: records.Fleet | None
    fleet: records.Fleet
    resize: resize.Resize
    conflicts: Mapping[str, scaling.Conflict]


def decide(seen: Snapshot, now: datetime) -> Decided:
    prices = cost.price_table(seen.spec.prices)
    rates = engine_rates(seen, prices)
    per_engine = measured.of(seen)
    new = ledger.fresh(seen.steps, seen.status, seen.created)
    bills = ledger.bills(
        new,
        seen.steps,
        pods=seen.pods,
        prices=prices,
        rates=rates,
        baseline=seen.spec.baseline,
        capacity_sessions=sum(group.sessions for group in capacities(seen, None, per_engine)),
    )
    totals = ledger.totals(
        seen.status.totals or Totals(),
        new=new,
        new_bills=bills,
        repeated_steps=ledger.repeated(new, seen.status),
        pods=seen.pods,
        prices=prices,
        now=now,
    )
    lineage = ledger.lineage(seen.steps)
    series = guard.series(lineage)
    verdict = guard.judge(
        seen.spec.guard,
        seen.generation,
        lifecycle.judged_again(seen, lineage),
        series,
        (group.name for group in seen.groups),
        reached=seen.status.step or 0,
    )
    life = lifecycle.judge(seen, totals, guard_paused=verdict.paused, guard_message=_pause_reason(seen, verdict))
    before = fleet_before(seen)
    conflicts = scaling.conflicts(seen, now)
    sized = resized(seen, now, life, verdict, rates, prices, per_engine, conflicts)
    allotment = allot(seen, life, prices, held_targets(seen, sized.targets, totals))
    groups_now = capacities(seen, verdict, per_engine, allotment)
    short_of = short_of_minimum(seen, life, groups_now)
    if short_of:
        life = replace(life, message=f"{life.message}; {_waits_for(seen, short_of, groups_now)}")
    wanted = shares.fleet(
        groups_now,
        generation=0,
        paused=life.stopped or short_of > 0,
    )
    heard = max(
        seen.router.fleet_generation if seen.router is not None else 0,
        seen.trainer.fleet_generation if seen.trainer is not None else 0,
    )
    fleet = shares.next_fleet(before, wanted, heard)
    if not life.stopped:
        allotment = resize.transaction(
            seen,
            allotment,
            {group.name: asked_engines(seen, group.name) for group in seen.groups},
            {group.name: existing_engines(seen, group.name) for group in seen.groups},
            contested=conflicts.keys(),
            shifted=seen.router is None or seen.router.fleet_generation >= fleet.generation,
        )
    return Decided(
        now=now,
        life=life,
        verdict=verdict,
        series=series,
        prices=prices,
        rates=rates,
        capacity=per_engine,
        new_steps=new,
        bills=bills,
        totals=totals,
        allotment=allotment,
        fleet_before=before,
        fleet=fleet,
        resize=sized,
        conflicts=conflicts,
    )


def short_of_minimum(seen: Snapshot, life: Life, groups: Sequence[shares.GroupCapacity]) -> int:
    """Sessions that rollout.minimumCapacityPercent demands before the first one starts, while ready engines serve fewer; else 0."""
    percent = seen.spec.rollout.minimum_capacity_percent
    if not percent or life.state is not lifecycle.State.STARTING:
        return 0
    demanded = -(-percent * declared_sessions(seen) // 100)
    return demanded if sum(group.sessions for group in groups if not group.quarantined) < demanded else 0


def declared_sessions(seen: Snapshot) -> int:
    return sum(resize.declared(group.spec) * group.spec.sessions_per_engine for group in seen.groups)


def _waits_for(seen: Snapshot, demanded: int, groups: Sequence[shares.GroupCapacity]) -> str:
    there = sum(group.sessions for group in groups if not group.quarantined)
    return (
        f"no session starts before ready engines serve {demanded} of {declared_sessions(seen)} declared sessions"
        f" (rollout.minimumCapacityPercent {seen.spec.rollout.minimum_capacity_percent}); they serve {there}"
    )


def resized(
    seen: Snapshot,
    now: datetime,
    life: Life,
    verdict: guard.Verdict,
    rates: Mapping[str, cost.EngineRate],
    prices: Mapping[cost.PriceKey, Decimal],
    per_engine: Mapping[str, Capacity],
    conflicts: Mapping[str, scaling.Conflict],
) -> resize.Resize:
    limits = caps(seen, prices)
    cap, trainer = limits.usd_per_hour, limits.fixed_usd_per_hour
    unknown = cap is not None and trainer is None  # fails closed: the cap leaves no known part to the samplers
    return resize.judge(
        seen,
        now,
        rates,
        per_engine,
        {group.name: existing_engines(seen, group.name) for group in seen.groups},
        samplers_usd_per_hour=None if cap is None or trainer is None else cap - trainer,
        samplers_gpus=None if limits.gpus is None else limits.gpus - limits.fixed_gpus,
        quarantined=frozenset(
            group.name for group in seen.groups if verdict.action(group.name) is GuardAction.QUARANTINE
        ),
        contested={
            group.name: conflicts[group.name].replicas
            if conflicts[group.name].kind == "Deployment"
            else resize.declared(group.spec)
            for group in seen.groups
            if group.name in conflicts
        },
        running=not unknown and not life.stopped,
    )


def _pause_reason(seen: Snapshot, verdict: guard.Verdict) -> str:
    """What paused the run: now, or as the status has held it since."""
    old = next(
        (item.message for item in seen.status.conditions if item.type == "MismatchHealthy" and item.status == "False"),
        "",
    )
    held = seen.status.guard is not None and seen.status.guard.action is GuardAction.PAUSE
    return old if held and old else verdict.message


def engine_rates(seen: Snapshot, prices: Mapping[cost.PriceKey, Decimal]) -> dict[str, cost.EngineRate]:
    """Price and throughput of one engine of each group: declared turns, else measured now, else as last measured."""
    engines: dict[str, list[records.EngineState]] = {}
    for engine in seen.router.engines if seen.router is not None else []:
        engines.setdefault(engine.group, []).append(engine)
    remembered = {group.name: group.turns_per_engine_hour for group in seen.status.groups}
    found = {}
    for group in seen.groups:
        seen_now = cost.measured_turns_per_hour(engines.get(group.name, ()))
        last = remembered.get(group.name)
        declared = group.spec.turns_per_engine_hour
        turns = Decimal(declared) if declared else seen_now or (Decimal(last) if last else None)
        found[group.name] = cost.EngineRate(
            group=group.name,
            usd_per_hour=engine_usd_per_hour(group, prices),
            turns_per_hour=turns,
            sessions=group.spec.sessions_per_engine,
            engines=max(1, ready_engines(seen, group.name)),
        )
    for row in seen.status.groups:
        if row.name not in found and row.usd_per_turn is not None:
            left = Decimal(row.usd_per_turn)
            found[row.name] = cost.EngineRate(row.name, None, None, sessions=0, engines=0, last_usd_per_turn=left)
    return found


def engine_usd_per_hour(group: GroupView, prices: Mapping[cost.PriceKey, Decimal]) -> Decimal | None:
    price = prices.get((group.spec.gpu_type.value, group.spec.capacity_type.value))
    return None if price is None else price * group.spec.gpus_per_engine


def ready_engines(seen: Snapshot, group: str) -> int:
    return sum(pod.serves for pod in seen.pods if pod.role == keys.ROLE_SAMPLER and pod.group == group)


def capacities(
    seen: Snapshot,
    verdict: guard.Verdict | None,
    per_engine: Mapping[str, Capacity],
    allotment: budget.Allotment | None = None,
) -> list[shares.GroupCapacity]:
    """Of ready engines; of a group that is to shrink, those that stay: its share leaves before its engines do."""

    def ready(group: GroupView) -> int:
        there = ready_engines(seen, group.name)
        shrinks = allotment is not None and resize.movable(group.spec)
        return min(there, allotment.replicas[group.name]) if allotment is not None and shrinks else there

    return [
        shares.GroupCapacity(
            name=group.name,
            view=view_of(group.spec),
            ready_engines=ready(group),
            sessions_per_engine=per_engine[group.name].sessions,
            most_per_engine=per_engine[group.name].whole if per_engine[group.name].source == "Measured" else 0,
            throttled=verdict is not None and verdict.action(group.name) is GuardAction.THROTTLE,
            quarantined=verdict is not None and verdict.action(group.name) is GuardAction.QUARANTINE,
        )
        for group in seen.groups
        if usable(group)
    ]


def usable(group: GroupView) -> bool:
    return not group.deleting and not group.error and placement.supported(group)


def fleet_before(seen: Snapshot) -> records.Fleet | None:
    """As it was decided last: fleet.json in the ConfigMap."""
    config = seen.child("ConfigMap", names.fleet(seen.name))
    text = (config or {}).get("data", {}).get(keys.FLEET_KEY, "")
    try:
        return msgspec.json.decode(text, type=records.Fleet) if text else None
    except msgspec.MsgspecError:
        return None  # edited by hand into something else: decided anew, above what the router has heard


def trainer_usd_per_hour(seen: Snapshot, prices: Mapping[cost.PriceKey, Decimal]) -> Decimal | None:
    trainer = seen.spec.trainer
    price = prices.get((trainer.gpu_type.value, trainer.capacity_type.value))
    return None if price is None else price * trainer.nodes * trainer.gpus_per_node


def held_targets(seen: Snapshot, targets: Mapping[str, int], totals: Totals) -> Mapping[str, int]:
    """Targets; near the end of budget.usdTotal no more than there is or a person asked for: the operator adds nothing by itself."""
    share = budget.spent_share(seen.spec.budget.usd_total, totals.billed_usd)
    if share is None or share < budget.HELD_AT:
        return targets
    return {
        group.name: min(targets[group.name], max(existing_engines(seen, group.name), group.spec.replicas))
        for group in seen.groups
    }


def allot(
    seen: Snapshot, life: Life, prices: Mapping[cost.PriceKey, Decimal], targets: Mapping[str, int]
) -> budget.Allotment:
    if life.stopped:
        return budget.Allotment({group.name: 0 for group in seen.groups}, {})
    wants = [
        budget.Want(
            name=group.name,
            replicas=targets[group.name] if usable(group) else 0,
            min_replicas=group.spec.min_replicas or 0,
            existing=existing_engines(seen, group.name),
            usd_per_engine_hour=engine_usd_per_hour(group, prices),
            gpus_per_engine=group.spec.gpus_per_engine,
        )
        for group in seen.groups
    ]
    return budget.allot(wants, caps(seen, prices))


def caps(seen: Snapshot, prices: Mapping[cost.PriceKey, Decimal]) -> budget.Caps:
    limits, trainer = seen.spec.budget, seen.spec.trainer
    return budget.Caps(
        usd_per_hour=None if limits.usd_per_hour is None else Decimal(limits.usd_per_hour),
        fixed_usd_per_hour=trainer_usd_per_hour(seen, prices),
        gpus=limits.gpus,
        fixed_gpus=trainer.nodes * trainer.gpus_per_node,
    )


def asked_engines(seen: Snapshot, group: str) -> int:
    deployment = seen.child("Deployment", group)
    return int(deployment.get("spec", {}).get("replicas", 0)) if deployment is not None else 0


def existing_engines(seen: Snapshot, group: str) -> int:
    pods = sum(
        pod.holds and (pod.deletion is None or pod.scheduled is not None)
        for pod in seen.pods
        if pod.role == keys.ROLE_SAMPLER and pod.group == group
    )
    return max(asked_engines(seen, group), pods)
