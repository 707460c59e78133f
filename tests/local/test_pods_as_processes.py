"""Pods on virtual nodes behave as pods do, on the real control plane."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from motley_local.testing import Cluster, wait_for

pytestmark = pytest.mark.apiserver

Object = dict[str, Any]


def pod(name: str, script: str, *, container: Object | None = None, **spec: Any) -> Object:
    """A pod with one container that runs a shell script."""
    main = {"name": "main", "image": "busybox", "command": ["sh", "-c", script], **(container or {})}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 5, "containers": [main], **spec},
    }


def phase(cluster: Cluster, namespace: str, name: str) -> str:
    return str((cluster.pod(namespace, name) or {}).get("status", {}).get("phase"))


def container(cluster: Cluster, namespace: str, name: str) -> Object:
    found = cluster.pod(namespace, name) or {}
    statuses: list[Object] = found.get("status", {}).get("containerStatuses") or [{}]
    return statuses[0]


def wait_phase(cluster: Cluster, namespace: str, name: str, want: str) -> None:
    wait_for(lambda: phase(cluster, namespace, name) == want, f"pod {name} {want}")


def gone(cluster: Cluster, namespace: str, name: str) -> bool:
    return cluster.pod(namespace, name) is None


def test_a_pod_runs_and_kubectl_logs_shows_what_it_wrote(local_cluster: Cluster, pods_namespace: str) -> None:
    local_cluster.create(pods_namespace, pod("writer", "echo one; echo two >&2; echo three"))
    wait_phase(local_cluster, pods_namespace, "writer", "Succeeded")
    assert local_cluster.kubectl("logs", "-n", pods_namespace, "writer").stdout == "one\ntwo\nthree\n"
    assert local_cluster.logs(pods_namespace, "writer", "tailLines=1") == "three\n"
    status = container(local_cluster, pods_namespace, "writer")
    assert status["state"]["terminated"]["exitCode"] == 0
    assert status["state"]["terminated"]["reason"] == "Completed"


def test_following_a_log_ends_with_the_container(local_cluster: Cluster, pods_namespace: str) -> None:
    script = "while [ ! -e /gate/open ]; do sleep 0.1; done; echo last"
    volume = {"name": "gate", "emptyDir": {}}
    mount = {"volumeMounts": [{"name": "gate", "mountPath": "/gate"}]}
    opener = {"name": "opener", "image": "busybox", "command": ["sh", "-c", "sleep 1; touch /gate/open"], **mount}
    made = pod("followed", f"echo first; {script}", container=mount, volumes=[volume])
    made["spec"]["containers"].append(opener)
    local_cluster.create(pods_namespace, made)
    wait_for(lambda: container(local_cluster, pods_namespace, "followed").get("containerID"), "the container to start")
    assert local_cluster.logs(pods_namespace, "followed", "container=main&follow=true") == "first\nlast\n"


def test_environment_comes_from_every_source(local_cluster: Cluster, pods_namespace: str) -> None:
    settings = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "settings"},
        "data": {"COLOUR": "green", "depth": "3"},
    }
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"token": "s3cret"}}
    env = [
        {"name": "PLAIN", "value": "a"},
        {"name": "BUILT", "value": "$(PLAIN)-$(UNKNOWN)-$$(PLAIN)"},
        {"name": "DEPTH", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "depth"}}},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "token"}}},
        {"name": "ABSENT", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "other", "optional": True}}},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "MEMORY", "valueFrom": {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}}},
    ]
    extra = {
        "env": env,
        "envFrom": [{"configMapRef": {"name": "settings"}, "prefix": "S_"}],
        "resources": {"limits": {"memory": "64Mi"}},
        "args": ["$(BUILT)"],
    }
    script = 'echo "$BUILT|$DEPTH|$TOKEN|${ABSENT-none}|$S_COLOUR|$MEMORY|$0|$IP|$NODE"'
    local_cluster.create(pods_namespace, settings, secret, pod("env", script, container=extra))
    wait_phase(local_cluster, pods_namespace, "env", "Succeeded")
    made = local_cluster.pod(pods_namespace, "env") or {}
    want_built = "a-$(UNKNOWN)-$(PLAIN)"
    want = f"{want_built}|3|s3cret|none|green|64|{want_built}|{made['status']['podIP']}|{made['spec']['nodeName']}\n"
    assert local_cluster.logs(pods_namespace, "env") == want
    assert made["status"]["podIP"].startswith(f"{local_cluster.plane.slot.pod_prefix}.")


def test_a_missing_config_map_holds_the_container_until_it_is_there(
    local_cluster: Cluster, pods_namespace: str
) -> None:
    env = [{"name": "X", "valueFrom": {"configMapKeyRef": {"name": "late", "key": "x"}}}]
    local_cluster.create(pods_namespace, pod("early", 'echo "$X"', container={"env": env}))

    def waiting() -> Object:
        return container(local_cluster, pods_namespace, "early").get("state", {}).get("waiting") or {}

    wait_for(lambda: waiting().get("reason") == "CreateContainerConfigError", "CreateContainerConfigError")
    assert waiting()["message"] == 'configmap "late" not found'
    local_cluster.create(
        pods_namespace, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "late"}, "data": {"x": "now"}}
    )
    wait_phase(local_cluster, pods_namespace, "early", "Succeeded")
    assert local_cluster.logs(pods_namespace, "early") == "now\n"


def test_a_mounted_config_map_changes_under_a_running_container(local_cluster: Cluster, pods_namespace: str) -> None:
    def settings(value: str) -> Object:
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "fleet"}, "data": {"fleet.json": value}}

    script = "cat /etc/motley/deep/fleet.json; until grep -q second /etc/motley/deep/fleet.json; do sleep 0.1; done; echo seen"
    extra = {"volumeMounts": [{"name": "fleet", "mountPath": "/etc/motley/deep"}]}
    volumes = [{"name": "fleet", "configMap": {"name": "fleet"}}]
    local_cluster.create(pods_namespace, settings("first\n"), pod("reader", script, container=extra, volumes=volumes))
    wait_phase(local_cluster, pods_namespace, "reader", "Running")
    local_cluster.replace(pods_namespace, settings("second\n"))
    wait_phase(local_cluster, pods_namespace, "reader", "Succeeded")
    assert local_cluster.logs(pods_namespace, "reader") == "first\nseen\n"
    assert not Path("/etc/motley/deep").exists(), "a mount path was left on the host"


def test_the_service_account_opens_the_api_as_in_a_cluster(local_cluster: Cluster, pods_namespace: str) -> None:
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "view"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"},
        "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": pods_namespace}],
    }
    script = """
