"""Options and the fixtures that every folder of tests may use."""

from __future__ import annotations

import pytest
from motley_local.testing import api_server, control_plane, full_namespace, local_cluster, namespace, pods_namespace

__all__ = ["api_server", "control_plane", "full_namespace", "local_cluster", "namespace", "pods_namespace"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--e2e", action="store_true", help="also run whole runs on the local cluster (minutes)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--e2e"):
        return
    skip = pytest.mark.skip(reason="a whole run on the local cluster: make test-e2e")
    for item in items:
        if "e2e" in item.keywords:
            item.add_marker(skip)
