"""What the operator makes and keeps right, on a real API server, scheduler and controller manager."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from operator_world import CHILDREN, Operators, World, eventually, owners

pytestmark = pytest.mark.apiserver


def container(world: World, deployment: str) -> dict[str, Any]:
    found: dict[str, Any] = world.must("Deployment", world.named(deployment))["spec"]["template"]["spec"]["containers"][
        0
    ]
    return found


def start_run(world: World, **spec: Any) -> None:
    world.apply(world.manifest(**spec))
    eventually(lambda: world.children() == CHILDREN, f"children {CHILDREN}")


def test_a_run_gets_its_children_each_with_its_owner(world: World) -> None:
    start_run(world)
    of_the_run = (
        ("Secret", "token"),
        ("ConfigMap", "fleet"),
        ("Service", "router"),
        ("Job", "trainer"),
        ("SamplerGroup", "h100-fp8"),
    )
    for kind, name in of_the_run:
        assert owners(world.must(kind, world.named(name))) == [("RLRun", world.run)]
    group = [("SamplerGroup", world.named("h100-fp8"))]
    assert owners(world.must("Deployment", world.named("h100-fp8"))) == group
    assert owners(world.must("ConfigMap", world.named("h100-fp8-config"))) == group

    address = world.must("Service", world.named("trainer"))["spec"]["clusterIP"]
    env = {item["name"]: item for item in container(world, "rollout")["env"]}
    assert env["MOTLEY_TRAINER_URL"]["value"] == f"http://{address}:8100"
    config = json.loads(world.must("ConfigMap", world.named("config"))["data"]["run.json"])
    assert (config["steps"], config["algorithm"]["importanceSampling"]["mode"]) == (4, "MIS")
    # The framework leaves nothing of its own on the objects.
    metadata = world.must("RLRun", world.run)["metadata"]
    assert "finalizers" not in metadata
    assert set(metadata["annotations"]) == {"kubectl.kubernetes.io/last-applied-configuration"}


def test_nothing_is_written_while_nothing_changes(world: World, shared_operators: Operators) -> None:
    start_run(world)
    world.until("CapacityAvailable", "False")

    def versions() -> dict[tuple[str, str], str]:
        kinds = ("RLRun", "SamplerGroup", "Deployment", "Job", "Service", "ConfigMap", "Secret")
        found = [item for kind in kinds for item in world.list(kind)]
        return {(item["kind"], item["metadata"]["name"]): item["metadata"]["resourceVersion"] for item in found}

    def reconciles() -> float:
        text = shared_operators.get(shared_operators.running[0], 9090, "/metrics")
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("motley_reconciles_total"))

    eventually(lambda: (before := versions()) and time.sleep(1) is None and before == versions(), "quiet")
    before, looked = versions(), reconciles()
    eventually(lambda: reconciles() >= looked + 5, "five more reconciles")
    assert versions() == before


def test_edits_of_an_inline_group_flow_to_it_and_a_removed_one_goes(world: World) -> None:
    start_run(world)
    first = world.manifest()["spec"]["samplerGroups"][0]
    world.apply(world.manifest(samplerGroups=[{**first, "replicas": 3, "template": {"image": "engine:2"}}]))
    eventually(
        lambda: world.get("Deployment", world.named("b200-nvfp4")) is None, "the removed group's Deployment goes"
    )
    assert world.get("SamplerGroup", world.named("b200-nvfp4")) is None
    eventually(lambda: container(world, "h100-fp8")["image"] == "engine:2", "the image reaches the Deployment")
    assert world.must("Deployment", world.named("h100-fp8"))["spec"]["replicas"] == 3
    # What is taken back falls back to the default: server-side apply owns the field.
    world.apply(world.manifest(samplerGroups=[first]))
    eventually(lambda: container(world, "h100-fp8")["image"] == "motley-sampler:dev", "the default image again")


def test_a_child_that_was_edited_or_deleted_by_hand_is_put_right(world: World) -> None:
    start_run(world)
    token = world.must("Secret", world.named("token"))["data"]["token"]
    assert len(token) >= 40
    world.patch("Deployment", world.named("h100-fp8"), {"spec": {"replicas": 7}})
    world.delete("ConfigMap", world.named("config"))
    eventually(lambda: world.must("Deployment", world.named("h100-fp8"))["spec"]["replicas"] == 1, "replicas again 1")
    eventually(lambda: world.get("ConfigMap", world.named("config")), "the ConfigMap again")
    assert world.must("Secret", world.named("token"))["data"]["token"] == token


def test_a_late_group_is_adopted_served_and_deleted_with_the_run(world: World) -> None:
    start_run(world)
    late = world.named("late")
    world.apply(world.group_manifest(late, replicas=2))
    eventually(lambda: world.get("Deployment", late), "the late group's Deployment")
    assert owners(world.must("SamplerGroup", late)) == [("RLRun", world.run)]
    assert world.must("Deployment", late)["spec"]["replicas"] == 2
    eventually(lambda: world.condition("SamplerGroup", late, "RunFound")[0] == "True", "RunFound")
    eventually(lambda: late in {item["name"] for item in world.status()["groups"]}, "the group is in the run's status")
    # The author's spec stays the author's: applying it again is no conflict, and does not shake off the owner.
    world.apply(world.group_manifest(late, replicas=3))
    eventually(lambda: world.must("Deployment", late)["spec"]["replicas"] == 3, "3 replicas")
    assert owners(world.must("SamplerGroup", late)) == [("RLRun", world.run)]

    world.delete("RLRun", world.run)
    eventually(
        lambda: not world.children() and world.get("SamplerGroup", late) is None and not world.pods(), "all gone"
    )


def test_a_group_whose_run_is_not_there_waits_with_a_condition(world: World) -> None:
    early = world.named("early")
    world.apply(world.group_manifest(early))
    status, reason, message = eventually(lambda: world.condition("SamplerGroup", early, "RunFound"), "a condition")
    assert (status, reason) == ("False", "RunNotFound")
    assert f"RLRun {world.run}, which is not in this namespace: apply it" in message
    assert world.get("Deployment", early) is None
    world.apply(world.manifest())
    eventually(lambda: world.get("Deployment", early), "it joins when the run comes")
    eventually(lambda: world.condition("SamplerGroup", early, "RunFound")[0] == "True", "RunFound")


def test_a_name_that_is_taken_is_left_alone_and_named(world: World) -> None:
    """Also when what takes it carries none of our labels, so that no watch of ours shows it."""
    mine = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": world.named("config")}, "data": {"a": "b"}}
    world.apply(mine)
    world.apply(world.manifest())
    _, message = world.until("ConfigurationValid", "False")
    assert f"ConfigMap {world.named('config')}" in message
    assert world.must("ConfigMap", world.named("config"))["data"] == {"a": "b"}
    world.delete("ConfigMap", world.named("config"))
    eventually(
        lambda: "run.json" in world.must("ConfigMap", world.named("config"))["data"], "made once the name is free"
    )


def test_deleting_a_run_under_a_second_one_touches_only_its_own(world: World) -> None:
    start_run(world)
    other = World(world.cluster, world.api, world.namespace, f"{world.run}x")
    other.apply(other.manifest())
    eventually(lambda: other.children() == CHILDREN, "the other's children")
    world.delete("RLRun", world.run)
    eventually(lambda: not world.children(), "all of the first gone")
    assert other.children() == CHILDREN
    other.leave()
