"""The group's condition Conformant: what agents report, and what is left of those that gave up."""

from __future__ import annotations

from typing import Any

import pytest
from motley_api import keys
from motley_api.records import NOT_CONFORMANT, EngineState, RouterStatus
from motley_api.resources.base import Condition
from motley_operator.planner.model import PodView, Snapshot
from motley_operator.planner.plan import plan
from planner import study
from planner.study import at

GROUP = sorted(study.FLEET)[0]


def engine(number: int, **more: Any) -> EngineState:
    values: dict[str, Any] = {"view": "bf16", "url": "http://10.0.0.9:8200", "version": 3, "ready": True} | more
    return EngineState(id=f"{GROUP}-{number}", group=GROUP, **values)


def snapshot(*engines: EngineState, pods: list[PodView] | None = None) -> Snapshot:
    router = RouterStatus(fleet_generation=0, sessions_active=0, sessions_total=0, groups=[], engines=list(engines))
    there = [study.engine_pod(GROUP, number) for number in range(2)] if pods is None else pods
    return study.snapshot([study.group(GROUP)], there, router=router)


def conditions(seen: Snapshot) -> dict[str, Condition]:
    return {item.type: item for item in plan(seen, at(100)).group_statuses[GROUP].conditions}


@pytest.mark.parametrize("reason", sorted(NOT_CONFORMANT))
def test_every_failure_of_a_proof_is_in_the_groups_conditions(reason: str) -> None:
    bad = engine(1, ready=False, reason=reason, message="differs by 3 nats", logprob_mode="BeforeTemperature")
    found = conditions(snapshot(engine(0), bad))
    want = f"{GROUP}-1: differs by 3 nats (log-prob mode BeforeTemperature)"
    assert (found["Conformant"].status, found["Conformant"].reason) == ("False", reason)
    assert found["Conformant"].message == want
    assert (found["Ready"].status, found["Ready"].reason) == ("False", reason)


@pytest.mark.parametrize("reason", ["Loading", "Draining", "Hung", "Rewinding"])
def test_an_engine_that_is_not_ready_for_another_reason_is_no_failure(reason: str) -> None:
    found = conditions(snapshot(engine(0), engine(1, ready=False, reason=reason)))
    assert found["Conformant"].status == "True"
    alone = conditions(snapshot(engine(1, ready=False, reason=reason)))["Conformant"]
    assert (alone.status, alone.reason) == ("Unknown", reason)


def test_an_engine_that_gave_up_stays_in_the_condition_while_it_starts_again_and_until_it_serves() -> None:
    words = "time=x event=gave_up\nCanaryFailed: prompt log-probs differ by up to 2.1 nats\n"
    ended = {"exit_code": keys.EXIT_GAVE_UP, "message": words}
    for engines in ((), (engine(0, ready=False, reason="Loading", version=-1),)):
        found = conditions(snapshot(*engines, pods=[study.engine_pod(GROUP, 0, ready=False, **ended)]))["Conformant"]
        assert (found.status, found.reason) == ("False", "CanaryFailed")
        assert found.message == f"{GROUP}-0: gave up: CanaryFailed: prompt log-probs differ by up to 2.1 nats"
    served = conditions(snapshot(engine(0), pods=[study.engine_pod(GROUP, 0, **ended)]))["Conformant"]
    assert served.status == "True"


def test_an_engine_that_died_otherwise_says_nothing_of_conformance() -> None:
    for ended in (
        {"exit_code": keys.EXIT_GAVE_UP, "message": "EngineFailed: out of memory"},
        {"exit_code": 137, "message": "CanaryFailed: long ago"},
    ):
        found = conditions(snapshot(pods=[study.engine_pod(GROUP, 0, ready=False, **ended)]))["Conformant"]
        assert (found.status, found.reason) == ("Unknown", "NoEngines")
