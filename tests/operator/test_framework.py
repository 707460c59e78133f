"""Traps of the operator framework, each sprung on purpose: docs/operations.md has the list."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import kopf
import pytest
from api_proxy import GONE, INTERNAL, ApiProxy, Asked
from motley_api import keys
from motley_operator import handlers
from motley_operator.cache import CHILD_KINDS, WATCHED
from motley_operator.kube import Credentials
from motley_operator.main import overdue
from operator_world import CHILDREN, Operators, World, eventually

PERIODS_WITHOUT_WRITES_S = 6.0  # twelve looks at MOTLEY_RECONCILE_SECONDS=0.5
FOREIGN_PODS = 400


class NoController:
    """Handlers are registered, not called."""


def found(resource: Any, settings: kopf.OperatorSettings) -> list[str]:
    return settings.watching.label_selectors.collect(resource)


def reference(kind: str) -> Any:
    group, version, plural = handlers.resource(kind)
    return kopf.Resource(group=group, version=version, plural=plural, preferred=True, namespaced=True)


def test_the_api_server_filters_what_is_ours_and_lists_come_in_pages() -> None:
    settings = handlers.operator_settings(namespaced=False)
    assert settings.watching.chunk_size == handlers.CHUNK
    for kind in (*CHILD_KINDS, "Pod"):
        assert found(reference(kind), settings) == [keys.RUN_LABEL]
    assert found(reference("RLRun"), settings) == []


def test_a_watch_that_goes_dead_is_opened_anew_after_the_bookmarks_that_did_not_come() -> None:
    assert 60 < handlers.operator_settings(namespaced=False).watching.inactivity_timeout <= 75


def test_names_are_our_own_and_events_are_not_posted_by_the_framework() -> None:
    settings = handlers.operator_settings(namespaced=False)
    assert settings.persistence.finalizer == keys.FINALIZER
    assert settings.peering.name == keys.FIELD_MANAGER
    assert not settings.posting.enabled
    prefixes = {settings.persistence.progress_storage.prefix, settings.persistence.diffbase_storage.prefix}  # type: ignore[attr-defined]
    assert prefixes == {"kopf.motley.dev"}


@pytest.mark.parametrize("namespaced", [True, False])
def test_a_namespaced_operator_looks_at_no_crds_or_namespaces(namespaced: bool) -> None:
    assert handlers.operator_settings(namespaced=namespaced).scanning.disabled is namespaced


def test_there_are_only_event_handlers_none_blocks_and_none_returns() -> None:
    """No timer, daemon or change handler: no finalizer, no annotation, no retry, nothing in status."""
    made = handlers.registry(NoController(), Credentials("https://localhost"))  # type: ignore[arg-type]
    watching = made._watching.get_all_handlers()
    assert len(watching) == len(WATCHED)
    assert not made._changing.get_all_handlers()
    assert not made._spawning.get_all_handlers()
    assert not made._indexing.get_all_handlers()
    assert all(inspect.iscoroutinefunction(handler.fn) for handler in watching)
    assert {inspect.signature(handler.fn).return_annotation for handler in watching} == {"None"}


def test_each_list_and_each_watch_of_a_kind_is_noticed() -> None:
    started: list[str] = []
    settings = handlers.operator_settings(namespaced=False, started=started.append)
    for kind in ("Pod", "RLRun"):
        assert settings.watching.field_selectors.collect(reference(kind)) == []
    assert started == ["Pod", "RLRun"]


def test_the_probe_names_what_is_overdue_and_a_quiet_cluster_is_no_fault() -> None:
    assert overdue(loop_s=1, lease_s=5, silence={}) == ""
    assert overdue(loop_s=1, lease_s=5, silence={"Pod": timedelta(seconds=180)}) == ""
    found = overdue(loop_s=1, lease_s=61, silence={"Deployment": timedelta(seconds=181)})
    assert found == (
        "61 s since the lease was looked at (limit 60 s); "
        "181 s since a Deployment was written that no watch has shown (limit 180 s)"
    )


# On the real API server.


@pytest.fixture
def proxy(own_world: World, tmp_path: Path) -> Iterator[ApiProxy]:
    with ApiProxy(own_world.cluster, tmp_path) as made:
        yield made


@pytest.fixture
def behind(proxy: ApiProxy, operators: Operators) -> subprocess.Popen[bytes]:
    """An operator that sees the API server through the proxy."""
    return operators.start(env={"KUBECONFIG": str(proxy.kubeconfig_path)})


@pytest.mark.apiserver
def test_a_pod_that_was_deleted_in_the_gap_of_a_410_is_not_counted(
    own_world: World, proxy: ApiProxy, operators: Operators, behind: subprocess.Popen[bytes]
) -> None:
    world = own_world
    world.apply(world.manifest())
    eventually(lambda: len(world.pods("sampler")) == 2, "engines")

    def objects() -> float:
        return operators.series(behind)["motley_cached_objects"]

    # Nobody makes the pods again, so that what the operator believes is all there is to see.
    proxy.withheld.add("pods")
    before = objects()
    lists = len([one for one in proxy.of("pods") if one.is_list])
    world.patch("RLRun", world.run, {"spec": {"suspend": True}})
    eventually(lambda: not world.pods(), "no pod is left, unseen")
    assert world.run_condition("Suspended")[0] != "True"  # it still believes in them
    assert proxy.end_watches("pods", GONE) == 1
    proxy.withheld.clear()
    world.until("Suspended", "True")
    assert objects() < before
    assert len([one for one in proxy.of("pods") if one.is_list]) > lists


@pytest.mark.apiserver
def test_any_other_error_of_a_watch_ends_the_process_which_is_started_anew(
    own_world: World, proxy: ApiProxy, operators: Operators, behind: subprocess.Popen[bytes]
) -> None:
    eventually(lambda: proxy.end_watches("pods", INTERNAL), "a watch of pods")
    assert behind.wait(timeout=150) == 1
    assert "event=part_ended part=watch" in operators.logs()
    again = operators.start(env={"KUBECONFIG": str(proxy.kubeconfig_path)})
    own_world.apply(own_world.manifest())
    eventually(lambda: own_world.children() == CHILDREN, "the next one works")
    assert again.poll() is None


@pytest.mark.apiserver
def test_a_paused_watch_shows_in_metric_and_probe(
    own_world: World, proxy: ApiProxy, operators: Operators, behind: subprocess.Popen[bytes]
) -> None:
    """Whatever paused it: what was written does not come back."""
    world = own_world
    world.apply(world.manifest())
    eventually(lambda: world.children() == CHILDREN, "the children")
    silent = 'motley_watch_silence_seconds{kind="Deployment"}'
    eventually(lambda: operators.series(behind)[silent] == 0.0, "all was shown")
    proxy.withheld.add("deployments")
    world.patch("RLRun", world.run, {"spec": {"rollout": {"workers": 2}}})
    eventually(lambda: operators.series(behind)[silent] > 0.0, "it waits for its own write")
    assert operators.get(behind, 9091, "/healthz") == "ok"  # not for long yet: the limit is tested without waiting


@pytest.mark.apiserver
def test_a_foreign_operator_on_the_default_peering_pauses_nothing(own_world: World, operators: Operators) -> None:
    """Case 37."""
    world = own_world
    for plural, kind, scope in (
        ("kopfpeerings", "KopfPeering", "Namespaced"),
        ("clusterkopfpeerings", "ClusterKopfPeering", "Cluster"),
    ):
        schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        crd = {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": f"{plural}.kopf.dev"},
            "spec": {
                "group": "kopf.dev",
                "scope": scope,
                "names": {"plural": plural, "kind": kind},
                "versions": [{"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}],
            },
        }
        world.api.call("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
        world.cluster.kubectl("wait", "--for=condition=Established", f"crd/{plural}.kopf.dev")
        for name in ("default", keys.FIELD_MANAGER):
            peer = {"priority": 1000, "lastseen": "2999-01-01T00:00:00+00:00", "lifetime": 100000}
            path = f"/apis/kopf.dev/v1/{f'namespaces/{world.namespace}/' if scope == 'Namespaced' else ''}{plural}"
            body = {
                "apiVersion": "kopf.dev/v1",
                "kind": kind,
                "metadata": {"name": name},
                "status": {"somebody-else": peer},
            }
            assert world.api.call("POST", path, body) is not None
    process = operators.start()
    world.apply(world.manifest())
    eventually(lambda: world.children() == CHILDREN, "it works all the same")
    assert operators.series(process)["motley_leader"] == 1.0


@pytest.mark.apiserver
def test_foreign_pods_are_never_sent_to_us(
    own_world: World, proxy: ApiProxy, operators: Operators, behind: subprocess.Popen[bytes]
) -> None:
    """Case 38, scaled: that memory does not grow with them follows from their never being asked for."""
    world = own_world
    world.apply(world.manifest())
    eventually(lambda: len(world.pods()) == 5, "our pods")
    known = operators.series(behind)["motley_cached_objects"]

    def create(number: int) -> None:
        spec = {"containers": [{"name": "main", "image": "foreign"}]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"foreign-{number}"}, "spec": spec}
        world.api.call("POST", f"/api/v1/namespaces/{world.namespace}/pods", pod)

    async def create_all() -> None:
        await asyncio.gather(*(asyncio.to_thread(create, number) for number in range(FOREIGN_PODS)))

    asyncio.run(create_all())
    world.apply(world.group_manifest("late"))
    eventually(lambda: len(world.pods()) == 6, "another pod of ours")
    eventually(lambda: operators.series(behind)["motley_cached_objects"] > known, "which is seen")
    assert len(world.list("Pod")) == FOREIGN_PODS + 6
    assert not [line for line in proxy.seen if '"foreign-' in line]
    for plural in ("pods", "deployments", "jobs", "services", "configmaps"):
        asked = [one for one in proxy.of(plural) if (one.is_list or one.is_watch) and not counts_gpus(one)]
        assert {one.query.get("labelSelector") for one in asked} == {keys.RUN_LABEL}, plural


def counts_gpus(one: Asked) -> bool:
    """The look at what everybody's pods hold, page by page, while a group may grow: of pods on nodes only, and kept by nobody."""
    return one.is_list and "spec.nodeName!=" in one.query.get("fieldSelector", "")


