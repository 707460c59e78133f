"""The operator with exactly the rights that the chart gives it, in both scopes: a run's whole life, and what it may not do."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from motley_local.binaries import ensure_helm
from operator_world import CHILDREN, ROOT, Api, Json, Operators, World, eventually, numbers

pytestmark = pytest.mark.apiserver

KINDS = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
# verb, resource: in the watched namespace
FORBIDDEN = (
    ("list", "secrets"),
    ("watch", "secrets"),
    ("update", "secrets"),
    ("delete", "secrets"),
    ("create", "pods"),
    ("delete", "pods"),
    ("create", "pods/exec"),
    ("get", "pods/log"),
    ("delete", "deployments.apps"),
    ("delete", "services"),
    ("delete", "configmaps"),
    ("create", "rlruns.motley.dev"),
    ("patch", "rlruns.motley.dev"),
    ("delete", "rlruns.motley.dev"),
    ("patch", "nodes"),
    ("create", "serviceaccounts/token"),
    ("create", "rolebindings.rbac.authorization.k8s.io"),
    ("create", "leases.coordination.k8s.io"),  # held in its own namespace
)


@dataclass(frozen=True)
class Installed:
    """The chart's account, and what it watches."""

    world: World
    operators: Operators
    system: str
    account: str
    scoped: bool
    env: dict[str, str]

    def may(self, verb: str, resource: str, namespace: str) -> bool:
        """`resource` as plural/subresource.group."""
        what, _, group = resource.partition(".")
        plural, _, sub = what.partition("/")
        asked = {"namespace": namespace, "verb": verb, "group": group, "resource": plural, "subresource": sub}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": self.account, "resourceAttributes": asked},
        }
        answer = self.world.api.call("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        assert answer is not None
        return bool(answer["status"]["allowed"])


def rendered(release: str, system: str, watched: str) -> list[Json]:
    """The chart's RBAC objects, each with its namespace, as an installation would make them."""
    done = subprocess.run(
        [
            str(ensure_helm()),
            "template",
            release,
            str(ROOT / "charts" / "motley"),
            f"--namespace={system}",
            f"--set=watchNamespace={watched}",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    found = [item for item in yaml.safe_load_all(done.stdout) if item and item["kind"] in KINDS]
    for item in found:
        if not item["kind"].startswith("Cluster"):
            item["metadata"].setdefault("namespace", system)
    return found


@pytest.fixture(params=["namespaced", "cluster-wide"])
def installed(
    request: pytest.FixtureRequest, own_world: World, operators: Operators, api: Api, tmp_path: Path
) -> Iterator[Installed]:
    world, scoped = own_world, request.param == "namespaced"
    release, system = f"rbac{next(numbers)}", f"{own_world.namespace}-system"
    world.cluster.kubectl("create", "namespace", system)
    made = rendered(release, system, world.namespace if scoped else "")
    world.cluster.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(made))
    token = world.cluster.kubectl("create", "token", f"{release}-operator", "-n", system).stdout.strip()
    document = yaml.safe_load(world.cluster.kubeconfig_path.read_text())
    document["users"][0]["user"] = {"token": token}
    kubeconfig = tmp_path / "account.kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(document))
    env = {
        "KUBECONFIG": str(kubeconfig),
        "MOTLEY_NAMESPACE": system,
        "MOTLEY_WATCH_NAMESPACE": world.namespace if scoped else "",
    }
    account = f"system:serviceaccount:{system}:{release}-operator"
    yield Installed(world, operators, system, account, scoped, env)
    operators.stop()
    for item in made:
        if item["kind"].startswith("Cluster"):
            world.cluster.kubectl("delete", item["kind"], item["metadata"]["name"], "--wait=false")


def test_a_run_lives_and_goes_with_the_charts_rights_alone(installed: Installed) -> None:
    world, operators = installed.world, installed.operators
    process = operators.start(env=installed.env)
    world.apply(world.manifest())
    eventually(lambda: world.children() == CHILDREN, "the children")
    eventually(lambda: len(world.pods()) == 5, "one pod each")
    world.apply(world.group_manifest("late"))
    eventually(lambda: world.get("Deployment", "late"), "a late group is adopted and served")
    world.patch("RLRun", world.run, {"spec": {"suspend": True}})
    world.until("Suspended", "True")
    world.patch("RLRun", world.run, {"spec": {"suspend": False}})
    world.until("Suspended", "False")
    eventually(lambda: world.pods("trainer"), "it goes on")
    groups = world.manifest()["spec"]["samplerGroups"]
    world.patch("RLRun", world.run, {"spec": {"samplerGroups": groups[:1]}})
    eventually(
        lambda: world.get("SamplerGroup", world.named("b200-nvfp4")) is None, "a group that is listed no more goes"
    )
    said = {event["reason"] for event in world.list("Event") if event["involvedObject"]["kind"] == "RLRun"}
    assert "Suspended" in said
    lease = world.api.call("GET", f"/apis/coordination.k8s.io/v1/namespaces/{installed.system}/leases/motley-operator")
    assert lease is not None
    world.delete("RLRun", world.run)
    eventually(lambda: not world.children(), "everything goes")
    assert process.poll() is None
    logs = operators.logs()
    assert "orbidden" not in logs
    assert "result=error" not in logs
    assert operators.series(process).get('motley_reconciles_total{result="error"}', 0.0) == 0.0


def test_it_may_do_nothing_beyond(installed: Installed) -> None:
    namespace = installed.world.namespace
    assert installed.may("list", "pods", namespace)  # the question is asked rightly
    allowed = [f"{verb} {resource}" for verb, resource in FORBIDDEN if installed.may(verb, resource, namespace)]
    assert allowed == []
    assert installed.may("list", "deployments.apps", "default") is not installed.scoped
    assert installed.may("update", "leases.coordination.k8s.io", installed.system)
