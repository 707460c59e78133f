"""What status says, on a real API server, scheduler and controller manager."""

from __future__ import annotations

import json
from typing import Any

import pytest
from operator_world import World, eventually, now_text

pytestmark = pytest.mark.apiserver


def test_conditions_tell_what_is_missing_while_no_node_is_there(world: World) -> None:
    world.apply(world.manifest())
    reason, _ = world.until("CapacityAvailable", "False")
    assert reason == "Unschedulable"
    eventually(
        lambda: "no node is labelled B200" in world.run_condition("CapacityAvailable")[2], "the labels looked for"
    )
    assert world.run_condition("Succeeded")[:2] == ("Unknown", "Starting")
    assert world.run_condition("PriceKnown")[0] == "True"
    group = world.named("h100-fp8")
    eventually(lambda: world.condition("SamplerGroup", group, "Ready")[1] == "Unschedulable", "group Unschedulable")
    eventually(
        lambda: any(
            event["reason"] == "Unschedulable" and event["involvedObject"]["name"] == world.run
            for event in world.list("Event")
        ),
        "an event on the run",
    )


def test_a_missing_price_is_a_condition_and_no_number(world: World) -> None:
    world.apply(world.manifest(prices=[{"gpuType": "H100", "usdPerGPUHour": "3.95"}]))
    reason, message = world.until("PriceKnown", "False")
    assert reason == "PriceMissing"
    assert "B200 OnDemand" in message


def test_the_scheduler_places_engines_by_gpu_type_and_shares_follow_those_that_are_ready(world: World) -> None:
    here = world.placed_here()
    groups = [{**group, "template": here} for group in world.manifest()["spec"]["samplerGroups"]]
    h100, b200 = world.node("NVIDIA-H100-80GB-HBM3", 2), world.node("NVIDIA-B200", 2)
    world.node("NVIDIA-H200", 8)
    world.apply(world.manifest(samplerGroups=groups))

    def placed() -> dict[str, str]:
        pods = world.list("Pod", f"{world.ours},motley.dev/role=sampler")
        return {pod["metadata"]["labels"]["motley.dev/group"]: pod["spec"].get("nodeName", "") for pod in pods}

    eventually(
        lambda: placed() == {world.named("h100-fp8"): h100, world.named("b200-nvfp4"): b200}, "each engine on its type"
    )

    def shares() -> dict[str, str]:
        return {
            item["name"].removeprefix(f"{world.run}-"): item["sharePercent"]
            for item in world.status().get("groups", [])
        }

    eventually(lambda: shares() == {"h100-fp8": "0", "b200-nvfp4": "0"}, "none before an engine is ready")
    assert world.make_ready(f"motley.dev/group={world.named('h100-fp8')}") == 1
    eventually(lambda: shares() == {"h100-fp8": "100", "b200-nvfp4": "0"}, "all to the first")
    assert world.make_ready(f"motley.dev/group={world.named('b200-nvfp4')}") == 1
    eventually(lambda: shares() == {"h100-fp8": "33.3", "b200-nvfp4": "66.7"}, "by capacity: 16 and 32")
    fleet = json.loads(world.must("ConfigMap", world.named("fleet"))["data"]["fleet.json"])
    want_milli = {world.named("h100-fp8"): 333, world.named("b200-nvfp4"): 667}
    assert {group["name"]: group["share_milli"] for group in fleet["groups"]} == want_milli
    decisions = world.status()["decisions"]
    assert any(f"{world.named('b200-nvfp4')} 0 -> 66.7%" in item["what"] for item in decisions), decisions
    assert world.run_condition("SamplersReady")[0] == "True"

    for pod in world.names("Pod", f"motley.dev/group={world.named('h100-fp8')}"):
        world.delete("Pod", pod, gracePeriodSeconds=0)
    eventually(lambda: shares()["h100-fp8"] == "0", "its share moves when it is gone")


def test_suspend_removes_every_pod_before_it_says_so_and_resume_brings_them_back(world: World) -> None:
    world.apply(world.manifest())
    eventually(lambda: len(world.pods()) == 5, "five pods")
    world.apply(world.manifest(suspend=True))
    world.until("Suspended", "True")
    assert world.pods() == set()
    assert world.must("Job", world.named("trainer"))["spec"]["suspend"] is True
    world.apply(world.manifest())
    eventually(lambda: len(world.pods()) == 5, "five pods again")
    world.until("Suspended", "False")


