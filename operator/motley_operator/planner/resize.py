"""Engines of groups that declare minReplicas or maxReplicas: chosen by the integer program, changed as a transaction.

A decision is kept in the fleet's ConfigMap before anything moves, so that a restarted operator goes on with it. It holds for a
group until its replicas, minReplicas or maxReplicas are edited. Then: shift (shares leave the engines that go), drain and shrink
(once the router has heard), grow (once they are gone). Between two decisions pass `EVERY` or more.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from fractions import Fraction

import msgspec
from motley_api import keys
from motley_api.resources import SamplerGroupSpec

from motley_operator import names
from motley_operator.planner import placement, rebalance, stock
from motley_operator.planner.budget import Allotment
from motley_operator.planner.capacity import Capacity
from motley_operator.planner.cost import HOUR_S, EngineRate, usd
from motley_operator.planner.model import GroupView, Snapshot, format_time, parse_time

EVERY = timedelta(minutes=5)
HORIZON_HOURS = Decimal(1)  # a move has to pay for itself within this
START_HOURS = Decimal("0.25")  # an engine costs this long before it serves: image, weights, conformance
STATE_KEY = "resize.json"
SOLVE_S = 1.0  # for the best fleet there is; then the best one found


class Chosen(msgspec.Struct, frozen=True):
    """For one group; valid while its spec says the same."""

    engines: int
    replicas: int
    minimum: int
    maximum: int


class State(msgspec.Struct, frozen=True):
    time: str = ""  # of the last decision
    groups: dict[str, Chosen] = {}


@dataclass(frozen=True)
class Resize:
    """What every group should have, and what is new about it."""

    targets: Mapping[str, int]
    state: State
    news: tuple[str, str] | None = None  # what, why


def movable(spec: SamplerGroupSpec) -> bool:
    return spec.min_replicas is not None or spec.max_replicas is not None


def bounds(spec: SamplerGroupSpec) -> tuple[int, int]:
    """Fewest and most engines; what is not declared is `replicas`, as far as the other allows."""
    low, high = spec.min_replicas, spec.max_replicas
    if low is None:
        low = spec.replicas if high is None else min(spec.replicas, high)
    return low, max(low, spec.replicas) if high is None else high


def declared(spec: SamplerGroupSpec) -> int:
    low, high = bounds(spec)
    return min(max(spec.replicas, low), high)


def state_of(seen: Snapshot) -> State:
    """As it was decided last; what cannot be read is decided anew."""
    text = (seen.child("ConfigMap", names.fleet(seen.name)) or {}).get("data", {}).get(STATE_KEY, "")
    try:
        return msgspec.json.decode(text, type=State) if text else State()
    except msgspec.MsgspecError:
        return State()


def target(group: GroupView, state: State) -> int:
    low, high = bounds(group.spec)
    chosen = state.groups.get(group.name)
    if not movable(group.spec):
        return group.spec.replicas
    if chosen is None or (chosen.replicas, chosen.minimum, chosen.maximum) != (group.spec.replicas, low, high):
        return declared(group.spec)
    return min(max(chosen.engines, low), high)


def held(seen: Snapshot, group: str) -> int:
    """Engines that hold their GPUs."""
    return sum(
        pod.holds and pod.scheduled is not None
        for pod in seen.pods
        if pod.role == keys.ROLE_SAMPLER and pod.group == group
    )


def option(
    group: GroupView,
    engines: int,
    rate: EngineRate,
    *,
    sessions: int | Fraction,
    effective: Decimal,
    serves: bool,
    placeable: int | None,
) -> rebalance.Option:
    spec = group.spec
    low, high = bounds(spec) if movable(spec) else (engines, engines)
    hourly = rate.usd_per_hour
    return rebalance.Option(
        name=group.name,
        pool=(spec.gpu_type.value, spec.capacity_type.value),
        gpus_per_engine=spec.gpus_per_engine,
        sessions=sessions if serves else 0,
        engines=engines,
        minimum=low,
        maximum=high,
        usd_per_hour=hourly,
        turns_per_hour=(rate.turns_per_hour or None) if serves else None,
        effective=effective,
        placeable=placeable,
        start_usd=(hourly or Decimal(0)) * START_HOURS,
        leave_usd=(hourly or Decimal(0)) * spec.drain_seconds / HOUR_S,
    )


def placeable(seen: Snapshot, group: GroupView, engines: int, waiting: int) -> int | None:
    """Most engines that the nodes hold; None where they are not looked at. What is not known is not there."""
    limits = [engines - waiting] if waiting else []
    if seen.nodes_error:
        limits.append(engines)
    elif seen.nodes is not None:
        room = placement.availability(seen.nodes, placement.ask_of(group.spec))
        fits = held(seen, group.name) + room.engines(group.spec.gpus_per_engine)
        limits.append(max(engines, fits) if room.unknown else fits)
    return max(0, min(limits)) if limits else None


def options(
    seen: Snapshot,
    now: datetime,
    targets: Mapping[str, int],
    rates: Mapping[str, EngineRate],
    per_engine: Mapping[str, Capacity],
    quarantined: frozenset[str],
    may_move: AbstractSet[str],
) -> list[rebalance.Option]:
    ess = {row.name: Decimal(row.ess_percent) / 100 for row in seen.status.groups if row.ess_percent}
    found = []
    for group in seen.groups:
        if group.deleting or group.error:
            continue
        engines, waiting = targets[group.name], len(stock.out(seen, group.name, now))
        made = option(
            group,
            engines,
            rates[group.name],
            sessions=per_engine[group.name].sessions,
            effective=min(Decimal(1), ess.get(group.name) or Decimal(1)),
            serves=group.name not in quarantined,
            placeable=placeable(seen, group, engines, waiting),
        )
        if group.name not in may_move:
            there = max(0, engines - waiting)  # of what was asked for, what is there
            made = replace(made, engines=there, minimum=there, maximum=there)
        found.append(made)
    return found


def pools(seen: Snapshot, wanted: list[rebalance.Option]) -> dict[rebalance.Pool, int]:
    """GPUs of each type that the run's engines hold or could have; no limit where nodes are not looked at."""
    if seen.nodes is None:
        return {}
    nodes: dict[rebalance.Pool, dict[str, int]] = {}  # a pool's groups may ask for different zones of it
    for group in seen.groups:
        pool = group.spec.gpu_type.value, group.spec.capacity_type.value
        room = placement.availability(seen.nodes, placement.ask_of(group.spec))
        nodes.setdefault(pool, {}).update(room.free_by_node)
    found = {pool: sum(free.values()) for pool, free in nodes.items()}
    for made in wanted:
        found[made.pool] += held(seen, made.name) * made.gpus_per_engine
    return found


