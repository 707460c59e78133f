"""What tests of the operator need of a real control plane: a client, operator processes, manifests.

There is no kubelet: pods are pending until a test gives them a node (`World.node`, the real scheduler then places them) or writes their
status as a kubelet would.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from motley_local.testing import Cluster
from motley_operator.kube import RESOURCES, from_kubeconfig

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
numbers = itertools.count(1)
MORE = {
    "Namespace": ("api/v1", "namespaces"),
    "ResourceQuota": ("api/v1", "resourcequotas"),
    "ReplicaSet": ("apis/apps/v1", "replicasets"),
}
CHILD_KINDS = ("Deployment", "Service", "ConfigMap", "Secret", "Job", "SamplerGroup")


# Of the manifest below, without the run's name.
CHILDREN = {
    *(("Deployment", name) for name in ("router", "rollout", "h100-fp8", "b200-nvfp4")),
    *(("Service", name) for name in ("router", "trainer")),
    *(("ConfigMap", name) for name in ("config", "fleet", "h100-fp8-config", "b200-nvfp4-config")),
    ("Secret", "token"),
    ("Job", "trainer"),
    *(("SamplerGroup", name) for name in ("h100-fp8", "b200-nvfp4")),
}


def eventually[T](look: Callable[[], T], what: str, timeout_s: float = 150.0) -> T:
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


def now_text() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class Api:
    """Requests to the API server as its administrator, without a process for each as kubectl would need."""

    def __init__(self, cluster: Cluster) -> None:
        self._credentials = from_kubeconfig(cluster.kubeconfig_path)
        self._context = ssl.create_default_context(cadata=self._credentials.ca)

    def call(self, method: str, path: str, body: Any = None, *, content_type: str = "application/json") -> Json | None:
        """The answer; None for 404."""
        request = urllib.request.Request(
            self._credentials.server + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._credentials.bearer()}", "Content-Type": content_type},
        )
        try:
            with urllib.request.urlopen(request, context=self._context, timeout=30) as answer:
                found: Json = json.load(answer)
                return found
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise AssertionError(f"{method} {path}: {error.code} {error.read().decode()[:500]}") from error
        except (TimeoutError, urllib.error.URLError) as error:  # a machine that is busy otherwise
            raise AssertionError(f"{method} {path}: {error}") from error


def path_of(kind: str, namespace: str = "", name: str = "", subresource: str = "") -> str:
    prefix, plural = (RESOURCES | MORE)[kind]
    parts = [prefix, *(("namespaces", namespace) if namespace else ()), plural, name, subresource]
    return "/" + "/".join(part for part in parts if part)


@dataclass
class Operators:
    """Operator processes that watch one namespace."""

    cluster: Cluster
    namespace: str
    folder: Path
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    addresses: dict[int, str] = field(default_factory=dict)

    def start(self, *, name: str = "operator-a", env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        number = next(numbers)
        address = f"127.{80 + os.getpid() % 40}.{number // 200}.{1 + number % 200}"
        with (self.folder / f"operator-{number:04d}.log").open("wb") as log:
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
        self.running.append(process)
        self.addresses[process.pid] = address
        return process

    def get(self, process: subprocess.Popen[bytes], port: int, path: str) -> str:
        try:
            with urllib.request.urlopen(f"http://{self.addresses[process.pid]}:{port}{path}", timeout=5) as answer:
                return str(answer.read().decode())
        except (urllib.error.URLError, ConnectionError) as error:
            raise AssertionError(f"{path}: {error}") from error

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """As a lost node would: no goodbye."""
        process.send_signal(signal.SIGKILL)
        process.wait()

    def series(self, process: subprocess.Popen[bytes]) -> dict[str, float]:
        """Its metrics, by name with labels."""
        lines = self.get(process, 9090, "/metrics").splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[:1] not in "#")}

    def has_started(self, times: int) -> bool:
        """Whether that many processes got as far as to watch."""
        return self.logs().count("event=started") >= times

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("operator-*.log")))

    def stop(self) -> None:
        for process in self.running:
            if process.poll() is None:
                process.terminate()
        for process in self.running:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@dataclass
class World:
    """One run's corner of the cluster: a namespace, perhaps shared, and a run name of its own."""

    cluster: Cluster
    api: Api
    namespace: str
    run: str
    nodes: list[str] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)

    def named(self, part: str) -> str:
        return f"{self.run}-{part}"

    @property
    def ours(self) -> str:
        return f"motley.dev/run={self.run}"

    def get(self, kind: str, name: str) -> Json | None:
        return self.api.call("GET", path_of(kind, self.namespace, name))

    def must(self, kind: str, name: str) -> Json:
        found = self.get(kind, name)
        assert found is not None, f"no {kind} {name}"
        return found

    def list(self, kind: str, selector: str = "") -> list[Json]:
        query = f"?labelSelector={urllib.parse.quote(selector)}" if selector else ""
        found = self.api.call("GET", path_of(kind, self.namespace) + query)
        assert found is not None
        return [{**item, "kind": kind} for item in found["items"]]

    def names(self, kind: str, selector: str = "") -> set[str]:
        return {item["metadata"]["name"] for item in self.list(kind, selector)}

    def children(self) -> set[tuple[str, str]]:
        """(kind, name without the run's) of everything labelled as the run's, but pods."""
        return {
            (kind, name.removeprefix(f"{self.run}-")) for kind in CHILD_KINDS for name in self.names(kind, self.ours)
        }

    def pods(self, role: str = "") -> set[str]:
        return self.names("Pod", f"{self.ours},motley.dev/role={role}" if role else self.ours)

    def apply(self, *manifests: Json) -> None:
        """As a person does."""
        text = yaml.safe_dump_all(
            [{**item, "metadata": {"namespace": self.namespace, **item["metadata"]}} for item in manifests]
        )
        self.cluster.kubectl("apply", "-f", "-", stdin=text)

    def patch(self, kind: str, name: str, body: Json, *, subresource: str = "") -> None:
        path = path_of(kind, self.namespace, name, subresource)
        assert self.api.call("PATCH", path, body, content_type="application/merge-patch+json") is not None, (
            f"no {kind} {name}"
        )

    def delete(self, kind: str, name: str, **options: Any) -> None:
        self.api.call("DELETE", path_of(kind, self.namespace, name), {"propagationPolicy": "Background", **options})

    def condition(self, kind: str, name: str, condition: str) -> tuple[str, str, str]:
        """(status, reason, message)"""
        found = self.must(kind, name).get("status", {}).get("conditions", [])
        item = next((one for one in found if one["type"] == condition), None)
        assert item is not None, f"{kind} {name} has no condition {condition} yet"
        return item["status"], item["reason"], item["message"]

    def run_condition(self, condition: str) -> tuple[str, str, str]:
        return self.condition("RLRun", self.run, condition)

    def until(self, condition: str, status: str) -> tuple[str, str]:
        """(reason, message) as soon as the run's condition has that status."""

        def look() -> tuple[str, str] | None:
            found = self.run_condition(condition)
            return found[1:] if found[0] == status else None

        found = eventually(look, f"{condition} {status}")
        assert found is not None
        return found

    def status(self) -> Json:
        found: Json = self.must("RLRun", self.run).get("status", {})
        return found

    def node(self, product: str, gpus: int) -> str:
        """A node with these GPUs for this run's pods alone; they tolerate its taint by `placed_here`."""
        name = f"node-{self.run}-{len(self.nodes)}"
        self.nodes.append(name)
        capacity = {"cpu": "64", "memory": "256Gi", "pods": "100", "nvidia.com/gpu": str(gpus)}
        labels = {"nvidia.com/gpu.product": product, "only-for": self.run}
        taint = {"key": "only-for", "value": self.run, "effect": "NoSchedule"}
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": labels},
            "spec": {"taints": [taint]},
        }
        self.api.call("POST", path_of("Node"), node)
        self._beat(name, capacity=capacity, allocatable=capacity)
        if len(self.nodes) == 1:
            threading.Thread(target=self._beat_on, daemon=True).start()
        return name

    def _beat(self, node: str, **status: Json) -> None:
        """As a kubelet says that it lives: a node that falls silent gets a taint after a while."""
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "Test",
            "lastHeartbeatTime": now_text(),
            "lastTransitionTime": now_text(),
        }
        body = {"status": {**status, "conditions": [ready]}}
        path = path_of("Node", name=node, subresource="status")
        self.api.call("PATCH", path, body, content_type="application/merge-patch+json")

    def _beat_on(self) -> None:
        while not self.left.wait(10):
            for name in self.nodes:
                with contextlib.suppress(AssertionError):  # a machine that is busy otherwise
                    self._beat(name)

    def placed_here(self) -> Json:
        """A pod template for nodes made by `node`."""
        return {
            "nodeSelector": {"only-for": self.run},
            "tolerations": [{"key": "only-for", "operator": "Equal", "value": self.run, "effect": "NoSchedule"}],
        }

    def make_ready(self, selector: str) -> int:
        """Write the status of its pods as a kubelet whose probes succeed would; how many."""
        count = 0
        for pod in self.list("Pod", f"{self.ours},{selector}"):
            if "deletionTimestamp" in pod["metadata"]:
                continue
            old = [item for item in pod.get("status", {}).get("conditions", []) if item["type"] == "PodScheduled"]
            ready = [
                {"type": kind, "status": "True", "lastTransitionTime": now_text()}
                for kind in ("Ready", "ContainersReady")
            ]
            status = {"phase": "Running", "startTime": now_text(), "conditions": [*old, *ready]}
            self.patch("Pod", pod["metadata"]["name"], {"status": status}, subresource="status")
            count += 1
        return count

    def manifest(self, **spec: Any) -> Json:
        return {
            "apiVersion": "motley.dev/v1alpha1",
            "kind": "RLRun",
            "metadata": {"name": self.run},
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

    def group_manifest(self, name: str, **spec: Any) -> Json:
        return {
            "apiVersion": "motley.dev/v1alpha1",
            "kind": "SamplerGroup",
            "metadata": {"name": name},
            "spec": {
                "runRef": {"name": self.run},
                "gpuType": "H200",
                "precision": "BF16",
                "sessionsPerEngine": 16,
                **spec,
            },
        }

    def leave(self) -> None:
        """Nothing of this test costs the next one."""
        self.left.set()
        self.delete("RLRun", self.run)
        for name in self.nodes:
            self.api.call("DELETE", path_of("Node", name=name))


def owners(obj: Json) -> list[tuple[str, str]]:
    return [(owner["kind"], owner["name"]) for owner in obj["metadata"].get("ownerReferences", [])]


# Fixtures: a real control plane with the CRDs; one operator for most tests, operators of their own for those that kill them.


@pytest.fixture(scope="session")
def cluster(control_plane: Cluster) -> Cluster:
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        control_plane.kubectl("apply", "--server-side", "-f", str(path))
    control_plane.kubectl(
        "wait", "--for=condition=Established", "crd/rlruns.motley.dev", "crd/samplergroups.motley.dev"
    )
    return control_plane


@pytest.fixture(scope="session")
def api(cluster: Cluster) -> Api:
    return Api(cluster)


@pytest.fixture(scope="session")
def shared_operators(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operators]:
    namespace = f"shared-{os.getpid()}"
    cluster.kubectl("create", "namespace", namespace)
    found = Operators(cluster, namespace, tmp_path_factory.mktemp("shared-operator"))
    found.start()
    yield found
    found.stop()


@pytest.fixture
def world(cluster: Cluster, api: Api, shared_operators: Operators) -> Iterator[World]:
    """A run's name in the namespace that the shared operator watches."""
    found = World(cluster, api, shared_operators.namespace, f"r{next(numbers)}")
    before = len(shared_operators.logs())
    yield found
    print(shared_operators.logs()[before:])  # shown by pytest when the test failed
    found.leave()


@pytest.fixture
def own_world(cluster: Cluster, api: Api) -> Iterator[World]:
    """A namespace without an operator yet."""
    number = next(numbers)
    found = World(cluster, api, f"own-{os.getpid()}-{number}", f"r{number}")
    cluster.kubectl("create", "namespace", found.namespace)
    yield found
    found.leave()


@pytest.fixture
def operators(own_world: World, tmp_path: Path) -> Iterator[Operators]:
    """Starts operators that watch own_world's namespace."""
    found = Operators(own_world.cluster, own_world.namespace, tmp_path)
    yield found
    found.stop()
    print(found.logs())
