"""Options and the fixtures that every folder of tests may use."""

from __future__ import annotations

import pytest
from motley_local.testing import api_server, control_plane, full_namespace, local_cluster, namespace, pods_namespace
from operator_world import api, cluster, operators, own_world, shared_operators, world

__all__ = [
    "api",
    "api_server",
    "cluster",
    "control_plane",
    "full_namespace",
    "local_cluster",
    "namespace",
    "operators",
    "own_world",
    "pods_namespace",
    "shared_operators",
    "world",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--e2e", action="store_true", help="also run whole runs on the local cluster (minutes)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--e2e"):
        return
    skip = pytest.mark.skip(reason="a whole run on the local cluster: make test-e2e")
    for item in items:
        if "e2e" in item.keywords:
            item.add_marker(skip)
