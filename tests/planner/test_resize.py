"""Groups that declare minReplicas or maxReplicas: what is chosen, and that no moment on the way there breaks a cap."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from motley_api import records
from motley_operator.planner import measured, resize
from motley_operator.planner.model import Apply, NodeView, Plan, PushFleet, Snapshot
from motley_operator.planner.plan import plan
from planner import study
from planner.study import at
from planner.test_plan import live

CAP = Decimal(97)  # the trainer takes 50; 6 x 6.25 + 2 x 4.54 = 46.58
MOVABLE = {"minReplicas": 0, "maxReplicas": 8, "drainSeconds": 60}


def run(h200: dict[str, Any] | None = None, b200: dict[str, Any] | None = None, **more: Any) -> Snapshot:
    """Two engines on H200 and six on B200 for 256 sessions, training. H200 serves them for less: 8 x 4.54."""
    groups = [
        study.group("h200-fp8", replicas=2, **(MOVABLE if h200 is None else h200)),
        study.group("b200-nvfp4", replicas=6, **(MOVABLE if b200 is None else b200)),
    ]
    pods = [study.engine_pod("h200-fp8", number) for number in range(2)]
    pods += [study.engine_pod("b200-nvfp4", number) for number in range(6)]
    spec = study.run_spec(rollout={"sessions": 256}, budget={"usdPerHour": str(CAP)})
    router = records.RouterStatus(fleet_generation=0, sessions_active=0, sessions_total=0, groups=[], engines=[])
    return study.snapshot(
        groups, [study.trainer_pod(), *pods], **{"spec": spec, "router": router, "steps": (study.step(1),), **more}
    )


def deployments(seen: Snapshot) -> dict[str, int]:
    return {group.name: int(seen.children["Deployment", group.name]["spec"]["replicas"]) for group in seen.groups}


def applied(seen: Snapshot, made: Plan) -> Snapshot:
    """What the API server and the router hold afterwards."""
    children = dict(seen.children)
    for action in made.actions:
        match action:
            case Apply(manifest=manifest):
                extra: dict[str, Any] = {}
                if manifest["kind"] == "Service" and "clusterIP" not in manifest["spec"]:
                    extra["spec"] = {**manifest["spec"], "clusterIP": f"10.0.0.{len(children)}"}
                children[manifest["kind"], manifest["metadata"]["name"]] = live(manifest, **extra)
            case PushFleet(role="router", fleet=fleet):
                assert seen.router is not None
                seen = replace(seen, router=msgspec.structs.replace(seen.router, fleet_generation=fleet.generation))
    return replace(seen, children=children, status=made.status or seen.status)


def moved_on(seen: Snapshot, now_s: float) -> Snapshot:
    """The cluster does its part: leaving pods end, pods above replicas begin to leave, missing ones come up."""
    pods = [pod for pod in seen.pods if pod.deletion is None]
    leaving = []
    for name, wanted in deployments(seen).items():
        mine = [pod for pod in pods if pod.group == name]
        leaving += mine[wanted:]
        numbers = iter(range(1000 + int(now_s), 9999))
        pods += [study.engine_pod(name, next(numbers), scheduled_s=now_s) for _ in range(wanted - len(mine))]
    gone = {pod.name for pod in leaving}
    return replace(seen, pods=tuple(replace(pod, deletion=at(now_s + 60)) if pod.name in gone else pod for pod in pods))


def usd_per_hour(seen: Snapshot) -> Decimal:
    return sum((pod.gpus * Decimal(study.PRICES[pod.gpu_type]) for pod in seen.pods if pod.holds), Decimal(0))


def settled(seen: Snapshot) -> Snapshot:
    """Everything made, nothing decided yet: the run has no step."""
    steps = seen.steps
    seen = replace(seen, steps=())
    for _ in range(4):
        seen = applied(seen, plan(seen, at(60)))
    return replace(seen, steps=steps)


def test_dear_engines_leave_and_cheap_ones_come_without_a_moment_above_the_cap() -> None:
    seen = settled(run())
    assert deployments(seen) == {"h200-fp8": 2, "b200-nvfp4": 6}
    history, texts = [], []
    for tick in range(14):
        now_s = 70.0 + 30 * tick
        made = plan(seen, at(now_s))
        assert made.status is not None
        texts += [item for item in made.status.decisions if item.what.startswith("engines:") and item not in texts]
        seen = applied(seen, made)
        history.append((deployments(seen), [share.share_milli for share in _fleet(seen).groups]))
        seen = moved_on(seen, now_s)
        assert usd_per_hour(seen) <= CAP
        assert deployments(seen)["h200-fp8"] <= 2 or deployments(seen)["b200-nvfp4"] == 0
    # Shift: the share (b200-nvfp4 comes first by name) is gone while all six engines are still asked for; then shrink, then grow.
    assert history[0] == ({"h200-fp8": 2, "b200-nvfp4": 6}, [0, 1000])
    assert history[-1][0] == {"h200-fp8": 8, "b200-nvfp4": 0}
    (decision,) = texts
    assert decision.what == "engines: b200-nvfp4 6 -> 0, h200-fp8 2 -> 8"
    # 6 x 4.54 x 0.25 h to start, 6 x 6.25 x 60 s to leave = 6.81 + 0.625
    assert "$46.58/h for 256 sessions -> $36.32/h for 256, 256 wanted; moving costs $7.435" in decision.why


def _fleet(seen: Snapshot) -> records.Fleet:
    return msgspec.json.decode(seen.children["ConfigMap", "study-fleet"]["data"]["fleet.json"], type=records.Fleet)


@pytest.mark.parametrize("seed", range(4))
def test_killed_after_any_action_it_goes_on_and_never_breaks_the_cap(seed: int) -> None:
    """Case 32. Of each plan only the first actions are done, status may be lost, and what follows starts from what is there."""
    chance = random.Random(seed)
    seen = settled(run())
    for tick in range(45):
        now_s = 70.0 + 30 * tick
        made = plan(seen, at(now_s))
        done = replace(made, actions=made.actions[: chance.randint(0, len(made.actions))])
        if chance.random() < 0.5:
            done = replace(done, status=None)  # killed before it was written
        seen = applied(seen, done)
        if chance.random() < 0.8:
            seen = moved_on(seen, now_s)
        assert usd_per_hour(seen) <= CAP
        assert deployments(seen)["h200-fp8"] <= 2 or deployments(seen)["b200-nvfp4"] == 0
    assert deployments(seen) == MOVES
    assert sum(pod.holds for pod in seen.pods if pod.group == "h200-fp8") == 8


def engines_after(seen: Snapshot, *, at_s: float = 70.0) -> dict[str, int]:
    return dict(judge(seen, at_s=at_s).targets)


def judge(seen: Snapshot, *, at_s: float = 70.0, samplers_gpus: int | None = None) -> resize.Resize:
    return resize.judge(
        seen,
        at(at_s),
        {
            group.name: resize.EngineRate(
                group.name, Decimal(study.PRICES[group.spec.gpu_type.value]), None, group.spec.sessions_per_engine
            )
            for group in seen.groups
        },
        measured.of(seen),
        {group.name: sum(pod.group == group.name for pod in seen.pods) for group in seen.groups},
        samplers_usd_per_hour=None,
        samplers_gpus=samplers_gpus,
        quarantined=frozenset(),
        contested={},
        running=True,
    )


STAYS = {"h200-fp8": 2, "b200-nvfp4": 6}
MOVES = {"h200-fp8": 8, "b200-nvfp4": 0}


def test_a_saving_below_the_cost_of_moving_changes_nothing() -> None:
    # 10.26 an hour are saved; with 600 s of draining the move costs 6.81 + 6.25
    slow = {**MOVABLE, "drainSeconds": 600}
    assert engines_after(run()) == MOVES
    assert engines_after(run(slow, slow)) == STAYS


def test_only_groups_that_declare_a_bound_move() -> None:
    assert engines_after(run(h200={})) == STAYS
    assert engines_after(run(b200={})) == {"h200-fp8": 2, "b200-nvfp4": 6}
    assert engines_after(run(h200={**MOVABLE, "maxReplicas": 4})) == {"h200-fp8": 4, "b200-nvfp4": 4}
    assert engines_after(run(b200={**MOVABLE, "minReplicas": 5})) == {"h200-fp8": 3, "b200-nvfp4": 5}


@pytest.mark.parametrize(("minutes", "want"), [(4, STAYS), (6, MOVES)])
def test_decisions_keep_a_distance(minutes: int, want: dict[str, int]) -> None:
    state = resize.State(resize.format_time(at(70) - timedelta(minutes=minutes)))
    data = {"data": {resize.STATE_KEY: msgspec.json.encode(state).decode()}}
    assert engines_after(run(children={("ConfigMap", "study-fleet"): data})) == want


def test_a_decision_survives_a_restart_and_ends_with_an_edit_of_the_group() -> None:
    chosen = {"h200-fp8": resize.Chosen(8, 2, 0, 8), "b200-nvfp4": resize.Chosen(0, 6, 0, 8)}
    state = resize.State(resize.format_time(at(69)), chosen)
    children = {("ConfigMap", "study-fleet"): {"data": {resize.STATE_KEY: msgspec.json.encode(state).decode()}}}
    assert engines_after(run(children=children)) == MOVES
    edited = run(b200={**MOVABLE, "maxReplicas": 7}, children=children)
    assert engines_after(edited) == {"h200-fp8": 8, "b200-nvfp4": 6}


def test_growth_is_limited_to_gpus_that_are_there() -> None:
    product = {"H200": "NVIDIA-H200", "B200": "NVIDIA-B200"}
    nodes = tuple(
        NodeView(gpu, {"nvidia.com/gpu.product": name}, 8, held_gpus=held)
        for (gpu, name), held in zip(product.items(), (7, 6), strict=True)
    )
    # Two are held by the run, one is free: three
    assert engines_after(run(nodes=nodes)) == {"h200-fp8": 3, "b200-nvfp4": 5}


def waiting(seen: Snapshot) -> Snapshot:
    """One of the two H200 engines has asked for a node since second 0."""
    words = "0/3 nodes are available"
    one = study.engine_pod("h200-fp8", 1, node="", scheduled=None, ready=False, unschedulable=words)
    return replace(seen, pods=(*(pod for pod in seen.pods if pod.name != "h200-fp8-1"), one))


def test_engines_that_found_no_node_are_waited_for_and_then_not_counted_on() -> None:
    """Case 30."""
    seen = waiting(run())
    assert engines_after(seen, at_s=599) == STAYS
    # One H200 engine is there and no more is to be had: 7 x 32 = 224 sessions are left to B200
    assert engines_after(seen, at_s=600) == {"h200-fp8": 1, "b200-nvfp4": 7}


def test_a_cap_on_gpus_holds_in_a_decision() -> None:
    judged = judge(run(b200={**MOVABLE, "minReplicas": 3}), samplers_gpus=7)
    # Seven of the eight engines wanted fit: three on B200 because they must, four cheaper ones
    assert judged.targets == {"h200-fp8": 4, "b200-nvfp4": 3}
    assert judged.news is not None
    assert "GPU cap 7 keeps the need from being met" in judged.news[1]


def test_where_nodes_cannot_be_looked_at_no_group_grows() -> None:
    """Unknown capacity fails closed."""
    seen = replace(run(), nodes_error="nodes is forbidden")
    assert engines_after(seen) == STAYS
    others = tuple(
        NodeView(name, {"nvidia.com/gpu.product": product}, 64, held_gpus=None)
        for name, product in (("h200", "NVIDIA-H200"), ("b200", "NVIDIA-B200"))
    )
    assert engines_after(run(nodes=others)) == STAYS


def test_groups_of_one_type_in_two_zones_count_their_own_nodes() -> None:
    here = {**MOVABLE, "template": {"nodeSelector": {"zone": "a"}}}
    nodes = tuple(
        NodeView(f"h200-{zone}", {"nvidia.com/gpu.product": "NVIDIA-H200", "zone": zone}, 8, held_gpus=held)
        for zone, held in (("a", 5), ("b", 0))
    )
    b200 = NodeView("b200", {"nvidia.com/gpu.product": "NVIDIA-B200"}, 8, held_gpus=6)
    # Two are the run's own, three are free in zone a; zone b's eight are out of reach
    assert engines_after(run(h200=here, nodes=(*nodes, b200))) == {"h200-fp8": 5, "b200-nvfp4": 3}


def test_without_a_router_or_a_step_nothing_is_decided() -> None:
    assert engines_after(run(router=None)) == STAYS
    assert engines_after(run(steps=())) == STAYS
