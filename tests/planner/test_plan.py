"""plan() as a whole: state of the world in, decisions out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

import msgspec
import pytest
from motley_api import keys, records
from motley_api.resources import RLRunStatus
from motley_operator import manifests
from motley_operator.planner import resize
from motley_operator.planner.conditions import RUN_CONDITIONS
from motley_operator.planner.model import Apply, Create, Delete, Object, Patch, Plan, PushFleet, Settings, Snapshot
from motley_operator.planner.plan import plan
from planner import study
from planner.study import at

RUN = manifests.RunRef("ns", "study", "uid-run")
URLS = manifests.Urls("http://10.0.0.1:8000", "http://10.0.0.2:8100")


def live(manifest: Object, **more: Any) -> Object:
    """As the server would hold it."""
    obj = json.loads(json.dumps(manifest))
    obj["metadata"].setdefault("uid", f"uid-{obj['kind']}-{obj['metadata']['name']}")
    return {**obj, **more}


def merged(old: Object, body: Object) -> dict[str, Any]:
    """As a merge patch does."""
    found = dict(old)
    for key, value in body.items():
        found[key] = merged(found.get(key, {}), value) if isinstance(value, Mapping) else value
    return found


def settle(seen: Snapshot, now: datetime, rounds: int = 6) -> Snapshot:
    """Apply plans to the snapshot's own children until nothing is left to do, as the API server would hold them."""
    for _ in range(rounds):
        decided = plan(seen, now)
        children = dict(seen.children)
        for action in decided.actions:
            match action:
                case Apply(manifest=manifest):
                    key = (manifest["kind"], manifest["metadata"]["name"])
                    extra: dict[str, Any] = {}
                    if manifest["kind"] == "Service" and "clusterIP" not in manifest["spec"]:
                        extra["spec"] = {**manifest["spec"], "clusterIP": f"10.0.0.{len(children)}"}
                    children[key] = live(manifest, **extra)
                case Create():
                    seen = replace(seen, has_token=True)
                case Patch(kind=kind, name=name, body=body):
                    old = children[kind, name]
                    children[kind, name] = merged(old, body)
                case Delete(kind=kind, name=name):
                    children.pop((kind, name))
                case PushFleet(role=role, fleet=fleet):
                    heard = getattr(seen, role)
                    seen = replace(seen, **{role: msgspec.structs.replace(heard, fleet_generation=fleet.generation)})
        seen = replace(seen, children=children)
        if decided.status is not None:
            groups = tuple(replace(group, status=decided.group_statuses[group.name]) for group in seen.groups)
            seen = replace(seen, status=decided.status, groups=groups)
        if not decided.actions:
            return seen
    raise AssertionError(f"still acting after {rounds} rounds: {decided.actions}")


def condition(decided: Plan, kind: str) -> tuple[str, str]:
    assert decided.status is not None
    found = next(item for item in decided.status.conditions if item.type == kind)
    return found.status, found.reason


def message(decided: Plan, kind: str) -> str:
    assert decided.status is not None
    return next(item.message for item in decided.status.conditions if item.type == kind)


def replicas(seen: Snapshot) -> dict[str, int]:
    return {name: child["spec"]["replicas"] for (kind, name), child in seen.children.items() if kind == "Deployment"}


def running(**more: Any) -> Snapshot:
    """Two groups of one engine, everything up."""
    groups = [study.group("h100-fp8", replicas=1), study.group("b200-nvfp4", replicas=1)]
    pods = [
        study.engine_pod("h100-fp8", 0),
        study.engine_pod("b200-nvfp4", 0),
        study.trainer_pod(),
        study.trainer_pod(name="study-router-x", uid="uid-router", role=keys.ROLE_ROUTER, gpus=0, gpu_type=""),
    ]
    trainer = records.TrainerStatus(
        run="study",
        attempt=1,
        steps_total=100,
        step=0,
        weights_version=0,
        durable_version=0,
        buffered=0,
        outstanding=0,
        fleet_generation=1,
    )
    router = records.RouterStatus(fleet_generation=1, sessions_active=0, sessions_total=0, groups=[], engines=[])
    job = live(manifests.trainer_job(RUN, study.run_spec(), Settings(), URLS, suspend=False))
    values: dict[str, Any] = {"trainer": trainer, "router": router, "children": {("Job", "study-trainer"): job}}
    return study.snapshot(groups, pods, **{**values, **more})


