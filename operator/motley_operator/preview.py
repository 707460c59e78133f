"""`motley plan`: the planner's own code on a manifest, before anything is applied."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import ROUND_FLOOR, Decimal
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from motley_api import keys
from motley_api.resources import CapacityType, GpuTypeName, RLRunSpec, RLRunStatus, SamplerGroupSpec, SamplerGroupStatus
from pydantic import ValidationError

from motley_operator import names, observe
from motley_operator.kube import ApiError, Kube, KubeconfigError, NoClusterError, user_credentials
from motley_operator.nodes import look
from motley_operator.planner import budget, cost, placement, rebalance, resize, shares, status
from motley_operator.planner.decide import caps as budget_caps
from motley_operator.planner.decide import declared_sessions, engine_usd_per_hour, trainer_usd_per_hour
from motley_operator.planner.model import GroupView, NodeView, Snapshot, view_of
from motley_operator.planner.placement import Ask

Json = dict[str, Any]


class UnknownCapacityError(Exception):
    """There is a cluster, and what is free in it cannot be seen."""


class ManifestError(Exception):
    """A manifest that cannot be planned, with what to change."""


@dataclass(frozen=True)
class GroupPlan:
    """One group as it would be."""

    name: str
    gpu_type: str
    precision: str
    engines: int
    placeable: int | None  # None: no nodes were looked at
    sessions: int
    share_milli: int
    usd_per_hour: Decimal | None
    why: str


@dataclass(frozen=True)
class RunPlan:
    run: str
    groups: tuple[GroupPlan, ...]
    trainer_usd_per_hour: Decimal | None
    sampler_usd_per_hour: Decimal | None
    baseline_usd_per_hour: Decimal | None
    baseline_sessions: int | None
    sessions: int
    nodes: str
    notes: tuple[str, ...]
    declared: rebalance.Fleet
    optimised: rebalance.Fleet
    rates: Mapping[str, Decimal | None]  # turns an engine-hour
    sessions_wanted: int


@dataclass(frozen=True)
class Caps:
    """From the command line, in place of what nodes say: GPUs by type, and GPUs in all."""

    gpus: Mapping[str, int] = field(default_factory=dict)
    gpu_cap: int | None = None


def parse_caps(available: str, gpu_cap: int | None) -> Caps:
    """`H100=16,B200=8`; a type that is not named has no limit."""
    found = {}
    for part in filter(None, available.split(",")):
        name, _, count = part.partition("=")
        if name not in list(GpuTypeName) or not count.isdigit():
            raise ManifestError(
                f"--available must be TYPE=GPUS,... with TYPE one of {', '.join(GpuTypeName)}, got {part!r}"
            )
        found[name] = int(count)
    return Caps(found, gpu_cap)


def optimise(seen: Snapshot, caps: Caps) -> tuple[rebalance.Fleet, rebalance.Fleet, int]:
    """(the declared fleet, the cheapest one within min/max, sessions wanted). Nothing runs yet, so moves cost nothing."""
    prices = cost.price_table(seen.spec.prices)
    options = []
    for group in seen.groups:
        turns = group.spec.turns_per_engine_hour
        hourly = engine_usd_per_hour(group, prices)
        rate = cost.EngineRate(group.name, hourly, Decimal(turns) if turns else None, group.spec.sessions_per_engine)
        room = None
        if seen.nodes is not None:
            room = placement.availability(seen.nodes, placement.ask_of(group.spec)).engines(group.spec.gpus_per_engine)
        engines = resize.declared(group.spec) if resize.movable(group.spec) else group.spec.replicas
        made = resize.option(
            group,
            engines if placement.supported(group) else 0,
            rate,
            sessions=group.spec.sessions_per_engine,
            effective=Decimal(1),
            serves=placement.supported(group),
            placeable=room,
        )
        options.append(replace(made, start_usd=Decimal(0), leave_usd=Decimal(0)))
    limits = budget_caps(seen, prices)
    cap, trainer = limits.usd_per_hour, limits.fixed_usd_per_hour
    gpu_caps = [caps.gpu_cap] if caps.gpu_cap is not None else []
    gpu_caps += [limits.gpus - limits.fixed_gpus] if limits.gpus is not None else []
    pools = {(name, kind.value): count for name, count in caps.gpus.items() for kind in CapacityType}
    need = rebalance.Need(
        sessions=seen.spec.rollout.sessions or int(sum(one.sessions * one.engines for one in options)),
        gpus=pools or resize.pools(seen, options),
        gpu_cap=min(gpu_caps, default=None),
        usd_per_hour=cap - trainer if cap is not None and trainer is not None else None,
    )
    declared = rebalance.fleet_of(options, need, {one.name: one.engines for one in options})
    if declared.sessions and all(one.turns_per_hour for one in options) and declared.turns_per_hour:
        # As many turns as the declared fleet serves for the sessions wanted.
        part = min(Decimal(1), Decimal(need.sessions) / declared.sessions)
        need = replace(need, turns_per_hour=(declared.turns_per_hour * part).to_integral_value(ROUND_FLOOR))
    return rebalance.fleet_of(options, need, declared.engines), rebalance.solve(options, need), need.sessions


def fleet_usd_per_hour(plan: RunPlan, fleet: rebalance.Fleet) -> Decimal | None:
    """None where an engine of the fleet has no price: what is not known is not free."""
    unpriced = {row.name for row in plan.groups if row.usd_per_hour is None}
    return None if any(engines and name in unpriced for name, engines in fleet.engines.items()) else fleet.usd_per_hour


def usd_per_thousand_turns(plan: RunPlan, fleet: rebalance.Fleet) -> Decimal | None:
    """Its price over the turns that it serves at the latency bound; None where a group's rate or price is not known."""
    hourly, turns = fleet_usd_per_hour(plan, fleet), Decimal(0)
    for name, engines in fleet.engines.items():
        rate = plan.rates[name]
        if engines and rate is None:
            return None
        turns += engines * (rate or 0)
    return hourly * 1000 / turns if turns and hourly is not None else None


