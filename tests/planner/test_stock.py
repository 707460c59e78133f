"""A GPU type without capacity: the run goes on, shares move, it is said why, and they move back."""

from __future__ import annotations

from dataclasses import replace

from motley_operator.planner.model import NodeView, Plan, PodView, Snapshot
from motley_operator.planner.plan import plan
from planner import study
from planner.study import at
from planner.test_plan import condition, message, running, settle
from planner.test_resize import _fleet

GROUP, OTHER = "h100-fp8", "b200-nvfp4"
WORDS = "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector."
NODES = (
    NodeView("b200-0", {"nvidia.com/gpu.product": "NVIDIA-B200"}, 8, held_gpus=1),
    NodeView("h200-0", {"nvidia.com/gpu.product": "NVIDIA-H200"}, 8),
)


def pending(seen: Snapshot) -> Snapshot:
    """GROUP's one engine has asked for a node since second 0."""
    asks = study.engine_pod(GROUP, 7, node="", scheduled=None, ready=False, phase="Pending", unschedulable=WORDS)
    return replace(seen, pods=(*(pod for pod in seen.pods if pod.group != GROUP), asks), nodes=NODES)


def placed(made: Plan) -> tuple[str, str, str]:
    found = next(item for item in made.group_statuses[GROUP].conditions if item.type == "Placed")
    return found.status, found.reason, found.message


def told(made: Plan) -> list[tuple[str, str]]:
    assert made.status is not None
    return [(item.what, item.why) for item in made.status.decisions if item.what.startswith("stock-out")]


def shares(seen: Snapshot) -> dict[str, int]:
    return {group.name: group.share_milli for group in _fleet(seen).groups}


def test_the_run_starts_with_the_groups_that_are_there_and_names_what_is_missing() -> None:
    seen = settle(pending(running()), at(60))
    assert shares(seen) == {GROUP: 0, OTHER: 1000}
    made = plan(seen, at(60))
    status, reason, text = placed(made)
    assert (status, reason) == ("False", "Unschedulable")
    assert text.startswith(f"1 pod(s) wait: {WORDS}")
    assert "no node is labelled H100 (nvidia.com/gpu.product in [NVIDIA-H100-80GB-HBM3, NVIDIA-H100-PCIe]" in text
    assert "labels of GPUs seen: nvidia.com/gpu.product=NVIDIA-B200 (1 node(s))" in text
    assert condition(made, "CapacityAvailable") == ("False", "Unschedulable")
    assert told(made) == []


def test_after_the_deadline_it_is_out_of_stock_and_said_where_its_sessions_go() -> None:
    """Case 30."""
    seen = settle(pending(running()), at(60))
    assert placed(plan(seen, at(599)))[1] == "Unschedulable"
    made = plan(seen, at(600))
    assert placed(made)[1] == "StockOut"
    assert (
        "1 engine(s) have had no node since 2026-10-13T12:00:00Z; other groups take their sessions" in placed(made)[2]
    )
    ((what, why),) = told(made)
    assert what == f"stock-out: {GROUP} has no node for 1 engine(s), its sessions go elsewhere"
    assert why.endswith(f"shares now: {OTHER} 100%, {GROUP} 0%")
    # Said once; and its pod stays and asks.
    later = settle(seen, at(600))
    assert len(told(plan(later, at(700)))) == 1
    assert later.children["Deployment", GROUP]["spec"]["replicas"] == 1


def test_when_a_node_comes_its_share_comes_back() -> None:
    seen = settle(settle(pending(running()), at(60)), at(600))
    back: tuple[PodView, ...] = (*(pod for pod in seen.pods if pod.group != GROUP), study.engine_pod(GROUP, 7))
    after = settle(replace(seen, pods=back, nodes=None), at(2300))
    assert shares(after) == {GROUP: 333, OTHER: 667}
    made = plan(after, at(2310))
    assert placed(made)[1] == "Scheduled"
    what, why = told(made)[-1]
    assert what == f"stock-out over: {GROUP}, its share comes back with its engines"
    assert why == f"1 engine(s) have a node; shares now: {OTHER} 66.7%, {GROUP} 33.3%"


def test_nodes_that_may_not_be_looked_at_are_said_so() -> None:
    seen = settle(replace(pending(running()), nodes=None, nodes_error="nodes cannot be looked at: forbidden"), at(60))
    assert "nodes cannot be looked at: forbidden" in placed(plan(seen, at(60)))[2]


def test_a_minimum_of_the_capacity_can_be_demanded_before_the_first_session() -> None:
    """48 sessions are declared, 32 of them are there: 66.7%."""
    for percent, paused in ((66, False), (67, True)):
        spec = study.run_spec(rollout={"minimumCapacityPercent": percent})
        seen = settle(pending(running(spec=spec)), at(60))
        assert _fleet(seen).paused is paused
        text = message(plan(seen, at(60)), "Succeeded")
        # 67% of 48 is 32.2: 33
        want = "no session starts before ready engines serve 33 of 48 declared sessions (rollout.minimumCapacityPercent 67)"
        assert (want in text) is paused
    # Once it trains, it goes on with what is there.
    assert seen.trainer is not None
    under_way = replace(seen, steps=(study.step(1),), status=seen.status.model_copy(update={"step": 1}), trainer=None)
    assert _fleet(settle(under_way, at(90))).paused is False