def with_job(seen: Snapshot, *conditions: dict[str, str]) -> Snapshot:
    job = seen.children["Job", "study-trainer"]
    return replace(
        seen, children={**seen.children, ("Job", "study-trainer"): {**job, "status": {"conditions": list(conditions)}}}
    )


def test_what_pods_mount_comes_first_and_pods_wait_for_the_addresses() -> None:
    decided = plan(study.snapshot([study.group("h100-fp8")], has_token=False, fresh_token="t"), at(0))
    kinds = [action.manifest["kind"] for action in decided.actions if isinstance(action, Apply | Create)]
    assert kinds == ["Secret", "ConfigMap", "ConfigMap", "Service", "Service"]


def test_a_settled_run_needs_nothing_and_its_status_rests() -> None:
    seen = settle(running(), at(60))
    decided = plan(seen, at(60))
    assert decided.actions == ()
    assert decided.status == seen.status
    assert decided.events == ()


def test_shares_follow_ready_engines() -> None:
    seen = settle(running(), at(60))
    fleet = json.loads(seen.children["ConfigMap", "study-fleet"]["data"]["fleet.json"])
    # 16 and 32 sessions: 333 and 667 thousandths
    assert {group["name"]: group["share_milli"] for group in fleet["groups"]} == {"h100-fp8": 333, "b200-nvfp4": 667}
    gone = replace(seen, pods=tuple(pod for pod in seen.pods if pod.group != "b200-nvfp4"))
    again = json.loads(settle(gone, at(90)).children["ConfigMap", "study-fleet"]["data"]["fleet.json"])
    assert {group["name"]: group["share_milli"] for group in again["groups"]} == {"h100-fp8": 1000, "b200-nvfp4": 0}
    assert again["generation"] > fleet["generation"]


def test_a_changed_fleet_is_pushed_to_whoever_has_heard_an_older_one() -> None:
    seen = settle(running(), at(60))
    generation = json.loads(seen.children["ConfigMap", "study-fleet"]["data"]["fleet.json"])["generation"]
    assert seen.router is not None
    assert seen.trainer is not None
    stale = replace(
        seen,
        router=records.RouterStatus(
            fleet_generation=generation - 1, sessions_active=0, sessions_total=0, groups=[], engines=[]
        ),
    )
    stale = replace(stale, trainer=msgspec.structs.replace(seen.trainer, fleet_generation=generation))
    pushes = [action for action in plan(stale, at(61)).actions if isinstance(action, PushFleet)]
    assert [(push.role, push.fleet.generation) for push in pushes] == [("router", generation)]


def test_a_finished_run_succeeds_and_stops_costing() -> None:
    seen = settle(running(), at(60))
    assert seen.trainer is not None
    done = settle(replace(seen, trainer=msgspec.structs.replace(seen.trainer, step=100, finished=True)), at(120))
    assert condition(plan(done, at(120)), "Succeeded") == ("True", "Completed")
    assert set(replicas(done).values()) == {0}


def test_the_last_measurements_stay_when_trainer_and_router_are_gone() -> None:
    group_step = records.GroupStep(
        name="h100-fp8", view="fp8", samples=64, turns=640, kl=records.Ratio(0.02, 1.0), version=99
    )
    seen = settle(replace(running(), steps=(study.step(100, groups=[group_step], kl=0.01),)), at(6060))
    assert seen.trainer is not None
    done = settle(replace(seen, trainer=msgspec.structs.replace(seen.trainer, step=100, finished=True)), at(6070))
    after = with_job(done, {"type": "Complete", "status": "True"})
    after = settle(replace(after, trainer=None, router=None, steps=(), pods=()), at(6080))
    assert (after.status.step, after.status.reward, after.status.status) == (100, "0.5", "Completed")
    row = next(item for item in after.status.groups if item.name == "h100-fp8")
    assert (row.samples, row.kl, row.kl_ratio, row.version) == (64, "0.02", "2", 99)


def test_a_step_is_counted_once_however_often_it_is_seen() -> None:
    group_step = records.GroupStep(name="h100-fp8", view="fp8", samples=64, generated_tokens=500, turns=640)
    seen = replace(running(), steps=tuple(study.step(number, groups=[group_step]) for number in (1, 2)))
    for moment in (120, 123, 126):
        seen = settle(seen, at(moment))
    totals = seen.status.totals
    assert totals is not None
    assert (totals.steps, totals.samples, totals.generated_tokens) == (2, 128, 1000)
    assert len(seen.status.step_costs) == 2


