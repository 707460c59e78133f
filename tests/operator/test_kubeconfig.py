"""Command lines read what kubectl reads."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from motley_operator.kube import NoClusterError, from_kubeconfig, user_credentials


def kubeconfig(folder: Path, user: dict[str, Any]) -> Path:
    path = folder / "config"
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "training"}}],
        "clusters": [
            {"name": "c", "cluster": {"server": "https://cluster.test:6443/", "insecure-skip-tls-verify": True}}
        ],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(yaml.safe_dump(document))
    return path


def plugin(folder: Path, token: str) -> dict[str, Any]:
    """As `aws eks get-token` and gke-gcloud-auth-plugin answer."""
    version = "client.authentication.k8s.io/v1beta1"
    said = {"apiVersion": version, "kind": "ExecCredential", "status": {"token": token}}
    script = folder / "plugin.py"
    script.write_text(f"print({json.dumps(json.dumps(said))})")
    command = {"apiVersion": version, "command": sys.executable, "args": [str(script)], "interactiveMode": "Never"}
    return {"exec": command}


@pytest.mark.parametrize("how", ["token", "exec"])
def test_a_token_comes_from_the_file_or_from_a_credential_plugin(tmp_path: Path, how: str) -> None:
    user = {"token": "secret-1"} if how == "token" else plugin(tmp_path, "secret-1")
    found = user_credentials({"KUBECONFIG": str(kubeconfig(tmp_path, user))})
    assert (found.server, found.namespace, found.insecure) == ("https://cluster.test:6443", "training", True)
    assert found.bearer() == "secret-1"


def test_the_operator_itself_runs_no_plugin(tmp_path: Path) -> None:
    with pytest.raises(NoClusterError, match="credential plugin"):
        from_kubeconfig(kubeconfig(tmp_path, plugin(tmp_path, "secret-1")))


def test_no_kubeconfig_and_no_pod_is_no_cluster(tmp_path: Path) -> None:
    with pytest.raises(NoClusterError):
        user_credentials({"HOME": str(tmp_path), "MOTLEY_SERVICE_ACCOUNT_DIR": str(tmp_path)})
