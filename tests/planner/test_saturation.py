"""The first point of what people did by hand: a group saturates, its sessions go elsewhere, and it gains an engine."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import msgspec
from motley_api import keys, records
from motley_api.resources import SamplerGroupStatus
from motley_api.resources.base import Condition
from motley_api.resources.rlrun import Decision, GroupStatus
from motley_operator.measure import RunMemory
from motley_operator.planner import measured
from motley_operator.planner.model import Plan, Snapshot
from motley_operator.planner.plan import plan
from planner import study
from planner.study import START, at
from planner.test_resize import _fleet, applied, deployments, moved_on, settled

GROUP = "rtx6000-bf16"


def fleet(sessions: int | None = None, **more: Any) -> Snapshot:
    """The study's fleet, all up, training; GROUP may grow to six engines. 1,376 sessions are declared."""
    groups = [study.group(name) for name in study.FLEET if name != GROUP]
    groups.append(study.group(GROUP, **{"minReplicas": 4, "maxReplicas": 6, **more.pop("group", {})}))
    rollout = {} if sessions is None else {"sessions": sessions}
    router = records.RouterStatus(fleet_generation=0, sessions_active=0, sessions_total=0, groups=[], engines=[])
    up = study.trainer_pod(name="study-router-x", uid="uid-router", role=keys.ROLE_ROUTER, gpus=0, gpu_type="")
    seen = study.snapshot(
        groups,
        [study.trainer_pod(), up, *study.all_engines()],
        spec=study.run_spec(rollout=rollout, **more),
        router=router,
        steps=(study.step(1),),
    )
    return settled(seen)


def saturated_router(second: int) -> records.RouterStatus:
    """As the router would tell it: 47 of 48 slots, KV cache 85-98% full over the engines, requests set back again and again."""
    engines = [
        records.EngineState(
            id=f"{GROUP}-{number}",
            group=GROUP,
            view="bf16",
            url="http://x",
            version=1,
            ready=True,
            max_sessions=12,
            running=9,
            queued=0,
            kv_used_percent=(85, 91, 94, 98)[number],
            turns=1000 + second * 5 // 6,
            generated_tokens=77_000 + 64 * second,
            busy_s=100.0 + second,
            preemptions=40 + second // 20,
        )
        for number in range(4)
    ]
    row = records.GroupSessions(name=GROUP, active=47, capacity_sessions=48, share_milli=35, engines_ready=4, engines=4)
    return records.RouterStatus(
        fleet_generation=1, sessions_active=1375, sessions_total=9000 + second, groups=[row], engines=engines
    )


def after_a_minute(seen: Snapshot) -> Snapshot:
    """What the operator hears in a minute of it, through the wire's bytes."""
    memory, began = RunMemory(), START.timestamp() + 10
    for second in range(0, 61, 3):
        heard = msgspec.json.decode(records.encode_json(saturated_router(second)), type=records.RouterStatus)
        memory.hear_router(heard, began + second)
    assert seen.router is not None
    router = msgspec.structs.replace(heard, fleet_generation=seen.router.fleet_generation)
    return replace(seen, loads=memory.loads[GROUP], router=router)


def row(made: Plan) -> GroupStatus:
    assert made.status is not None
    return next(item for item in made.status.groups if item.name == GROUP)


def decided(made: Plan, what: str) -> Decision:
    assert made.status is not None
    return next(item for item in made.status.decisions if item.what.startswith(what))


def share(seen: Snapshot) -> records.GroupShare:
    return next(item for item in _fleet(seen).groups if item.name == GROUP)


def test_a_saturated_group_loses_new_sessions() -> None:
    seen = fleet(sessions=1344)
    assert (share(seen).share_milli, share(seen).capacity_sessions, share(seen).sessions_per_engine) == (35, 48, 0)
    made = plan(after_a_minute(seen), at(75))
    # 47 / 4 = 11.75; 12 set back in 200 turns: x 0.9 = 10.575. The KV cache is 92% full on average: x 90 / 92 says less.
    assert (row(made).sessions_per_engine, row(made).capacity_source) == ("10.575", "Measured")
    after = applied(after_a_minute(seen), made)
    # 4 x 10.575 = 42.3 sessions of 1328 + 42.3: 3.1%; and no engine is given an eleventh
    assert (share(after).share_milli, share(after).capacity_sessions, share(after).sessions_per_engine) == (31, 42, 10)
    found = {item.type: item for item in made.group_statuses[GROUP].conditions}["Saturated"]
    assert (found.status, found.reason) == ("True", "Saturated")
    assert "KV cache 92% full" in found.message
    what = decided(made, f"capacity: {GROUP}")
    assert what.what == f"capacity: {GROUP} 12 -> 10.575 sessions an engine"
    assert "11.8 sessions an engine over 60 s" in what.why
    # 1370 sessions are left for 1344: nothing is bought.
    assert deployments(after)[GROUP] == 4


