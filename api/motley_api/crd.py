"""CustomResourceDefinitions out of the pydantic models, in the structural form that an API server accepts.

pydantic emits $ref, anyOf with null, titles, null defaults, const and additionalProperties: false, all of which structural schemas
refuse or do not need; this module rewrites them. `motley crds` writes the files under crds/ and the chart's copies of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from motley_api import API_GROUP, API_VERSION
from motley_api.resources import RLRun, SamplerGroup

Json = dict[str, Any]

_KEPT = {
    "default",
    "description",
    "enum",
    "format",
    "items",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minItems",
    "minLength",
    "minimum",
    "pattern",
    "properties",
    "required",
    "type",
}


def structural(schema: Json, definitions: Mapping[str, Json]) -> Json:
    """One JSON schema node of pydantic's as a structural schema. Raises ValueError on what has no structural form."""
    if "$ref" in schema:
        target = definitions[schema["$ref"].removeprefix("#/$defs/")]
        return structural({**target, **{key: value for key, value in schema.items() if key != "$ref"}}, definitions)
    if "anyOf" in schema:
        options = [option for option in schema["anyOf"] if option.get("type") != "null"]
        if len(options) != 1:
            raise ValueError(f"a union of {len(options)} types has no structural schema: {schema}")
        rest = {key: value for key, value in schema.items() if key != "anyOf"}
        return structural({**options[0], **rest}, definitions)
    unknown = [
        key
        for key in schema
        if key not in _KEPT | {"title", "const", "additionalProperties"} and not key.startswith("x-kubernetes-")
    ]
    if unknown:
        raise ValueError(f"no structural form for {unknown} in {schema}")
    node = {key: value for key, value in schema.items() if key in _KEPT or key.startswith("x-kubernetes-")}
    if "const" in schema:
        node["enum"] = [schema["const"]]
    if isinstance(schema.get("additionalProperties"), dict):
        node["additionalProperties"] = structural(schema["additionalProperties"], definitions)
    if "items" in node:
        node["items"] = structural(node["items"], definitions)
    if "properties" in node:
        node["properties"] = {name: structural(child, definitions) for name, child in node["properties"].items()}
    return _with_structural_default(node)


def _with_structural_default(node: Json) -> Json:
    """Null and empty defaults go; an object's default is spelled out, since the server checks its rules before it fills it."""
    if "default" not in node:
        return node
    default = node["default"]
    if isinstance(default, dict):
        default = {name: child["default"] for name, child in node.get("properties", {}).items() if "default" in child}
    if default in (None, [], "", {}):
        return {key: value for key, value in node.items() if key != "default"}
    return {**node, "default": default}


def root_schema(model: type[BaseModel]) -> Json:
    """openAPIV3Schema of a resource: spec and status from the model, metadata left to the server."""
    schema = model.model_json_schema(by_alias=True, mode="validation")
    node = structural({key: value for key, value in schema.items() if key != "$defs"}, schema.get("$defs", {}))
    node["properties"] |= {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {"type": "object"}}
    return node


def _columns(*columns: tuple[str, str, str]) -> list[Json]:
    return [{"name": name, "type": kind, "jsonPath": path} for name, kind, path in columns]


def _definition(model: type[BaseModel], plural: str, short: list[str], columns: list[Json], subresources: Json) -> Json:
    kind = model.__name__
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{API_GROUP}"},
        "spec": {
            "group": API_GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": short,
                "categories": ["motley"],
            },
            "versions": [
                {
                    "name": API_VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": root_schema(model)},
                    "subresources": subresources,
                    "additionalPrinterColumns": columns,
                }
            ],
        },
    }


def definitions() -> dict[str, Json]:
    """File name -> CustomResourceDefinition."""
    age = ("Age", "date", ".metadata.creationTimestamp")
    return {
        "motley.dev_rlruns.yaml": _definition(
            RLRun,
            "rlruns",
            ["rlr"],
            _columns(
                ("Step", "integer", ".status.step"),
                ("Reward", "string", ".status.reward"),
                ("KL", "string", ".status.mismatch.kl"),
                ("$/Step", "string", ".status.costPerStep.billedUSD"),
                ("Saving%", "string", ".status.costPerStep.savingPercent"),
                ("Groups", "string", ".status.groupsReady"),
                ("Status", "string", ".status.status"),
                age,
            ),
            {"status": {}},
        ),
        "motley.dev_samplergroups.yaml": _definition(
            SamplerGroup,
            "samplergroups",
            ["sg"],
            _columns(
                ("GPU", "string", ".spec.gpuType"),
                ("Precision", "string", ".spec.precision"),
                ("Engines", "integer", ".status.readyReplicas"),
                ("Share%", "string", ".status.sharePercent"),
                ("Out-of-range%", "string", ".status.outOfRangePercent"),
                ("Version", "integer", ".status.version"),
                ("$/MTok", "string", ".status.usdPerMillionTokens"),
                ("Status", "string", ".status.status"),
                age,
            ),
            {
                "status": {},
                "scale": {
                    "specReplicasPath": ".spec.replicas",
                    "statusReplicasPath": ".status.replicas",
                    "labelSelectorPath": ".status.selector",
                },
            },
        ),
    }


def to_yaml(value: Any, indent: int = 0) -> Iterator[str]:
    """Block YAML of JSON-like data, strings always in double quotes (JSON's), keys in the order given."""
    pad = "  " * indent
    for key, child in value.items():
        name = key if key.replace("-", "").replace("_", "").replace(".", "").isalnum() else json.dumps(key)
        if isinstance(child, dict) and child:
            yield f"{pad}{name}:"
            yield from to_yaml(child, indent + 1)
        elif isinstance(child, list) and child:
            yield f"{pad}{name}:"
            for item in child:
                if isinstance(item, dict):
                    first, *rest = to_yaml(item, indent + 1)
                    yield f"{pad}- {first.strip()}"
                    yield from rest
                else:
                    yield f"{pad}- {json.dumps(item, ensure_ascii=False)}"
        else:
            yield f"{pad}{name}: {json.dumps(child, ensure_ascii=False)}"


def render() -> dict[str, str]:
    """File name -> text of each generated file."""
    header = "# Generated from api/motley_api/resources by `motley crds`. Do not edit.\n"
    return {name: header + "\n".join(to_yaml(body)) + "\n" for name, body in definitions().items()}
