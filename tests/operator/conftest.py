"""A real control plane with the CRDs; one operator for most tests, operators of their own for those that kill them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from motley_local.testing import Cluster
from operator_world import ROOT, Api, Operators, World, numbers


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