def test_a_saturated_group_gains_an_engine_when_the_sessions_have_no_other_place() -> None:
    """1,376 wanted, 1,370.3 served: 4 -> 5 engines, as people did by hand."""
    seen = after_a_minute(fleet())
    made = plan(seen, at(75))
    what = decided(made, "engines:")
    assert what.what == f"engines: {GROUP} 4 -> 5"
    # 1328 + 4 x 10.575 = 1370.3; 1328 + 5 x 10.575 = 1380.9; an engine is 2 x 3.03
    assert "$286.88/h for 1370 sessions -> $292.94/h for 1380, 1376 wanted" in what.why
    for tick in range(4):
        seen = moved_on(applied(seen, plan(seen, at(75 + tick))), 75 + tick)
    assert deployments(seen)[GROUP] == 5
    # 52.9 of 1380.9 sessions: its share is back
    assert share(seen).share_milli == 38
    again = plan(seen, at(90))
    assert again.actions == ()
    assert (row(again).engines, row(again).capacity_sessions) == (5, 52)


def test_a_saturated_group_stays_within_max_and_budget() -> None:
    at_most = after_a_minute(fleet(group={"maxReplicas": 4}))
    assert deployments(applied(at_most, plan(at_most, at(75))))[GROUP] == 4
    # The fleet costs 286.88 and the trainer 50; an engine of 6.06 more does not fit
    poor = after_a_minute(fleet(budget={"usdPerHour": str(Decimal("336.88") + Decimal("6.05"))}))
    assert deployments(applied(poor, plan(poor, at(75))))[GROUP] == 4
    rich = after_a_minute(fleet(budget={"usdPerHour": str(Decimal("336.88") + Decimal("6.06"))}))
    assert deployments(applied(rich, plan(rich, at(75))))[GROUP] == 5


def test_capacity_holds_over_a_restart_and_ends_with_a_new_declaration() -> None:
    seen = after_a_minute(fleet(sessions=1344))
    after = applied(seen, plan(seen, at(75)))
    restarted = replace(after, loads=())  # what was heard is forgotten; status is not
    assert row(plan(restarted, at(80))).sessions_per_engine == "10.575"
    assert plan(restarted, at(80)).actions == plan(after, at(80)).actions
    groups = [*(one for one in after.groups if one.name != GROUP), study.group(GROUP, sessionsPerEngine=8)]
    edited = row(plan(replace(restarted, groups=tuple(groups)), at(80)))
    assert (edited.sessions_per_engine, edited.capacity_source) == ("8", "Declared")


def test_a_restart_says_nothing_new_about_a_group_with_room() -> None:
    """Otherwise every group's status is written twice whenever the operator starts."""
    said = Condition(
        type="Saturated",
        status="False",
        reason="Room",
        message="nothing waits",
        last_transition_time="2026-10-13T12:00:00Z",
        observed_generation=1,
    )
    group = replace(study.group(GROUP), status=SamplerGroupStatus(conditions=[said]))
    restarted = replace(fleet(sessions=1344), loads=())
    found = measured.finding(restarted, group)
    assert (found.status, found.reason, found.message) == ("False", "Room", "nothing waits")


def test_a_group_without_load_keeps_its_declared_capacity_and_is_marked() -> None:
    """Case 34: never a silent stop."""
    made = plan(after_a_minute(fleet(sessions=1344)), at(75))
    assert made.status is not None
    other = next(item for item in made.status.groups if item.name == "h200-fp8")
    assert (other.capacity_source, other.sessions_per_engine, other.capacity_sessions) == ("Declared", "32", 256)
    conditions = {item.type: item for item in made.group_statuses["h200-fp8"].conditions}
    assert conditions["Saturated"].reason == "NotMeasured"


def test_a_group_without_engines_is_not_saturated_any_more() -> None:
    seen = after_a_minute(fleet(sessions=1344))
    gone = replace(seen, pods=tuple(pod for pod in seen.pods if pod.group != GROUP))
    found = {item.type: item for item in plan(gone, at(80)).group_statuses[GROUP].conditions}["Saturated"]
    assert (found.status, found.reason) == ("False", "NoEngines")