def effective_turns_consumed(seen: Snapshot) -> Decimal | None:
    """Effective turns an hour that the trainer took in the remembered last steps of this attempt."""
    last = [record for record in seen.steps if record.attempt == max(item.attempt for item in seen.steps)][-10:]
    if len(last) < 2:
        return None
    seconds = last[-1].finished_unix_s - last[0].finished_unix_s
    turns = sum(
        group.turns * (group.ess.num / group.ess.den if group.ess.den else 1.0)
        for record in last[1:]
        for group in record.groups
    )
    return Decimal(round(turns * HOUR_S / seconds)) if seconds > 0 else None


def due(seen: Snapshot, now: datetime) -> bool:
    """Whether it is time for a decision, as far as can be seen without the nodes."""
    before = parse_time(state_of(seen).time)
    sized = any(movable(group.spec) and not group.deleting and not group.error for group in seen.groups)
    measured = seen.router is not None and len(seen.steps) > 0
    return sized and measured and (before is None or now - before >= EVERY)


def _absent(seen: Snapshot, now: datetime) -> str:
    found = {group.name: len(stock.out(seen, group.name, now)) for group in seen.groups}
    text = ", ".join(f"{name} lacks nodes for {count}" for name, count in sorted(found.items()) if count)
    return f"; out of stock: {text}" if text else ""


