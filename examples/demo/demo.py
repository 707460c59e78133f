"""The main job on one machine: a real control plane, the operator from its chart, one mixed-precision run to its end.

`make demo` runs this. Everything that it applies is a file that a GPU cluster takes too; what it adds is the local cluster under it,
a line a step on the terminal, one more SamplerGroup half-way, and the report at the end.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from motley_api import keys
from motley_local.binaries import MissingBinaryError
from motley_local.cluster import LocalCluster
from motley_local.kube import Access
from motley_local.processes import ChildFailedError

sys.path.insert(0, str(Path(__file__).parent))

import report

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "examples/demo"
NAMESPACE = "default"
SGLANG_GROUP = "h200-bf16"
LOOK_S = 1.0
MEMORY_S = 3.0
STALL_S = 180.0  # without a step, say what the cluster shows
GIVE_UP_S = 600.0

Object = dict[str, Any]


class DemoFailedError(RuntimeError):
    """The run did not get to its end; the message says what was seen."""


def say(text: str) -> None:
    print(text, flush=True)


@dataclass
class Api:
    """GET requests to the local API server, cheaper than a kubectl process for each look."""

    access: Access
    context: ssl.SSLContext = field(init=False)

    def __post_init__(self) -> None:
        self.context = ssl.create_default_context(cadata=self.access.ca_pem)

    def get(self, path: str) -> Object | None:
        """The object, or None when there is none."""
        request = urllib.request.Request(
            self.access.server + path,
            headers={"Authorization": f"Bearer {self.access.token}", "Accept": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, context=self.context, timeout=10) as answer:
                found: Object = json.load(answer)
                return found
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    def run(self, name: str) -> Object | None:
        return self.get(f"/apis/motley.dev/v1alpha1/namespaces/{NAMESPACE}/rlruns/{name}")


class PeakMemory(threading.Thread):
    """Samples the resident memory of the whole cluster until stopped."""

    def __init__(self, cluster: LocalCluster) -> None:
        super().__init__(daemon=True)
        self._cluster = cluster
        self._ended = threading.Event()
        self.peak_mib = 0.0

    def run(self) -> None:
        while not self._ended.wait(MEMORY_S):
            try:
                self.peak_mib = max(self.peak_mib, self._cluster.memory().total_mib)
            except (RuntimeError, OSError):
                continue  # a process ended while it was read; the next sample comes soon

    def stop(self) -> None:
        self._ended.set()


def manifests(*, seed: int, steps: int | None, sglang: bool) -> list[Object]:
    """run.yaml, with what the command line changes."""
    documents: list[Object] = list(yaml.safe_load_all((HERE / "run.yaml").read_text()))
    run = next(document for document in documents if document["kind"] == "RLRun")
    run["spec"]["seed"] = seed
    if steps is not None:
        run["spec"]["steps"] = steps
    if sglang:
        group = next(group for group in run["spec"]["samplerGroups"] if group["name"] == SGLANG_GROUP)
        group["engine"] = {"type": "SGLang", "args": ["--device=cpu"]}
        group["kvCachePrecision"] = "BF16"
        group["template"] = {"env": [{"name": keys.ENV_SGLANG_PYTHON, "value": "/opt/motley/.venv-sglang/bin/python"}]}
    return documents


def install_operator(cluster: LocalCluster) -> None:
    say("[demo] installing the operator from charts/motley")
    command = [str(cluster.helm_path), "upgrade", "--install", "motley", str(ROOT / "charts/motley")]
    command += ["--namespace", "motley-system", "--create-namespace", "--wait", "--timeout", "120s"]
    done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        logs = cluster.kubectl("logs", "-n", "motley-system", "deployment/motley-operator", "--tail=30", check=False)
        raise DemoFailedError(f"helm could not install the chart: {done.stderr.strip()}\n{logs.stdout}{logs.stderr}")


def money(value: str | None) -> str:
    return f"${float(value):.4f}" if value is not None else "unknown"


def step_line(status: Object, steps: int) -> str:
    """One line a step, in words that need no legend."""
    cost = status.get("costPerStep", {})
    mismatch = status.get("mismatch", {})
    return (
        f"step {status.get('step', 0):>3}/{steps}  reward {float(status.get('reward', 'nan')):.2f}"
        f"  KL {float(mismatch.get('kl', 'nan')):.4f}  out of range {float(mismatch.get('outOfRangePercent', 'nan')):.2f}%"
        f"  $/step {money(cost.get('billedUSD'))} billed, {money(cost.get('workPricedUSD'))} by work"
        f" (baseline {money(cost.get('baselineUSD'))})  groups {status.get('groupsReady', '')}"
    )


def condition(status: Object, kind: str) -> Object:
    return next((found for found in status.get("conditions", []) if found["type"] == kind), {})


def group_table(cluster: LocalCluster) -> str:
    return cluster.kubectl("get", "samplergroups", "-n", NAMESPACE, check=False).stdout


def diagnosis(cluster: LocalCluster, name: str) -> str:
    """What a person would look at first when a run does not move."""
    parts = [
        cluster.kubectl(
            "get",
            "rlrun",
            name,
            "-n",
            NAMESPACE,
            "-o",
            "jsonpath={range .status.conditions[*]}{.type}={.status} {.reason}: {.message}{'\\n'}{end}",
            check=False,
        ).stdout,
        cluster.kubectl("get", "pods,jobs,deployments", "-A", "-o", "wide", check=False).stdout,
        cluster.kubectl("logs", "-n", "motley-system", "deployment/motley-operator", "--tail=20", check=False).stdout,
    ]
    for role in ("trainer", "router", "rollout"):
        logs = cluster.kubectl(
            "logs", "-n", NAMESPACE, "-l", f"motley.dev/run={name},motley.dev/role={role}", "--tail=15", check=False
        )
        parts.append(f"--- {role}\n{logs.stdout}")
    return "\n".join(parts)


@dataclass
class Followed:
    """What was seen of the run while it went on."""

    glimpses: list[report.Glimpse] = field(default_factory=list)
    late_group: Object = field(default_factory=dict)
    run: Object = field(default_factory=dict)


def looks(api: Api, name: str, cluster: LocalCluster) -> Iterator[Object]:
    """The RLRun's status about once a second, until the run ended. Raises DemoFailedError when it stands still."""
    newest, moved_s, warned = -1, time.monotonic(), False
    while True:
        cluster.check()
        run = api.run(name)
        if run is None:
            raise DemoFailedError(f"RLRun {name} is gone")
        yield run
        status = run.get("status", {})
        if condition(status, "Succeeded").get("status") in ("True", "False"):
            return
        if status.get("step", 0) > newest:
            newest, moved_s, warned = status.get("step", 0), time.monotonic(), False
        still_s = time.monotonic() - moved_s
        if still_s > GIVE_UP_S:
            raise DemoFailedError(f"no step for {still_s:.0f} s\n{diagnosis(cluster, name)}")
        if still_s > STALL_S and not warned:
            warned = True
            say(f"[demo] no step for {still_s:.0f} s; this is what the cluster shows:\n{diagnosis(cluster, name)}")
        time.sleep(LOOK_S)


