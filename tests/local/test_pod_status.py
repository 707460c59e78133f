"""A pod's phase, conditions and restarts."""

from __future__ import annotations

from typing import Any

import pytest
from motley_local.podstatus import (
    ContainerState,
    Running,
    State,
    Terminated,
    Waiting,
    pod_phase,
    pod_status,
    restart_delay_s,
    should_restart,
)
from motley_local.probes import Tally, Timing

T0, T1 = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"
RUNNING = Running(T0)
GOOD = Terminated(0, "Completed", T0, T1)
BAD = Terminated(1, "Error", T0, T1)
CREATING = Waiting("ContainerCreating")
BACKOFF = Waiting("CrashLoopBackOff")


def one(state: State, last: Terminated | None = None, **more: Any) -> ContainerState:
    return ContainerState("c", "image", state=state, last=last, **more)


@pytest.mark.parametrize(
    ("policy", "main", "want"),
    [
        ("Always", [one(CREATING)], "Pending"),
        ("Always", [one(RUNNING), one(CREATING)], "Pending"),
        ("Always", [one(RUNNING)], "Running"),
        ("Always", [one(BACKOFF, BAD)], "Running"),
        ("Always", [one(GOOD)], "Running"),
        ("OnFailure", [one(GOOD)], "Succeeded"),
        ("OnFailure", [one(BACKOFF, BAD)], "Running"),
        ("OnFailure", [one(GOOD), one(RUNNING)], "Running"),
        ("Never", [one(GOOD), one(BAD)], "Failed"),
        ("Never", [one(GOOD), one(GOOD)], "Succeeded"),
        ("Never", [one(BAD), one(RUNNING)], "Running"),
    ],
)
def test_the_phase_follows_the_containers(policy: str, main: list[ContainerState], want: str) -> None:
    assert pod_phase(policy, [], main) == want


def test_init_containers_hold_the_pod_pending_and_may_fail_it() -> None:
    waiting = [one(Waiting("PodInitializing"))]
    assert pod_phase("Always", [one(RUNNING)], waiting) == "Pending"
    assert pod_phase("Never", [one(BAD)], waiting) == "Failed"
    assert pod_phase("OnFailure", [one(BAD)], waiting) == "Pending"
    sidecar = one(RUNNING, started=True, restart_policy="Always")
    assert pod_phase("Always", [sidecar], [one(RUNNING)]) == "Running"


def test_restarts_begin_at_once_and_double_to_five_minutes() -> None:
    assert [restart_delay_s(count) for count in range(8)] == [0, 10, 20, 40, 80, 160, 300, 300]


def test_policies_decide_which_endings_restart() -> None:
    endings = [
        (policy, code) for policy in ("Always", "OnFailure", "Never") for code in (0, 1) if should_restart(policy, code)
    ]
    assert endings == [("Always", 0), ("Always", 1), ("OnFailure", 1)]


def status(main: ContainerState, previous: dict[str, Any], now: str, **spec: Any) -> dict[str, Any]:
    pod = {"metadata": {}, "spec": {"restartPolicy": "Always", **spec}}
    return pod_status(
        pod, init=[], main=[main], pod_ip="127.65.0.1", host_ip="127.0.0.1", start_time=T0, now=now, previous=previous
    )


def condition(of: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(item for item in of["conditions"] if item["type"] == kind)


def test_a_transition_time_moves_only_when_the_status_flips() -> None:
    first = status(one(RUNNING), {}, T0)
    assert condition(first, "Ready")["status"] == "False"
    assert condition(first, "Ready")["reason"] == "ContainersNotReady"
    same = status(one(RUNNING), first, T1)
    assert condition(same, "Ready")["lastTransitionTime"] == T0
    flipped = status(one(RUNNING, ready=True), first, T1)
    assert condition(flipped, "Ready")["lastTransitionTime"] == T1
    assert condition(flipped, "PodScheduled")["lastTransitionTime"] == T0


def test_conditions_of_others_are_kept_and_gates_hold_readiness() -> None:
    other = {"type": "DisruptionTarget", "status": "True", "reason": "X"}
    gates = [{"conditionType": "motley.dev/fresh"}]
    held = status(one(RUNNING, ready=True), {"conditions": [other]}, T0, readinessGates=gates)
    assert condition(held, "DisruptionTarget") == other
    assert condition(held, "ContainersReady")["status"] == "True"
    assert condition(held, "Ready")["status"] == "False"
    open_gate = {"type": "motley.dev/fresh", "status": "True"}
    assert (
        condition(status(one(RUNNING, ready=True), {"conditions": [open_gate]}, T0, readinessGates=gates), "Ready")[
            "status"
        ]
        == "True"
    )


def test_probe_results_count_in_a_row() -> None:
    timing = Timing.of({"failureThreshold": 2, "successThreshold": 1})
    tally = Tally()
    verdicts = []
    for ok in (False, True, False, True, False, False):
        tally = tally.add(ok, timing)
        verdicts.append(tally.verdict)
    # One failure alone never decides; the second in a row does.
    assert verdicts == [None, True, True, True, True, False]
