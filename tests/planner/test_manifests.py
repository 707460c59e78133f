from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from motley_api import keys
from motley_api.resources import RLRunSpec
from motley_api.resources.base import MAX_NAME
from motley_operator import manifests, names
from motley_operator.planner.model import Settings
from planner import study

RUN = manifests.RunRef("ns", "study", "uid-run")
URLS = manifests.Urls("http://10.0.0.1:8000", "http://10.0.0.2:8100")


def sampler(spec: RLRunSpec | None = None, replicas: int = 8, **group: Any) -> dict[str, Any]:
    return manifests.sampler_deployment(
        RUN,
        spec or study.run_spec(),
        Settings(),
        URLS,
        "study-h100-fp8",
        "uid-g",
        study.group_spec("h100-fp8", **group),
        replicas,
    )


def job(**spec: Any) -> dict[str, Any]:
    return manifests.trainer_job(RUN, study.run_spec(**spec), Settings(), URLS, suspend=False)


def everything(spec: RLRunSpec | None = None) -> list[dict[str, Any]]:
    spec = spec or study.run_spec()
    return [
        manifests.router_deployment(RUN, spec, Settings(), URLS, 1),
        manifests.rollout_deployment(RUN, spec, Settings(), URLS, 1),
        sampler(spec),
        manifests.trainer_job(RUN, spec, Settings(), URLS, suspend=False),
    ]