def test_cost_of_a_step_is_in_status_billed_and_by_work() -> None:
    seen = running()
    groups = [
        study.group("h100-fp8", replicas=1, turnsPerEngineHour=3950),
        study.group("b200-nvfp4", replicas=1, turnsPerEngineHour=6250),
    ]
    steps = [
        study.step(
            1,
            groups=[
                records.GroupStep(name="h100-fp8", view="fp8", samples=4, turns=20, generated_tokens=1000),
                records.GroupStep(name="b200-nvfp4", view="nvfp4", samples=4, turns=30, generated_tokens=1000),
            ],
        )
    ]
    spec = study.run_spec(
        baseline={"gpuType": "B200", "engines": 42, "sessionsPerEngine": 32, "turnsPerEngineHour": 3125}
    )
    seen = settle(replace(seen, groups=tuple(groups), steps=tuple(steps), spec=spec), at(65))
    cost = seen.status.cost_per_step
    assert cost is not None
    # a minute: engines (3.95 + 6.25) / 60 = 0.17, trainer 8 x 6.25 / 60 = 0.833333
    assert (cost.sampler_usd, cost.trainer_usd, cost.billed_usd) == ("0.17", "0.833333", "1.003333")
    # 20 x 0.001 + 30 x 0.001 = 0.05; baseline 50 x 0.002 = 0.1
    assert (cost.work_priced_usd, cost.baseline_usd, cost.saving_percent) == ("0.05", "0.1", "50.0")
    assert cost.idle_usd == "0.12"
    row = next(item for item in seen.status.groups if item.name == "h100-fp8")
    assert row.usd_per_million_tokens == "65.83"  # 3.95 / 60 dollars for 1000 tokens


def test_without_a_price_there_is_a_condition_and_no_number() -> None:
    spec = study.run_spec(prices=[{"gpuType": "B200", "usdPerGPUHour": "6.25"}])
    group_step = records.GroupStep(name="h100-fp8", view="fp8", samples=4, turns=20)
    decided = plan(settle(replace(running(), spec=spec, steps=(study.step(1, groups=[group_step]),)), at(65)), at(65))
    assert condition(decided, "PriceKnown") == ("False", "PriceMissing")
    assert "H100 OnDemand" in message(decided, "PriceKnown")
    assert decided.status is not None
    assert decided.status.totals is not None
    assert decided.status.cost_per_step is not None
    assert decided.status.totals.billed_usd is None
    assert decided.status.cost_per_step.billed_usd is None
    assert decided.status.cost_per_step.work_priced_usd is None
    assert decided.status.cost_per_step.trainer_usd is not None


def test_suspend_takes_every_pod_and_is_true_only_when_none_is_left() -> None:
    seen = settle(running(), at(60))
    suspended = settle(replace(seen, spec=study.run_spec(suspend=True)), at(90))
    assert suspended.children["Job", "study-trainer"]["spec"]["suspend"] is True
    assert set(replicas(suspended).values()) == {0}
    decided = plan(suspended, at(90))
    assert condition(decided, "Suspended") == ("False", "Suspending")
    empty = plan(replace(suspended, pods=()), at(120))
    assert condition(empty, "Suspended") == ("True", "Suspended")
    resumed = settle(replace(suspended, spec=study.run_spec(), pods=()), at(150))
    assert resumed.children["Job", "study-trainer"]["spec"]["suspend"] is False
    assert replicas(resumed) == {"study-router": 1, "study-rollout": 1, "h100-fp8": 1, "b200-nvfp4": 1}


def test_a_spent_budget_stops_the_pods_and_says_what_it_cost() -> None:
    seen = settle(replace(running(), spec=study.run_spec(budget={"usdTotal": "60"})), at(60))
    # engines 10.20 an hour, trainer 50: one hour is 60.20
    spent = settle(seen, at(3605))
    assert set(replicas(spent).values()) == {0}
    assert spent.children["Job", "study-trainer"]["spec"]["suspend"] is True
    decided = plan(spent, at(3605))
    assert condition(decided, "WithinBudget") == ("False", "BudgetSpent")
    assert "has cost $60.2 of budget.usdTotal $60" in message(decided, "WithinBudget")


