"""Killed, doubled, stopped: the cluster ends up the same."""

from __future__ import annotations

import calendar
import json
import random
import time
from functools import partial
from typing import Any

import pytest
from operator_world import CHILDREN, Operators, World, eventually

pytestmark = pytest.mark.apiserver


@pytest.mark.parametrize("seed", [0, 1])
def test_killed_at_random_moments_it_makes_the_same_children_and_no_duplicates(
    own_world: World, operators: Operators, seed: int
) -> None:
    chance = random.Random(seed)
    world = own_world
    process = operators.start()
    world.apply(world.manifest())
    for started in range(1, 4):
        # From "not yet watching" to "half of the children are there".
        eventually(partial(operators.has_started, started), "it starts")
        time.sleep(chance.uniform(0.0, 0.6))
        operators.kill(process)
        process = operators.start()  # the same identity, as when a container restarts: the lease is its own
    eventually(lambda: world.children() == CHILDREN, "the children")
    eventually(lambda: len(world.pods()) == 5, "one pod each")
    assert len(world.names("ReplicaSet", world.ours)) == 4  # no template was rendered in two ways
    assert process.poll() is None


def test_time_on_gpus_is_billed_and_restarts_lose_none(own_world: World, operators: Operators) -> None:
    world = own_world
    process = operators.start()
    groups = [{**group, "template": world.placed_here()} for group in world.manifest()["spec"]["samplerGroups"]]
    world.node("NVIDIA-H100-PCIe", 1)
    world.node("NVIDIA-B200", 1)
    world.apply(world.manifest(samplerGroups=groups))

    def totals() -> dict[str, Any]:
        found: dict[str, Any] = world.status().get("totals", {})
        return found

    eventually(lambda: len(totals().get("gpuTime", [])) == 2, "both are billed")
    first = totals()["accountedUntil"]
    operators.kill(process)
    time.sleep(2)
    operators.start()
    eventually(lambda: totals()["accountedUntil"] > first, "the next one goes on")
    found = totals()
    until = calendar.timegm(time.strptime(found["accountedUntil"], "%Y-%m-%dT%H:%M:%SZ"))
    want = {}
    for pod in world.list("Pod", f"{world.ours},motley.dev/role=sampler"):
        bound = next(item for item in pod["status"]["conditions"] if item["type"] == "PodScheduled")[
            "lastTransitionTime"
        ]
        want[pod["metadata"]["labels"]["motley.dev/gpu-type"]] = until - calendar.timegm(
            time.strptime(bound, "%Y-%m-%dT%H:%M:%SZ")
        )
    # Exactly the seconds since each was bound: none lost, none billed twice over the restart.
    assert {item["gpuType"]: item["gpuSeconds"] for item in found["gpuTime"]} == want
    dollars = (want["H100"] * 3.95 + want["B200"] * 6.25) / 3600
    assert float(found["billedUSD"]) == pytest.approx(dollars, abs=1e-6)


def test_of_two_replicas_one_acts_and_the_other_follows_when_it_dies(own_world: World, operators: Operators) -> None:
    world = own_world
    processes = {name: operators.start(name=name) for name in ("operator-a", "operator-b")}

    def holder() -> str:
        return str(world.must("Lease", "motley-operator")["spec"].get("holderIdentity", ""))

    leader = eventually(holder, "somebody leads")
    world.apply(world.manifest())
    eventually(lambda: world.children() == CHILDREN, "the children")
    operators.kill(processes.pop(leader))
    (staying,) = processes
    world.apply(world.group_manifest("late"))
    eventually(lambda: world.get("Deployment", "late"), "the other one takes over", 90)
    assert holder() == staying
    assert processes[staying].poll() is None


def test_a_namespace_is_deleted_with_the_operator_dead(own_world: World, operators: Operators) -> None:
    world = own_world
    process = operators.start()
    groups = [{**group, "drainSeconds": 0} for group in world.manifest()["spec"]["samplerGroups"]]
    world.apply(world.manifest(samplerGroups=groups))
    eventually(lambda: world.children() == CHILDREN, "the children")
    operators.kill(process)
    world.api.call("DELETE", f"/api/v1/namespaces/{world.namespace}")
    # Where a pod is still there at its first look, the namespace controller looks again after half of the longest grace: 150 s.
    gone = f"/api/v1/namespaces/{world.namespace}"
    eventually(lambda: world.api.call("GET", gone) is None, "the namespace goes", 240)


def test_sigterm_ends_it_in_order_and_frees_the_lease(own_world: World, operators: Operators) -> None:
    process = operators.start()
    eventually(lambda: own_world.get("Lease", "motley-operator"), "it leads")
    process.terminate()
    assert process.wait(timeout=30) == 0
    assert own_world.must("Lease", "motley-operator")["spec"].get("holderIdentity", "") == ""


def test_health_and_metrics_answer_and_a_deleted_run_leaves_no_series(own_world: World, operators: Operators) -> None:
    world = own_world
    process = operators.start()
    assert eventually(lambda: operators.get(process, 9091, "/healthz"), "healthy") == "ok"
    world.apply(world.manifest())
    line = f'motley_group_share_milli{{group="{world.named("h100-fp8")}",namespace="{world.namespace}",run="{world.run}"}} 0.0'
    eventually(lambda: line in operators.get(process, 9090, "/metrics"), "a series for the group")
    assert "motley_leader 1.0" in operators.get(process, 9090, "/metrics")
    world.delete("RLRun", world.run)
    eventually(
        lambda: "motley_group_share_milli{" not in operators.get(process, 9090, "/metrics"), "no series stay behind"
    )


def test_without_a_cluster_it_says_what_to_set(tmp_path: Any) -> None:
    import os
    import subprocess
    import sys

    from operator_world import ROOT

    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": f"{ROOT / 'api'}:{ROOT / 'operator'}"}
    done = subprocess.run(
        [sys.executable, "-m", "motley_operator.main"], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 78
    assert "set KUBECONFIG" in done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "motley_operator.main"],
        env={**env, "MOTLEY_LOG_LEVEL": "LOUD"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, json.dumps("LOUD")[1:-1] in done.stderr) == (78, True)
