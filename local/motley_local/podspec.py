"""What a container of a pod will be run with. Pure: everything looked up is an argument."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from motley_local.quantities import divided

Object = Mapping[str, Any]
Lookup = Callable[[str, str, str], Object | None]  # ("ConfigMap" | "Secret", namespace, name) -> the object

_REFERENCE = re.compile(r"\$(\$|\([^()]*\)|)")
_QUOTED_KEY = re.compile(r"^metadata\.(labels|annotations)\['([^']+)'\]$")


class ConfigError(ValueError):
    """The container cannot be made from what is there now; the message is shown as kubelet shows it."""


@dataclass(frozen=True)
class PodFacts:
    """What the downward API tells beyond the pod itself."""

    pod_ip: str
    host_ip: str
    allocatable: Mapping[str, str]


def expand(text: str, values: Mapping[str, str]) -> str:
    """Kubernetes' $(NAME) expansion: unknown names stay as they are, $$ is a dollar sign that starts nothing."""

    def replacement(match: re.Match[str]) -> str:
        inner = match.group(1)
        if inner == "$":
            return "$"
        if inner:
            return values.get(inner[1:-1], match.group(0))
        return "$"

    return _REFERENCE.sub(replacement, text)


def field_value(pod: Object, path: str, facts: PodFacts) -> str:
    """Value of a ``fieldRef``.

    Raises:
        ConfigError: the path is not one that the downward API offers.
    """
    metadata, spec = pod["metadata"], pod["spec"]
    if match := _QUOTED_KEY.match(path):
        return str((metadata.get(match.group(1)) or {}).get(match.group(2), ""))
    if path in ("metadata.labels", "metadata.annotations"):
        entries = metadata.get(path.rpartition(".")[2]) or {}
        return "".join(f'{key}="{_escaped(value)}"\n' for key, value in sorted(entries.items()))
    simple: dict[str, str] = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": spec.get("nodeName", ""),
        "spec.serviceAccountName": spec.get("serviceAccountName", ""),
        "status.podIP": facts.pod_ip,
        "status.podIPs": facts.pod_ip,
        "status.hostIP": facts.host_ip,
        "status.hostIPs": facts.host_ip,
    }
    if path not in simple:
        raise ConfigError(f"fieldRef.fieldPath {path!r} is not supported; must be one of {', '.join(simple)}")
    return simple[path]


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def resource_value(container: Object, reference: Object, facts: PodFacts) -> str:
    """Value of a ``resourceFieldRef``; an absent limit reads as what the node has."""
    kind, _, name = str(reference["resource"]).partition(".")
    resources = container.get("resources") or {}
    declared = (resources.get(kind) or {}).get(name)
    if declared is None:
        declared = facts.allocatable.get(name, "0") if kind == "limits" else "0"
    return divided(str(declared), str(reference.get("divisor") or "1"))


def _env_name(name: str) -> str:
    return name.upper().replace("-", "_").replace(".", "_")


def service_environment(
    services: Sequence[Object], namespace: str, api_server: tuple[str, int], links: bool
) -> dict[str, str]:
    """The variables that kubelet injects for Services, and the API server's address.

    The API server is given by its own address: on loopback its Service's port 443 is open to root only.
    """
    env: dict[str, str] = {}
    for service in services:
        spec = service["spec"]
        address = spec.get("clusterIP")
        is_kubernetes = (service["metadata"]["namespace"], service["metadata"]["name"]) == ("default", "kubernetes")
        if not links or service["metadata"]["namespace"] != namespace or address in (None, "", "None") or is_kubernetes:
            continue
        env.update(_one_service(_env_name(service["metadata"]["name"]), address, spec.get("ports") or ()))
    host, port = api_server
    env.update(_one_service("KUBERNETES", host, [{"name": "https", "port": port, "protocol": "TCP"}]))
    return env


def _one_service(prefix: str, address: str, ports: Sequence[Object]) -> dict[str, str]:
    env: dict[str, str] = {}
    if not ports:
        return env
    env[f"{prefix}_SERVICE_HOST"] = address
    env[f"{prefix}_SERVICE_PORT"] = str(ports[0]["port"])
    first = ports[0]
    env[f"{prefix}_PORT"] = f"{first.get('protocol', 'TCP').lower()}://{address}:{first['port']}"
    for port in ports:
        protocol = str(port.get("protocol", "TCP"))
        if port.get("name"):
            env[f"{prefix}_SERVICE_PORT_{_env_name(port['name'])}"] = str(port["port"])
        base = f"{prefix}_PORT_{port['port']}_{protocol}"
        env[base] = f"{protocol.lower()}://{address}:{port['port']}"
        env[f"{base}_PROTO"] = protocol.lower()
        env[f"{base}_PORT"] = str(port["port"])
        env[f"{base}_ADDR"] = address
    return env


def _source(lookup: Lookup, kind: str, namespace: str, reference: Object) -> Object | None:
    """A ConfigMap or Secret that environment refers to; None where it is absent and optional."""
    found = lookup(kind, namespace, str(reference["name"]))
    if found is None and not reference.get("optional"):
        raise ConfigError(f'{kind.lower()} "{reference["name"]}" not found')
    return found


def _keyed(lookup: Lookup, kind: str, namespace: str, reference: Object) -> str | None:
    found = _source(lookup, kind, namespace, reference)
    value = None if found is None else text_data(kind, found).get(str(reference["key"]))
    if value is None and not reference.get("optional"):
        raise ConfigError(f"couldn't find key {reference['key']} in {kind} {namespace}/{reference['name']}")
    return value


