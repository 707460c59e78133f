"""What an edit does mid-run, field by field of both schemas. docs/operations.md holds the table; here it is held to it."""

from __future__ import annotations

import copy
import re
import typing
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import pytest
from motley_api.resources import RLRunSpec, SamplerGroupSpec
from motley_api.resources.base import Model
from motley_operator import manifests
from motley_operator.planner.model import Settings
from operator_world import ROOT, Api, Cluster, numbers, path_of

Json = dict[str, Any]
RUN = manifests.RunRef("ns", "r", "uid")
URLS = manifests.Urls("http://10.0.0.1:8000", "http://10.0.0.2:8100")

RUN_SPEC: Json = {
    "model": {"source": "/data/model", "contextLength": 512},
    "tasks": {"source": "/data/tasks"},
    "store": {"url": "file:///data/store", "claimName": "data"},
    "steps": 4,
    "samplerGroups": [{"name": "h200-fp8", "gpuType": "H200", "precision": "FP8"}],
    "evaluation": {"everySteps": 5},
    "baseline": {"gpuType": "B200", "engines": 2},
    "prices": [{"gpuType": "H200", "usdPerGPUHour": "4.54"}],
}
GROUP_SPEC: Json = {"runRef": {"name": "r"}, "gpuType": "H200", "precision": "BF16"}
# Where a value made from the type alone would be refused for another reason than the edit.
VALUES: Json = {
    "prices": [{"gpuType": "H200", "usdPerGPUHour": "9.99"}],
    "samplerGroups": [*RUN_SPEC["samplerGroups"], {"name": "more", "gpuType": "B200", "precision": "BF16"}],
    "template.tolerations": [{"key": "a", "operator": "Exists"}],
    "template.env": [{"name": "A", "value": "b"}],
    "engine.args": ["--a=b"],
}


# The schemas' fields, and the table's.


def model_in(annotation: Any) -> type[Model] | None:
    if isinstance(annotation, type) and issubclass(annotation, Model):
        return annotation
    return next((found for part in typing.get_args(annotation) if (found := model_in(part))), None)