def first_step_of(group: str, steps: list[Any]) -> int | None:
    """The first step that trained on a sample of the group."""
    return next((step.step for step in steps for part in step.groups if part.name == group and part.samples > 0), None)


def wait_for_slow_group(cluster: LocalCluster, run: Object, group: str) -> None:
    """Gives the run more steps while the group has sampled nothing: SGLang needs minutes to start where nine others share two cores."""
    status, steps = run.get("status", {}), run["spec"]["steps"]
    samples = next((found.get("samples", 0) for found in status.get("groups", []) if found["name"] == group), 0)
    if samples == 0 and (status.get("step") or 0) >= steps - 4:
        say(f"[demo] {group} is still starting: kubectl patch rlrun ... steps: {steps + 16} (steps may grow mid-run)")
        patch = json.dumps({"spec": {"steps": steps + 16}})
        cluster.kubectl("patch", "rlrun", run["metadata"]["name"], "-n", NAMESPACE, "--type=merge", "-p", patch)


def follow(api: Api, cluster: LocalCluster, name: str, steps: int, slow_group: str | None) -> Followed:
    """Prints a line a step; applies the late group half-way; returns what was seen."""
    seen = Followed()
    more = yaml.safe_load((HERE / "more.yaml").read_text())["metadata"]["name"]
    shown, waiting = 0, ""
    for run in looks(api, name, cluster):
        status = run.get("status", {})
        seen.run = run
        step = status.get("step") or 0
        seen.glimpses.append(report.Glimpse(time.time(), status))
        if step == 0 and (text := f"{status.get('status', '')} {status.get('groupsReady', '')}") != waiting:
            waiting = text
            say(f"[demo] {time.strftime('%H:%M:%S')} run {name}: {text.strip() or 'applied'}")
        if step > shown:
            shown = step
            say(step_line(status, run["spec"]["steps"]))
        if slow_group:
            wait_for_slow_group(cluster, run, slow_group)
        if step >= steps // 2 and not seen.late_group:
            seen.late_group = {"name": more, "appliedAtStep": step, "firstSampleStep": None}
            say(f"[demo] kubectl apply -f examples/demo/more.yaml: one more group joins the run at step {step}")
            say(cluster.kubectl("apply", "-n", NAMESPACE, "-f", str(HERE / "more.yaml")).stdout.rstrip())
            say(group_table(cluster).rstrip())
    return seen