def test_a_budget_is_told_then_stops_growth_then_pauses() -> None:
    """The engines cost 10.20 an hour, the trainer 50: a cap of 602 lasts ten hours."""
    movable = [study.group("h100-fp8", replicas=1, maxReplicas=3), study.group("b200-nvfp4", replicas=1)]
    spec = study.run_spec(budget={"usdTotal": "602"})
    seen = settle(replace(running(), spec=spec, groups=tuple(movable)), at(60))

    def stage(hours: float) -> tuple[str, str]:
        return condition(plan(seen, at(3600 * hours + 5)), "WithinBudget")

    assert stage(7.9) == ("True", "Within")
    assert stage(8.1) == ("False", "NearlySpent")
    assert stage(9.1) == ("False", "NoGrowth")
    assert stage(10.1) == ("False", "BudgetSpent")
    told = plan(replace(seen, status=plan(seen, at(3600 * 8.1)).status or seen.status), at(3600 * 9.1))
    assert [(event.type, event.reason) for event in told.events if "usdTotal" in event.message] == [
        ("Warning", "NoGrowth")
    ]

    # The optimiser wants three engines; a person's replicas is one, and one is there.
    chosen = resize.State("2026-10-13T12:00:00Z", {"h100-fp8": resize.Chosen(3, 1, 1, 3)})
    fleet = seen.children["ConfigMap", "study-fleet"]
    kept = {**fleet, "data": {**fleet["data"], resize.STATE_KEY: records.encode_json(chosen).decode()}}
    decided = replace(seen, children={**seen.children, ("ConfigMap", "study-fleet"): kept})
    assert replicas(settle(decided, at(3600 * 7)))["h100-fp8"] == 3
    assert replicas(settle(decided, at(3600 * 9.1)))["h100-fp8"] == 1


def test_a_job_that_failed_for_good_fails_the_run_with_its_pods_last_words() -> None:
    seen = with_job(
        settle(running(), at(60)),
        {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "too many"},
    )
    ended = study.trainer_pod(
        phase="Failed", ready=False, finished=at(80), exit_code=1, message="CUDA error: device lost"
    )
    decided = plan(settle(replace(seen, pods=(ended,), trainer=None), at(90)), at(90))
    assert condition(decided, "Succeeded") == ("False", "Failed")
    assert "CUDA error: device lost" in message(decided, "Succeeded")
    assert decided.status is not None
    # The pod is collected later; what it said stays.
    later = plan(settle(replace(seen, pods=(), trainer=None, status=decided.status), at(99)), at(99))
    assert "CUDA error: device lost" in message(later, "Succeeded")


def test_bad_configuration_becomes_a_condition_with_its_text_and_stops_the_pods() -> None:
    seen = with_job(
        settle(running(), at(60)),
        {"type": "Failed", "status": "True", "reason": "PodFailurePolicy", "message": "exit code 78"},
    )
    ended = study.trainer_pod(
        phase="Failed", ready=False, finished=at(80), exit_code=78, message="ModelNotFound: /model: no config.json"
    )
    after = settle(replace(seen, pods=(ended,), trainer=None), at(90))
    decided = plan(after, at(90))
    assert condition(decided, "ConfigurationValid") == ("False", "InvalidConfiguration")
    assert "ModelNotFound: /model: no config.json" in message(decided, "ConfigurationValid")
    assert condition(decided, "Succeeded") == ("False", "InvalidConfiguration")
    assert set(replicas(after).values()) == {0}


def test_the_guards_pause_stops_the_bill_until_a_person_edits_the_spec() -> None:
    kls = [0.01] * 5 + [0.1] * 4
    seen = settle(
        replace(running(), steps=tuple(study.step(number, kl=kl) for number, kl in enumerate(kls, 1))), at(600)
    )
    fleet = json.loads(seen.children["ConfigMap", "study-fleet"]["data"]["fleet.json"])
    assert fleet["paused"] is True
    assert set(replicas(seen).values()) == {0}
    assert seen.children["Job", "study-trainer"]["spec"]["suspend"] is True  # SIGTERM: it saves
    decided = plan(seen, at(601))
    assert condition(decided, "MismatchHealthy") == ("False", "Paused")
    assert condition(decided, "Succeeded") == ("Unknown", "Paused")
    assert condition(decided, "Suspended") == ("False", "Suspending")
    assert "KL 0.1 against 0.01 early" in message(decided, "Succeeded")
    assert any(item.what == "guard: Pause the run" for item in seen.status.decisions)
    assert "no checkpoint is from before it grew" in message(decided, "MismatchHealthy")  # every 10 steps, it grew at 6

    # No pod is left, nobody answers, the operator was restarted: it holds.
    quiet = {"pods": (), "trainer": None, "router": None, "steps": ()}
    resting = settle(replace(seen, **quiet), at(700))
    assert condition(plan(resting, at(700)), "Suspended") == ("True", "Paused")
    assert "KL 0.1 against 0.01 early" in message(plan(resting, at(700)), "Succeeded")
    edited = settle(replace(resting, generation=2, spec=study.run_spec(guard={"klGrowth": "20"})), at(800))
    assert edited.children["Job", "study-trainer"]["spec"]["suspend"] is False
    assert replicas(edited) == {"study-router": 1, "study-rollout": 1, "h100-fp8": 1, "b200-nvfp4": 1}
    # The trainer is back and tells its steps: they are no news.
    back = settle(replace(edited, steps=seen.steps, trainer=seen.trainer, pods=seen.pods, generation=2), at(900))
    assert condition(plan(back, at(900)), "Succeeded")[1] != "Paused"