def env_of(workload: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {item["name"]: item for item in workload["spec"]["template"]["spec"]["containers"][0]["env"]}


def test_no_workload_pod_gets_a_service_account_token() -> None:
    for workload in everything():
        assert workload["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


def test_the_token_reaches_pods_by_reference_and_never_by_value() -> None:
    for workload in everything():
        reference = env_of(workload)[keys.ENV_TOKEN]["valueFrom"]["secretKeyRef"]
        assert reference == {"name": "study-token", "key": "token"}
    assert "secret-value" not in json.dumps(everything())


def test_every_pod_has_the_environment_of_its_role() -> None:
    common = {
        keys.ENV_RUN,
        keys.ENV_RUN_UID,
        keys.ENV_NAMESPACE,
        keys.ENV_TOKEN,
        keys.ENV_RUN_CONFIG,
        keys.ENV_STORE_URL,
        keys.ENV_ROUTER_URL,
        keys.ENV_TRAINER_URL,
        keys.ENV_POD_NAME,
        keys.ENV_POD_IP,
        keys.ENV_NODE_NAME,
        keys.ENV_SCRATCH,
    }
    router, rollout, engines, trainer = map(env_of, everything())
    assert router.keys() == common | {keys.ENV_FLEET}
    assert rollout.keys() == common
    assert engines.keys() == common | {keys.ENV_GROUP, keys.ENV_GROUP_CONFIG}
    assert trainer.keys() == common | {keys.ENV_FLEET}


def test_every_path_in_the_environment_is_mounted() -> None:
    for workload in everything():
        mounts = [item["mountPath"] for item in workload["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]]
        for name in (keys.ENV_RUN_CONFIG, keys.ENV_FLEET, keys.ENV_GROUP_CONFIG, keys.ENV_SCRATCH):
            item = env_of(workload).get(name)
            if item is not None:
                assert any(item["value"] == mount or item["value"].startswith(f"{mount}/") for mount in mounts), name


def test_an_engine_gets_its_drain_time_and_a_margin_to_end() -> None:
    pod = sampler(drainSeconds=600)["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 600 + manifests.GRACE_MARGIN_S


def test_a_roll_out_of_engines_takes_one_away_before_it_adds_one() -> None:
    assert sampler()["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_the_claim_is_mounted_at_the_stores_path() -> None:
    spec = study.run_spec(store={"url": "file:///data/runs", "claimName": "runs"})
    mounts = sampler(spec)["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert {"name": "store", "mountPath": "/data/runs"} in mounts


def test_an_object_store_mounts_nothing() -> None:
    spec = study.run_spec(store={"url": "s3://bucket/runs", "claimName": "runs"})
    assert "store" not in [volume["name"] for volume in sampler(spec)["spec"]["template"]["spec"]["volumes"]]


def test_pods_say_what_they_are_priced_as() -> None:
    labels = sampler(capacityType="Spot")["spec"]["template"]["metadata"]["labels"]
    assert (labels[keys.GPU_TYPE_LABEL], labels[keys.CAPACITY_TYPE_LABEL]) == ("H100", "Spot")


def test_a_users_override_wins_and_reaches_the_pod() -> None:
    template = {
        "image": "mine:1",
        "env": [{"name": "NCCL_DEBUG", "value": "INFO"}, {"name": keys.ENV_SCRATCH, "value": "/nvme"}],
        "nodeSelector": {"topology.kubernetes.io/zone": "a"},
        "tolerations": [{"key": "team", "operator": "Exists"}],
        "labels": {"team": "rl"},
    }
    deployment = sampler(template=template)
    pod = deployment["spec"]["template"]
    assert pod["spec"]["containers"][0]["image"] == "mine:1"
    assert env_of(deployment)["NCCL_DEBUG"]["value"] == "INFO"
    assert env_of(deployment)[keys.ENV_SCRATCH]["value"] == "/nvme"
    assert pod["spec"]["nodeSelector"] == {"topology.kubernetes.io/zone": "a"}
    assert [item["key"] for item in pod["spec"]["tolerations"]] == ["nvidia.com/gpu", "team"]
    assert pod["metadata"]["labels"]["team"] == "rl"


def test_the_queue_name_is_on_the_deployment() -> None:
    assert sampler(queueName="gpus")["metadata"]["labels"][keys.QUEUE_LABEL] == "gpus"


@pytest.mark.parametrize(
    ("change", "replaces_pods"),
    [
        ({"replicas": 2}, False),
        ({"turnsPerEngineHour": 5000}, False),
        ({"template": {"image": "other:2"}}, True),
        ({"engine": {"args": ["--mem-fraction-static", "0.9"]}}, True),
        ({"sessionsPerEngine": 24}, True),
        ({"kvCachePrecision": "BF16"}, True),
    ],
)
def test_what_an_engine_reads_only_at_its_start_replaces_its_pods(change: dict[str, Any], replaces_pods: bool) -> None:
    assert (sampler()["spec"]["template"] != sampler(**change)["spec"]["template"]) is replaces_pods


def test_the_gang_has_one_pod_a_node_and_ends_at_once_on_bad_configuration() -> None:
    spec = job(trainer={"nodes": 4, "gpusPerNode": 8})["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (4, 4, "Indexed")
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert spec["template"]["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    fail, left, ignore = spec["podFailurePolicy"]["rules"]
    assert (fail["action"], fail["onExitCodes"]["values"]) == ("FailJob", [78])
    assert (left["action"], left["onExitCodes"]["values"]) == ("Ignore", [143])  # saved, and left with its gang
    assert (ignore["action"], ignore["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")


def test_rendering_is_the_same_every_time() -> None:
    assert json.dumps(everything()) == json.dumps(everything())


# Differences.


def test_what_the_server_adds_is_no_difference() -> None:
    rendered = sampler()
    live = json.loads(json.dumps(rendered))
    live["metadata"] |= {"uid": "1", "resourceVersion": "5", "generation": 1}
    live["spec"]["template"]["spec"] |= {"dnsPolicy": "ClusterFirst", "schedulerName": "default-scheduler"}
    live["spec"]["template"]["spec"]["containers"][0]["imagePullPolicy"] = "IfNotPresent"
    live["status"] = {"replicas": 8}
    assert not manifests.differs(rendered, live)


@pytest.mark.parametrize(
    "path",
    [("spec", "replicas"), ("spec", "template", "spec", "terminationGracePeriodSeconds"), ("metadata", "labels")],
)
def test_a_changed_field_is_a_difference(path: tuple[str, ...]) -> None:
    live = json.loads(json.dumps(sampler()))
    holder = live
    for part in path[:-1]:
        holder = holder[part]
    holder[path[-1]] = 3 if path[-1] != "labels" else {}
    assert manifests.differs(sampler(), live)


def test_a_field_that_is_no_longer_rendered_is_a_difference() -> None:
    live = json.loads(json.dumps(sampler(template={"nodeSelector": {"zone": "a"}})))
    assert manifests.differs(sampler(), live)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text("ab", max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", min_size=1, max_size=1), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60)
@given(json_values)
def test_nothing_differs_from_itself(value: Any) -> None:
    assert not manifests.differs(value, value)


# Names.


def test_every_name_that_admission_lets_through_fits_its_pods() -> None:
    """63 characters is the limit of labels and of pod names that are hostnames; the longest suffix is a Deployment's."""
    run = "r" * (MAX_NAME - 10)
    group = names.inline_group(run, "g" * 9)
    assert len(group) == MAX_NAME
    assert len(f"{group}-{'x' * 10}-{'y' * 5}") <= 63
    assert len(f"{names.rollout(run)}-{'x' * 10}-{'y' * 5}") <= 63
    assert len(f"{names.trainer(run)}-1023-{'y' * 5}") <= 63


def test_an_ipv6_address_is_bracketed() -> None:
    assert names.url("fd00::1", 8000) == "http://[fd00::1]:8000"
    assert names.url("10.0.0.1", 8000) == "http://10.0.0.1:8000"
