"""Jobs, Deployments, StatefulSets, Services, claims and GPUs on the local cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from motley_local.testing import Cluster, wait_for

pytestmark = pytest.mark.apiserver

Object = dict[str, Any]

SERVER = """
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = os.environ["HOSTNAME"].encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
    def log_message(self, *_): pass
http.server.HTTPServer((os.environ["IP"], 8080), Handler).serve_forever()
"""


def server_template(app: str) -> Object:
    container = {
        "name": "server",
        "image": "motley-rollout",
        "command": ["python", "-S", "-c", SERVER],
        "env": [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "ports": [{"name": "web", "containerPort": 8080}],
        "readinessProbe": {"httpGet": {"path": "/", "port": "web"}, "periodSeconds": 1},
    }
    spec = {"terminationGracePeriodSeconds": 0, "containers": [container]}
    return {"metadata": {"labels": {"app": app}}, "spec": spec}


def workload(kind: str, name: str, replicas: int, **spec: Any) -> Object:
    selector = {"matchLabels": {"app": name}}
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": {"name": name},
        "spec": {"replicas": replicas, "selector": selector, "template": server_template(name), **spec},
    }


def service(name: str, app: str, **spec: Any) -> Object:
    ports = [{"port": 80, "targetPort": "web"}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": {"app": app}, "ports": ports, **spec},
    }


def job(name: str, script: str, **spec: Any) -> Object:
    container = {"name": "main", "image": "busybox", "command": ["sh", "-c", script]}
    template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": {"template": template, **spec}}


def wait_job(cluster: Cluster, namespace: str, name: str, want: str) -> None:
    def ended() -> bool:
        found = cluster.get(f"/apis/batch/v1/namespaces/{namespace}/jobs/{name}") or {}
        conditions = found.get("status", {}).get("conditions") or ()
        return any(one["type"] == want and one["status"] == "True" for one in conditions)

    wait_for(ended, f"job {name} {want}")


def pods_of(cluster: Cluster, namespace: str, app: str) -> list[Object]:
    found = cluster.get(f"/api/v1/namespaces/{namespace}/pods?labelSelector=app%3D{app}") or {}
    return list(found.get("items") or ())


def is_ready(pod: Object) -> bool:
    return any(
        one["type"] == "Ready" and one["status"] == "True" for one in pod.get("status", {}).get("conditions") or ()
    )


def wait_ready(cluster: Cluster, namespace: str, app: str, count: int) -> list[Object]:
    def ready() -> list[Object] | None:
        pods = [
            pod
            for pod in pods_of(cluster, namespace, app)
            if is_ready(pod) and not pod["metadata"].get("deletionTimestamp")
        ]
        return pods if len(pods) == count else None

    return wait_for(ready, f"{count} ready pods of {app}")


def log_of_job(cluster: Cluster, namespace: str, name: str) -> str:
    found = (
        cluster.get(f"/api/v1/namespaces/{namespace}/pods?labelSelector=batch.kubernetes.io%2Fjob-name%3D{name}") or {}
    )
    (pod,) = found["items"]
    return cluster.logs(namespace, pod["metadata"]["name"])


def job_log(cluster: Cluster, namespace: str, name: str, script: str) -> str:
    cluster.create(namespace, job(name, script, backoffLimit=0))
    wait_job(cluster, namespace, name, "Complete")
    return log_of_job(cluster, namespace, name)


def test_a_job_completes_and_a_failing_one_fails(local_cluster: Cluster, pods_namespace: str) -> None:
    local_cluster.create(
        pods_namespace, job("good", "exit 0", completions=2, parallelism=2), job("bad", "exit 3", backoffLimit=0)
    )
    wait_job(local_cluster, pods_namespace, "good", "Complete")
    wait_job(local_cluster, pods_namespace, "bad", "Failed")


def test_a_deployment_is_reached_by_cluster_ip_and_by_name(local_cluster: Cluster, pods_namespace: str) -> None:
    local_cluster.create(pods_namespace, service("demo-router", "web"), workload("Deployment", "web", 2))
    pods = wait_ready(local_cluster, pods_namespace, "web", 2)
    address = (local_cluster.get(f"/api/v1/namespaces/{pods_namespace}/services/demo-router") or {})["spec"][
        "clusterIP"
    ]
    names = (address, "demo-router", f"demo-router.{pods_namespace}.svc.cluster.local", "$DEMO_ROUTER_SERVICE_HOST")
    # Two requests to each: connections go to the two pods in turn. The hosts file follows readiness within moments.
    calls = "".join(
        f"curl -sS --retry 20 --retry-connrefused --retry-delay 1 http://{name}; echo; " * 2 for name in names
    )
    seen = job_log(local_cluster, pods_namespace, "caller", calls).split()
    want = {pod["metadata"]["name"] for pod in pods}
    assert len(seen) == 8
    assert set(seen) == want


def test_a_service_without_ready_pods_refuses(local_cluster: Cluster, pods_namespace: str) -> None:
    local_cluster.create(pods_namespace, service("empty", "nothing"))
    # Exit code 7 of curl: connection refused, not a time-out.
    assert job_log(local_cluster, pods_namespace, "knock", "curl -sS http://empty; echo code $?").endswith("code 7\n")


def test_a_stateful_set_has_stable_names_behind_a_headless_service(local_cluster: Cluster, pods_namespace: str) -> None:
    headless = service("gang", "gang", clusterIP="None", publishNotReadyAddresses=True)
    local_cluster.create(
        pods_namespace, headless, workload("StatefulSet", "gang", 2, serviceName="gang", podManagementPolicy="Parallel")
    )
    wait_ready(local_cluster, pods_namespace, "gang", 2)
    script = f"until getent hosts gang-1.gang >/dev/null; do sleep 0.2; done; curl -sS http://gang-1.gang.{pods_namespace}:8080"
    assert job_log(local_cluster, pods_namespace, "caller", script) == "gang-1"


def test_a_claim_is_bound_shared_and_removed(local_cluster: Cluster, pods_namespace: str) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "store"},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }

    def with_claim(name: str, script: str) -> Object:
        made = job(name, script)
        spec = made["spec"]["template"]["spec"]
        spec["volumes"] = [{"name": "store", "persistentVolumeClaim": {"claimName": "store"}}]
        spec["containers"][0]["volumeMounts"] = [{"name": "store", "mountPath": "/store/of/run"}]
        return made

    local_cluster.create(pods_namespace, claim, with_claim("writer", "echo kept > /store/of/run/file"))
    wait_job(local_cluster, pods_namespace, "writer", "Complete")
    local_cluster.create(pods_namespace, with_claim("reader", "cat /store/of/run/file"))
    wait_job(local_cluster, pods_namespace, "reader", "Complete")
    assert log_of_job(local_cluster, pods_namespace, "reader") == "kept\n"
    bound = local_cluster.get(f"/api/v1/namespaces/{pods_namespace}/persistentvolumeclaims/store") or {}
    volume = local_cluster.get(f"/api/v1/persistentvolumes/{bound['spec']['volumeName']}") or {}
    folder = Path(volume["spec"]["hostPath"]["path"])
    assert (folder / "file").read_text() == "kept\n"
    local_cluster.delete(pods_namespace, "Job", "writer", "reader")
    local_cluster.delete(pods_namespace, "PersistentVolumeClaim", "store")
    wait_for(lambda: not folder.exists(), "the claim's folder to be removed")


def gpu_pod(name: str, product: str, gpus: int) -> Object:
    container = {
        "name": "main",
        "image": "busybox",
        "command": ["sleep", "600"],
        "resources": {"limits": {"nvidia.com/gpu": str(gpus)}},
    }
    spec = {
        "terminationGracePeriodSeconds": 0,
        "nodeSelector": {"nvidia.com/gpu.product": product},
        "containers": [container],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def test_gpus_are_counted_by_the_scheduler(local_cluster: Cluster, pods_namespace: str) -> None:
    product = "NVIDIA-H100-80GB-HBM3"
    local_cluster.create(pods_namespace, gpu_pod("eight", product, 8))
    wait_for(
        lambda: (local_cluster.pod(pods_namespace, "eight") or {})["status"]["phase"] == "Running", "eight GPUs in use"
    )
    local_cluster.create(pods_namespace, gpu_pod("ninth", product, 1), gpu_pod("elsewhere", "NVIDIA-A100-SXM4-80GB", 1))

    def unschedulable() -> str | None:
        conditions = (local_cluster.pod(pods_namespace, "ninth") or {})["status"].get("conditions") or ()
        return next((one["message"] for one in conditions if one.get("reason") == "Unschedulable"), None)

    assert "Insufficient nvidia.com/gpu" in wait_for(unschedulable, "the ninth GPU to be refused")
    wait_for(
        lambda: (local_cluster.pod(pods_namespace, "elsewhere") or {})["status"]["phase"] == "Running", "the A100 pod"
    )
    assert (local_cluster.pod(pods_namespace, "elsewhere") or {})["spec"]["nodeName"] == "a100-0"
    local_cluster.delete(pods_namespace, "Pod", "eight")
    wait_for(
        lambda: (local_cluster.pod(pods_namespace, "ninth") or {})["status"]["phase"] == "Running",
        "the ninth to follow",
    )


def test_a_lost_node_is_noticed_its_pods_replaced_and_its_return_seen(
    local_cluster: Cluster, pods_namespace: str
) -> None:
    deployment = workload("Deployment", "spot", 1)
    spec = deployment["spec"]["template"]["spec"]
    spec["terminationGracePeriodSeconds"] = 5
    spec |= {
        "nodeSelector": {"pool": "spot"},
        "tolerations": [{"key": "pool", "value": "spot", "effect": "NoSchedule"}],
    }
    local_cluster.create(pods_namespace, deployment)
    (first,) = wait_ready(local_cluster, pods_namespace, "spot", 1)
    lost = first["spec"]["nodeName"]
    local_cluster.kubectl("annotate", "node", lost, "local.motley.dev/power=off")

    def replaced() -> Object | None:
        pods = [
            pod
            for pod in pods_of(local_cluster, pods_namespace, "spot")
            if is_ready(pod) and pod["spec"]["nodeName"] != lost
        ]
        return pods[0] if pods else None

    replacement = wait_for(replaced, "a replacement on the other node")
    assert replacement["metadata"]["name"] != first["metadata"]["name"]
    # Nobody is left on the node to say that the pod has ended.
    assert first["metadata"]["name"] in {
        pod["metadata"]["name"] for pod in pods_of(local_cluster, pods_namespace, "spot")
    }
    local_cluster.kubectl("annotate", "node", lost, "local.motley.dev/power-")
    wait_for(lambda: is_ready(local_cluster.get(f"/api/v1/nodes/{lost}") or {}), "the node to be Ready again")
    wait_for(lambda: len(pods_of(local_cluster, pods_namespace, "spot")) == 1, "the old pod to be cleared away")


def test_pods_without_processes_run_and_end_by_status_alone(local_cluster: Cluster, pods_namespace: str) -> None:
    deployment = workload("Deployment", "ghosts", 40)
    deployment["spec"]["template"]["spec"] |= {
        "nodeName": "ghost-0",
        "tolerations": [{"key": "pool", "value": "ghost", "effect": "NoSchedule"}],
    }
    local_cluster.create(pods_namespace, deployment)
    pods = wait_ready(local_cluster, pods_namespace, "ghosts", 40)
    assert len({pod["status"]["podIP"] for pod in pods}) == 40
    local_cluster.delete(pods_namespace, "Deployment", "ghosts")
    wait_for(lambda: not pods_of(local_cluster, pods_namespace, "ghosts"), "all to be gone")


def test_a_namespace_with_pods_is_removed_whole(local_cluster: Cluster, pods_namespace: str) -> None:
    local_cluster.create(pods_namespace, service("web", "web"), workload("Deployment", "web", 1))
    wait_ready(local_cluster, pods_namespace, "web", 1)
    local_cluster.delete("", "Namespace", pods_namespace)
    wait_for(lambda: local_cluster.get(f"/api/v1/namespaces/{pods_namespace}") is None, "the namespace to be gone")