def test_a_pause_names_the_last_checkpoint_from_before_it_grew() -> None:
    kls = [0.01] * 23 + [0.1] * 3  # from step 24 on; saved at 10 and 20
    steps = tuple(study.step(number, kl=kl) for number, kl in enumerate(kls, 1))
    decided = plan(replace(settle(running(), at(60)), steps=steps), at(2000))
    assert condition(decided, "Succeeded")[1] == "Paused"
    assert "of step 20: checkpoint.rewindToStep goes back to it" in message(decided, "MismatchHealthy")


def test_a_run_that_was_taken_back_is_judged_from_there_on() -> None:
    kls = [0.01] * 23 + [0.1] * 3
    steps = tuple(study.step(number, attempt=1, kl=kl) for number, kl in enumerate(kls, 1))
    paused = settle(replace(settle(running(), at(60)), steps=steps), at(2000))
    spec = study.run_spec(checkpoint={"rewindToStep": 20})
    freed = settle(replace(paused, spec=spec, generation=2, pods=(), trainer=None), at(2100))
    assert freed.status.guard is not None
    assert (freed.status.guard.action, freed.status.guard.since_step) == (None, 26)

    def again(*kls: float) -> Plan:
        more = tuple(
            study.step(number, attempt=2, finished_s=2200 + 60 * number, kl=kl) for number, kl in enumerate(kls, 21)
        )
        return plan(replace(freed, steps=(*steps, *more)), at(4000))

    assert condition(again(0.01, 0.01), "MismatchHealthy")[0] == "True"  # the steps that were undone alarm nobody
    assert condition(again(0.01, 0.1, 0.1, 0.1), "Succeeded") == ("Unknown", "Paused")  # and at step 24, not after 26


def test_a_quarantined_group_gets_no_session_and_its_samples_are_refused() -> None:
    def record(number: int) -> records.StepRecord:
        grown = 0.01 if number <= 5 else 0.2
        groups = [
            records.GroupStep(name="h100-fp8", view="fp8", samples=64, kl=records.Ratio(grown, 1.0)),
            records.GroupStep(name="b200-nvfp4", view="nvfp4", samples=64, kl=records.Ratio(0.01, 1.0)),
        ]
        return study.step(number, groups=groups)

    seen = settle(replace(running(), steps=tuple(record(number) for number in range(1, 10))), at(600))
    fleet = json.loads(seen.children["ConfigMap", "study-fleet"]["data"]["fleet.json"])
    rows = {group["name"]: (group["share_milli"], group.get("quarantined", False)) for group in fleet["groups"]}
    assert rows == {"h100-fp8": (0, True), "b200-nvfp4": (1000, False)}
    assert plan(seen, at(600)).group_statuses["h100-fp8"].status == "Quarantined"


def test_an_inline_group_that_was_taken_out_of_the_spec_is_deleted() -> None:
    spec = study.run_spec(samplerGroups=[{"name": "keep", "gpuType": "H100", "precision": "BF16"}])
    seen = settle(study.snapshot(spec=spec), at(0))
    assert ("SamplerGroup", "study-keep") in seen.children
    fewer = replace(seen, spec=study.run_spec(), removed_groups=("study-keep",))
    assert [(action.kind, action.name) for action in plan(fewer, at(1)).actions if isinstance(action, Delete)] == [
        ("SamplerGroup", "study-keep")
    ]


def test_a_group_that_was_applied_late_gets_the_run_as_an_owner_and_no_more() -> None:
    late = replace(study.group("h200-bf16", replicas=1), owned=False)
    decided = plan(study.snapshot([late]), at(0))
    adopted = [
        action.manifest
        for action in decided.actions
        if isinstance(action, Apply) and action.manifest["kind"] == "SamplerGroup"
    ]
    assert len(adopted) == 1
    assert adopted[0]["metadata"]["ownerReferences"] == [
        {"apiVersion": "motley.dev/v1alpha1", "kind": "RLRun", "name": "study", "uid": "uid-run"}
    ]
    assert "spec" not in adopted[0]