def judge(
    seen: Snapshot,
    now: datetime,
    rates: Mapping[str, EngineRate],
    per_engine: Mapping[str, Capacity],
    existing: Mapping[str, int],
    *,
    samplers_usd_per_hour: Decimal | None,
    samplers_gpus: int | None = None,
    quarantined: frozenset[str],
    contested: Mapping[str, int],
    running: bool,
) -> Resize:
    """Targets as decided before, or a new decision when one is due: the run trains, the last one is done, and it is not too soon."""
    state = state_of(seen)
    targets = {group.name: target(group, state) for group in seen.groups} | dict(contested)
    may_move = [
        group
        for group in seen.groups
        if movable(group.spec) and not group.deleting and not group.error and group.name not in contested
    ]
    settled = all(existing[group.name] == targets[group.name] for group in may_move)
    if not (may_move and running and settled and seen.resize_due and due(seen, now)) or stock.coming(seen, now):
        return Resize(targets, state)
    wanted = options(seen, now, targets, rates, per_engine, quarantined, {group.name for group in may_move})
    need = rebalance.Need(
        sessions=seen.spec.rollout.sessions
        or sum(declared(group.spec) * group.spec.sessions_per_engine for group in seen.groups),
        turns_per_hour=effective_turns_consumed(seen) if all(one.turns_per_hour for one in wanted) else None,
        gpus=pools(seen, wanted),
        gpu_cap=samplers_gpus,
        usd_per_hour=samplers_usd_per_hour,
        hours=HORIZON_HOURS,
    )
    fleet = rebalance.solve(wanted, need, limit_s=SOLVE_S)
    stay = rebalance.fleet_of(wanted, need, {one.name: one.engines for one in wanted})
    moved = {
        group.name: (targets[group.name], fleet.engines[group.name])
        for group in may_move
        if fleet.engines[group.name] != targets[group.name]
    }
    if fleet.refused or not moved:
        return Resize(targets, state)
    chosen = {
        group.name: Chosen(fleet.engines[group.name], group.spec.replicas, *bounds(group.spec)) for group in may_move
    }
    what = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in sorted(moved.items()))
    why = (
        f"${usd(stay.usd_per_hour)}/h for {stay.sessions} sessions -> ${usd(fleet.usd_per_hour)}/h for {fleet.sessions}, "
        f"{need.sessions} wanted{_absent(seen, now)}; moving costs ${usd(fleet.moving_usd)}; binding: "
        + ("; ".join(map(str, fleet.binding[:4])) or "nothing")
        + ("" if fleet.proven else "; a cheaper one may be there")
    )
    return Resize(
        targets | {name: new for name, (_, new) in moved.items()},
        State(format_time(now), chosen),
        (f"engines: {what}", why),
    )


def transaction(
    seen: Snapshot,
    allotment: Allotment,
    asked: Mapping[str, int],
    existing: Mapping[str, int],
    *,
    contested: AbstractSet[str] = frozenset(),
    shifted: bool,
) -> Allotment:
    """Replicas of movable groups for this moment: none leaves before its share has, none comes while others leave.

    asked: replicas of the Deployments now; shifted: the router has heard of the fleet without the engines that leave, or is not there
    to place a session on them.
    """
    ours = [group.name for group in seen.groups if movable(group.spec) and group.name not in contested]
    leaving = any(existing[name] > allotment.replicas[name] for name in ours)
    replicas = dict(allotment.replicas)
    for name in ours:
        early = replicas[name] < asked[name] and not shifted
        waits = replicas[name] > asked[name] and leaving and existing[name]
        if early or waits:
            replicas[name] = asked[name]
    return Allotment(replicas, allotment.short)
