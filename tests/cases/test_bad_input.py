"""What nobody should apply, and what was applied under an earlier version."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from motley_api.resources import RLRun, SamplerGroup
from motley_operator.planner.plan import plan
from operator_world import ROOT, Api, Cluster, World, eventually, numbers, path_of
from planner import study
from planner.study import at
from planner.test_plan import condition, message, replicas, running, settle

Json = dict[str, Any]
BEFORE = {
    name: json.loads((ROOT / f"tests/cases/before/{name}.json").read_text()) for name in ("rlrun", "samplergroup")
}
RUN: Json = {
    "model": {"source": "/data/model", "contextLength": 512},
    "tasks": {"source": "/data/tasks"},
    "store": {"url": "file:///data/store"},
    "steps": 4,
}
GROUP: Json = {"runRef": {"name": "r"}, "gpuType": "H200", "precision": "BF16"}


def apply(api: Api, kind: str, spec: Json) -> str:
    """What the server says against it; "" when it took it."""
    name = f"bad-{next(numbers)}"
    body = {"apiVersion": "motley.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}
    try:
        api.call("POST", path_of(kind, "default"), body)
    except AssertionError as error:
        return str(error)
    api.call("DELETE", path_of(kind, "default", name))
    return ""


@pytest.mark.apiserver
@pytest.mark.parametrize(
    ("price", "want"),
    [
        ("-1", "should match"),
        ("1e9", "should match"),
        ("NaN", "should match"),
        ("", "should match"),
        ("10000.01", "usdPerGPUHour must be at most 10000"),
        ("999999999", "usdPerGPUHour must be at most 10000"),
        ("0", ""),
        ("10000", ""),
    ],
)
def test_prices_that_cannot_be_are_refused(api: Api, cluster: Cluster, price: str, want: str) -> None:
    said = apply(api, "RLRun", {**RUN, "prices": [{"gpuType": "H100", "usdPerGPUHour": price}]})
    assert want in said
    assert bool(said) == bool(want)


@pytest.mark.apiserver
@pytest.mark.parametrize(
    ("kind", "spec", "want"),
    [
        ("SamplerGroup", {**GROUP, "minReplicas": 3, "maxReplicas": 2}, "minReplicas must be"),
        (
            "RLRun",
            {**RUN, "store": {"url": "s3://runs"}, "trainer": {"nodes": 2}},
            "trainer.nodes must be 1 unless store.url is a file system",
        ),
        ("RLRun", {**RUN, "samplerGroups": [{**GROUP, "name": "router"}]}, "name must not be one of router"),
        ("RLRun", {**RUN, "samplerGroups": 2 * [{**GROUP, "name": "twice"}]}, "Duplicate value"),
        ("RLRun", {**RUN, "budget": {"usdTotal": "-5"}}, "should match"),
    ],
)
def test_contradictions_are_refused(api: Api, cluster: Cluster, kind: str, spec: Json, want: str) -> None:
    spec = copy.deepcopy(spec)
    for group in spec.get("samplerGroups", []):
        group.pop("runRef", None)
    assert want in apply(api, kind, spec)


@pytest.mark.apiserver
def test_two_runs_that_want_one_name_are_told_and_the_first_keeps_it(world: World) -> None:
    """<run>-x and its group w make <run>-x-w, as does <run> with its group x-w; and a group x-router of <run> is <run>-x's router."""
    group = {"gpuType": "H100", "precision": "FP8"}
    world.apply(world.manifest(samplerGroups=[{**group, "name": "x-w"}, {**group, "name": "x-router"}]))
    eventually(lambda: world.get("Deployment", world.named("x-router")), "the first run's groups")
    uid = world.must("SamplerGroup", world.named("x-w"))["metadata"]["uid"]
    other = World(world.cluster, world.api, world.namespace, world.named("x"))
    other.apply(other.manifest(samplerGroups=[{**group, "name": "w"}]))
    _, text = other.until("ConfigurationValid", "False")

    def both() -> bool:
        words = other.run_condition("ConfigurationValid")[2]
        return f"SamplerGroup {world.named('x-w')}" in words and f"Deployment {world.named('x-router')}" in words

    eventually(both, "both are named")
    assert "rename one of them, or delete it" in text
    kept = world.must("SamplerGroup", world.named("x-w"))
    assert (kept["metadata"]["uid"], kept["spec"]["runRef"]["name"]) == (uid, world.run)
    assert world.run_condition("ConfigurationValid")[0] != "False"
    other.leave()


def test_a_budget_below_the_trainer_allows_no_engine_and_says_so() -> None:
    spec = study.run_spec(budget={"usdPerHour": "10"})  # the trainer alone is 50
    seen = settle(running(spec=spec), at(60))
    assert {name: count for name, count in replicas(seen).items() if name in study.FLEET} == {
        "h100-fp8": 0,
        "b200-nvfp4": 0,
    }
    decided = plan(replace(seen, pods=()), at(90))
    assert condition(decided, "WithinBudget") == ("False", "BudgetLimits")
    assert "budget.usdPerHour 10 leaves room for 0 of 1 engines" in message(decided, "WithinBudget")
    assert condition(decided, "SamplersReady") == ("False", "NoEngines")


# Objects as a server stored them under an earlier version of the CRDs.


def test_objects_from_before_are_read_with_their_totals() -> None:
    run, group = RLRun.model_validate(BEFORE["rlrun"]), SamplerGroup.model_validate(BEFORE["samplergroup"])
    assert run.status is not None
    seen = replace(study.snapshot(spec=run.spec, status=run.status), name="before")
    decided = plan(seen, at(60))
    assert decided.status is not None
    assert decided.status.totals is not None
    assert (decided.status.totals.steps, decided.status.totals.gpu_seconds) == (3, 360)
    assert group.spec.max_replicas == 2


@pytest.mark.apiserver
def test_objects_from_before_are_still_valid(api: Api, cluster: Cluster) -> None:
    for kind, body in (("RLRun", BEFORE["rlrun"]), ("SamplerGroup", BEFORE["samplergroup"])):
        name = f"before-{next(numbers)}"
        api.call("POST", path_of(kind, "default"), {**body, "metadata": {"name": name}})
        if "status" in body:
            answer = api.call(
                "PATCH",
                path_of(kind, "default", name, "status"),
                {"status": body["status"]},
                content_type="application/merge-patch+json",
            )
            assert answer is not None
            assert answer["status"]["totals"]["gpuTime"] == [
                {"capacityType": "OnDemand", **item} for item in body["status"]["totals"]["gpuTime"]
            ]
        stored = api.call("GET", path_of(kind, "default", name))
        assert stored is not None
        api.call("PUT", path_of(kind, "default", name), stored)  # an edit of anything else does not trip over it
        api.call("DELETE", path_of(kind, "default", name))
