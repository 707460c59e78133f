"""How many engines, on which nodes, decided by whom: on a real API server, scheduler and controller manager.

Router and trainer are played by small servers on their Services' addresses, kubelets by `Kubelet`.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest
from motley_api import keys, records
from operator_world import Json, Operators, World, eventually, now_text, path_of

pytestmark = pytest.mark.apiserver

PRICES = {"H100": 3.95, "H200": 4.54, "B200": 6.25}


@contextmanager
def played(address: str, port: int, answers: dict[str, Any], heard: dict[str, int]) -> Iterator[None]:
    """A server that answers GETs, and takes fleets as router and trainer do."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path.split("?")[0])
            if callable(answer):
                answer = answer()
            self._say(200 if answer is not None else 404, records.encode_json(answer))

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            heard["generation"] = msgspec.json.decode(body, type=records.Fleet).generation
            self._say(200, b"{}")

        def _say(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer((address, port), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Kubelet:
    """Pods with a node become ready, pods that are to go are gone; and who holds what is looked at each time."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.most_usd = 0.0
        self.beat_s = float("-inf")

    def beat(self) -> None:
        """A node that is silent for 50 s counts as lost."""
        ready = {"type": "Ready", "status": "True", "reason": "Test", "lastHeartbeatTime": now_text()}
        for name in self.world.nodes:
            path = path_of("Node", name=name, subresource="status")
            body = {"status": {"conditions": [{**ready, "lastTransitionTime": now_text()}]}}
            self.world.api.call("PATCH", path, body, content_type="application/merge-patch+json")
        self.beat_s = time.monotonic()

    def turn(self) -> None:
        if time.monotonic() - self.beat_s > 5:
            self.beat()
        pods = self.world.list("Pod", f"{self.world.ours},motley.dev/role=sampler")
        held = [pod for pod in pods if pod["spec"].get("nodeName")]
        self.most_usd = max(self.most_usd, sum(PRICES[pod["metadata"]["labels"][keys.GPU_TYPE_LABEL]] for pod in held))
        for pod in pods:
            name = pod["metadata"]["name"]
            if "deletionTimestamp" in pod["metadata"]:
                self.world.delete("Pod", name, gracePeriodSeconds=0)
            elif pod in held and pod["status"].get("phase") != "Running":
                old = [item for item in pod["status"]["conditions"] if item["type"] == "PodScheduled"]
                ready = {"type": "Ready", "status": "True", "lastTransitionTime": now_text()}
                status = {"phase": "Running", "startTime": now_text(), "conditions": [*old, ready]}
                self.world.patch("Pod", name, {"status": status}, subresource="status")


def one_step(world: World) -> records.StepRecord:
    return records.StepRecord(
        run=world.run,
        step=1,
        attempt=1,
        started_unix_s=time.time() - 60,
        finished_unix_s=time.time(),
        wait_s=1.0,
        train_s=1.0,
        publish_s=1.0,
        reward=records.Ratio(1.0, 2.0),
        kl=records.Ratio(0.01, 1.0),
        out_of_range=records.Ratio(0.0, 1.0),
        entropy=records.Ratio(1.0, 1.0),
        grad_norm=0.1,
        loss=0.1,
        lag=records.Ratio(0.0, 1.0),
        groups=[],
    )


def idle_router() -> records.RouterStatus:
    return records.RouterStatus(fleet_generation=0, sessions_active=0, sessions_total=0, groups=[], engines=[])


@contextmanager
def training(world: World, router: Callable[[], records.RouterStatus] = idle_router) -> Iterator[None]:
    """Router and trainer answer: one step is done."""
    heard = {"generation": 0}
    step = one_step(world)

    def told() -> records.RouterStatus:
        return msgspec.structs.replace(router(), fleet_generation=heard["generation"])

    def trainer() -> records.TrainerStatus:
        return records.TrainerStatus(
            run=world.run,
            attempt=1,
            steps_total=4,
            step=1,
            weights_version=1,
            durable_version=0,
            buffered=0,
            outstanding=0,
            fleet_generation=heard["generation"],
        )

    def address(name: str) -> str:
        found: str = eventually(
            lambda: world.must("Service", world.named(name))["spec"]["clusterIP"], f"{name}'s address"
        )
        return found

    eventually(lambda: world.pods("router"), "the router's pod")
    with (
        played(address("router"), keys.ROUTER_PORT, {"/v1/status": told}, heard),
        played(address("trainer"), keys.TRAINER_PORT, {"/v1/status": trainer, "/v1/steps": [step]}, heard),
    ):
        eventually(lambda: world.make_ready("motley.dev/role=router"), "the router is ready")
        yield


def groups(world: World, **more: Any) -> list[Json]:
    same = {"template": world.placed_here(), "drainSeconds": 1, **more}
    return [
        {"name": "h200", "gpuType": "H200", "precision": "FP8", "replicas": 2, "sessionsPerEngine": 32, **same},
        {"name": "b200", "gpuType": "B200", "precision": "NVFP4", "replicas": 6, "sessionsPerEngine": 32, **same},
    ]


def engines(world: World) -> dict[str, int]:
    return {name: world.must("Deployment", world.named(name))["spec"]["replicas"] for name in ("h200", "b200")}


def ready(world: World) -> dict[str, int]:
    return {row["name"].removeprefix(f"{world.run}-"): row["ready"] for row in world.status()["groups"]}


@pytest.mark.parametrize("seed", [0])
def test_a_rebalance_that_is_killed_again_and_again_ends_and_never_breaks_the_cap(
    own_world: World, operators: Operators, seed: int
) -> None:
    """Case 32. Eight H200 serve what two H200 and six B200 do, for less: the cap has no room for both."""
    world, chance = own_world, random.Random(seed)
    for product in ("NVIDIA-H200", "NVIDIA-B200"):
        world.node(product, 8)
    process = operators.start()
    # The trainer is declared at 6.25, the engines cost 46.58 at first and 36.32 at last.
    cap = 6.25 + 48
    sized = groups(world, minReplicas=0, maxReplicas=8)
    world.apply(world.manifest(samplerGroups=sized, rollout={"sessions": 256}, budget={"usdPerHour": str(cap)}))
    kubelet = Kubelet(world)

    def turn(times: int = 1) -> bool:
        for _ in range(times):
            kubelet.turn()
            time.sleep(0.1)
        return True

    eventually(lambda: turn() and len(world.status().get("groups", [])) == 2, "the groups")
    eventually(lambda: turn() and all(row["ready"] for row in world.status()["groups"]), "engines are ready")
    with training(world):
        eventually(lambda: turn() and engines(world) != {"h200": 2, "b200": 6}, "something moves")
        for started in range(2, 5):
            operators.kill(process)
            process = operators.start()
            eventually(lambda started=started: turn() and operators.has_started(started), "it starts")
            turn(chance.randint(1, 12))
        eventually(lambda: turn() and engines(world) == {"h200": 8, "b200": 0}, "the cheaper fleet")
        eventually(lambda: turn() and ready(world) == {"h200": 8, "b200": 0}, "eight are ready")

    assert kubelet.most_usd <= cap - 6.25 + 1e-9
    decisions = [item for item in world.status()["decisions"] if item["what"].startswith("engines:")]
    assert [item["what"] for item in decisions] == [
        f"engines: {world.named('b200')} 6 -> 0, {world.named('h200')} 2 -> 8"
    ]
    assert "$46.58/h for 256 sessions -> $36.32/h for 256, 256 wanted" in decisions[0]["why"]


def test_a_saturated_group_loses_new_sessions_and_gains_an_engine(own_world: World, operators: Operators) -> None:
    """The study's: 47 of 48 slots, KV cache 85-98% full, requests set back. All from what a router tells, over HTTP."""
    world = own_world
    world.node("NVIDIA-H200", 8)
    operators.start()
    sized = {"minReplicas": 4, "maxReplicas": 6, "template": world.placed_here(), "drainSeconds": 1}
    group = {"name": "h200", "gpuType": "H200", "precision": "FP8", "replicas": 4, "sessionsPerEngine": 12, **sized}
    world.apply(world.manifest(samplerGroups=[group]))
    kubelet, name, began = Kubelet(world), world.named("h200"), time.monotonic()

    def turn() -> bool:
        kubelet.turn()
        return True

    def row() -> Json:
        rows = world.status().get("groups", [])
        assert rows, "no status yet"
        found: Json = rows[0]
        return found

    def router() -> records.RouterStatus:
        seconds = int(time.monotonic() - began)
        engines = [
            records.EngineState(
                id=f"e{number}",
                group=name,
                view="fp8",
                url="http://e",
                version=1,
                ready=True,
                running=9,
                kv_used_percent=(85, 91, 94, 98)[number],
                turns=100 * seconds,
                generated_tokens=7700 * seconds,
                busy_s=float(seconds),
                preemptions=20 * seconds,
            )
            for number in range(4)
        ]
        told = records.GroupSessions(
            name=name, active=47, capacity_sessions=48, share_milli=1000, engines_ready=4, engines=4
        )
        return records.RouterStatus(
            fleet_generation=0, sessions_active=47, sessions_total=9000, groups=[told], engines=engines
        )

    eventually(lambda: turn() and row()["ready"] == 4, "four engines")
    assert (row()["capacitySource"], row()["capacitySessions"]) == ("Declared", 48)
    with training(world, router):
        eventually(lambda: turn() and row()["capacitySource"] == "Measured", "a measured capacity")
        # 20% of the turns were set back: 11.75 x 0.9
        assert row()["sessionsPerEngine"] == "10.575"
        eventually(lambda: turn() and world.must("Deployment", name)["spec"]["replicas"] == 5, "a fifth engine")
        eventually(lambda: turn() and row()["capacitySessions"] == 52, "5 x 10.575 sessions")
        eventually(lambda: world.condition("SamplerGroup", name, "Saturated")[0] == "True", "Saturated")
    fleet = json.loads(world.must("ConfigMap", world.named("fleet"))["data"]["fleet.json"])
    assert fleet["groups"][0]["sessions_per_engine"] == 10
    told = [item["what"] for item in world.status()["decisions"]]
    assert f"capacity: {name} 12 -> 10.575 sessions an engine" in told
    assert f"engines: {name} 4 -> 5" in told


def test_groups_are_scaled_by_kubectl_and_the_operator_follows(world: World) -> None:
    world.apply(world.manifest())
    inline, late = world.named("h100-fp8"), world.named("late")
    world.apply(world.group_manifest(late, replicas=1))
    for name in (inline, late):
        eventually(lambda name=name: world.must("Deployment", name)["spec"]["replicas"] == 1, "one engine")
        world.cluster.kubectl("scale", "-n", world.namespace, f"samplergroup/{name}", "--replicas=3")
        eventually(lambda name=name: world.must("Deployment", name)["spec"]["replicas"] == 3, "three engines")
    scale = world.api.call("GET", path_of("SamplerGroup", world.namespace, late, "scale"))
    assert scale is not None
    eventually(
        lambda: len(world.names("Pod", world.must("SamplerGroup", late)["status"]["selector"])) == 3,
        "the scale's selector finds the pods",
    )
    # An edit of the run that is not about replicas leaves them; one that is decides anew.
    first, second = world.manifest()["spec"]["samplerGroups"]
    world.apply(world.manifest(samplerGroups=[{**first, "template": {"image": "engine:2"}}, second]))
    eventually(
        lambda: world.must("Deployment", inline)["spec"]["template"]["spec"]["containers"][0]["image"] == "engine:2",
        "the image",
    )
    assert world.must("Deployment", inline)["spec"]["replicas"] == 3
    world.apply(world.manifest(samplerGroups=[{**first, "replicas": 2}, second]))
    eventually(lambda: world.must("Deployment", inline)["spec"]["replicas"] == 2, "as the run says")
    assert world.condition("SamplerGroup", inline, "ScaleConflict")[0] == "False"


def set_replicas(world: World, kind: str, name: str, replicas: int, manager: str) -> None:
    """As an autoscaler does, through the scale subresource."""
    path = path_of(kind, world.namespace, name, "scale") + f"?fieldManager={manager}"
    body = {"spec": {"replicas": replicas}}
    assert world.api.call("PATCH", path, body, content_type="application/merge-patch+json") is not None


def test_an_autoscaler_that_fights_for_the_deployment_is_named_and_left_alone(world: World) -> None:
    world.apply(world.manifest())
    group = world.named("h100-fp8")

    def replicas() -> int:
        return int(world.must("Deployment", group)["spec"]["replicas"])

    eventually(lambda: replicas() == 1, "one engine")
    flips = 0

    def contested() -> bool:
        nonlocal flips
        if replicas() == 1:
            set_replicas(world, "Deployment", group, 5, "horizontal-pod-autoscaler")
            flips += 1
        return world.condition("SamplerGroup", group, "ScaleConflict")[0] == "True"

    eventually(contested, "ScaleConflict")
    assert flips == 3  # put right twice
    _, reason, message = world.condition("SamplerGroup", group, "ScaleConflict")
    assert reason == "DeploymentContested"
    assert message.startswith(
        "horizontal-pod-autoscaler (scale) and motley-operator both set the Deployment's spec.replicas"
    )
    version = world.must("Deployment", group)["metadata"]["generation"]
    time.sleep(2)
    assert (replicas(), world.must("Deployment", group)["metadata"]["generation"]) == (5, version)
    eventually(
        lambda: any(
            event["reason"] == "DeploymentContested" and event["involvedObject"]["name"] == group
            for event in world.list("Event")
        ),
        "an event on the group",
    )


def test_an_autoscaler_that_fights_for_a_group_which_the_operator_sizes_is_followed(world: World) -> None:
    first, second = world.manifest()["spec"]["samplerGroups"]
    world.apply(world.manifest(samplerGroups=[{**first, "minReplicas": 0, "maxReplicas": 6}, second]))
    group = world.named("h100-fp8")
    eventually(lambda: world.condition("SamplerGroup", group, "ScaleConflict")[0] == "False", "seen")
    for count in (3, 2, 5):
        set_replicas(world, "SamplerGroup", group, count, "keda")
        eventually(lambda count=count: world.must("Deployment", group)["spec"]["replicas"] == count, f"{count} engines")
    eventually(
        lambda: world.condition("SamplerGroup", group, "ScaleConflict")[1] == "SamplerGroupContested", "conflict"
    )
    assert (
        "keda (scale) and motley-operator both set spec.replicas"
        in world.condition("SamplerGroup", group, "ScaleConflict")[2]
    )


def test_a_group_that_was_applied_while_the_operator_was_down_joins_when_it_is_back(
    own_world: World, operators: Operators
) -> None:
    world = own_world
    process = operators.start()
    world.apply(world.manifest())
    eventually(lambda: world.get("Deployment", world.named("rollout")), "the run's children")
    operators.kill(process)
    late = world.named("late")
    world.apply(world.group_manifest(late, replicas=2))
    world.delete("SamplerGroup", world.named("b200-nvfp4"))  # and one that the run still lists is deleted by hand
    operators.start()
    eventually(lambda: world.get("Deployment", late), "its Deployment")
    owners = {owner["name"] for owner in world.must("SamplerGroup", late)["metadata"]["ownerReferences"]}
    assert owners == {world.run}
    eventually(lambda: world.condition("SamplerGroup", late, "RunFound")[0] == "True", "RunFound")
    eventually(lambda: world.get("Deployment", world.named("b200-nvfp4")), "the run's own group is made again")
    # Deleted, it drains: its pods get their grace, its Deployment goes with it.
    world.delete("SamplerGroup", late)
    eventually(lambda: world.get("Deployment", late) is None, "its Deployment goes")
    eventually(
        lambda: late not in {row["name"] for row in world.status()["groups"] if row["engines"]}, "no engine counts"
    )


def test_what_others_hold_is_not_free_and_dra_alone_is_not_counted(world: World) -> None:
    full, dra = world.node("NVIDIA-H200", 2), world.node("NVIDIA-H200-NVL", 0)
    other: Json = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": world.named("other"), "namespace": world.namespace},
        "spec": {
            "nodeName": full,
            "containers": [
                {"name": "c", "image": "i", "resources": {"limits": {keys.GPU_RESOURCE: "2"}}},
            ],
        },
    }
    assert world.api.call("POST", path_of("Pod", world.namespace), other) is not None
    device = {"name": "gpu-0", "attributes": {"productName": {"string": "NVIDIA H200 NVL"}, "type": {"string": "gpu"}}}
    offered = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": world.named("slice")},
        "spec": {
            "driver": "gpu.nvidia.com",
            "nodeName": dra,
            "pool": {"name": dra, "generation": 1, "resourceSliceCount": 1},
            "devices": [device],
        },
    }
    assert world.api.call("POST", path_of("ResourceSlice"), offered) is not None
    here = {"template": world.placed_here()}
    group = {"name": "h200", "gpuType": "H200", "precision": "BF16", **here}
    world.apply(world.manifest(samplerGroups=[group]))
    name = world.named("h200")
    eventually(lambda: f"{full} (0 free)" in world.condition("SamplerGroup", name, "Placed")[2], "0 are free")
    message = world.condition("SamplerGroup", name, "Placed")[2]
    assert f"offered only through DRA, for which Motley does not ask, so not counted: {dra}" in message
    world.delete("Pod", world.named("other"), gracePeriodSeconds=0)
    world.api.call("DELETE", path_of("ResourceSlice", name=world.named("slice")))
    eventually(
        lambda: (
            [pod["spec"].get("nodeName") for pod in world.list("Pod", f"{world.ours},motley.dev/role=sampler")]
            == [full]
        ),
        "it gets what the other one held",
    )


def test_two_runs_that_make_a_group_of_one_name_say_so_and_do_not_fight(world: World) -> None:
    """<run>-<group> of one is <run>-<group> of the other: a, b-c and a-b, c."""
    other = World(world.cluster, world.api, world.namespace, f"{world.run}-b")
    first = {"gpuType": "H100", "precision": "FP8"}
    world.apply(world.manifest(samplerGroups=[{"name": "b-c", **first}]))
    name = world.named("b-c")
    eventually(lambda: world.get("Deployment", name), "the first one's group")
    other.apply(other.manifest(samplerGroups=[{"name": "c", **first, "gpuType": "H200"}]))
    _, message = other.until("ConfigurationValid", "False")
    assert f"SamplerGroup {name}" in message
    group = world.must("SamplerGroup", name)
    assert (group["spec"]["gpuType"], group["spec"]["runRef"]["name"]) == ("H100", world.run)
    time.sleep(2)
    later = world.must("SamplerGroup", name)  # its status may move; what either run says of it does not
    for field in ("generation", "ownerReferences", "labels", "annotations"):
        assert later["metadata"].get(field) == group["metadata"].get(field), field
    assert json.dumps(other.status()).count(name) >= 1
    other.leave()
