"""One short run on the real control plane: it advances, survives three kills, an edit and a rest, takes a late group, ends, and leaves
nothing.

The tests of this file share one cluster and one run, and follow it in order: each is a chapter of the run's life.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from motley_api.records import StepRecord
from motley_local.cluster import LocalCluster

pytestmark = [pytest.mark.e2e, pytest.mark.apiserver]

ROOT = Path(__file__).parents[2]
STEPS = 40
GROUPS = ("h200-fp8", "b300-nvfp4", "h200-bf16")


def small_run() -> list[dict[str, Any]]:
    """examples/demo/run.yaml with three of its groups, a small batch and few steps."""
    documents = list(yaml.safe_load_all((ROOT / "examples/demo/run.yaml").read_text()))
    spec = next(document["spec"] for document in documents if document["kind"] == "RLRun")
    spec |= {"steps": STEPS, "batch": {"prompts": 4, "samplesPerPrompt": 4}, "checkpoint": {"everySteps": 3, "keep": 2}}
    spec["rollout"]["sessions"] = 16
    spec["evaluation"] = {"everySteps": 7, "samplesPerTask": 1}
    spec["samplerGroups"] = [group for group in spec["samplerGroups"] if group["name"] in GROUPS]
    return documents


class Watched:
    """The run as a test sees it: through kubectl alone."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster

    def get(self, *what: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.cluster.kubectl("get", *what, "-o", "json").stdout)
        return found

    @property
    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.get("rlrun", "demo").get("status", {})
        return status

    def patch(self, spec: dict[str, Any]) -> None:
        body = json.dumps({"spec": spec})
        self.cluster.kubectl("patch", "rlrun", "demo", "--type", "merge", "-p", body)

    def until(self, what: str, holds: Callable[[], bool], timeout_s: float = 240) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not holds():
            self.cluster.check()
            if time.monotonic() > deadline_s:
                raise AssertionError(f"not seen within {timeout_s:.0f} s: {what}\n{self.picture()}")
            time.sleep(1)

    def until_step(self, step: int) -> None:
        self.until(f"step {step}", lambda: self.status.get("step", 0) >= step)

    def picture(self) -> str:
        pods = self.cluster.kubectl("get", "pods,rlruns,samplergroups", "-A", check=False).stdout
        logs = [
            self.cluster.kubectl("logs", "-l", f"motley.dev/role={role}", "--tail=12", check=False).stdout
            for role in ("trainer", "rollout")
        ]
        return f"{pods}\n{logs}\n{json.dumps(self.status.get('conditions'), indent=1)}"

    def pods(self, namespace: str, selector: str) -> list[dict[str, Any]]:
        return list(self.get("pods", "-n", namespace, "-l", selector)["items"])

    def kill(self, namespace: str, selector: str) -> str:
        """SIGKILL to every process of the first pod that the selector finds. Returns the pod's name."""
        pod = self.pods(namespace, selector)[0]["metadata"]["name"]
        victims = [process for process in psutil.process_iter() if _pod_of(process) == pod]
        assert victims, f"no process of pod {pod}"
        for process in victims:
            os.kill(process.pid, signal.SIGKILL)
        return str(pod)


def _pod_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("MOTLEY_POD_NAME")
    except psutil.Error:
        return None


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        command = [
            str(cluster.helm_path),
            "upgrade",
            "--install",
            "motley",
            str(ROOT / "charts/motley"),
            "--wait",
            "--timeout",
            "180s",
        ]
        command += ["--namespace", "motley-system", "--create-namespace"]
        subprocess.run(command, env=cluster.environment, check=True, capture_output=True)
        yield cluster


@pytest.fixture(scope="module")
def run(cluster: LocalCluster) -> Watched:
    cluster.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(small_run()))
    return Watched(cluster)


def ledger(run: Watched) -> list[StepRecord]:
    import msgspec

    volume = run.get("pvc", "motley-store")["spec"]["volumeName"]
    folder = Path(run.get("pv", volume)["spec"]["hostPath"]["path"]) / "demo/ledger"
    return [msgspec.json.decode(path.read_bytes(), type=StepRecord) for path in sorted(folder.glob("step-*.json"))]


def test_run_advances_on_groups_of_three_precisions(run: Watched) -> None:
    run.until_step(2)
    run.until("samples of all groups", lambda: all(group["samples"] > 0 for group in run.status["groups"]))
    assert {group["precision"] for group in run.status["groups"]} == {"FP8", "NVFP4", "BF16"}
    assert float(run.status["costPerStep"]["billedUSD"]) > 0


