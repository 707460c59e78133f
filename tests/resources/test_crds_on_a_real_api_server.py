"""The generated CRDs are structural, and refuse at apply what could never run, naming the field and what is allowed."""

from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from motley_api.crd import render
from motley_local.testing import Cluster

pytestmark = pytest.mark.apiserver

ROOT = Path(__file__).parents[2]

RUN: dict[str, Any] = {
    "apiVersion": "motley.dev/v1alpha1",
    "kind": "RLRun",
    "metadata": {"name": "r"},
    "spec": {
        "model": {"source": "/models/m", "contextLength": 512},
        "tasks": {"source": "/tasks"},
        "store": {"url": "file:///store"},
        "steps": 10,
        "samplerGroups": [{"name": "a", "gpuType": "H100", "precision": "FP8"}],
    },
}
GROUP: dict[str, Any] = {
    "apiVersion": "motley.dev/v1alpha1",
    "kind": "SamplerGroup",
    "metadata": {"name": "g"},
    "spec": {"runRef": {"name": "r"}, "gpuType": "B200", "precision": "NVFP4"},
}


@pytest.fixture(scope="module")
def crds(api_server: Cluster) -> Cluster:
    api_server.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "crds"))
    api_server.kubectl(
        "wait", "--for=condition=Established", "--timeout=30s", "crd/rlruns.motley.dev", "crd/samplergroups.motley.dev"
    )
    return api_server