def read_manifest(text: str) -> tuple[Json, list[Json]]:
    """(the RLRun, SamplerGroups that name it). Raises ManifestError."""
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise ManifestError(f"the manifest is not YAML: {one_line(error)}") from error
    for number, document in enumerate(documents, 1):
        where = f"document {number} of the manifest"
        if not isinstance(document, dict):
            raise ManifestError(f"{where} must be an object with kind, metadata and spec, found {_kind_of(document)}")
        for key in ("metadata", "spec"):
            if document.get("kind") in ("RLRun", "SamplerGroup") and not isinstance(document.get(key), dict):
                raise ManifestError(f"{where}: {key} must be an object, found {_kind_of(document.get(key))}")
    runs = [document for document in documents if document.get("kind") == "RLRun"]
    if len(runs) != 1:
        raise ManifestError(f"the manifest must have exactly one RLRun, found {len(runs)}")
    groups = [document for document in documents if document.get("kind") == "SamplerGroup"]
    for document in (runs[0], *groups):
        if not isinstance(document["metadata"].get("name"), str):
            raise ManifestError(f"metadata.name of {document['kind']} must be set, to a string")
    name = runs[0]["metadata"]["name"]
    return runs[0], [document for document in groups if _run_of(document) == name]


def _run_of(group: Json) -> object:
    ref = group["spec"].get("runRef")
    return ref.get("name") if isinstance(ref, dict) else None


