"""A cluster's end: nothing is left, whichever way it comes. And the cluster without namespaces."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from motley_local.cluster import LocalCluster
from motley_local.nodes import NodeSpec
from motley_local.processes import descendants, parent_of_each, process_start_ticks
from motley_local.testing import Cluster, wait_for

pytestmark = pytest.mark.apiserver

ONE_NODE = [NodeSpec("cpu-0")]


def command(state: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "motley_local.main", *arguments, "--state", str(state)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def pod(name: str, script: str, **more: Any) -> dict[str, Any]:
    container = {"name": "main", "image": "busybox", "command": ["bash", "-c", script], **more.pop("container", {})}
    spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container], **more}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "default"}, "spec": spec}


def identities(pids: Sequence[int]) -> set[tuple[int, int]]:
    """Pids with their start times, which together name a process for good."""
    return {(pid, ticks) for pid in pids if (ticks := process_start_ticks(pid)) is not None}


def alive(processes: set[tuple[int, int]]) -> set[tuple[int, int]]:
    return {(pid, ticks) for pid, ticks in processes if process_start_ticks(pid) == ticks}


def test_a_killed_cluster_leaves_no_process(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes.yaml"
    nodes.write_text("nodes: [{name: cpu-0}]\n")
    state = tmp_path / "state"
    with (tmp_path / "up.log").open("w") as log:
        up = subprocess.Popen([*command(state, "up"), "--nodes", str(nodes)], env=environment(), stdout=log, stderr=log)
    try:
        wait_for(lambda: (state / "cluster.json").exists() or up.poll() is not None, "the cluster to be up")
        assert up.poll() is None, (tmp_path / "up.log").read_text()
        again = subprocess.run(command(state, "up"), env=environment(), capture_output=True, text=True, check=False)
        assert again.returncode == 1
        assert "a cluster already runs" in again.stderr
        kubectl = command(state, "kubectl")
        manifest = json.dumps(pod("sleeper", "sleep 600 & exec sleep 600"))
        subprocess.run([*kubectl, "apply", "-f", "-"], input=manifest, env=environment(), text=True, check=True)
        waiting = [*kubectl, "wait", "--for=condition=Ready", "pod/sleeper", "--timeout=60s"]
        subprocess.run(waiting, env=environment(), check=True)
        below = identities(descendants(up.pid, parent_of_each()))
        # etcd, API server, scheduler, controller manager, agent; and two sleeps.
        assert len(below) == 7
    finally:
        up.send_signal(signal.SIGKILL)
        up.wait()
    wait_for(lambda: not alive(below), "every process below it to be gone")


def test_without_namespaces_paths_are_rewritten_and_nothing_is_left(tmp_path: Path) -> None:
    # Clusters of other tests are children of this process too.
    others = identities(descendants(os.getpid(), parent_of_each()))
    with LocalCluster(tmp_path, ONE_NODE, isolation="none") as local:
        assert local.plane is not None
        cluster = Cluster(local.plane, local.kubectl_path)
        settings = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "settings"},
            "data": {"run.json": '{"store": "file:///store/run", "tasks": "/opt/motley/examples"}'},
        }
        container = {
            "volumeMounts": [
                {"name": "settings", "mountPath": "/etc/motley"},
                {"name": "store", "mountPath": "/store"},
            ],
            "env": [{"name": "CONFIG", "value": "/etc/motley/run.json"}],
            "image": "motley-rollout",
        }
        volumes = [{"name": "settings", "configMap": {"name": "settings"}}, {"name": "store", "emptyDir": {}}]
        script = (
            "cat $CONFIG; echo x > /store/file; cat /store/file; (setsid env -i sleep 600 &); setsid sleep 600 & exit 0"
        )
        cluster.create("default", settings, pod("plain", script, container=container, volumes=volumes))
        wait_for(
            lambda: (cluster.pod("default", "plain") or {})["status"].get("phase") in ("Succeeded", "Failed"),
            "the pod to end",
        )
        text, _, written = cluster.logs("default", "plain").partition("}")
        pods = tmp_path / "agent" / "pods"
        store = json.loads(text + "}")["store"]
        assert store.startswith(f"file://{pods}/")
        assert store.endswith("/volumes/store/run")
        assert json.loads(text + "}")["tasks"] == f"{local.repo_root}/examples"
        assert written == "x\n"
        memory = local.memory()
        assert memory.control_plane_mib > 100
        assert memory.total_mib == memory.control_plane_mib + memory.agent_mib + memory.pods_mib
        below = identities(descendants(os.getpid(), parent_of_each())) - others
        # The four servers and the agent at least, and the process that cleared its environment.
        assert len(below) >= 6
    assert not alive(below)


def test_down_without_a_cluster_is_not_an_error_and_status_is(tmp_path: Path) -> None:
    down = subprocess.run(command(tmp_path, "down"), env=environment(), capture_output=True, text=True, check=False)
    assert (down.returncode, down.stderr.startswith("no cluster runs in")) == (0, True)
    status = subprocess.run(command(tmp_path, "status"), env=environment(), capture_output=True, text=True, check=False)
    assert status.returncode == 1
    assert "start one with: motley local up" in status.stderr