@pytest.mark.apiserver
def test_the_framework_leaves_no_trace_on_objects_and_an_idle_run_is_not_written(
    own_world: World, proxy: ApiProxy, behind: subprocess.Popen[bytes]
) -> None:
    world = own_world
    world.apply(world.manifest())
    eventually(lambda: world.children() == CHILDREN, "the children")
    eventually(lambda: len(world.pods()) == 5, "the pods")
    for kind, name in (("RLRun", world.run), ("SamplerGroup", world.named("h100-fp8"))):
        metadata = world.must(kind, name)["metadata"]
        assert "finalizers" not in metadata
        assert not [key for key in metadata.get("annotations", {}) if "kopf" in key]
    eventually(partial(is_idle, world, proxy), "a while without a write")


def is_idle(world: World, proxy: ApiProxy) -> bool:
    """Whether for some periods nothing but the lease was asked for or written, and the run's resourceVersion stood still."""
    import time

    before, asked = world.must("RLRun", world.run)["metadata"]["resourceVersion"], len(proxy.asked)
    time.sleep(PERIODS_WITHOUT_WRITES_S)
    after = world.must("RLRun", world.run)["metadata"]["resourceVersion"]
    others = [one for one in proxy.asked[asked:] if not one.is_watch and "leases" not in one.path]
    # No node is there: a group that waits for one looks for it now and then.
    looks = {"/api/v1/nodes", "/api/v1/pods", "/apis/resource.k8s.io/v1/resourceslices"}
    return before == after and not [one for one in others if one.method != "GET" or one.path not in looks]