def end_trainer(world: World, code: int, message: str) -> None:
    """As a kubelet reports a container that ended."""
    (pod,) = eventually(lambda: world.pods("trainer"), "the trainer's pod")
    ended: dict[str, Any] = {"exitCode": code, "reason": "Error" if code else "Completed", "message": message}
    ended |= {"startedAt": now_text(), "finishedAt": now_text()}
    container = {
        "name": "trainer",
        "image": "i",
        "imageID": "i",
        "ready": False,
        "restartCount": 0,
        "state": {"terminated": ended},
    }
    phase = "Failed" if code else "Succeeded"
    world.patch("Pod", pod, {"status": {"phase": phase, "containerStatuses": [container]}}, subresource="status")


def test_a_trainer_that_cannot_be_configured_fails_the_run_with_its_words(world: World) -> None:
    world.apply(world.manifest())
    end_trainer(world, 78, "ModelNotFound: /data/model has no config.json")
    reason, message = world.until("ConfigurationValid", "False")
    assert reason == "InvalidConfiguration"
    assert "ModelNotFound: /data/model has no config.json" in message
    assert world.until("Succeeded", "False")[0] == "InvalidConfiguration"
    eventually(
        lambda: not world.pods("sampler") and not world.pods("router") and not world.pods("rollout"),
        "no pod stays and costs",
    )
    assert "ModelNotFound" in world.run_condition("ConfigurationValid")[2]


def test_a_trainer_that_crashes_is_tried_again(world: World) -> None:
    world.apply(world.manifest())
    first = eventually(lambda: world.pods("trainer"), "the trainer's pod")
    end_trainer(world, 1, "CUDA error: device lost")
    eventually(lambda: world.pods("trainer") - first, "another pod, of the same Job")
    eventually(lambda: "CUDA error: device lost" in world.run_condition("TrainerReady")[2], "its words are told")
    assert world.run_condition("Succeeded")[0] == "Unknown"


def test_a_job_that_completes_completes_the_run_and_stops_what_costs(world: World) -> None:
    world.apply(world.manifest())
    end_trainer(world, 0, "")
    assert world.until("Succeeded", "True")[0] == "Completed"
    eventually(
        lambda: not world.pods("sampler") and not world.pods("router") and not world.pods("rollout"), "no pod stays"
    )


def test_a_quota_that_refuses_pods_is_told_in_the_servers_words(own_world: World, operators: Any) -> None:
    world = own_world
    hard = {"requests.nvidia.com/gpu": "0"}
    world.apply({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "gpus"}, "spec": {"hard": hard}})
    eventually(lambda: world.must("ResourceQuota", "gpus").get("status", {}).get("hard"), "the quota is in force")
    operators.start()
    world.apply(world.manifest())

    def told() -> bool:
        status, _, message = world.run_condition("QuotaExceeded")
        return (
            status == "True"
            and f"Deployment {world.named('h100-fp8')}" in message
            and f"Job {world.named('trainer')}" in message
        )

    eventually(told, "QuotaExceeded names both")
    assert "exceeded quota: gpus" in world.run_condition("QuotaExceeded")[2]


def test_another_writers_condition_and_a_conflict_lose_nothing(world: World) -> None:
    world.apply(world.manifest())
    eventually(lambda: world.status().get("observedGeneration") == 1, "a first status")
    foreign = {
        "type": "CostApproved",
        "status": "True",
        "reason": "Finance",
        "message": "",
        "lastTransitionTime": now_text(),
    }
    body = {
        "apiVersion": "motley.dev/v1alpha1",
        "kind": "RLRun",
        "metadata": {"name": world.run, "namespace": world.namespace},
        "status": {"conditions": [foreign]},
    }
    world.cluster.kubectl(
        "apply", "--server-side", "--subresource=status", "--field-manager=finance", "-f", "-", stdin=json.dumps(body)
    )
    world.apply(world.manifest(steps=9))  # and the spec moves at the same time
    eventually(lambda: world.status().get("observedGeneration") == 2, "the new spec is observed")
    world.patch("RLRun", world.run, {"spec": {"suspend": True}})
    world.until("Suspended", "True")
    assert world.run_condition("CostApproved")[:2] == ("True", "Finance")
