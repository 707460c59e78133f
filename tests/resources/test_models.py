"""What the models accept is what the resources mean, without a server."""

from __future__ import annotations

import pytest
from motley_api.crd import root_schema, structural
from motley_api.resources import GPU_TYPES, GpuTypeName, Precision, RLRun, RLRunSpec, SamplerGroup


def walk(node: dict[str, object]) -> list[dict[str, object]]:
    found = [node]
    for child in node.get("properties", {}).values():  # type: ignore[attr-defined]
        found += walk(child)
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            found += walk(node[key])  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("model", [RLRun, SamplerGroup])
def test_every_string_and_list_is_bounded_so_that_cel_costs_are(model: type[RLRun]) -> None:
    for node in walk(root_schema(model)["properties"]["spec"]):
        if node.get("type") == "string" and "enum" not in node and "format" not in node:
            assert "maxLength" in node, node
        if node.get("type") == "array":
            assert "maxItems" in node, node
        if node.get("type") == "integer":
            assert "minimum" in node, node
            assert "maximum" in node, node
        assert node.get("type") != "number", f"floats do not belong in a spec: {node}"


def test_union_without_structural_form_is_an_error() -> None:
    with pytest.raises(ValueError, match="union of 2 types"):
        structural({"anyOf": [{"type": "integer"}, {"type": "string"}]}, {})


@pytest.mark.parametrize(
    ("gpu", "want_able"),
    [
        # FP8 needs SM 8.9, NVFP4 SM 10.0: A100 is 8.0, H100 and H200 9.0, B200 10.0, B300 10.3, RTX PRO 6000 12.0.
        ("A100-80GB", {"BF16"}),
        ("H100", {"BF16", "FP8"}),
        ("H200", {"BF16", "FP8"}),
        ("B200", {"BF16", "FP8", "NVFP4"}),
        ("B300", {"BF16", "FP8", "NVFP4"}),
        ("RTX-PRO-6000", {"BF16", "FP8", "NVFP4"}),
    ],
)
def test_compute_capability_gates_precision(gpu: str, want_able: set[str]) -> None:
    assert {precision.value for precision in Precision if GPU_TYPES[GpuTypeName(gpu)].runs(precision)} == want_able


def test_no_label_value_names_two_types_of_a_cloud_that_tells_them_apart() -> None:
    for key in ("product", "gke"):
        values = [value for gpu in GPU_TYPES.values() for value in getattr(gpu, key)]
        assert len(values) == len(set(values))


def test_spec_round_trips_through_json_with_its_defaults() -> None:
    spec = RLRunSpec.model_validate(
        {
            "model": {"source": "m", "contextLength": 64},
            "tasks": {"source": "t"},
            "store": {"url": "file:///s"},
            "steps": 1,
        }
    )
    again = RLRunSpec.model_validate(spec.to_json_dict())
    assert again == spec
    assert spec.to_json_dict()["rollout"] == {
        "workers": 1,
        "turnLatencySeconds": 10,
        "minimumCapacityPercent": 0,
        "template": {"env": [], "labels": {}, "nodeSelector": {}, "tolerations": []},
    }
