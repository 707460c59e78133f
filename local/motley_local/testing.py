"""Fixtures for tests on a real API server. In a conftest.py: ``from motley_local.testing import api_server, namespace``.

``api_server`` is etcd and the API server alone: objects are stored and validated, nothing acts on them. ``control_plane`` has scheduler and
controller manager too. Both live for the session, so every test takes a ``namespace`` of its own (or names that do not clash).
"""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from motley_api.resources.gpus import CapacityType, GpuTypeName

from motley_local.binaries import ControlPlaneBinaries, ensure_control_plane, ensure_kubectl
from motley_local.cluster import LocalCluster
from motley_local.controlplane import ControlPlane
from motley_local.nodes import NodeSpec

_counter = itertools.count(1)


@dataclass(frozen=True)
class Cluster:
    """What a test needs to talk to a running control plane."""

    plane: ControlPlane
    kubectl_path: Path

    @property
    def kubeconfig_path(self) -> Path:
        return self.plane.kubeconfig_path

    @property
    def server(self) -> str:
        return self.plane.server

    @property
    def environment(self) -> dict[str, str]:
        """The environment for a child process that reads KUBECONFIG."""
        return self.plane.environment(os.environ)

    def kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl; with ``check``, a failure is an AssertionError that shows what it printed."""
        done = subprocess.run(
            [str(self.kubectl_path), *arguments],
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if check:
            assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr.strip()}"
        return done

    def get(self, path: str) -> Any | None:
        """A GET of the API as administrator: parsed JSON, or None when there is no such thing. Cheaper than kubectl in a loop."""
        return self.plane.get(path)

    def create(self, namespace: str, *manifests: dict[str, Any]) -> None:
        """Create objects of the kinds in ``PATHS`` in a namespace."""
        for manifest in manifests:
            path = PATHS[manifest["kind"]].format(namespace=namespace)
            status, answer = self.plane.request("POST", path, manifest)
            if status == 0:  # no answer: on a busy machine the request may have arrived all the same
                status, answer = self.plane.request("POST", path, manifest)
                status = HTTPStatus.CREATED if status == HTTPStatus.CONFLICT else status
            assert status == HTTPStatus.CREATED, (
                f"creating {manifest['kind']} {manifest['metadata']}: {status} {answer}"
            )

    def replace(self, namespace: str, manifest: dict[str, Any]) -> None:
        """Replace an object."""
        path = PATHS[manifest["kind"]].format(namespace=namespace)
        status, answer = self.plane.request("PUT", f"{path}/{manifest['metadata']['name']}", manifest)
        assert status == HTTPStatus.OK, f"replacing {manifest['kind']} {manifest['metadata']}: {status} {answer}"

    def delete(self, namespace: str, kind: str, *names: str) -> None:
        """Delete objects, and in the background what they own."""
        for name in names:
            path = PATHS[kind].format(namespace=namespace)
            status, answer = self.plane.request("DELETE", f"{path}/{name}", {"propagationPolicy": "Background"})
            assert status in (HTTPStatus.OK, HTTPStatus.ACCEPTED), f"deleting {kind} {name}: {status} {answer}"

    def pod(self, namespace: str, name: str) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self.get(f"/api/v1/namespaces/{namespace}/pods/{name}")
        return found

    def logs(self, namespace: str, pod: str, query: str = "") -> str:
        """A pod's log by way of the API server, as kubectl asks for it; ``query`` such as ``container=main&tailLines=1``."""
        status, answer = self.plane.request("GET", f"/api/v1/namespaces/{namespace}/pods/{pod}/log?{query}")
        assert status == HTTPStatus.OK, f"logs of {pod}: {status} {answer}"
        return str(answer)


PATHS = {
    "ConfigMap": "/api/v1/namespaces/{namespace}/configmaps",
    "Deployment": "/apis/apps/v1/namespaces/{namespace}/deployments",
    "Job": "/apis/batch/v1/namespaces/{namespace}/jobs",
    "Namespace": "/api/v1/namespaces",
    "PersistentVolumeClaim": "/api/v1/namespaces/{namespace}/persistentvolumeclaims",
    "Pod": "/api/v1/namespaces/{namespace}/pods",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings",
    "Secret": "/api/v1/namespaces/{namespace}/secrets",
    "Service": "/api/v1/namespaces/{namespace}/services",
    "StatefulSet": "/apis/apps/v1/namespaces/{namespace}/statefulsets",
}


def wait_for[T](look: Callable[[], T | None], what: str, timeout_s: float = 90.0) -> T:
    """The first truthy answer of ``look``; an AssertionError that says ``what`` was awaited when none comes."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < deadline_s, f"not seen within {timeout_s:g} s: {what}"
        time.sleep(0.15)
    return found


TEST_NODES = (
    NodeSpec("cpu-0"),
    NodeSpec("h100-0", GpuTypeName.H100),
    NodeSpec("a100-0", GpuTypeName.A100_80GB),
    *(
        NodeSpec(
            f"spot-{index}",
            GpuTypeName.H200,
            capacity_type=CapacityType.SPOT,
            labels={"pool": "spot"},
            taints=({"key": "pool", "value": "spot", "effect": "NoSchedule"},),
        )
        for index in range(2)
    ),
    NodeSpec("ghost-0", processless=True, taints=({"key": "pool", "value": "ghost", "effect": "NoSchedule"},)),
)


def _run(folder: Path, binaries: ControlPlaneBinaries) -> Iterator[Cluster]:
    with ControlPlane(folder, binaries) as plane:
        yield Cluster(plane, ensure_kubectl(binaries.server_minor))


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """etcd and the API server, for the whole session."""
    yield from _run(tmp_path_factory.mktemp("api-server") / "state", ensure_control_plane(full=False))


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """etcd, API server, scheduler and controller manager, for the whole session; no nodes."""
    yield from _run(tmp_path_factory.mktemp("control-plane") / "state", ensure_control_plane(full=True))


@pytest.fixture(scope="session")
def local_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The whole local cluster with ``TEST_NODES``: pods run."""
    with LocalCluster(tmp_path_factory.mktemp("local-cluster"), TEST_NODES, node_grace_s=12) as cluster:
        assert cluster.plane is not None
        yield Cluster(cluster.plane, cluster.kubectl_path)


def _fresh_namespace(cluster: Cluster) -> str:
    name = f"test-{os.getpid()}-{next(_counter)}"
    cluster.create("", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    return name


@pytest.fixture
def namespace(api_server: Cluster) -> str:
    """A new namespace in ``api_server``."""
    return _fresh_namespace(api_server)


@pytest.fixture
def full_namespace(control_plane: Cluster) -> str:
    """A new namespace in ``control_plane``."""
    return _fresh_namespace(control_plane)


@pytest.fixture
def pods_namespace(local_cluster: Cluster) -> str:
    """A new namespace in ``local_cluster``, where pods can be created."""
    name = _fresh_namespace(local_cluster)
    wait_for(
        lambda: local_cluster.get(f"/api/v1/namespaces/{name}/serviceaccounts/default"), "the default ServiceAccount"
    )
    return name
