from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml
from motley_operator import preview
from motley_operator.planner.model import NodeView
from planner import study

PRODUCTS = {
    "H100": "NVIDIA-H100-80GB-HBM3",
    "H200": "NVIDIA-H200",
    "B200": "NVIDIA-B200",
    "B300": "NVIDIA-B300-SXM6-AC",
    "A100-80GB": "NVIDIA-A100-SXM4-80GB",
    "RTX-PRO-6000": "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition",
}


def manifest(**spec: Any) -> dict[str, Any]:
    groups = [
        {
            "name": name,
            "gpuType": gpu,
            "precision": precision,
            "gpusPerEngine": gpus,
            "replicas": engines,
            "sessionsPerEngine": sessions,
        }
        for name, (gpu, precision, gpus, engines, sessions) in study.FLEET.items()
    ]
    return {
        "apiVersion": "motley.dev/v1alpha1",
        "kind": "RLRun",
        "metadata": {"name": "study"},
        "spec": {**study.run_spec().to_json_dict(), "samplerGroups": groups, **spec},
    }


def nodes(**gpus: int) -> tuple[NodeView, ...]:
    return tuple(
        NodeView(f"node-{gpu}", {"nvidia.com/gpu.product": PRODUCTS[gpu]}, count) for gpu, count in gpus.items()
    )


def planned(found: tuple[NodeView, ...] | None = None, **spec: Any) -> preview.RunPlan:
    return preview.preview(preview.snapshot_of(manifest(**spec), [], found), "test")


def test_the_studys_manifest_costs_what_the_study_says() -> None:
    plan = planned()
    assert plan.sampler_usd_per_hour == Decimal("286.88")
    assert plan.baseline_usd_per_hour == Decimal("262.50")
    assert (plan.sessions, plan.baseline_sessions) == (1376, 1344)
    assert sum(row.share_milli for row in plan.groups) == 1000


def test_only_what_fits_on_free_gpus_is_placed_and_the_rest_says_why() -> None:
    # 24 H100 are wanted (8 fp8, 4 x 2 bf16 = 16 in all); 11 are there: h100-bf16 comes first by name and takes 8, three are left
    plan = planned(nodes(H100=11, H200=16, B200=16, B300=8))
    rows = {row.name: row for row in plan.groups}
    assert (rows["study-h100-bf16"].engines, rows["study-h100-fp8"].engines) == (4, 3)
    assert "3 of 8 engines fit" in rows["study-h100-fp8"].why
    assert rows["study-a100-bf16"].engines == 0
    assert "no node is labelled A100-80GB" in rows["study-a100-bf16"].why
    assert plan.notes == ()


def test_what_others_hold_and_what_keeps_engines_away_is_not_counted() -> None:
    product = {"nvidia.com/gpu.product": PRODUCTS["H200"]}
    found = (
        NodeView("busy", product, 8, held_gpus=5),
        NodeView("tainted", product, 8, taints=(("team", "x", "NoSchedule"),)),
        NodeView("spot", {**product, "karpenter.sh/capacity-type": "spot"}, 8),
        NodeView("hidden", product, 8, held_gpus=None),
    )
    rows = {row.name: row for row in planned(found).groups}
    # Sixteen are wanted; three are free, and h200-bf16 comes first by name.
    assert (rows["study-h200-bf16"].engines, rows["study-h200-fp8"].engines) == (3, 0)
    why = rows["study-h200-fp8"].why
    assert "0 of 8 engines fit: 2 node(s) of H200: busy (3 free), hidden (0 free)" in why
    assert "spot, and the group is OnDemand: spot" in why
    assert "tainted team=x:NoSchedule and not tolerated: tainted" in why
    assert "what pods of other namespaces hold is not known" in why


def test_the_cheapest_fleet_leaves_the_trainer_its_nodes() -> None:
    """The trainer holds eight B200; of twelve, four are left for engines, however cheap they would be."""
    group = {
        "name": "b200",
        "gpuType": "B200",
        "precision": "NVFP4",
        "replicas": 1,
        "minReplicas": 0,
        "maxReplicas": 8,
        "sessionsPerEngine": 32,
    }
    plan = planned(nodes(B200=12), samplerGroups=[group], rollout={"sessions": 256})
    assert plan.optimised.engines == {"study-b200": 4}
    assert not plan.optimised.met


def test_a_cap_on_gpus_counts_the_trainers() -> None:
    # The fleet holds 64, the trainer eight.
    assert not any("budget.gpus" in row.why for row in planned(budget={"gpus": 72}).groups)
    short = [row for row in planned(budget={"gpus": 71}).groups if "budget.gpus 71" in row.why]
    assert [row.name for row in short] == ["study-h100-bf16"]  # the dearest engine, 2 x 3.95, comes last


def test_a_minimum_that_does_not_fit_is_noted() -> None:
    plan = planned(nodes(H200=16, B200=8), rollout={"minimumCapacityPercent": 50})
    # 8 x 16 + 8 x 32 = 384 of 1376 are 28%
    want = "no session would start: 384 of 1376 declared sessions fit, rollout.minimumCapacityPercent is 50"
    assert want in plan.notes


def test_a_gang_that_does_not_fit_is_noted() -> None:
    assert any("gang does not fit" in note for note in planned(nodes(H100=64, B200=4)).notes)


def test_a_budget_binds_and_says_so() -> None:
    plan = planned(budget={"usdPerHour": "150"})
    assert plan.sampler_usd_per_hour is not None
    assert plan.sampler_usd_per_hour <= 100  # the trainer takes 50
    assert any("budget.usdPerHour 150" in row.why for row in plan.groups)


def test_a_missing_price_is_unknown_and_noted() -> None:
    plan = planned(prices=[{"gpuType": "B200", "usdPerGPUHour": "6.25"}])
    assert plan.sampler_usd_per_hour is None
    assert preview.document(plan)["samplerUSDPerHour"] is None
    assert any("H100 OnDemand" in note for note in plan.notes)


def test_groups_that_come_as_documents_of_their_own_count_too() -> None:
    late = {
        "kind": "SamplerGroup",
        "metadata": {"name": "late"},
        "spec": {
            "runRef": {"name": "study"},
            "gpuType": "H200",
            "precision": "FP8",
            "replicas": 2,
            "sessionsPerEngine": 32,
        },
    }
    other = {**late, "metadata": {"name": "other"}, "spec": {**late["spec"], "runRef": {"name": "another"}}}
    run, found = preview.read_manifest(yaml.safe_dump_all([manifest(), late, other]))
    plan = preview.preview(preview.snapshot_of(run, found, None), "test")
    assert plan.sessions == 1376 + 64


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("kind: ConfigMap", "exactly one RLRun, found 0"),
        ("kind: RLRun\nmetadata: {name: a}\nspec: {steps: 0}", "spec.model: Field required"),
    ],
)
def test_a_manifest_that_cannot_be_planned_says_what_to_change(
    text: str, want: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert preview.main(str(file), "json") == 1
    assert want in capsys.readouterr().err


def test_the_json_output_is_one_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(manifest()))
    assert preview.main(str(file), "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["samplerUSDPerHour"], found["baselineUSDPerHour"]) == ("286.88", "262.5")
    assert preview.main(str(file), "yaml") == 2
