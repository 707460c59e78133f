"""The control plane in its fast form, etcd and API server alone, as other test folders use it."""

from __future__ import annotations

import json
import stat

import pytest
from motley_local.testing import Cluster

pytestmark = pytest.mark.apiserver


def test_the_server_stores_objects_and_says_its_real_version(api_server: Cluster, namespace: str) -> None:
    api_server.kubectl("create", "configmap", "kept", "--from-literal=a=1", "-n", namespace)
    stored = json.loads(api_server.kubectl("get", "configmap", "kept", "-n", namespace, "-o", "json").stdout)
    assert stored["data"] == {"a": "1"}
    # A server that calls itself v0.0.0 would be refused by every chart that states a kubeVersion.
    version = json.loads(api_server.kubectl("version", "-o", "json").stdout)["serverVersion"]
    assert version["gitVersion"].startswith(f"v1.{api_server.plane.binaries.server_minor}.")


def test_invalid_objects_are_refused_by_the_server(api_server: Cluster, namespace: str) -> None:
    bad = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "s", "namespace": namespace},
        "spec": {"ports": [{"port": 70000}]},
    }
    refused = api_server.kubectl("apply", "-f", "-", stdin=json.dumps(bad), check=False)
    assert refused.returncode != 0
    assert "spec.ports[0].port" in refused.stderr


def test_the_admin_kubeconfig_is_readable_by_its_owner_only(api_server: Cluster) -> None:
    assert stat.S_IMODE(api_server.kubeconfig_path.stat().st_mode) == 0o600
    assert stat.S_IMODE(api_server.kubeconfig_path.parent.stat().st_mode) == 0o700


def test_a_request_without_a_token_is_refused(api_server: Cluster, namespace: str) -> None:
    refused = api_server.kubectl(
        "get", "secrets", "-n", namespace, "--as=system:anonymous", "--as-group=system:unauthenticated", check=False
    )
    assert refused.returncode != 0
    assert "forbidden" in refused.stderr.lower()
