"""What is held, offered and not to be seen on nodes, from what the API server answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from motley_api import keys
from motley_operator import nodes, preview
from motley_operator.kube import ApiError, Kube
from motley_operator.planner.model import NodeView

Json = dict[str, Any]
FORBIDDEN = ApiError(403, "Forbidden", "is forbidden")


def pod(name: str, node: str, *gpus: int, inits: tuple[tuple[int, str], ...] = (), run: str = "") -> Json:
    def container(count: int, **more: str) -> Json:
        return {"name": "c", "resources": {"limits": {keys.GPU_RESOURCE: str(count)}} if count else {}, **more}

    return {
        "metadata": {"name": name, "namespace": "ns", "labels": {keys.RUN_LABEL: run} if run else {}},
        "spec": {
            "nodeName": node,
            "containers": [container(count) for count in gpus],
            "initContainers": [container(count, restartPolicy=policy) for count, policy in inits],
        },
    }


def node(name: str, gpus: str = "8", **more: Any) -> Json:
    ready = [{"type": "Ready", "status": "True"}]
    allocatable = {keys.GPU_RESOURCE: gpus}
    return {
        "metadata": {"name": name, "labels": {}},
        "spec": more,
        "status": {"allocatable": allocatable, "conditions": ready},
    }


def offered(node: str, *devices: tuple[str, str], driver: str = "gpu.nvidia.com", version: str = "v1") -> Json:
    found: list[Json] = []
    for product, kind in devices:
        attributes = {"productName": {"string": product}, "type": {"string": kind}}
        found.append({"attributes": attributes} if version == "v1" else {"basic": {"attributes": attributes}})
    return {"spec": {"driver": driver, "nodeName": node, "devices": found}}


class Answers:
    """An API server that has these objects, or refuses."""

    def __init__(self, **by_kind: list[Json] | ApiError) -> None:
        self.by_kind, self.lists = by_kind, 0

    async def list(self, kind: str, **_: Any) -> AsyncIterator[Json]:
        self.lists += 1
        found = self.by_kind.get(kind, [])
        if isinstance(found, ApiError):
            raise found
        for item in found:
            yield item


def look(answers: Answers, **more: Any) -> nodes.Seen:
    return asyncio.run(nodes.look(cast(Kube, answers), **more))


def views(seen: nodes.Seen) -> dict[str, NodeView]:
    assert seen.nodes is not None
    return {view.name: view for view in seen.nodes}


def test_what_everybodys_pods_hold_is_taken_off() -> None:
    pods = [
        pod("a", "n1", 2, 1),
        pod("b", "n1", 1),
        pod("c", "n2", 0),
        pod("init", "n2", 1, inits=((4, "Never"),)),  # four while it starts, one later: four are held
        pod("sidecar", "n3", 1, inits=((2, "Always"),)),
    ]
    found = views(look(Answers(Pod=pods, Node=[node("n1"), node("n2"), node("n3"), node("n4")])))
    assert {name: view.free_gpus for name, view in found.items()} == {"n1": 4, "n2": 4, "n3": 5, "n4": 8}


def test_a_runs_own_pods_are_not_others() -> None:
    pods = [pod("mine", "n1", 4, run="r"), pod("other", "n1", 1)]

    def mine(one: Mapping[str, Any]) -> bool:
        return one["metadata"]["labels"].get(keys.RUN_LABEL) == "r"

    assert views(look(Answers(Pod=pods, Node=[node("n1")]), ours=mine))["n1"].free_gpus == 7


def test_pods_that_may_not_be_seen_make_nothing_free() -> None:
    """Case 33."""
    found = views(look(Answers(Pod=FORBIDDEN, Node=[node("n1")])))
    assert (found["n1"].held_gpus, found["n1"].free_gpus) == (None, 0)


def test_nodes_that_may_not_be_seen_are_unknown_and_not_none_at_all() -> None:
    found = look(Answers(Node=FORBIDDEN))
    assert found.nodes is None
    assert found.error == "nodes cannot be looked at: is forbidden"


@pytest.mark.parametrize("gpus", ["", "many", "-3", "1.5", "8e3"])
def test_a_quantity_that_is_no_whole_number_is_no_gpu(gpus: str) -> None:
    assert views(look(Answers(Node=[node("n1", gpus)])))["n1"].allocatable_gpus == 0


def test_resource_slices_tell_whole_gpus_by_product() -> None:
    slices = [
        offered(
            "n1", ("NVIDIA H100 80GB HBM3", "gpu"), ("NVIDIA H100 80GB HBM3", "gpu"), ("NVIDIA H100 80GB HBM3", "mig")
        ),
        offered("n2", ("NVIDIA B200", "gpu"), version="v1beta1"),
        offered("n2", ("NVIDIA B200", "gpu")),
        offered("n3", ("Something", "gpu"), driver="other.example.com"),
        {"spec": {"driver": "gpu.nvidia.com", "allNodes": True, "devices": []}},
    ]
    found = views(look(Answers(ResourceSlice=slices, Node=[node("n1", "0"), node("n2", "0"), node("n3", "0")])))
    assert found["n1"].dra_gpus == (("NVIDIA H100 80GB HBM3", 2),)
    assert found["n2"].dra_gpus == (("NVIDIA B200", 2),)
    assert found["n3"].dra_gpus == ()


@pytest.mark.parametrize("status", [403, 404])
def test_a_server_without_dra_is_no_trouble(status: int) -> None:
    assert set(views(look(Answers(ResourceSlice=ApiError(status, "", ""), Node=[node("n1")])))) == {"n1"}


def test_taints_and_cordons_are_read() -> None:
    taint = {"key": "k", "effect": "NoSchedule"}
    found = views(look(Answers(Node=[node("n1", taints=[taint]), node("n2", unschedulable=True)])))
    assert found["n1"].taints == (("k", "", "NoSchedule"),)
    assert (found["n1"].ready, found["n2"].ready) == (True, False)


def test_many_runs_share_one_look_and_a_slow_one_is_rarer() -> None:
    answers, now = Answers(Node=[node("n1")]), [0.0]

    async def course() -> None:
        kept = nodes.Nodes(cast(Kube, answers), lambda: now[0], 30.0)
        await asyncio.gather(*(kept.seen() for _ in range(50)))
        assert answers.lists == 3  # pods, slices, nodes
        now[0] = 29.0
        await kept.seen()
        assert answers.lists == 3
        now[0] = 31.0
        await kept.seen()
        assert answers.lists == 6

    asyncio.run(course())


def test_a_plan_against_a_cluster_that_cannot_be_seen_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unknown capacity fails closed: nothing is assumed to fit, unless GPUs are named or the cluster is left out."""
    cluster = {"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}
    context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
    config = {
        "clusters": [cluster],
        "contexts": [context],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "current-context": "x",
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    run = {
        "kind": "RLRun",
        "metadata": {"name": "r"},
        "spec": {
            "model": {"source": "/m", "contextLength": 64},
            "tasks": {"source": "/t"},
            "store": {"url": "file:///s"},
            "steps": 1,
            "samplerGroups": [{"name": "a", "gpuType": "H100", "precision": "FP8"}],
        },
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    file = str(tmp_path / "run.yaml")
    assert preview.main(file, "json") == 1
    assert "the cluster cannot be looked at" in capsys.readouterr().err
    assert preview.main(file, "json", available="H100=1") == 0
    assert preview.main(file, "json", offline=True) == 0
    assert "without a cluster: every engine is assumed to find a node" in capsys.readouterr().out