def text_data(kind: str, item: Object) -> dict[str, str]:
    """Text values of a ConfigMap or Secret."""
    if kind == "ConfigMap":
        return dict(item.get("data") or {})
    return {key: raw.decode(errors="surrogateescape") for key, raw in byte_data(kind, item).items()}


def byte_data(kind: str, item: Object) -> dict[str, bytes]:
    """All values of a ConfigMap or Secret as bytes."""
    import base64

    if kind == "Secret":
        return {key: base64.b64decode(value) for key, value in (item.get("data") or {}).items()}
    text = {key: value.encode() for key, value in (item.get("data") or {}).items()}
    return text | {key: base64.b64decode(value) for key, value in (item.get("binaryData") or {}).items()}


def container_environment(
    pod: Object, container: Object, service_env: Mapping[str, str], facts: PodFacts, lookup: Lookup
) -> dict[str, str]:
    """A container's variables in kubelet's order of precedence: env, then envFrom, then Services.

    Raises:
        ConfigError: a ConfigMap, Secret or key is missing and not optional.
    """
    namespace = pod["metadata"]["namespace"]
    env: dict[str, str] = {}
    for source in container.get("envFrom") or ():
        for field, kind in (("configMapRef", "ConfigMap"), ("secretRef", "Secret")):
            if field in source:
                found = _source(lookup, kind, namespace, source[field])
                values = {} if found is None else text_data(kind, found)
                env.update({f"{source.get('prefix', '')}{key}": value for key, value in values.items()})
    declared: dict[str, str] = {}
    for entry in container.get("env") or ():
        value = _declared_value(pod, container, entry, {**service_env, **declared}, facts, lookup)
        if value is not None:
            declared[entry["name"]] = value
    return {**service_env, **env, **declared}


def _declared_value(
    pod: Object, container: Object, entry: Object, known: Mapping[str, str], facts: PodFacts, lookup: Lookup
) -> str | None:
    reference = entry.get("valueFrom")
    namespace = pod["metadata"]["namespace"]
    if not reference:
        return expand(str(entry.get("value", "")), known)
    if "fieldRef" in reference:
        return field_value(pod, reference["fieldRef"]["fieldPath"], facts)
    if "resourceFieldRef" in reference:
        return resource_value(container, reference["resourceFieldRef"], facts)
    if "configMapKeyRef" in reference:
        return _keyed(lookup, "ConfigMap", namespace, reference["configMapKeyRef"])
    if "secretKeyRef" in reference:
        return _keyed(lookup, "Secret", namespace, reference["secretKeyRef"])
    raise ConfigError(f"env {entry['name']}: valueFrom has no source that is supported: {', '.join(reference)}")


def container_argv(container: Object, env: Mapping[str, str], image_command: Sequence[str]) -> list[str]:
    """Command and arguments; without a command the image's own is used, without both its arguments too.

    Raises:
        ConfigError: neither the container nor its image has a command.
    """
    command = [expand(part, env) for part in container.get("command") or ()]
    arguments = [expand(part, env) for part in container.get("args") or ()]
    if not command and not arguments:
        command = list(image_command)
    elif not command and image_command:
        command = list(image_command[:1])
    if not command:
        raise ConfigError(
            f"container {container['name']!r} must state a command: the local cluster runs host programs and has no image "
            f"{container.get('image')!r}"
        )
    return command + arguments


@dataclass(frozen=True)
class Image:
    """What an image name stands for on this machine."""

    known: bool
    command: tuple[str, ...]
    working_dir: str


MOTLEY_ROLES = ("operator", "sampler", "trainer", "rollout")
IMAGE_ROOT = "/opt/motley"


def resolve_image(name: str) -> Image:
    """The project's own images are this repository; any other image has nothing but the host's programs."""
    last = name.rpartition("/")[2].partition("@")[0].partition(":")[0]
    for role in MOTLEY_ROLES:
        if last.endswith(f"motley-{role}"):
            return Image(True, ("motley", role), IMAGE_ROOT)
    return Image(False, (), "/")


@dataclass(frozen=True)
class Mount:
    """A host path that a container sees at ``target``."""

    source: str
    target: str
    readonly: bool = False


def rewrite_paths(text: str, mounts: Sequence[Mount]) -> str:
    """``text`` with mount paths replaced by the host paths behind them; for machines without mount namespaces.

    Only whole path prefixes are replaced: with a mount at /data, /data/x changes, /database and /my/data do not; file:///data/x does.
    """
    for mount in sorted(mounts, key=lambda one: -len(one.target)):
        pattern = rf"(?:(?<=://)|(?<![\w.\-/])){re.escape(mount.target.rstrip('/'))}(?=[/:\"'\s,;=)\]}}&]|$)"
        text = re.sub(pattern, mount.source.replace("\\", r"\\"), text)
    return text


def named_port(container: Object, port: int | str) -> int:
    """A probe's port number; names are looked up among the container's ports.

    Raises:
        ConfigError: the container has no port of that name.
    """
    if isinstance(port, int):
        return port
    for declared in container.get("ports") or ():
        if declared.get("name") == port:
            return int(declared["containerPort"])
    if port.isdigit():
        return int(port)
    raise ConfigError(f"container {container['name']!r} has no port named {port!r}")
