"""What users of comparable operators ran into, as docs/cases.md lists it: the cases that need more than one part of the planner, or the
assembled operator on a real control plane. The others are where their part is tested; the table names them all."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from motley_api import keys, records
from motley_operator import manifests
from motley_operator.planner.model import Apply, Delete, Object, Patch, Settings, Snapshot
from motley_operator.planner.plan import plan
from operator_world import Operators, World, eventually, now_text, path_of
from planner import study
from planner.study import at
from planner.test_plan import RUN, condition, live, message, replicas, running, settle, with_job

Json = dict[str, Any]
GROUP = ("Deployment", "h100-fp8")
JOB = ("Job", "study-trainer")


def gang_gone(seen: Snapshot) -> Snapshot:
    """Its pods saved and left."""
    return replace(seen, pods=tuple(pod for pod in seen.pods if pod.role != keys.ROLE_TRAINER), trainer=None)


def job_actions(seen: Snapshot, seconds: float) -> list[str]:
    found = []
    for action in plan(seen, at(seconds)).actions:
        match action:
            case Apply(manifest=manifest) if manifest["kind"] == "Job":
                found.append("made")
            case Delete(kind="Job"):
                found.append("deleted")
            case Patch(kind="Job", body=body):
                found.append("suspended" if body["spec"]["suspend"] else "resumed")
    return found


def image(workload: Object) -> str:
    return str(workload["spec"]["template"]["spec"]["containers"][0]["image"])


# 23: an image edited in the resource was ignored mid-run.


def test_case_23_an_engines_new_image_rolls_its_group_with_drain_and_no_other() -> None:
    seen = settle(running(), at(60))
    groups = (study.group("h100-fp8", replicas=1, template={"image": "engine:2"}), *seen.groups[1:])
    edited = settle(replace(seen, groups=groups), at(90))
    assert image(edited.children[GROUP]) == "engine:2"
    assert edited.children[GROUP]["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    grace_s = edited.children[GROUP]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s == 600 + manifests.GRACE_MARGIN_S  # drainSeconds
    unchanged = seen.children.keys() - {GROUP, ("ConfigMap", "h100-fp8-config")}
    assert all(edited.children[key] == seen.children[key] for key in unchanged)


def test_case_23_a_trainers_new_image_comes_with_the_next_gang_after_a_save() -> None:
    seen = settle(running(), at(60))
    trainer = {"gpuType": "B200", "gpusPerNode": 8, "template": {"image": "trainer:2"}}
    edited = replace(seen, spec=study.run_spec(trainer=trainer), generation=2)
    assert job_actions(edited, 90) == ["suspended"]  # SIGTERM: it finishes its step and saves
    decided = plan(edited, at(90))
    assert condition(decided, "TrainerReady") == ("False", "Restarting")
    assert "spec.trainer changed" in message(decided, "TrainerReady")
    assert decided.status is not None
    assert [item.what for item in decided.status.decisions] == ["the trainer saves and starts again"]
    assert condition(decided, "Suspended")[0] == "False"

    saving = settle(edited, at(95))
    assert job_actions(saving, 100) == []  # two gangs at once would write over each other
    left = gang_gone(saving)
    assert job_actions(left, 110) == ["deleted"]
    after = settle(left, at(110))
    assert image(after.children[JOB]) == "trainer:2"
    assert after.children[JOB]["spec"]["suspend"] is False
    assert replicas(after) == replicas(seen)  # nothing else was touched
    assert [item.what for item in after.status.decisions].count("the trainer saves and starts again") == 1


@pytest.mark.apiserver
def test_case_23_on_a_cluster_the_edited_trainer_is_made_again_and_the_others_stay(world: World) -> None:
    world.apply(world.manifest())
    eventually(lambda: len(world.pods()) == 5, "five pods")
    others, first = world.pods() - world.pods("trainer"), world.pods("trainer")
    trainer = {**world.manifest()["spec"]["trainer"], "template": {"image": "trainer:2"}}
    world.apply(world.manifest(trainer=trainer))

    def images() -> set[str]:
        pods = world.list("Pod", f"{world.ours},motley.dev/role=trainer")
        return {pod["spec"]["containers"][0]["image"] for pod in pods if "deletionTimestamp" not in pod["metadata"]}

    eventually(lambda: images() == {"trainer:2"}, "the trainer with its new image")
    assert not first & world.pods("trainer")
    assert world.pods() - world.pods("trainer") == others
    eventually(
        lambda: any(item["what"] == "the trainer saves and starts again" for item in world.status()["decisions"]),
        "the decision",
    )
    eventually(lambda: world.run_condition("TrainerReady")[1] == "Waiting", "no restart is told any more")


# 24: suspending leaked what was reserved.


@pytest.mark.parametrize("why", ["Suspended", "BudgetSpent", "Paused"])
def test_case_24_a_run_that_rests_is_suspended_only_when_no_pod_of_it_is_left(why: str) -> None:
    spec = {
        "Suspended": study.run_spec(suspend=True),
        "BudgetSpent": study.run_spec(budget={"usdTotal": "1"}),
        "Paused": study.run_spec(),
    }[why]
    kls = [0.01] * 8 + ([1.0] * 6 if why == "Paused" else [])
    steps = tuple(study.step(number, kl=kl) for number, kl in enumerate(kls, 1))
    rests = settle(replace(settle(running(), at(60)), spec=spec, steps=steps), at(900))
    assert condition(plan(rests, at(900)), "Succeeded") == ("Unknown", why)
    assert set(replicas(rests).values()) == {0}
    assert rests.children[JOB]["spec"]["suspend"] is True
    for pod in rests.pods:  # one that lingers, whatever its role, keeps what it reserved
        lingers = replace(rests, pods=(replace(pod, ready=False, deletion=at(930)),))
        decided = plan(lingers, at(960))
        assert condition(decided, "Suspended") == ("False", "Suspending")
        assert pod.name in message(decided, "Suspended")
    assert condition(plan(replace(rests, pods=()), at(960)), "Suspended") == ("True", why)


# 26: cleanup failed and the finalizer stayed.


def test_case_26_nothing_that_is_made_has_a_finalizer_and_deletion_asks_for_nothing() -> None:
    inline = [{"name": "b300", "gpuType": "B300", "precision": "NVFP4"}]
    seen = running(spec=study.run_spec(samplerGroups=inline))
    made = [*settle(seen, at(60)).children.values(), manifests.adopted_sampler_group(RUN, "late", "uid")]
    assert len(made) > 10
    assert [child["metadata"]["name"] for child in made if "finalizers" in child["metadata"]] == []
    assert plan(replace(seen, deleting=True), at(60)).actions == ()


# 31: pod sets were capped at 8 or 18.


def test_case_31_eight_groups_and_three_roles_and_as_many_more_as_one_likes() -> None:
    groups = [study.group(name) for name in study.FLEET]
    more = [
        replace(study.group("h100-fp8", replicas=1), name=f"more-{number}", uid=f"uid-more-{number}")
        for number in range(32)
    ]
    for members in (groups, [*groups, *more]):
        made = settle(study.snapshot(members), at(0)).children
        workloads = sorted(name for kind, name in made if kind in ("Deployment", "Job"))
        assert workloads == sorted(
            [*(group.name for group in members), "study-router", "study-rollout", "study-trainer"]
        )


# 33: a budget that read 0 allowed everything.


@pytest.mark.parametrize("cap", [{"usdPerHour": "0"}, {"gpus": 0}])
def test_case_33_a_cap_of_nothing_allows_nothing(cap: Json) -> None:
    seen = settle(study.snapshot([study.group("h100-fp8")], spec=study.run_spec(budget=cap)), at(0))
    assert replicas(seen)["h100-fp8"] == 0
    assert condition(plan(seen, at(1)), "WithinBudget") == ("False", "BudgetLimits")


def test_case_33_a_total_of_nothing_is_spent_from_the_start() -> None:
    seen = settle(study.snapshot([study.group("h100-fp8")], spec=study.run_spec(budget={"usdTotal": "0"})), at(0))
    assert condition(plan(seen, at(1)), "Succeeded")[1] == "BudgetSpent"
    assert JOB not in seen.children
    assert set(replicas(seen).values()) == {0}


# 35: a spot node vanished with its pods.


def test_case_35_pods_of_a_lost_node_serve_nothing_cost_nothing_and_their_successors_serve_once_ready() -> None:
    seen = settle(running(), at(60))
    lost = study.engine_pod("h100-fp8", 0, ready=False, deletion=at(100))  # Terminating, and will be for ever
    others = tuple(pod for pod in seen.pods if pod.name != lost.name)
    successor = study.engine_pod("h100-fp8", 1, scheduled_s=120, ready=False)

    def shares(now: Snapshot) -> dict[str, int]:
        found = records_of(now)
        return {group.name: group.share_milli for group in found.groups}

    def records_of(now: Snapshot) -> records.Fleet:
        import msgspec

        return msgspec.json.decode(now.children["ConfigMap", "study-fleet"]["data"]["fleet.json"], type=records.Fleet)

    without = settle(replace(seen, pods=(*others, lost)), at(110))
    assert shares(without) == {"b200-nvfp4": 1000, "h100-fp8": 0}
    loading = settle(replace(without, pods=(*others, lost, successor)), at(200))
    assert shares(loading) == {"b200-nvfp4": 1000, "h100-fp8": 0}  # it has no weights yet
    ready = settle(replace(loading, pods=(*others, lost, replace(successor, ready=True))), at(300))
    assert shares(ready) == {"b200-nvfp4": 667, "h100-fp8": 333}
    assert replicas(ready)["h100-fp8"] == 1

    def h100_seconds(now: Snapshot, seconds: float) -> int:
        totals = (plan(now, at(seconds)).status or now.status).totals
        assert totals is not None
        return next(item.gpu_seconds for item in totals.gpu_time if item.gpu_type == "H100")

    # The lost one from 0 to its deletion time 100, its successor from 120 on.
    assert h100_seconds(ready, 3605) == 100 + (3600 - 120)


# 40: the trainer was evicted.


def evict(world: World, pod: str) -> None:
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": world.namespace}}
    world.api.call("POST", path_of("Pod", world.namespace, pod, "eviction"), body)


def ends(world: World, pod: str, code: int) -> None:
    """As a kubelet reports a trainer that saved and left."""
    moment = now_text()
    ended = {"exitCode": code, "reason": "Error", "startedAt": moment, "finishedAt": moment}
    state: Json = {"name": "trainer", "image": "i", "imageID": "i", "ready": False, "restartCount": 0}
    containers = [{**state, "state": {"terminated": ended}}]
    world.patch("Pod", pod, {"status": {"phase": "Failed", "containerStatuses": containers}}, subresource="status")


@pytest.mark.apiserver
def test_case_40_an_evicted_gang_is_made_again_whole_and_nothing_counts_against_its_limit(world: World) -> None:
    """Two nodes: one is drained, its pod is evicted and saves; the other pod leaves with it. Neither is a failure of the run."""
    trainer = {"nodes": 2, "gpusPerNode": 1, "dtype": "FP32", "template": world.placed_here()}
    for _ in range(2):
        world.node("NVIDIA-B200", 1)
    world.apply(world.manifest(trainer=trainer, samplerGroups=[]))

    def bound() -> dict[str, str]:
        """Pods that have not ended: name -> index in the gang."""
        pods = world.list("Pod", f"{world.ours},motley.dev/role=trainer")
        return {
            pod["metadata"]["name"]: pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]
            for pod in pods
            if pod["spec"].get("nodeName") and pod["status"]["phase"] not in ("Failed", "Succeeded")
        }

    first = eventually(lambda: found if sorted((found := bound()).values()) == ["0", "1"] else None, "the gang")
    assert first is not None
    for pod in first:
        world.patch("Pod", pod, {"status": {"phase": "Running"}}, subresource="status")
    evicted, other = sorted(first)
    evict(world, evicted)
    eventually(
        lambda: (
            "deletionTimestamp" in (world.get("Pod", evicted) or {"metadata": {"deletionTimestamp": ""}})["metadata"]
        ),
        "the evicted pod is asked to leave",
    )
    for pod in (evicted, other):
        if world.get("Pod", pod) is not None:
            ends(world, pod, keys.EXIT_STOPPED)
    if world.get("Pod", evicted) is not None:
        world.delete("Pod", evicted, gracePeriodSeconds=0)  # the kubelet's last word

    def again() -> bool:
        now = bound()
        if sorted(now.values()) == ["0", "1"] and not set(now) & set(first):
            return True
        raise AssertionError(
            [
                (pod["metadata"]["name"], pod["metadata"].get("finalizers"), pod["status"], pod["spec"].get("nodeName"))
                for pod in world.list("Pod", f"{world.ours},motley.dev/role=trainer")
            ]
            + [world.must("Job", world.named("trainer"))["status"]]
        )

    eventually(again, "both pods are made again", 60)
    status = world.must("Job", world.named("trainer"))["status"]
    assert (status.get("failed", 0), status.get("succeeded", 0)) == (0, 0)
    assert world.run_condition("Succeeded")[0] == "Unknown"


def test_case_40_the_attempt_and_the_steps_done_again_are_in_status_and_in_cost() -> None:
    group = records.GroupStep(name="h100-fp8", view="fp8", samples=8, turns=80)
    first = tuple(study.step(number, attempt=1, groups=[group]) for number in range(1, 8))
    seen = settle(replace(running(), steps=first), at(500))
    # The checkpoint was of step 5: 6 and 7 are trained again, in attempt 2, a few minutes later.
    again = tuple(study.step(number, attempt=2, finished_s=700 + 60 * number, groups=[group]) for number in (6, 7, 8))
    trainer = records.TrainerStatus(
        run="study", attempt=2, steps_total=100, step=8, weights_version=8, durable_version=5, buffered=0, outstanding=0
    )
    after = settle(replace(seen, trainer=trainer, steps=(*first, *again)), at(1300))
    totals = after.status.totals
    assert totals is not None
    assert (after.status.attempt, after.status.step) == (2, 8)
    assert (totals.steps, totals.repeated_steps) == (10, 2)
    assert totals.samples == 80
    assert totals.billed_usd is not None
    assert [item.step for item in after.status.step_costs][-4:] == [7, 6, 7, 8]


# Lifecycle: what users expect besides.


def test_a_failed_run_starts_again_once_what_its_trainer_reads_was_edited() -> None:
    failed = {"type": "Failed", "status": "True", "reason": "PodFailurePolicy", "message": "exit code 78"}
    words = "RunFolderExists: store.url: /store/study holds an earlier run: set store.onExisting to Resume"
    ended = study.trainer_pod(phase="Failed", ready=False, finished=at(80), exit_code=78, message=words)
    seen = with_job(settle(running(), at(60)), failed)
    seen = settle(replace(seen, pods=(ended,), trainer=None, router=None), at(90))
    assert condition(plan(seen, at(90)), "Succeeded") == ("False", "InvalidConfiguration")
    assert words in message(plan(seen, at(90)), "ConfigurationValid")
    priced = replace(seen, spec=study.run_spec(budget={"usdTotal": "9999"}), generation=2)
    assert job_actions(priced, 95) == []  # nothing that it could have failed from
    resume = replace(seen, spec=study.run_spec(store={"url": "file:///store", "onExisting": "Resume"}), generation=3)
    assert job_actions(resume, 100) == ["deleted"]
    after = settle(resume, at(100))
    assert after.children[JOB].get("status") is None
    assert condition(plan(after, at(101)), "Succeeded") == ("Unknown", "Starting")
    assert replicas(after)["h100-fp8"] == 1


def test_suspending_and_resuming_a_failed_run_tries_it_again() -> None:
    failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "too many"}
    seen = gang_gone(with_job(settle(running(), at(60)), failed))
    assert condition(plan(seen, at(90)), "Succeeded") == ("False", "Failed")
    rests = settle(replace(seen, spec=study.run_spec(suspend=True), pods=()), at(90))
    assert JOB not in rests.children
    assert condition(plan(rests, at(91)), "Succeeded") == ("Unknown", "Suspended")
    again = settle(replace(rests, spec=study.run_spec()), at(120))
    assert again.children[JOB]["spec"]["suspend"] is False
    assert condition(plan(again, at(121)), "Succeeded") == ("Unknown", "Starting")


def test_an_object_store_says_what_dies_with_the_trainers_pod() -> None:
    decided = plan(running(spec=study.run_spec(store={"url": "s3://runs"})), at(60))
    assert condition(decided, "StoreDurable") == ("False", "PodScratch")
    assert "start" in message(decided, "StoreDurable")
    assert any(event.reason == "PodScratch" and event.type == "Warning" for event in decided.events)
    assert condition(plan(running(), at(60)), "StoreDurable") == ("Unknown", "NoClaim")
    claimed = running(spec=study.run_spec(store={"url": "file:///store", "claimName": "runs"}))
    assert condition(plan(claimed, at(60)), "StoreDurable") == ("True", "FileSystem")


def test_a_run_that_goes_on_with_anothers_folder_pays_for_none_of_its_steps() -> None:
    group = records.GroupStep(name="h100-fp8", view="fp8", samples=8, turns=80)
    steps = tuple(study.step(number, attempt=1, groups=[group]) for number in range(1, 5))  # until 240 s
    own = study.step(5, attempt=2, finished_s=600, groups=[group])
    decided = plan(replace(running(), created=at(300), steps=(*steps, own)), at(700))
    assert decided.status is not None
    assert decided.status.totals is not None
    assert (decided.status.totals.steps, decided.status.totals.repeated_steps) == (1, 0)
    assert [item.step for item in decided.status.step_costs] == [5]


NEXT = Settings(
    image_sampler="sampler:2", image_trainer="trainer:2", image_rollout="rollout:2", image_router="rollout:2"
)


def test_an_upgraded_operator_leaves_running_pods_and_gives_them_its_images_when_they_are_replaced_anyway() -> None:
    seen = settle(running(), at(60))
    upgraded = settle(replace(seen, settings=NEXT), at(90))
    for key in seen.children:
        if key[0] in ("Deployment", "Job"):
            assert upgraded.children[key]["spec"] == seen.children[key]["spec"], key
    assert plan(upgraded, at(91)).actions == ()
    scaled = settle(replace(upgraded, groups=(study.group("h100-fp8", replicas=3), *upgraded.groups[1:])), at(120))
    assert (replicas(scaled)["h100-fp8"], image(scaled.children[GROUP])) == (3, "motley-sampler:dev")
    drained = study.group("h100-fp8", replicas=1, drainSeconds=60)
    edited = settle(replace(upgraded, groups=(drained, *upgraded.groups[1:])), at(120))
    assert image(edited.children[GROUP]) == "sampler:2"
    assert image(edited.children["Deployment", "b200-nvfp4"]) == "motley-sampler:dev"

    resting = settle(replace(upgraded, spec=study.run_spec(suspend=True)), at(200))
    resumed = settle(replace(gang_gone(resting), pods=(), spec=study.run_spec()), at(300), rounds=9)
    images = {name: image(child) for (kind, name), child in resumed.children.items() if kind in ("Deployment", "Job")}
    assert images == {
        "study-router": "rollout:2",
        "study-rollout": "rollout:2",
        "study-trainer": "trainer:2",
        "h100-fp8": "sampler:2",
        "b200-nvfp4": "sampler:2",
    }


def test_children_of_an_operator_that_noted_nothing_are_adopted_as_they_are() -> None:
    seen = settle(running(), at(60))

    def bare(child: Object) -> Object:
        found = live(child)
        for key in (keys.START_ANNOTATION, keys.RENDERED_BY_ANNOTATION):
            found["metadata"].get("annotations", {}).pop(key, None)
        if found["kind"] == "Deployment":
            found["spec"]["template"]["spec"]["containers"][0]["image"] = "from-before:1"
        return found

    children = {key: bare(child) for key, child in seen.children.items()}
    adopted = settle(replace(seen, children=children), at(90))
    assert image(adopted.children[GROUP]) == "from-before:1"
    noted = adopted.children[JOB]["metadata"]["annotations"][keys.START_ANNOTATION]
    assert noted == manifests.reads_text(manifests.trainer_reads(study.run_spec()))
    assert adopted.children[JOB]["spec"] == seen.children[JOB]["spec"]


@pytest.mark.apiserver
def test_an_upgrade_of_the_operator_restarts_no_pod_on_a_cluster(own_world: World, operators: Operators) -> None:
    world = own_world
    first = operators.start()
    world.apply(world.manifest())
    eventually(lambda: len(world.pods()) == 5, "five pods")
    before = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in world.list("Pod", world.ours)}
    first.terminate()
    first.wait(timeout=30)
    images = {f"MOTLEY_IMAGE_{role}": "next:2" for role in ("SAMPLER", "TRAINER", "ROLLOUT", "ROUTER")}
    operators.start(env=images)
    eventually(partial(operators.has_started, 2), "the next one starts")
    world.apply(world.group_manifest("late"))
    eventually(lambda: world.get("Deployment", "late"), "it leads, and what comes from now on")
    assert image(world.must("Deployment", "late")) == "next:2"
    after = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in world.list("Pod", world.ours)}
    assert before.items() <= after.items()
    assert image(world.must("Deployment", world.named("router"))) == "motley-rollout:dev"

    world.patch("RLRun", world.run, {"spec": {"suspend": True}})
    world.until("Suspended", "True")
    world.patch("RLRun", world.run, {"spec": {"suspend": False}})
    eventually(lambda: len(world.pods()) == 6, "all pods again")
    pods = world.list("Pod", world.ours)
    assert {pod["spec"]["containers"][0]["image"] for pod in pods} == {"next:2"}


@pytest.mark.apiserver
def test_pods_that_ended_while_no_operator_ran_are_billed_until_they_ended(
    own_world: World, operators: Operators
) -> None:
    world = own_world
    process = operators.start()
    world.node("NVIDIA-B200", 1)
    trainer = {"gpusPerNode": 1, "dtype": "FP32", "template": world.placed_here()}
    world.apply(world.manifest(trainer=trainer, samplerGroups=[], suspend=False))

    def seconds() -> int:
        return sum(item["gpuSeconds"] for item in world.status().get("totals", {}).get("gpuTime", []))

    eventually(lambda: seconds() > 0, "it is billed")
    operators.kill(process)
    (pod,) = world.pods("trainer")
    bound = next(
        item["lastTransitionTime"]
        for item in world.must("Pod", pod)["status"]["conditions"]
        if item["type"] == "PodScheduled"
    )
    ends(world, pod, keys.EXIT_CONFIG)
    ended = world.must("Pod", pod)["status"]["containerStatuses"][0]["state"]["terminated"]["finishedAt"]
    want = round((study_time(ended) - study_time(bound)).total_seconds())
    operators.start()
    eventually(lambda: world.run_condition("Succeeded")[0] == "False", "the next one sees it")
    eventually(lambda: seconds() == want, f"{want} s, no more and no less")


def study_time(text: str) -> Any:
    from datetime import datetime

    return datetime.fromisoformat(text)
