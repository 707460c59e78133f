"""What a container is run with."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from motley_local.podspec import (
    ConfigError,
    Mount,
    PodFacts,
    container_argv,
    container_environment,
    expand,
    field_value,
    named_port,
    resolve_image,
    resource_value,
    rewrite_paths,
    service_environment,
)
from motley_local.quantities import divided, parse_quantity

FACTS = PodFacts("127.65.0.9", "127.0.0.1", {"memory": "1Gi", "cpu": "2"})
POD: dict[str, Any] = {
    "metadata": {
        "name": "p",
        "namespace": "ns",
        "uid": "u",
        "labels": {"a": "1", "b": 'say "x"'},
        "annotations": {"k": "v"},
    },
    "spec": {"nodeName": "n", "serviceAccountName": "sa", "containers": []},
}


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("$(A)", "1"),
        ("$(A)$(B)", "12"),
        ("$(C)", "$(C)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("cost $5 and $", "cost $5 and $"),
        ("$(A", "$(A"),
        ("$()", "$()"),
    ],
)
def test_references_expand_as_kubernetes_expands_them(text: str, want: str) -> None:
    assert expand(text, {"A": "1", "B": "2"}) == want


@given(st.text(alphabet="ab($) ", max_size=12).filter(lambda text: "$" not in text))
def test_text_without_a_dollar_is_left_alone(text: str) -> None:
    assert expand(text, {"a": "x"}) == text


def test_later_variables_may_use_earlier_ones_and_services_but_not_later_ones() -> None:
    container = {
        "name": "c",
        "env": [
            {"name": "EARLY", "value": "$(LATE)"},
            {"name": "LATE", "value": "z"},
            {"name": "URL", "value": "http://$(R_SERVICE_HOST)/$(LATE)"},
        ],
    }
    env = container_environment(POD, container, {"R_SERVICE_HOST": "127.64.0.9"}, FACTS, lambda *_: None)
    assert (env["EARLY"], env["URL"]) == ("$(LATE)", "http://127.64.0.9/z")


def test_declared_variables_win_over_sources_and_sources_over_services() -> None:
    found = {"data": {"X": "source", "Y": "source"}}
    container = {"name": "c", "envFrom": [{"configMapRef": {"name": "m"}}], "env": [{"name": "X", "value": "own"}]}
    env = container_environment(POD, container, {"X": "svc", "Y": "svc", "Z": "svc"}, FACTS, lambda *_: found)
    assert (env["X"], env["Y"], env["Z"]) == ("own", "source", "svc")


def test_a_missing_key_is_named_and_an_optional_one_is_left_out() -> None:
    secret = {"data": {"token": base64.b64encode(b"t").decode()}}
    reference = {"name": "s", "key": "other"}
    container = {"name": "c", "env": [{"name": "T", "valueFrom": {"secretKeyRef": reference}}]}
    with pytest.raises(ConfigError, match="couldn't find key other in Secret ns/s"):
        container_environment(POD, container, {}, FACTS, lambda *_: secret)
    reference["optional"] = True  # type: ignore[assignment]
    assert "T" not in container_environment(POD, container, {}, FACTS, lambda *_: secret)


@pytest.mark.parametrize(
    ("path", "want"),
    [
        ("metadata.name", "p"),
        ("metadata.labels['a']", "1"),
        ("metadata.labels['absent']", ""),
        ("metadata.labels", 'a="1"\nb="say \\"x\\""\n'),
        ("status.podIP", "127.65.0.9"),
        ("spec.nodeName", "n"),
    ],
)
def test_the_downward_api_tells_of_the_pod(path: str, want: str) -> None:
    assert field_value(POD, path, FACTS) == want


def test_an_unknown_field_path_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'spec\.colour' is not supported; must be one of metadata\.name"):
        field_value(POD, "spec.colour", FACTS)


def test_an_absent_limit_reads_as_what_the_node_has() -> None:
    container = {"name": "c", "resources": {"limits": {"cpu": "1500m"}}}
    # 1500m in whole CPUs, rounded up; memory is not limited: the node's 1Gi = 1024 Mi.
    assert resource_value(container, {"resource": "limits.cpu"}, FACTS) == "2"
    assert resource_value(container, {"resource": "limits.memory", "divisor": "1Mi"}, FACTS) == "1024"
    assert resource_value(container, {"resource": "requests.cpu"}, FACTS) == "0"


def test_quantities_have_decimal_and_binary_suffixes() -> None:
    assert parse_quantity("2Gi") == 2 * 1024**3
    assert parse_quantity("1e3") == 1000
    assert divided("1Gi", "1M") == "1074"  # 1073.74 rounded up
    with pytest.raises(ValueError, match="must look like 500m or 2Gi, got 'x'"):
        parse_quantity("x")


def service(name: str, namespace: str, ip: str, *ports: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": namespace}, "spec": {"clusterIP": ip, "ports": list(ports)}}


def test_service_variables_are_those_of_kubelet() -> None:
    services = [
        service("demo-router", "ns", "127.64.1.2", {"name": "http", "port": 8000, "protocol": "TCP"}),
        service("headless", "ns", "None", {"port": 1}),
        service("foreign", "other", "127.64.1.3", {"port": 1}),
        service("kubernetes", "default", "127.64.0.1", {"port": 443}),
    ]
    env = service_environment(services, "ns", ("127.0.0.1", 7001), True)
    assert env["DEMO_ROUTER_SERVICE_HOST"] == "127.64.1.2"
    assert env["DEMO_ROUTER_SERVICE_PORT_HTTP"] == "8000"
    assert env["DEMO_ROUTER_PORT_8000_TCP_ADDR"] == "127.64.1.2"
    assert (env["KUBERNETES_SERVICE_HOST"], env["KUBERNETES_SERVICE_PORT"]) == ("127.0.0.1", "7001")
    assert not [name for name in env if name.startswith(("HEADLESS", "FOREIGN"))]
    assert {name.split("_")[0] for name in service_environment(services, "ns", ("127.0.0.1", 7001), False)} == {
        "KUBERNETES"
    }


def test_command_and_arguments_follow_the_images_where_they_are_left_out() -> None:
    image = ("motley", "sampler")
    assert container_argv({"name": "c"}, {}, image) == ["motley", "sampler"]
    assert container_argv({"name": "c", "args": ["router"]}, {}, image) == ["motley", "router"]
    assert container_argv({"name": "c", "command": ["$(A)"], "args": ["b"]}, {"A": "a"}, image) == ["a", "b"]
    with pytest.raises(ConfigError, match="must state a command"):
        container_argv({"name": "c", "image": "nginx"}, {}, ())


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("motley-sampler", ("motley", "sampler")),
        ("ghcr.io:443/team/motley-operator:0.1", ("motley", "operator")),
        ("x/motley-trainer@sha256:00", ("motley", "trainer")),
        ("x/motley-trainer-debug", ()),
        ("busybox", ()),
    ],
)
def test_only_the_projects_images_are_known(name: str, want: tuple[str, ...]) -> None:
    assert resolve_image(name).command == want


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("/data/run", "/host/d/run"),
        ("file:///data/run", "file:///host/d/run"),
        ('{"path": "/data"}', '{"path": "/host/d"}'),
        ("--a=/data/x:/data/deep/y", "--a=/host/d/x:/host/deep/y"),
        ("/database", "/database"),
        ("/my/data/x", "/my/data/x"),
        ("http://host/data/x", "http://host/data/x"),
    ],
)
def test_without_mount_namespaces_whole_path_prefixes_are_rewritten(text: str, want: str) -> None:
    assert rewrite_paths(text, [Mount("/host/d", "/data"), Mount("/host/deep", "/data/deep")]) == want


def test_ports_are_found_by_name() -> None:
    container = {"name": "c", "ports": [{"name": "http", "containerPort": 8000}]}
    assert named_port(container, "http") == 8000
    assert named_port(container, 5) == 5
    with pytest.raises(ConfigError, match="has no port named 'grpc'"):
        named_port(container, "grpc")