def changed(body: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """A deep copy of `body` with the dotted `path` set."""
    body = copy.deepcopy(body)
    *parents, last = path.split(".")
    node: Any = body
    for key in parents:
        node = node[int(key)] if key.isdigit() else node.setdefault(key, {})
    node[last] = value
    return body


def apply(cluster: Cluster, namespace: str, body: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    return cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(body), check=False)


def stored(cluster: Cluster, namespace: str, kind: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(cluster.kubectl("get", kind, name, "-n", namespace, "-o", "json").stdout)
    return found


def test_committed_crds_are_what_the_models_say() -> None:
    for folder in (ROOT / "crds", ROOT / "charts/motley/files/crds"):
        assert {path.name: path.read_text() for path in folder.glob("*.yaml")} == render()


def test_server_finds_both_definitions_structural(crds: Cluster) -> None:
    for name in ("rlruns.motley.dev", "samplergroups.motley.dev"):
        conditions = json.loads(crds.kubectl("get", "crd", name, "-o", "json").stdout)["status"]["conditions"]
        states = {condition["type"]: condition["status"] for condition in conditions}
        assert states["Established"] == "True"
        assert states.get("NonStructuralSchema", "False") == "False"


def test_small_run_is_stored_with_the_recipe_of_the_study_as_defaults(crds: Cluster, namespace: str) -> None:
    assert apply(crds, namespace, RUN).returncode == 0
    spec = stored(crds, namespace, "rlrun", "r")["spec"]
    assert spec["algorithm"]["importanceSampling"] == {"mode": "MIS", "level": "Token", "low": "0.5", "high": "5"}
    assert "clip" not in spec["algorithm"]
    assert "sequenceMask" not in spec["algorithm"]
    assert spec["algorithm"]["scoreCentering"] == "Enabled"
    assert spec["algorithm"]["sampling"] == {"temperature": "1", "topP": "0.97", "topK": 64, "topLogprobsNum": 0}
    assert spec["samplerGroups"][0]["kvCachePrecision"] == "FP8"


def test_demo_manifests_are_accepted(crds: Cluster, namespace: str) -> None:
    for name in ("run.yaml", "more.yaml"):
        for body in yaml.safe_load_all((ROOT / "examples/demo" / name).read_text()):
            done = apply(crds, namespace, body)
            assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("body", "path", "value", "want_words"),
    [
        pytest.param(
            GROUP,
            "spec.precision",
            "INT4",
            ["spec.precision", "INT4", '"BF16", "FP8", "NVFP4"'],
            id="unknown precision",
        ),
        pytest.param(GROUP, "spec.gpuType", "H100", ["NVFP4", "B200, B300"], id="NVFP4 on H100"),
        pytest.param(
            RUN, "spec.samplerGroups.0.precision", "NVFP4", ["NVFP4", "B200, B300"], id="NVFP4 on H100 inline"
        ),
        pytest.param(GROUP, "spec.gpuType", "V100", ["spec.gpuType", "A100-80GB"], id="unknown GPU type"),
        pytest.param(GROUP, "metadata.name", "g" * 46, ["metadata.name", "45"], id="group name too long for its pods"),
        pytest.param(GROUP, "metadata.name", "r", ["metadata.name", "the run's own"], id="group named as its run"),
        pytest.param(GROUP, "metadata.name", "r-router", ["metadata.name", "-router"], id="group named as the router"),
        pytest.param(RUN, "spec.guard.klGrowth", "0", ["klGrowth", "above 0"], id="a growth of nothing"),
        pytest.param(RUN, "spec.guard.entropyFall", "0.0", ["entropyFall", "above 0"], id="a fall to an infinite part"),
        pytest.param(
            RUN, "metadata.name", "my.run", ["metadata.name", "no dots"], id="a name that no Service can have"
        ),
        pytest.param(
            RUN, "metadata.name", "7run", ["metadata.name", "start with a letter"], id="a name with a digit first"
        ),
        pytest.param(
            RUN, "spec.trainer.tensorParallel", 3, ["tensorParallel", "nodes x gpusPerNode"], id="3 of 8 processes"
        ),
        pytest.param(RUN, "metadata.name", "r" * 36, ["metadata.name", "35"], id="run name too long for its children"),
        pytest.param(
            RUN, "spec.samplerGroups.0.name", "g" * 44, ["samplerGroups[].name", "45"], id="child name too long"
        ),
        pytest.param(
            RUN,
            "spec.prices",
            [{"gpuType": "H100", "usdPerGPUHour": "-3"}],
            ["usdPerGPUHour", "should match"],
            id="negative price",
        ),
        pytest.param(RUN, "spec.steps", 0, ["spec.steps", "greater than or equal to 1"], id="no steps"),
        pytest.param(
            RUN, "spec.algorithm.advantage", "GroupMeanStd", ["advantage must be GroupMean"], id="std with centering"
        ),
    ],
)
def test_what_could_never_run_is_refused_at_apply(
    crds: Cluster, namespace: str, body: dict[str, Any], path: str, value: object, want_words: list[str]
) -> None:
    done = apply(crds, namespace, changed(body, path, value))
    assert done.returncode != 0
    for word in want_words:
        assert word in done.stderr, done.stderr
    left = crds.kubectl("get", "rlruns,samplergroups", "-n", namespace, "-o", "name").stdout
    assert left == ""


@pytest.mark.parametrize(
    ("body", "path", "value", "want_words"),
    [
        (GROUP, "spec.precision", "BF16", ["precision is immutable", "apply another SamplerGroup"]),
        (GROUP, "spec.gpuType", "B300", ["gpuType is immutable", "apply another SamplerGroup"]),
        (GROUP, "spec.runRef.name", "other", ["runRef is immutable", "apply another SamplerGroup"]),
        (RUN, "spec.model.source", "/models/other", ["model is immutable", "apply another RLRun"]),
        (RUN, "spec.batch.prompts", 7, ["batch is immutable"]),
        (RUN, "spec.steps", 9, ["steps may only grow"]),
    ],
)
def test_edit_that_cannot_apply_mid_run_is_refused(
    crds: Cluster, namespace: str, body: dict[str, Any], path: str, value: object, want_words: list[str]
) -> None:
    assert apply(crds, namespace, body).returncode == 0
    done = apply(crds, namespace, changed(body, path, value))
    assert done.returncode != 0
    for word in want_words:
        assert word in done.stderr, done.stderr


UNCENTRED: dict[str, Any] = {"scoreCentering": "Disabled"}
UNFILTERED: dict[str, Any] = {"topP": "1", "topK": -1}
DRIFT: dict[str, Any] = {"mode": "Drift", "drift": "0.1"}


@pytest.mark.parametrize(
    ("algorithm", "want_words"),
    [
        pytest.param({"clip": {}}, ["clip must be unset with scoreCentering"], id="clip with centering"),
        pytest.param(
            {"sequenceMask": DRIFT},
            ["sequenceMask must be unset with scoreCentering"],
            id="sequence mask with centering",
        ),
        pytest.param(
            {"importanceSampling": {"level": "Sequence"}},
            ["at level Token with scoreCentering"],
            id="sequence weight with centering",
        ),
        pytest.param(
            {"importanceSampling": {"mode": "VTrace"}},
            ["at level Token with scoreCentering"],
            id="V-trace with centering",
        ),
        pytest.param(
            {"maskReplay": "Disabled", "sampling": UNFILTERED},
            ["topK or sampling.topLogprobsNum must be set with scoreCentering"],
            id="no candidates",
        ),
        pytest.param(
            {**UNCENTRED, "sampling": UNFILTERED},
            ["topP below 1 or topK must be set with maskReplay"],
            id="no mask to replay",
        ),
        pytest.param(
            {"sampling": {"topP": "0.9", "topK": -1}},
            ["topK must be from 1 to 4096 with topP below 1"],
            id="unbounded sets",
        ),
        pytest.param({"sampling": {"topK": 0}}, ["topK must be -1"], id="top-k of nothing"),
        pytest.param(
            {"sampling": {"topLogprobsNum": 128}},
            ["topLogprobsNum must be 0 unless topP is 1"],
            id="a head of a filter",
        ),
        pytest.param(
            {"sampling": {**UNFILTERED, "topLogprobsNum": 128}},
            ["topP below 1 or topK must be set with maskReplay"],
            id="replay of a head",
        ),
        pytest.param({"sampling": {"topP": "0"}}, ["topP must be above 0"], id="top-p of nothing"),
        pytest.param({"sampling": {"topP": "1.1"}}, ["topP must be above 0 and at most 1"], id="top-p above one"),
        pytest.param({"sampling": {"temperature": "0"}}, ["temperature must be above 0"], id="greedy"),
        pytest.param(
            {"importanceSampling": {"low": "6"}}, ["0 < low < high with mode MIS"], id="MIS bounds the wrong way round"
        ),
        pytest.param({"importanceSampling": {"low": "0"}}, ["0 < low < high with mode MIS"], id="MIS from zero"),
        pytest.param({"importanceSampling": {"mode": "TIS", "high": "0"}}, ["high must be above 0"], id="TIS at zero"),
        pytest.param(
            {**UNCENTRED, "importanceSampling": {"mode": "VTrace", "high": "0.5"}},
            ["high must be at least 1"],
            id="V-trace below one",
        ),
        pytest.param(
            {**UNCENTRED, "importanceSampling": {"mode": "None", "level": "Sequence"}},
            ["level must be Token unless"],
            id="no ratio",
        ),
        pytest.param(
            {**UNCENTRED, "sequenceMask": {"mode": "Drift"}},
            ["drift goes with mode Drift"],
            id="drift without its bound",
        ),
        pytest.param(
            {**UNCENTRED, "sequenceMask": {**DRIFT, "low": "0.5"}},
            ["drift goes with mode Drift"],
            id="drift with a range",
        ),
        pytest.param(
            {**UNCENTRED, "sequenceMask": {"mode": "Ratio", "low": "0.5"}},
            ["low and high with modes"],
            id="half a range",
        ),
        pytest.param(
            {**UNCENTRED, "sequenceMask": {"mode": "Geometric", "low": "2", "high": "1"}},
            ["0 < low < high"],
            id="range reversed",
        ),
        pytest.param(
            {**UNCENTRED, "clip": {}, "importanceSampling": {"mode": "VTrace"}},
            ["clip must be unset with import"],
            id="V-trace clip",
        ),
        pytest.param(
            {**UNCENTRED, "clip": {"oldPolicy": "Sampler"}}, ["the ratio would count twice"], id="ratio twice"
        ),
        pytest.param(
            {**UNCENTRED, "clip": {"level": "Sequence"}}, ["lossReduction must be SequenceMean"], id="GSPO over tokens"
        ),
        pytest.param({**UNCENTRED, "clip": {"low": "1"}}, ["low must be below 1"], id="clip at zero"),
        pytest.param({"entropyBonus": "-1"}, ["entropyBonus", "should match"], id="entropy penalty"),
    ],
)
def test_choices_that_contradict_are_refused_with_the_reason(
    crds: Cluster, namespace: str, algorithm: dict[str, Any], want_words: list[str]
) -> None:
    done = apply(crds, namespace, changed(RUN, "spec.algorithm", algorithm))
    assert done.returncode != 0
    for word in want_words:
        assert word in done.stderr, done.stderr


def as_recipe(algorithm: dict[str, Any]) -> Any:
    from motley_api.resources.rlrun import Algorithm
    from motley_trainer.recipe import recipe_of

    return recipe_of(Algorithm.model_validate(algorithm))


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param({}, id="final recipe"),
        pytest.param({"importanceSampling": {"mode": "None"}}, id="score centering alone"),
        pytest.param(
            {"importanceSampling": {"mode": "TIS", "high": "2"}, "maskReplay": "Disabled"}, id="SC and TIS over a head"
        ),
        pytest.param(
            {**UNCENTRED, "importanceSampling": {"mode": "None"}, "clip": {}, "advantage": "GroupMeanStd"}, id="GRPO"
        ),
        pytest.param(
            {**UNCENTRED, "importanceSampling": {"mode": "TIS", "high": "2"}, "clip": {"high": "0.28"}},
            id="DAPO and TIS",
        ),
        pytest.param(
            {
                **UNCENTRED,
                "importanceSampling": {"mode": "None"},
                "clip": {"low": "0.0003", "high": "0.0004", "level": "Sequence", "oldPolicy": "Sampler"},
                "lossReduction": "SequenceMean",
            },
            id="GSPO against the sampler",
        ),
        pytest.param(
            {**UNCENTRED, "importanceSampling": {"mode": "TIS", "level": "Sequence", "high": "2"}}, id="sequence TIS"
        ),
        pytest.param({**UNCENTRED, "importanceSampling": {"mode": "MIS", "level": "Geometric"}}, id="geometric MIS"),
        pytest.param({**UNCENTRED, "importanceSampling": {"mode": "VTrace", "high": "1"}}, id="V-trace"),
        pytest.param({**UNCENTRED, "sequenceMask": DRIFT}, id="DeepSeek-V3.2"),
        pytest.param(
            {**UNCENTRED, "sequenceMask": {"mode": "Geometric", "low": "0.99", "high": "1.01"}}, id="geometric mask"
        ),
        pytest.param(
            {**UNCENTRED, "maskReplay": "Disabled", "sampling": UNFILTERED, "entropyBonus": "0.001"}, id="unfiltered"
        ),
        pytest.param(
            {"maskReplay": "Disabled", "sampling": {**UNFILTERED, "topLogprobsNum": 128}, "referenceKL": "0.001"},
            id="SC and MIS over the likeliest 128, near a reference",
        ),
    ],
)
def test_every_named_choice_is_stored_and_is_a_recipe(crds: Cluster, namespace: str, algorithm: dict[str, Any]) -> None:
    done = apply(crds, namespace, changed(RUN, "spec.algorithm", algorithm))
    assert done.returncode == 0, done.stderr
    assert as_recipe(stored(crds, namespace, "rlrun", "r")["spec"]["algorithm"]) == as_recipe(algorithm)