import os, ssl, urllib.request
root = "/var/run/secrets/kubernetes.io/serviceaccount"
host = f"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}"
url = f"{host}/api/v1/namespaces/{open(root + '/namespace').read()}/pods"
request = urllib.request.Request(url, headers={"Authorization": "Bearer " + open(root + "/token").read()})
print(urllib.request.urlopen(request, context=ssl.create_default_context(cafile=root + "/ca.crt")).status)
"""
    made = pod("caller", "", container={"image": "motley-operator:0.1", "command": ["python", "-c", script]})
    local_cluster.create(pods_namespace, role, made)
    wait_phase(local_cluster, pods_namespace, "caller", "Succeeded")
    assert local_cluster.logs(pods_namespace, "caller") == "200\n"


def test_the_projects_images_are_this_repository(local_cluster: Cluster, pods_namespace: str) -> None:
    script = "pwd; test -f /opt/motley/pyproject.toml && python -c 'import motley_api; print(motley_api.API_GROUP)'"
    env = [{"name": "PYTHONPATH", "value": "/opt/motley/api"}]
    made = pod(
        "image", script, container={"image": "registry.example/team/motley-sampler:1.2@sha256:" + "0" * 64, "env": env}
    )
    local_cluster.create(pods_namespace, made)
    wait_phase(local_cluster, pods_namespace, "image", "Succeeded")
    assert local_cluster.logs(pods_namespace, "image") == "/opt/motley\nmotley.dev\n"


def test_an_image_whose_program_is_not_here_is_not_pulled(local_cluster: Cluster, pods_namespace: str) -> None:
    local_cluster.create(pods_namespace, pod("foreign", "", container={"command": ["no-such-program-anywhere"]}))
    waiting = wait_for(
        lambda: container(local_cluster, pods_namespace, "foreign").get("state", {}).get("waiting", {}).get("message"),
        "a waiting reason",
    )
    assert "no-such-program-anywhere" in waiting
    assert container(local_cluster, pods_namespace, "foreign")["state"]["waiting"]["reason"] == "ErrImagePull"


def test_a_crash_is_counted_and_then_backed_off(local_cluster: Cluster, pods_namespace: str) -> None:
    local_cluster.create(pods_namespace, pod("crasher", "echo try; exit 7", restartPolicy="Always"))

    def backing_off() -> Object | None:
        status = container(local_cluster, pods_namespace, "crasher")
        return status if status.get("state", {}).get("waiting", {}).get("reason") == "CrashLoopBackOff" else None

    status = wait_for(backing_off, "CrashLoopBackOff")
    # The first restart comes at once; the pause is before the second.
    assert status["restartCount"] == 1
    assert status["lastState"]["terminated"]["exitCode"] == 7
    assert status["lastState"]["terminated"]["reason"] == "Error"
    assert status["ready"] is False
    assert phase(local_cluster, pods_namespace, "crasher") == "Running"
    assert local_cluster.logs(pods_namespace, "crasher", "previous=true") == "try\n"


def test_a_killed_process_is_restarted_with_its_signal_told(local_cluster: Cluster, pods_namespace: str) -> None:
    script = "if [ -e /keep/again ]; then exec sleep 600; fi; touch /keep/again; kill -9 $$$$"
    mount = {
        "volumeMounts": [{"name": "keep", "mountPath": "/keep"}],
        "command": ["sh", "-c", f"sh -c '{script}'; exit $?"],
    }
    local_cluster.create(
        pods_namespace,
        pod("killed", "", container=mount, restartPolicy="OnFailure", volumes=[{"name": "keep", "emptyDir": {}}]),
    )
    wait_for(lambda: container(local_cluster, pods_namespace, "killed").get("restartCount") == 1, "a restart")
    wait_for(
        lambda: container(local_cluster, pods_namespace, "killed").get("state", {}).get("running"), "running again"
    )
    assert container(local_cluster, pods_namespace, "killed")["lastState"]["terminated"]["exitCode"] == 137


def test_probes_gate_readiness_and_restart_what_is_not_alive(local_cluster: Cluster, pods_namespace: str) -> None:
    extra = {
        "volumeMounts": [{"name": "flags", "mountPath": "/flags"}],
        "readinessProbe": {"exec": {"command": ["test", "-e", "/flags/ready"]}, "periodSeconds": 1},
        "livenessProbe": {
            "exec": {"command": ["test", "!", "-e", "/flags/dead"]},
            "periodSeconds": 1,
            "failureThreshold": 1,
        },
    }
    volumes = [
        {
            "name": "flags",
            "hostPath": {"path": str(local_cluster.plane.folder.parent / "flags"), "type": "DirectoryOrCreate"},
        }
    ]
    made = pod("probed", "rm -f /flags/dead; exec sleep 600", container=extra, volumes=volumes, restartPolicy="Always")
    local_cluster.create(pods_namespace, made)
    flags = local_cluster.plane.folder.parent / "flags"
    wait_phase(local_cluster, pods_namespace, "probed", "Running")
    assert container(local_cluster, pods_namespace, "probed")["ready"] is False
    (flags / "ready").touch()
    wait_for(lambda: container(local_cluster, pods_namespace, "probed")["ready"], "ready")
    (flags / "ready").unlink()
    (flags / "dead").touch()
    wait_for(
        lambda: container(local_cluster, pods_namespace, "probed")["restartCount"] == 1,
        "a restart by the liveness probe",
    )
    assert container(local_cluster, pods_namespace, "probed")["ready"] is False


def test_termination_runs_the_hook_then_asks_then_kills(local_cluster: Cluster, pods_namespace: str) -> None:
    diary = local_cluster.plane.folder.parent / "diary"
    volumes = [{"name": "diary", "hostPath": {"path": str(diary), "type": "DirectoryOrCreate"}}]
    mount = {"volumeMounts": [{"name": "diary", "mountPath": "/diary"}]}
    hook = {"lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", "echo hook >> /diary/polite"]}}}}
    polite = "trap 'echo term >> /diary/polite; exit 0' TERM; echo up > /diary/started; while :; do sleep 0.1; done"
    stubborn = "trap 'echo term >> /diary/stubborn' TERM; echo up >> /diary/stubborn; while :; do sleep 0.1; done"
    local_cluster.create(
        pods_namespace,
        pod("polite", polite, container=mount | hook, volumes=volumes, terminationGracePeriodSeconds=30),
        pod("stubborn", stubborn, container=mount, volumes=volumes, terminationGracePeriodSeconds=1),
    )
    wait_for(lambda: (diary / "started").exists() and (diary / "stubborn").exists(), "both pods to start")
    local_cluster.delete(pods_namespace, "Pod", "polite", "stubborn")
    wait_for(lambda: gone(local_cluster, pods_namespace, "polite"), "polite gone")
    wait_for(lambda: gone(local_cluster, pods_namespace, "stubborn"), "stubborn gone")
    assert (diary / "polite").read_text() == "hook\nterm\n"
    assert (diary / "stubborn").read_text() == "up\nterm\n"


def test_init_containers_run_in_order_before_the_others(local_cluster: Cluster, pods_namespace: str) -> None:
    mount = {"volumeMounts": [{"name": "work", "mountPath": "/work-of-pod"}]}

    def step(name: str, script: str, **more: Any) -> Object:
        return {"name": name, "image": "busybox", "command": ["sh", "-c", script], **mount, **more}

    init = [
        step("one", "echo one >> /work-of-pod/log"),
        step("side", "echo side >> /work-of-pod/log; exec sleep 600", restartPolicy="Always"),
        step("two", "until grep -q side /work-of-pod/log; do sleep 0.1; done; echo two >> /work-of-pod/log"),
    ]
    made = pod(
        "staged",
        "cat /work-of-pod/log",
        container=mount,
        initContainers=init,
        volumes=[{"name": "work", "emptyDir": {}}],
    )
    local_cluster.create(pods_namespace, made)
    wait_phase(local_cluster, pods_namespace, "staged", "Succeeded")
    assert local_cluster.logs(pods_namespace, "staged", "container=main") == "one\nside\ntwo\n"


def test_a_failing_init_container_fails_a_pod_that_never_restarts(local_cluster: Cluster, pods_namespace: str) -> None:
    init = [{"name": "bad", "image": "busybox", "command": ["false"]}]
    local_cluster.create(pods_namespace, pod("stuck", "echo never", initContainers=init))
    wait_phase(local_cluster, pods_namespace, "stuck", "Failed")
    assert container(local_cluster, pods_namespace, "stuck")["state"] == {"waiting": {"reason": "PodInitializing"}}


def test_a_container_can_sandbox_others_with_namespaces(local_cluster: Cluster, pods_namespace: str) -> None:
    inside = "mount -t tmpfs none /mnt && echo pid $$$$"  # kubelet makes $$ of it
    script = f"unshare --user --map-root-user --mount --pid --fork --mount-proc sh -c '{inside}'"
    local_cluster.create(pods_namespace, pod("sandboxer", script))
    wait_for(lambda: phase(local_cluster, pods_namespace, "sandboxer") in ("Succeeded", "Failed"), "the sandbox to end")
    assert local_cluster.logs(pods_namespace, "sandboxer") == "pid 1\n"


def test_what_a_container_leaves_behind_ends_with_it(local_cluster: Cluster, pods_namespace: str) -> None:
    mark = f"leftover-{os.getpid()}"
    # setsid and a cleared environment: neither process group nor environment would find it.
    script = f"setsid env -i sh -c 'exec -a {mark} sleep 600' & sleep 0.5"
    local_cluster.create(pods_namespace, pod("leaver", "", container={"command": ["bash", "-c", script]}))
    wait_phase(local_cluster, pods_namespace, "leaver", "Succeeded")
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [command for command in commands if command.startswith(mark.encode())]