def test_a_complete_job_is_made_again_when_steps_grew() -> None:
    seen = with_job(settle(running(), at(60)), {"type": "Complete", "status": "True"})
    assert condition(plan(replace(seen, trainer=None), at(90)), "Succeeded") == ("True", "Completed")
    longer = replace(seen, spec=study.run_spec(steps=200), trainer=None)
    deletes = [action for action in plan(longer, at(90)).actions if isinstance(action, Delete)]
    assert [(action.kind, action.name) for action in deletes] == [("Job", "study-trainer")]


def test_objects_of_somebody_else_are_left_alone_and_named() -> None:
    foreign = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "study-router", "namespace": "ns", "uid": "other", "labels": {}},
        "spec": {"replicas": 3},
    }
    seen = replace(running(), children={("Deployment", "study-router"): foreign})
    after = settle(seen, at(60))
    assert after.children["Deployment", "study-router"] == foreign
    decided = plan(after, at(60))
    assert condition(decided, "ConfigurationValid") == ("False", "NameConflict")
    assert "Deployment study-router" in message(decided, "ConfigurationValid")


def test_quota_refusals_become_a_condition_with_the_servers_words() -> None:
    words = 'pods "h100-fp8-x" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=1'
    decided = plan(replace(running(), failed_creates={("Deployment", "h100-fp8"): words}), at(60))
    assert condition(decided, "QuotaExceeded") == ("True", "QuotaExceeded")
    assert words in message(decided, "QuotaExceeded")


def test_every_known_condition_is_set_at_first_sight() -> None:
    decided = plan(study.snapshot(), at(0))
    assert decided.status is not None
    assert tuple(item.type for item in decided.status.conditions) == RUN_CONDITIONS


def test_a_transition_time_moves_only_when_the_status_flips() -> None:
    seen = settle(running(trainer=None, trainer_error="refused"), at(60))
    later = settle(replace(seen, trainer_error="timeout"), at(90))
    found = next(item for item in later.status.conditions if item.type == "TrainerReady")
    assert found.message == "timeout"
    assert found.last_transition_time == "2026-10-13T12:01:00Z"


def test_an_unreachable_trainer_stops_nothing() -> None:
    seen = settle(running(), at(60))
    decided = plan(replace(seen, trainer=None, router=None, trainer_error="connection refused"), at(90))
    assert [action for action in decided.actions if not isinstance(action, PushFleet)] == []
    assert condition(decided, "TrainerReady") == ("False", "Unreachable")


def test_a_run_that_is_being_deleted_is_left_to_the_garbage_collector() -> None:
    assert plan(replace(running(), deleting=True), at(0)) == Plan()


def test_restarted_between_any_two_plans_the_totals_are_the_same() -> None:
    """Plan every 7 s from a status that went through JSON, or once at the end: the same dollars."""
    group_step = records.GroupStep(name="h100-fp8", view="fp8", samples=8, turns=80, generated_tokens=100)
    steps = tuple(study.step(number, groups=[group_step]) for number in range(1, 6))
    often = running()
    for moment in range(0, 400, 7):
        known = tuple(record for record in steps if record.finished_unix_s <= at(moment).timestamp())
        decided = plan(replace(often, steps=known), at(moment))
        assert decided.status is not None
        often = replace(often, status=RLRunStatus.model_validate(json.loads(json.dumps(decided.status.to_json_dict()))))
    often_status = plan(replace(often, steps=steps), at(400)).status
    once_status = plan(replace(running(), steps=steps), at(400)).status
    assert often_status is not None
    assert once_status is not None
    assert often_status.totals == once_status.totals
    assert often_status.step_costs == once_status.step_costs


@pytest.mark.parametrize("precision", ["NVFP4"])
def test_a_group_that_its_hardware_cannot_run_gets_no_pod_and_says_why(precision: str) -> None:
    """Admission refuses it; an object from before the rule must not run either."""
    seen = settle(replace(running(), groups=(study.group("h100-fp8", precision=precision),)), at(60))
    assert "h100-fp8" not in replicas(seen)
    found = plan(seen, at(60)).group_statuses["h100-fp8"]
    assert found.status == "NotSupported"
