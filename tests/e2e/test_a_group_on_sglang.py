"""One run whose samples come from two engines at once: the real SGLang server in one group, the reference engine in another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e.test_a_whole_run import ROOT, Watched, cluster, ledger
from engine.test_sglang_arguments import SGLANG_PYTHON
from motley_api import keys
from motley_api.records import GroupStep
from motley_local.cluster import LocalCluster

__all__ = ["cluster"]

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.apiserver,
    pytest.mark.skipif(not SGLANG_PYTHON.exists(), reason="sglang is not installed (make venv-sglang)"),
]

STEPS = 200  # never reached: the run is over when SGLang's samples were trained on
ON_SGLANG, ON_REFERENCE = "h200-bf16", "h200-fp8"
KL_WITHIN = 0.05  # nats a token, group to trainer: rounding to BF16, and a step or two of training in between


def _manifests() -> list[dict[str, Any]]:
    documents = list(yaml.safe_load_all((ROOT / "examples/demo/run.yaml").read_text()))
    spec = next(document["spec"] for document in documents if document["kind"] == "RLRun")
    spec |= {"steps": STEPS, "batch": {"prompts": 4, "samplesPerPrompt": 4}}
    spec["rollout"]["sessions"] = 12
    spec.pop("evaluation")
    spec["samplerGroups"] = [group for group in spec["samplerGroups"] if group["name"] in (ON_SGLANG, ON_REFERENCE)]
    group = next(group for group in spec["samplerGroups"] if group["name"] == ON_SGLANG)
    group |= {"engine": {"type": "SGLang", "args": ["--device=cpu"]}, "kvCachePrecision": "BF16"}
    group["template"] = {"env": [{"name": keys.ENV_SGLANG_PYTHON, "value": _in_the_pod(SGLANG_PYTHON)}]}
    return documents


def _in_the_pod(python: Path) -> str:
    """A pod finds the repository where the images have it."""
    return f"/opt/motley/{python.relative_to(ROOT)}" if python.is_relative_to(ROOT) else str(python)


def test_samples_of_the_real_server_are_trained_on_beside_the_reference_engines(cluster: LocalCluster) -> None:
    cluster.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(_manifests()))
    run = Watched(cluster)

    def samples() -> dict[str, int]:
        return {group["name"].removeprefix("demo-"): group["samples"] for group in run.status.get("groups", [])}

    run.until("a step with samples of SGLang", lambda: samples().get(ON_SGLANG, 0) > 0, timeout_s=420)

    def parts() -> list[GroupStep]:
        return [
            part
            for step in ledger(run)
            for part in step.groups
            if part.name == f"demo-{ON_SGLANG}" and part.samples > 0
        ]

    # It follows the trainer's weights.
    run.until("samples of two versions", lambda: len({part.version for part in parts()}) >= 2, timeout_s=180)
    assert samples()[ON_REFERENCE] > 0
    group = run.get("samplergroup", f"demo-{ON_SGLANG}")["status"]
    conditions = {found["type"]: found for found in group["conditions"]}
    assert (conditions["Conformant"]["status"], conditions["Ready"]["status"]) == ("True", "True"), conditions
    trained = parts()
    kl = sum(part.kl.num for part in trained) / sum(part.kl.den for part in trained)
    assert 0 <= kl < KL_WITHIN