def _kind_of(value: object) -> str:
    names_of = {type(None): "nothing", list: "a list", dict: "an object", str: "text"}
    return names_of.get(type(value), f"the {type(value).__name__} {value!r}")


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def read_text(file: str) -> str:
    """A manifest's text, - is standard input. Raises ManifestError."""
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text()
    except OSError as error:
        raise ManifestError(f"{file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ManifestError(f"{file}: not a text file: {error.reason} at byte {error.start}") from error


def snapshot_of(run: Json, late: Sequence[Json], nodes: tuple[NodeView, ...] | None) -> Snapshot:
    """As if it had just been applied."""
    try:
        spec = RLRunSpec.model_validate(run.get("spec") or {})
        groups = [
            _view(
                names.inline_group(run["metadata"]["name"], group.name),
                SamplerGroupSpec.model_validate(
                    {
                        **{key: value for key, value in group.to_json_dict().items() if key != "name"},
                        "runRef": {"name": run["metadata"]["name"]},
                    }
                ),
                inline=True,
            )
            for group in spec.sampler_groups
        ]
        groups += [
            _view(item["metadata"]["name"], SamplerGroupSpec.model_validate(item["spec"]), inline=False)
            for item in late
        ]
    except ValidationError as error:
        raise ManifestError(observe.explain(error)) from error
    return Snapshot(
        namespace=run["metadata"].get("namespace", "default"),
        name=run["metadata"]["name"],
        uid="",
        generation=1,
        deleting=False,
        spec=spec,
        raw_spec=run.get("spec") or {},
        status=RLRunStatus(),
        groups=tuple(groups),
        nodes=nodes,
    )


def _view(name: str, spec: SamplerGroupSpec, *, inline: bool) -> GroupView:
    return GroupView(
        name=name, uid="", generation=1, spec=spec, status=SamplerGroupStatus(), inline=inline, owned=False
    )


def place(seen: Snapshot) -> dict[str, int]:
    """Engines of each group that fit on free GPUs; the trainer first, then groups by name, each node's GPUs given out once."""
    free = {node.name: node.free_gpus for node in seen.nodes or ()}
    found = {"": take(seen, free, placement.trainer_ask(seen.spec.trainer), *gang_of(seen))}
    for group in sorted(seen.groups, key=lambda group: group.name):
        asked = placement.ask_of(group.spec)
        found[group.name] = take(seen, free, asked, group.spec.gpus_per_engine, group.spec.replicas)
    return found


def gang_of(seen: Snapshot) -> tuple[int, int]:
    """(GPUs of a pod, pods)"""
    return seen.spec.trainer.gpus_per_node, seen.spec.trainer.nodes


def take(seen: Snapshot, free: dict[str, int], ask: Ask, gpus: int, wanted: int) -> int:
    """Pods that find a place, node by node; what they hold is taken out of `free`."""
    placed = 0
    for name, _ in placement.availability(seen.nodes or (), ask).free_by_node:
        fitting = min(wanted - placed, free[name] // gpus)
        free[name] -= fitting * gpus
        placed += fitting
    return placed


def beside_the_gang(seen: Snapshot) -> Snapshot:
    """What is left for engines once the trainer has its nodes."""
    if seen.nodes is None:
        return seen
    free = {node.name: node.free_gpus for node in seen.nodes}
    before = dict(free)
    take(seen, free, placement.trainer_ask(seen.spec.trainer), *gang_of(seen))
    nodes = (
        node
        if node.held_gpus is None
        else replace(node, held_gpus=node.held_gpus + before[node.name] - free[node.name])
        for node in seen.nodes
    )
    return replace(seen, nodes=tuple(nodes))


def preview(seen: Snapshot, cluster: str, caps: Caps = Caps()) -> RunPlan:
    prices = cost.price_table(seen.spec.prices)
    placed = place(seen) if seen.nodes is not None else None
    wants = [
        budget.Want(
            name=group.name,
            replicas=group.spec.replicas if placement.supported(group) else 0,
            min_replicas=group.spec.min_replicas or 0,
            existing=0,
            usd_per_engine_hour=engine_usd_per_hour(group, prices),
            gpus_per_engine=group.spec.gpus_per_engine,
        )
        for group in seen.groups
    ]
    allotted = budget.allot(wants, budget_caps(seen, prices))
    engines = {
        name: replicas if placed is None else min(replicas, placed[name])
        for name, replicas in allotted.replicas.items()
    }
    capacities = [
        shares.GroupCapacity(group.name, view_of(group.spec), engines[group.name], group.spec.sessions_per_engine)
        for group in seen.groups
    ]
    split = {share.name: share for share in shares.fleet(capacities, generation=0, paused=False).groups}
    rows = []
    for group in sorted(seen.groups, key=lambda group: group.name):
        hourly = engine_usd_per_hour(group, prices)
        rows.append(
            GroupPlan(
                name=group.name,
                gpu_type=group.spec.gpu_type.value,
                precision=group.spec.precision.value,
                engines=engines[group.name],
                placeable=None if placed is None else placed[group.name],
                sessions=split[group.name].capacity_sessions,
                share_milli=split[group.name].share_milli,
                usd_per_hour=None if hourly is None else hourly * engines[group.name],
                why=_why(seen, group, engines[group.name], placed, allotted),
            )
        )
    baseline = seen.spec.baseline
    declared, optimised, wanted = optimise(beside_the_gang(seen), caps)
    return RunPlan(
        run=seen.name,
        groups=tuple(rows),
        trainer_usd_per_hour=trainer_usd_per_hour(seen, prices),
        sampler_usd_per_hour=cost.add(*(row.usd_per_hour for row in rows)),
        baseline_usd_per_hour=cost.baseline_usd_per_hour(baseline, prices) if baseline else None,
        baseline_sessions=baseline.engines * baseline.sessions_per_engine if baseline else None,
        sessions=sum(row.sessions for row in rows),
        nodes=cluster,
        notes=tuple(_notes(seen, rows, placed)),
        declared=declared,
        optimised=optimised,
        rates={
            group.name: Decimal(turns) if (turns := group.spec.turns_per_engine_hour) else None for group in seen.groups
        },
        sessions_wanted=wanted,
    )


def _why(
    seen: Snapshot, group: GroupView, engines: int, placed: dict[str, int] | None, allotted: budget.Allotment
) -> str:
    spec = group.spec
    if not placement.supported(group):
        return f"{spec.gpu_type.value} cannot run {spec.precision.value}"
    if group.name in allotted.short and (placed is None or allotted.replicas[group.name] <= placed[group.name]):
        return allotted.short[group.name]
    if placed is not None and seen.nodes is not None and placed[group.name] < spec.replicas:
        text = placement.availability(seen.nodes, placement.ask_of(spec)).describe()
        return f"{placed[group.name]} of {spec.replicas} engines fit: {text}"
    return f"{engines} engine(s) x {spec.sessions_per_engine} sessions"


def _notes(seen: Snapshot, rows: Sequence[GroupPlan], placed: dict[str, int] | None) -> list[str]:
    found = []
    trainer = seen.spec.trainer
    if placed is not None and seen.nodes is not None and placed[""] < trainer.nodes:
        text = placement.availability(seen.nodes, placement.trainer_ask(trainer)).describe()
        found.append(f"the trainer's gang does not fit ({placed['']} of {trainer.nodes} pods): {text}")
    used = {(group.spec.gpu_type.value, group.spec.capacity_type.value) for group in seen.groups}
    used.add((trainer.gpu_type.value, trainer.capacity_type.value))
    missing = sorted(used - cost.price_table(seen.spec.prices).keys())
    if missing:
        listed = ", ".join(" ".join(pair) for pair in missing)
        found.append(f"no price for {listed}: what they cost is not known")
    percent, declared = seen.spec.rollout.minimum_capacity_percent, declared_sessions(seen)
    there = sum(row.sessions for row in rows)
    if 100 * there < percent * declared:
        found.append(
            f"no session would start: {there} of {declared} declared sessions fit, rollout.minimumCapacityPercent is {percent}"
        )
    if not rows:
        found.append("no sampler group: nothing would be sampled")
    return found


def document(plan: RunPlan) -> Json:
    """As JSON: dollars as decimal strings."""
    return {
        "run": plan.run,
        "nodes": plan.nodes,
        "sessions": plan.sessions,
        "groups": [
            {
                "name": row.name,
                "gpuType": row.gpu_type,
                "precision": row.precision,
                "engines": row.engines,
                "placeable": row.placeable,
                "sessions": row.sessions,
                "sharePercent": status.share_percent(row.share_milli),
                "usdPerHour": cost.usd(row.usd_per_hour),
                "why": row.why,
            }
            for row in plan.groups
        ],
        "samplerUSDPerHour": cost.usd(plan.sampler_usd_per_hour),
        "trainerUSDPerHour": cost.usd(plan.trainer_usd_per_hour),
        "baselineUSDPerHour": cost.usd(plan.baseline_usd_per_hour),
        "baselineSessions": plan.baseline_sessions,
        "sessionsWanted": plan.sessions_wanted,
        "declared": _fleet_document(plan, plan.declared),
        "optimised": {
            **_fleet_document(plan, plan.optimised),
            "met": plan.optimised.met,
            "proven": plan.optimised.proven,
            "refused": plan.optimised.refused,
            "binding": [
                {"constraint": one.constraint, "unit": one.unit, "usdPerHour": cost.usd(one.usd_per_hour)}
                for one in plan.optimised.binding
            ],
        },
        "notes": list(plan.notes),
    }


def _fleet_document(plan: RunPlan, fleet: rebalance.Fleet) -> Json:
    return {
        "engines": dict(sorted(fleet.engines.items())),
        "sessions": fleet.sessions,
        "usdPerHour": cost.usd(fleet_usd_per_hour(plan, fleet)),
        "usdPerThousandTurns": cost.usd(usd_per_thousand_turns(plan, fleet)),
    }


def show(plan: RunPlan) -> None:
    from rich.console import Console
    from rich.table import Table

    def dollars(amount: Decimal | None) -> str:
        return f"{amount:.2f}" if amount is not None else "unknown"

    table = Table(title=f"RLRun {plan.run}: what would be placed, shared and paid ({plan.nodes})")
    for column in ("group", "GPU", "precision"):
        table.add_column(column)
    for column in ("engines", "cheapest", "sessions", "share", "$/h"):
        table.add_column(column, justify="right")
    table.add_column("why")
    for row in plan.groups:
        table.add_row(
            row.name,
            row.gpu_type,
            row.precision,
            str(row.engines),
            str(plan.optimised.engines[row.name]),
            str(row.sessions),
            f"{status.share_percent(row.share_milli)}%",
            dollars(row.usd_per_hour),
            row.why,
        )
    console = Console()
    console.print(table)
    console.print(
        f"samplers ${dollars(plan.sampler_usd_per_hour)}/h for {plan.sessions} sessions; trainer ${dollars(plan.trainer_usd_per_hour)}/h"
    )
    if plan.baseline_usd_per_hour is not None:
        console.print(f"baseline ${dollars(plan.baseline_usd_per_hour)}/h for {plan.baseline_sessions} sessions")
    for name, fleet in (("declared", plan.declared), ("cheapest within min/max", plan.optimised)):
        per_turns = usd_per_thousand_turns(plan, fleet)
        text = "unknown" if per_turns is None else f"{per_turns:.4f}"
        console.print(
            f"{name}: ${dollars(fleet_usd_per_hour(plan, fleet))}/h, {fleet.sessions} sessions, ${text} per 1,000 turns"
        )
    if plan.optimised.refused:
        console.print(f"no cheaper fleet: {plan.optimised.refused}")
    elif not plan.optimised.met:
        console.print(f"{plan.sessions_wanted} sessions are wanted and cannot be had:")
    for binding in plan.optimised.binding:
        console.print(f"binds: {binding}")
    for note in plan.notes:
        console.print(f"note: {note}")


async def cluster_nodes(run: Json) -> tuple[tuple[NodeView, ...] | None, str]:
    """Nodes with what others than this run hold on them, and where they were seen. Raises UnknownCapacityError."""
    try:
        credentials = user_credentials()
        kube = Kube(credentials)
    except KubeconfigError as error:
        raise UnknownCapacityError(one_line(error)) from error
    except NoClusterError:
        return None, "no cluster: every engine is assumed to find a node"
    metadata = run.get("metadata", {})
    mine = metadata.get("namespace", credentials.namespace), metadata.get("name", "")

    def ours(pod: Mapping[str, Any]) -> bool:
        labels = pod["metadata"].get("labels") or {}
        return (pod["metadata"]["namespace"], labels.get(keys.RUN_LABEL)) == mine

    try:
        found = await look(kube, ours=ours)
    except (ApiError, aiohttp.ClientError, OSError, TimeoutError) as error:
        raise UnknownCapacityError(str(error)) from error
    finally:
        await kube.close()
    if found.nodes is None:
        raise UnknownCapacityError(found.error)
    return found.nodes, f"{len(found.nodes)} nodes of {credentials.server}"


async def nodes_of(run: Json, caps: Caps, *, offline: bool) -> tuple[tuple[NodeView, ...] | None, str]:
    """What is not known is not there: a cluster that cannot be looked at gives no plan, unless GPUs are named."""
    if offline:
        return None, "without a cluster: every engine is assumed to find a node"
    try:
        return await cluster_nodes(run)
    except UnknownCapacityError as error:
        if caps.gpus:
            return None, f"GPUs as named; the cluster cannot be looked at: {error}"
        raise ManifestError(
            f"the cluster cannot be looked at ({error}); name GPUs with --available, or plan without it with --offline"
        ) from error


def main(file: str, output: str, available: str = "", gpu_cap: int | None = None, offline: bool = False) -> int:
    if output not in ("table", "json"):
        print(f"motley plan: --output must be table or json, got {output!r}", file=sys.stderr)
        return 2
    try:
        run, late = read_manifest(read_text(file))
        caps = parse_caps(available, gpu_cap)
        nodes, where = asyncio.run(nodes_of(run, caps, offline=offline))
        plan = preview(snapshot_of(run, late, nodes), where, caps)
    except ManifestError as error:
        print(f"motley plan: {error}", file=sys.stderr)
        return 1
    if output == "json":
        print(json.dumps(document(plan), indent=1))
    else:
        show(plan)
    return 0