def test_run_goes_on_after_its_operator_is_killed(run: Watched) -> None:
    before = {
        item["metadata"]["uid"]
        for item in run.get("deployments,jobs,services,configmaps,samplergroups", "-l", "motley.dev/run=demo")["items"]
    }
    step = run.status["step"]
    run.kill("motley-system", "app.kubernetes.io/name=motley")
    run.until_step(step + 1)
    after = {
        item["metadata"]["uid"]
        for item in run.get("deployments,jobs,services,configmaps,samplergroups", "-l", "motley.dev/run=demo")["items"]
    }
    assert after == before


def test_run_goes_on_after_a_sampler_is_killed_and_the_sampler_comes_back(run: Watched) -> None:
    step = run.status["step"]
    killed = run.kill("default", "motley.dev/role=sampler,motley.dev/group=demo-h200-fp8")
    run.until_step(step + 1)
    run.until(
        "the sampler is ready again", lambda: run.get("deployment", "demo-h200-fp8")["status"].get("readyReplicas") == 1
    )
    restarts = [
        pod["status"]["containerStatuses"][0]["restartCount"]
        for pod in run.pods("default", "motley.dev/group=demo-h200-fp8")
    ]
    assert restarts == [1], killed


def test_run_goes_on_from_its_checkpoint_after_the_trainer_is_killed(run: Watched) -> None:
    run.until("a checkpoint and a step beyond it", lambda: run.status.get("step", 0) >= 4)
    attempt = run.status["attempt"]
    step = run.status["step"]
    run.kill("default", "motley.dev/role=trainer")
    run.until(
        "a new attempt passes the step of the old one",
        lambda: run.status["attempt"] > attempt and run.status["step"] > step,
    )


def test_an_edit_of_what_the_trainer_reads_starts_it_again_after_a_save(run: Watched) -> None:
    before = run.status
    engines = {pod["metadata"]["uid"] for pod in run.pods("default", "motley.dev/role=sampler")}
    run.patch({"checkpoint": {"keep": 3}})
    run.until(
        "a new attempt goes on",
        lambda: run.status["attempt"] > before["attempt"] and run.status["step"] > before["step"],
    )
    after = run.status
    assert after["totals"]["repeatedSteps"] == before["totals"]["repeatedSteps"]  # it saved before it left
    assert {pod["metadata"]["uid"] for pod in run.pods("default", "motley.dev/role=sampler")} == engines
    assert any(item["what"] == "the trainer saves and starts again" for item in after["decisions"])


def test_a_suspended_run_holds_no_pod_and_goes_on_where_it_was(run: Watched) -> None:
    def suspended() -> str:
        return next(str(item["status"]) for item in run.status["conditions"] if item["type"] == "Suspended")

    run.patch({"suspend": True})
    run.until("Suspended", lambda: suspended() == "True")
    before = run.status
    assert not run.pods("default", "motley.dev/run=demo")
    run.patch({"suspend": False})
    run.until_step(before["step"] + 1)
    assert run.status["totals"]["repeatedSteps"] == before["totals"]["repeatedSteps"]


def test_late_group_joins_without_a_restart(run: Watched) -> None:
    run.cluster.kubectl("apply", "-f", str(ROOT / "examples/demo/more.yaml"))
    run.until(
        "samples of the late group are trained on",
        lambda: (
            any(group["name"] == "demo-more-b200-fp8" and group["samples"] > 0 for group in run.status["groups"])
            or run.status["step"] >= STEPS
        ),
    )
    late = next(group for group in run.status["groups"] if group["name"] == "demo-more-b200-fp8")
    assert late["samples"] > 0


def test_run_ends_with_every_step_once_in_its_ledger(run: Watched) -> None:
    run.until("Succeeded", lambda: run.status.get("status") in ("Completed", "Failed", "Succeeded"))
    succeeded = next(condition for condition in run.status["conditions"] if condition["type"] == "Succeeded")
    assert succeeded["status"] == "True", succeeded
    records = ledger(run)
    assert [record.step for record in records] == list(range(1, STEPS + 1))
    assert run.status["weightsVersion"] == STEPS
    run.until("no pod holds a GPU any longer", lambda: not run.pods("default", "motley.dev/role=sampler"))


def test_deleting_the_run_leaves_nothing_of_it(run: Watched) -> None:
    run.cluster.kubectl("delete", "rlrun", "demo", "--timeout=90s")
    kinds = "samplergroups,deployments,jobs,services,configmaps,secrets,pods"
    run.until(
        "everything of the run is gone", lambda: not run.get(kinds, "-l", "motley.dev/run=demo")["items"], timeout_s=90
    )
    late = run.cluster.kubectl("get", "samplergroups", "-o", "name").stdout
    assert late == ""