def test_group_scales_through_the_scale_subresource(crds: Cluster, namespace: str) -> None:
    assert apply(crds, namespace, GROUP).returncode == 0
    crds.kubectl("scale", "samplergroup/g", "--replicas=3", "-n", namespace)
    assert stored(crds, namespace, "samplergroup", "g")["spec"]["replicas"] == 3


def test_status_is_a_subresource_that_a_spec_edit_cannot_touch(crds: Cluster, namespace: str) -> None:
    assert apply(crds, namespace, changed(RUN, "status", {"step": 7})).returncode == 0
    assert "status" not in stored(crds, namespace, "rlrun", "r")
    crds.kubectl(
        "patch", "rlrun", "r", "-n", namespace, "--subresource=status", "--type=merge", "-p", '{"status":{"step":7}}'
    )
    assert stored(crds, namespace, "rlrun", "r")["status"]["step"] == 7


def test_table_shows_what_a_person_looks_for(crds: Cluster, namespace: str) -> None:
    apply(crds, namespace, RUN)
    apply(crds, namespace, GROUP)
    runs = crds.kubectl("get", "rlruns", "-n", namespace).stdout.splitlines()[0].split()
    groups = crds.kubectl("get", "samplergroups", "-n", namespace).stdout.splitlines()[0].split()
    assert runs == ["NAME", "STEP", "REWARD", "KL", "$/STEP", "SAVING%", "GROUPS", "STATUS", "AGE"]
    assert groups == [
        "NAME",
        "GPU",
        "PRECISION",
        "ENGINES",
        "SHARE%",
        "OUT-OF-RANGE%",
        "VERSION",
        "$/MTOK",
        "STATUS",
        "AGE",
    ]
