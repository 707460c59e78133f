"""The operator as a process against a real control plane; pods stay pending, or a test writes their status as a kubelet would."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml
from motley_local.testing import Cluster

Json = dict[str, Any]
T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
_numbers = itertools.count(1)


def eventually(look: Callable[[], T], what: str, timeout_s: float = 30.0) -> T:
    """The first truthy answer of `look`. Assertion errors inside count as "not yet"."""
    deadline = time.monotonic() + timeout_s
    last: object = None
    while time.monotonic() < deadline:
        try:
            last = look()
            if last:
                return last  # type: ignore[return-value]
        except AssertionError as error:
            last = error
        time.sleep(0.1)
    raise AssertionError(f"not within {timeout_s:.0f} s: {what}; last seen: {last}")


@dataclass
class Operators:
    """Operator processes of one test."""

    cluster: Cluster
    namespace: str
    folder: Path
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *, name: str = "operator-a", env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        number = next(_numbers)
        log = (self.folder / f"operator-{number}.log").open("wb")
        address = f"127.{80 + os.getpid() % 40}.{number // 200}.{1 + number % 200}"
        process = subprocess.Popen(
            [sys.executable, "-m", "motley_operator.main"],
            env={
                **self.cluster.environment,
                "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("api", "operator")),
                "MOTLEY_NAMESPACE": self.namespace,
                "MOTLEY_WATCH_NAMESPACE": self.namespace,
                "MOTLEY_POD_NAME": name,
                "MOTLEY_POD_IP": address,
                "MOTLEY_RECONCILE_SECONDS": "0.5",
                **(env or {}),
            },
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        process.address = address  # type: ignore[attr-defined]
        self.running.append(process)
        return process

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """As a lost node would: no goodbye."""
        process.send_signal(signal.SIGKILL)
        process.wait()

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("operator-*.log")))

    def stop(self) -> None:
        for process in self.running:
            if process.poll() is None:
                process.terminate()
        for process in self.running:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@dataclass(frozen=True)
class World:
    """What a test sees of the cluster."""

    cluster: Cluster
    namespace: str

    def get(self, kind: str, name: str) -> Json | None:
        done = self.cluster.kubectl("-n", self.namespace, "get", kind, name, "-o", "json", check=False)
        if done.returncode == 0:
            found: Json = json.loads(done.stdout)
            return found
        assert "NotFound" in done.stderr or "not found" in done.stderr, done.stderr
        return None

    def must(self, kind: str, name: str) -> Json:
        found = self.get(kind, name)
        assert found is not None, f"no {kind} {name}"
        return found

    def list(self, kind: str, selector: str = "") -> list[Json]:
        arguments = ["-n", self.namespace, "get", kind, "-o", "json", *(("-l", selector) if selector else ())]
        items: list[Json] = json.loads(self.cluster.kubectl(*arguments).stdout)["items"]
        return items

    def names(self, kind: str, selector: str = "") -> set[str]:
        return {item["metadata"]["name"] for item in self.list(kind, selector)}

    def apply(self, *manifests: Json) -> None:
        text = yaml.safe_dump_all(
            [{**item, "metadata": {"namespace": self.namespace, **item["metadata"]}} for item in manifests]
        )
        self.cluster.kubectl("apply", "-f", "-", stdin=text)

    def patch(self, kind: str, name: str, body: Json, *, subresource: str = "") -> None:
        more = ["--subresource", subresource] if subresource else []
        self.cluster.kubectl("-n", self.namespace, "patch", kind, name, "--type=merge", "-p", json.dumps(body), *more)

    def condition(self, kind: str, name: str, condition: str) -> tuple[str, str, str]:
        """(status, reason, message)"""
        found = self.must(kind, name).get("status", {}).get("conditions", [])
        item = next((one for one in found if one["type"] == condition), None)
        assert item is not None, f"{kind} {name} has no condition {condition} yet"
        return item["status"], item["reason"], item["message"]

    def run_pods(self, selector: str) -> list[str]:
        """Write the status of pending pods as a kubelet that runs them would; their names."""
        names = []
        for pod in self.list("pods", selector):
            name = pod["metadata"]["name"]
            if "deletionTimestamp" in pod["metadata"]:
                continue
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            status = {
                "phase": "Running",
                "startTime": now,
                "conditions": [
                    {"type": kind, "status": "True", "lastTransitionTime": now}
                    for kind in ("PodScheduled", "Ready", "ContainersReady")
                ],
            }
            self.patch("pod", name, {"status": status}, subresource="status")
            names.append(name)
        return names


@pytest.fixture(scope="session")
def cluster(control_plane: Cluster) -> Cluster:
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        control_plane.kubectl("apply", "--server-side", "-f", str(path))
    control_plane.kubectl(
        "wait", "--for=condition=Established", "crd/rlruns.motley.dev", "crd/samplergroups.motley.dev"
    )
    return control_plane


@pytest.fixture
def world(cluster: Cluster) -> World:
    name = f"operator-{os.getpid()}-{next(_numbers)}"
    cluster.kubectl("create", "namespace", name)
    return World(cluster, name)


@pytest.fixture
def operators(world: World, tmp_path: Path) -> Iterator[Operators]:
    found = Operators(world.cluster, world.namespace, tmp_path)
    yield found
    found.stop()
    print(found.logs())  # shown by pytest when the test failed


def run_manifest(name: str = "demo", **spec: Any) -> Json:
    return {
        "apiVersion": "motley.dev/v1alpha1",
        "kind": "RLRun",
        "metadata": {"name": name},
        "spec": {
            "model": {"source": "/data/model", "contextLength": 512},
            "tasks": {"source": "/data/tasks"},
            "store": {"url": "file:///data/store"},
            "steps": 4,
            "trainer": {"gpusPerNode": 1, "dtype": "FP32"},
            "samplerGroups": [
                {"name": "h100-fp8", "gpuType": "H100", "precision": "FP8", "sessionsPerEngine": 16},
                {"name": "b200-nvfp4", "gpuType": "B200", "precision": "NVFP4", "sessionsPerEngine": 32},
            ],
            "prices": [
                {"gpuType": "H100", "usdPerGPUHour": "3.95"},
                {"gpuType": "H200", "usdPerGPUHour": "4.54"},
                {"gpuType": "B200", "usdPerGPUHour": "6.25"},
            ],
            **spec,
        },
    }


def group_manifest(name: str, run: str = "demo", **spec: Any) -> Json:
    return {
        "apiVersion": "motley.dev/v1alpha1",
        "kind": "SamplerGroup",
        "metadata": {"name": name},
        "spec": {"runRef": {"name": run}, "gpuType": "H200", "precision": "BF16", "sessionsPerEngine": 16, **spec},
    }