def store_folder(cluster: LocalCluster) -> Path:
    """Where the claim's volume lies on this machine."""
    volume = cluster.kubectl("get", "pvc", "motley-store", "-n", NAMESPACE, "-o", "jsonpath={.spec.volumeName}").stdout
    return Path(cluster.kubectl("get", "pv", volume, "-o", "jsonpath={.spec.hostPath.path}").stdout)


def run_demo(options: argparse.Namespace, folder: Path) -> Object:
    """Set up, apply, follow, report. Returns report.json's content."""
    began_s = time.monotonic()
    documents = manifests(seed=options.seed, steps=options.steps, sglang=options.sglang)
    run = next(document for document in documents if document["kind"] == "RLRun")
    name, steps = run["metadata"]["name"], run["spec"]["steps"]
    say(
        "[demo] starting a Kubernetes control plane and virtual GPU nodes on this machine (for laptops and CI, not for production)"
    )
    with LocalCluster(folder / "cluster", report=say) as cluster:
        memory = PeakMemory(cluster)
        memory.start()
        install_operator(cluster)
        say(cluster.kubectl("get", "nodes", "-L", "nvidia.com/gpu.product").stdout.rstrip())
        setup_s = time.monotonic() - began_s
        say(f"[demo] set up in {setup_s:.0f} s; kubectl apply -f examples/demo/run.yaml")
        say(cluster.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=yaml.safe_dump_all(documents)).stdout.rstrip())
        api = Api(Access.from_kubeconfig(cluster.kubeconfig_path))
        seen = follow(api, cluster, name, steps, f"{name}-{SGLANG_GROUP}" if options.sglang else None)
        run_s = time.monotonic() - began_s - setup_s
        memory.stop()
        ledger = report.read_ledger(store_folder(cluster) / name / "ledger")
        if seen.late_group:
            seen.late_group["firstSampleStep"] = first_step_of(seen.late_group["name"], ledger)
        say(cluster.kubectl("get", "rlruns", "-n", NAMESPACE).stdout.rstrip())
        say(group_table(cluster).rstrip())
        finished = report.Finished(
            seen.run,
            ledger,
            seen.glimpses,
            seen.late_group,
            {"setup": round(setup_s, 1), "run": round(run_s, 1)},
            memory.peak_mib,
        )
        facts = report.write(finished, folder)
        verdict = condition(seen.run.get("status", {}), "Succeeded")
        if verdict.get("status") != "True":
            raise DemoFailedError(
                f"the run ended {verdict.get('reason')}: {verdict.get('message')}\n{diagnosis(cluster, name)}"
            )
        tell(facts, folder)
        if options.keep:
            keep(cluster)
        say("[demo] stopping the cluster")
    return facts


def tell(facts: Object, folder: Path) -> None:
    """The result, for people."""
    reward = facts["reward"]
    late = facts["lateGroup"]
    say(
        f"\n[demo] Succeeded: {facts['steps']} steps in {facts['seconds']['run']:.0f} s,"
        f" reward {reward['first']:.2f} -> {reward['last']:.2f}, at most {facts['peakMemoryMiB']} MiB."
    )
    if late:
        say(
            f"[demo] {late['name']} was applied at step {late['appliedAtStep']};"
            f" its first samples were trained on at step {late['firstSampleStep']}."
        )
    for name in ("report.html", "report.png", "report.json"):
        say(f"[demo] {(folder / name).relative_to(ROOT)}")


def keep(cluster: LocalCluster) -> None:
    """Leaves the cluster up until Ctrl-C."""
    say(f"\n[demo] the cluster stays up. In another terminal:\n\n  export KUBECONFIG={cluster.kubeconfig_path}")
    say(f"  {cluster.kubectl_path} get rlruns,samplergroups,pods\n\n[demo] Ctrl-C here ends it.")
    while True:
        cluster.check()
        time.sleep(1)


def _interrupt(_: int, __: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> None:
    parser = argparse.ArgumentParser(prog="make demo", description="One mixed-precision run on a local cluster.")
    parser.add_argument("--keep", action="store_true", help="leave the cluster up after the run")
    parser.add_argument(
        "--sglang", action="store_true", help=f"serve the group {SGLANG_GROUP} with the real SGLang server"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of task order and sampling")
    parser.add_argument("--steps", type=int, default=None, help="optimizer steps; default: run.yaml's")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/demo", help="where cluster state and report go")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    folder = options.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        run_demo(options, folder)
    except KeyboardInterrupt:
        say("\n[demo] stopped")
        sys.exit(130)
    except (DemoFailedError, ChildFailedError, MissingBinaryError, RuntimeError) as error:
        say(f"\n[demo] failed: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
