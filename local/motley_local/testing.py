"""Fixtures for tests on a real API server. In a conftest.py: ``from motley_local.testing import api_server, namespace``.

``api_server`` is etcd and the API server alone: objects are stored and validated, nothing acts on them. ``control_plane`` has scheduler and
controller manager too. Both live for the session, so every test takes a ``namespace`` of its own (or names that do not clash).
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from motley_local.binaries import ControlPlaneBinaries, ensure_control_plane, ensure_kubectl
from motley_local.controlplane import ControlPlane

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


def _fresh_namespace(cluster: Cluster) -> str:
    name = f"test-{os.getpid()}-{next(_counter)}"
    cluster.kubectl("create", "namespace", name)
    return name


@pytest.fixture
def namespace(api_server: Cluster) -> str:
    """A new namespace in ``api_server``."""
    return _fresh_namespace(api_server)


@pytest.fixture
def full_namespace(control_plane: Cluster) -> str:
    """A new namespace in ``control_plane``."""
    return _fresh_namespace(control_plane)