def fields(model: type[Model], rows: set[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, annotation) of every field, down to scalars and lists; a part with a row of its own and none below it is one field."""
    for field in model.model_fields.values():
        path = f"{prefix}{field.alias}"
        inner = model_in(field.annotation)
        if inner is None or "list[" in str(field.annotation) or refused_whole(path, rows):
            yield path, field.annotation
        else:
            yield from fields(inner, rows, f"{path}.")


def refused_whole(path: str, rows: set[str]) -> bool:
    return path in rows and TABLES["RLRun"].get(path) == "refused"


def table(resource: str) -> dict[str, str]:
    """Field -> effect, as docs/operations.md says."""
    text = (ROOT / "docs/operations.md").read_text()
    section = text.split(f"| `{resource}.spec` |")[1].split("\n\n")[0]
    found: dict[str, str] = {}
    for line in section.splitlines()[2:]:
        names, effect, _ = (cell.strip() for cell in line.strip("|").split("|", 2))
        for name in re.findall(r"`([^`]+)`", names):
            assert name not in found, f"{name} has two rows"
            found[name] = effect
    return found


TABLES = {resource: table(resource) for resource in ("RLRun", "SamplerGroup")}
ROWS = {resource: set(TABLES[resource]) for resource in TABLES}
FIELDS = {
    "RLRun": dict(fields(RLRunSpec, ROWS["RLRun"])),
    "SamplerGroup": dict(fields(SamplerGroupSpec, ROWS["SamplerGroup"])),
}


def row_of(resource: str, path: str) -> str | None:
    """The longest row that the field lies under."""
    parts = path.split(".")
    candidates = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    names = [name for part in candidates for name in (part, f"{part}[]") if name in TABLES[resource]]
    return names[0] if names else None


def effect(resource: str, path: str) -> str:
    row = row_of(resource, path)
    assert row is not None, (
        f"{resource}.spec.{path} has no row in the table of docs/operations.md: what does an edit do?"
    )
    return TABLES[resource][row]


ALL = [(resource, path) for resource in FIELDS for path in FIELDS[resource]]


# Edits.


def base(resource: str) -> Json:
    """With every default filled in, as the server stores it."""
    model, spec = (RLRunSpec, RUN_SPEC) if resource == "RLRun" else (SamplerGroupSpec, GROUP_SPEC)
    return model.model_validate(spec).to_json_dict()


def other(path: str, annotation: Any, now: Any) -> Any:
    """A value that the schema allows and that is not `now`."""
    for ending, value in VALUES.items():
        if path == ending or path.endswith(f".{ending}"):
            return value
    parts = [annotation, *typing.get_args(annotation)]
    parts += [inner for part in parts for inner in typing.get_args(part)]
    kinds = [part for part in parts if isinstance(part, type)]
    enum = next((kind for kind in kinds if issubclass(kind, StrEnum)), None)
    if enum is not None:
        return next(item.value for item in enum if item.value != now)
    if bool in kinds:
        return not now
    if int in kinds:
        return 2 if now is None or now == 1 else now + 1
    if "dict[" in str(annotation):
        return {"a": "b"}
    if ("pattern" in str(annotation) and "[0-9]{1,9}" in str(annotation)) or re.fullmatch(r"[0-9.]+", str(now)):
        return "7.5"
    return f"{now or ''}x"


def edited(resource: str, path: str) -> Json:
    spec = copy.deepcopy(base(resource))
    *parents, last = path.split(".")
    inside = spec
    for part in parents:
        inside = inside.setdefault(part, {})
    if isinstance(inside.get(last), dict) and model_in(FIELDS[resource][path]):
        first = next(key for key, value in inside[last].items() if isinstance(value, int | str))
        inside = inside[last]
        value = inside[first]
        inside[first] = value + 1 if isinstance(value, int) else {"GroupMean": "GroupMeanStd"}.get(value, f"{value}x")
    else:
        inside[last] = other(path, FIELDS[resource][path], inside.get(last))
    assert spec != base(resource)
    return spec


@pytest.mark.parametrize("resource", ["RLRun", "SamplerGroup"])
def test_every_field_has_a_row_and_every_row_a_field(resource: str) -> None:
    used = {row_of(resource, path) for path in FIELDS[resource]}
    lacking = [path for path in FIELDS[resource] if row_of(resource, path) is None]
    assert not lacking, f"without a row in the table of docs/operations.md: {lacking}"
    assert used == ROWS[resource]


# What pods are made from.


def made_from_run(spec: Json) -> dict[str, Any]:
    run = RLRunSpec.model_validate(spec)
    group = SamplerGroupSpec.model_validate(GROUP_SPEC)
    job = manifests.trainer_job(RUN, run, Settings(), URLS, suspend=False)
    return {
        "gang": manifests.trainer_reads(run),
        "gang's pods": job["spec"],
        "workers": manifests.rollout_deployment(RUN, run, Settings(), URLS, 1)["spec"]["template"],
        "router": manifests.router_deployment(RUN, run, Settings(), URLS, 1)["spec"]["template"],
        "engines": manifests.sampler_deployment(RUN, run, Settings(), URLS, "g", "u", group, 1)["spec"]["template"],
        "groups": [manifests.inline_sampler_group(RUN, item)["spec"] for item in run.sampler_groups],
    }


WANT_CHANGED = {
    "grows": set(),
    "at once": set(),
    "by group": {"groups"},
    "workers roll": {"workers"},
    "gang restarts": {"gang"},
    "workers roll, gang restarts": {"workers", "gang"},
}


@pytest.mark.parametrize("path", [path for path in FIELDS["RLRun"] if effect("RLRun", path) != "refused"])
def test_an_edit_of_a_run_replaces_the_pods_that_its_row_names_and_no_other(path: str) -> None:
    before, after = made_from_run(base("RLRun")), made_from_run(edited("RLRun", path))
    changed = {part for part in before if before[part] != after[part]}
    if "gang's pods" in changed:  # never silently: a Job's template cannot follow
        assert "gang" in changed
        changed.remove("gang's pods")
    assert changed == WANT_CHANGED[effect("RLRun", path)]


@pytest.mark.parametrize("path", [path for path in FIELDS["SamplerGroup"] if effect("SamplerGroup", path) != "refused"])
def test_an_edit_of_a_group_replaces_its_engines_or_applies_at_once(path: str) -> None:
    def template(spec: Json) -> Any:
        group = SamplerGroupSpec.model_validate(spec)
        run = RLRunSpec.model_validate(RUN_SPEC)
        return manifests.sampler_deployment(RUN, run, Settings(), URLS, "g", "u", group, 1)["spec"]["template"]

    rolls = template(base("SamplerGroup")) != template(edited("SamplerGroup", path))
    assert {True: "engines roll", False: "at once"}[rolls] == effect("SamplerGroup", path)


@pytest.mark.parametrize("path", [path for path in FIELDS["SamplerGroup"] if path != "runRef.name"])
def test_an_edit_of_an_inline_group_reaches_its_sampler_group(path: str) -> None:
    spec = edited("SamplerGroup", path)
    del spec["runRef"]
    run = RLRunSpec.model_validate({**RUN_SPEC, "samplerGroups": [{"name": "g", **spec}]})
    assert manifests.inline_sampler_group(RUN, run.sampler_groups[0])["spec"] == {**spec, "runRef": {"name": "r"}}


# At apply.


def put(api: Api, kind: str, name: str, spec: Json) -> str:
    """What the server says against it; "" when it took it."""
    old = api.call("GET", path_of(kind, "default", name))
    metadata = {"name": name, **({"resourceVersion": old["metadata"]["resourceVersion"]} if old else {})}
    body = {"apiVersion": "motley.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}
    try:
        api.call("PUT" if old else "POST", path_of(kind, "default", name if old else ""), body)
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.apiserver
def test_the_server_refuses_what_cannot_apply_and_takes_the_rest(api: Api, cluster: Cluster) -> None:
    wrong = []
    for resource, path in ALL:
        name = f"edit-{next(numbers)}"
        assert put(api, resource, name, base(resource)) == ""
        said = put(api, resource, name, edited(resource, path))
        want = effect(resource, path)
        if (want == "refused") != bool(said) or (said and "immutable; apply another" not in said):
            wrong.append(f"{resource}.spec.{path}: {want}, but: {said or 'taken'}")
        api.call("DELETE", path_of(resource, "default", name))
    assert not wrong, "\n".join(wrong)


@pytest.mark.apiserver
def test_steps_may_only_grow_and_an_inline_groups_hardware_may_not_change(api: Api, cluster: Cluster) -> None:
    name = f"edit-{next(numbers)}"
    assert put(api, "RLRun", name, base("RLRun")) == ""
    assert "steps may only grow" in put(api, "RLRun", name, {**base("RLRun"), "steps": 3})
    for field, value in (("gpuType", "B200"), ("precision", "BF16")):
        spec = base("RLRun")
        spec["samplerGroups"] = [{**spec["samplerGroups"][0], field: value}]
        assert f"{field} is immutable; add another group" in put(api, "RLRun", name, spec)
    assert put(api, "RLRun", name, {**base("RLRun"), "samplerGroups": []}) == ""
    api.call("DELETE", path_of("RLRun", "default", name))
