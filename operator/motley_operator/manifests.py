"""Renders every object that the operator owns. Pure: the same spec gives the same bytes.

Addresses: pods reach router and trainer by ClusterIP, which works with and without cluster DNS and holds as long as the Service.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from motley_api import GROUP_VERSION, keys, records
from motley_api.resources import CapacityType, GpuTypeName, Precision, RLRunSpec, SamplerGroupSpec
from motley_api.resources.base import Model, PodOverrides
from motley_api.resources.rlrun import InlineGroup, ModelSource, Store, Tasks
from motley_api.resources.samplergroup import RunRef as GroupRunRef

from motley_operator import names
from motley_operator.planner import placement
from motley_operator.planner.model import Settings

Json = dict[str, Any]

# A save, and the last trajectories: longer than either should take, shorter than a cloud's notice of preemption would matter.
TRAINER_GRACE_S = 300
GRACE_MARGIN_S = 30  # on top of drainSeconds: deregister, flush
# Of the gang, over the run's life. Evictions and preemptions do not count, bad configuration ends it at once.
TRAINER_BACKOFF_LIMIT = 100


@dataclass(frozen=True)
class RunRef:
    """The run that objects are rendered for."""

    namespace: str
    name: str
    uid: str

    def owner(self, *, controller: bool = True) -> Json:
        return owner("RLRun", self.name, self.uid, controller=controller)


def owner(kind: str, name: str, uid: str, *, controller: bool = True) -> Json:
    reference = {"apiVersion": GROUP_VERSION, "kind": kind, "name": name, "uid": uid}
    return {**reference, "controller": True, "blockOwnerDeletion": True} if controller else reference


def labels(run: str, role: str = "", group: str = "") -> dict[str, str]:
    found = {keys.MANAGED_BY_LABEL: keys.MANAGED_BY, keys.RUN_LABEL: run}
    if role:
        found[keys.ROLE_LABEL] = role
    if group:
        found[keys.GROUP_LABEL] = group
    return found


def hashed(manifest: Mapping[str, Any]) -> Json:
    """With the hash of all that was rendered, so that also a field that went away shows as a difference."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    metadata = dict(manifest["metadata"])
    metadata["annotations"] = {**metadata.get("annotations", {}), keys.SPEC_HASH_ANNOTATION: digest}
    return {**manifest, "metadata": metadata}


def differs(rendered: Any, live: Any) -> bool:
    """Whether `live` lacks something of `rendered`. What the server added, defaults and status, does not count.

    The operator's innermost loop, so without abstract types and generators.
    """
    if isinstance(rendered, dict):
        return not isinstance(live, dict) or any(map(differs, rendered.values(), map(live.get, rendered)))
    if isinstance(rendered, list | tuple):
        if not rendered and live is None:
            return False
        return not isinstance(live, list) or len(live) != len(rendered) or any(map(differs, rendered, live))
    if rendered is None or (live is None and rendered in ("", False)):
        return False  # the server drops zero values
    return bool(rendered != live)


def _object(
    api_version: str, kind: str, run: RunRef, name: str, owned_by: Json, labelled: dict[str, str], **body: Any
) -> Json:
    metadata = {"name": name, "namespace": run.namespace, "labels": labelled, "ownerReferences": [owned_by]}
    metadata |= body.pop("metadata", {})
    return hashed({"apiVersion": api_version, "kind": kind, "metadata": metadata, **body})


# Secrets, configuration, services.


def token_secret(run: RunRef, token: str) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": names.token(run.name),
            "namespace": run.namespace,
            "labels": labels(run.name),
            "ownerReferences": [run.owner()],
        },
        "type": "Opaque",
        "immutable": True,
        "stringData": {keys.SECRET_TOKEN_KEY: token},
    }


def run_config_map(run: RunRef, spec: RLRunSpec) -> Json:
    """run.json: the spec with defaults. Without rollout.sessions the workers follow the capacity that the router tells."""
    data = {keys.RUN_CONFIG_KEY: json.dumps(spec.to_json_dict(), indent=1, sort_keys=True)}
    return _object("v1", "ConfigMap", run, names.run_config(run.name), run.owner(), labels(run.name), data=data)


def fleet_config_map(run: RunRef, fleet: records.Fleet, more: Mapping[str, str] | None = None) -> Json:
    data = {keys.FLEET_KEY: records.encode_json(fleet).decode(), **(more or {})}
    return _object("v1", "ConfigMap", run, names.fleet(run.name), run.owner(), labels(run.name), data=data)


def group_config_map(run: RunRef, group: str, group_uid: str, spec: SamplerGroupSpec) -> Json:
    data = {keys.GROUP_CONFIG_KEY: json.dumps(spec.to_json_dict(), indent=1, sort_keys=True)}
    owned_by = owner("SamplerGroup", group, group_uid)
    return _object(
        "v1", "ConfigMap", run, names.group_config(group), owned_by, labels(run.name, group=group), data=data
    )


def router_service(run: RunRef) -> Json:
    spec = {
        "selector": labels(run.name, keys.ROLE_ROUTER),
        "ports": [{"name": "http", "port": keys.ROUTER_PORT, "targetPort": keys.ROUTER_PORT, "protocol": "TCP"}],
    }
    labelled = labels(run.name, keys.ROLE_ROUTER)
    return _object("v1", "Service", run, names.router(run.name), run.owner(), labelled, spec=spec)


def trainer_service(run: RunRef) -> Json:
    """Pod 0 of the gang: the trajectory buffer, and torchrun's store, which is needed before the pod is ready."""
    spec = {
        "selector": {**labels(run.name, keys.ROLE_TRAINER), "batch.kubernetes.io/job-completion-index": "0"},
        "publishNotReadyAddresses": True,
        "ports": [
            {"name": name, "port": port, "targetPort": port, "protocol": "TCP"}
            for name, port in (("http", keys.TRAINER_PORT), ("rendezvous", keys.RENDEZVOUS_PORT))
        ],
    }
    labelled = labels(run.name, keys.ROLE_TRAINER)
    return _object("v1", "Service", run, names.trainer(run.name), run.owner(), labelled, spec=spec)


def gang_service(run: RunRef) -> Json:
    """Headless: DNS names for the pods of a gang, which training processes connect to directly."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": labels(run.name, keys.ROLE_TRAINER),
    }
    labelled = labels(run.name, keys.ROLE_TRAINER)
    return _object("v1", "Service", run, names.gang(run.name), run.owner(), labelled, spec=spec)


def inline_sampler_group(run: RunRef, group: InlineGroup, live: Mapping[str, Any] | None = None) -> Json:
    """replicas are written when the run's change; in between they belong to who scales the group itself."""
    spec = group.to_json_dict()
    del spec["name"]
    name = names.inline_group(run.name, group.name)
    labelled = labels(run.name, group=name)
    spec["runRef"] = {"name": run.name}
    noted = {keys.REPLICAS_ANNOTATION: str(group.replicas)}
    if live is not None and live["metadata"].get("annotations", {}).get(keys.REPLICAS_ANNOTATION) == str(
        group.replicas
    ):
        # Left to whoever set it, also when that changes between this look and the apply; without an owner it would be the default.
        del spec["replicas"]
        if not live["metadata"].get("replicasSetBy"):
            spec["replicas"] = live["spec"].get("replicas", group.replicas)
    metadata = {"annotations": noted}
    return _object(GROUP_VERSION, "SamplerGroup", run, name, run.owner(), labelled, metadata=metadata, spec=spec)


def adopted_sampler_group(run: RunRef, name: str, uid: str) -> Json:
    """Only an owner reference: a group that was applied by itself goes with its run, and stays its author's otherwise."""
    return {
        "apiVersion": GROUP_VERSION,
        "kind": "SamplerGroup",
        "metadata": {
            "name": name,
            "namespace": run.namespace,
            "uid": uid,
            "ownerReferences": [run.owner(controller=False)],
        },
    }


# Workloads.


@dataclass(frozen=True)
class Urls:
    router: str
    trainer: str


def _env(run: RunRef, spec: RLRunSpec, urls: Urls, more: Mapping[str, str], user: PodOverrides) -> list[Json]:
    plain = {
        keys.ENV_RUN: run.name,
        keys.ENV_RUN_UID: run.uid,
        keys.ENV_NAMESPACE: run.namespace,
        keys.ENV_RUN_CONFIG: f"{names.RUN_DIR}/{keys.RUN_CONFIG_KEY}",
        keys.ENV_STORE_URL: spec.store.url,
        keys.ENV_ROUTER_URL: urls.router,
        keys.ENV_TRAINER_URL: urls.trainer,
        keys.ENV_SCRATCH: names.SCRATCH_DIR,
        **more,
        **{item.name: item.value for item in user.env},
    }
    fields = {
        keys.ENV_POD_NAME: "metadata.name",
        keys.ENV_POD_IP: "status.podIP",
        keys.ENV_NODE_NAME: "spec.nodeName",
    }
    secret = {"secretKeyRef": {"name": names.token(run.name), "key": keys.SECRET_TOKEN_KEY}}
    return [
        {"name": keys.ENV_TOKEN, "valueFrom": secret},
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
        *({"name": name, "value": value} for name, value in plain.items()),
    ]


def _volumes(config_maps: Mapping[str, str], spec: RLRunSpec, *, store: bool) -> tuple[list[Json], list[Json]]:
    """(volumes, mounts): ConfigMaps by directory, scratch, and the store's claim where it is a path."""
    volumes: list[Json] = [{"name": "scratch", "emptyDir": {}}]
    mounts: list[Json] = [{"name": "scratch", "mountPath": names.SCRATCH_DIR}]
    for directory, config_map in config_maps.items():
        volume = directory.rsplit("/", 1)[1]
        volumes.append({"name": volume, "configMap": {"name": config_map}})
        mounts.append({"name": volume, "mountPath": directory, "readOnly": True})
    path = names.store_mount(spec.store.url)
    if store and spec.store.claim_name and path:
        volumes.append({"name": "store", "persistentVolumeClaim": {"claimName": spec.store.claim_name}})
        mounts.append({"name": "store", "mountPath": path})
    return volumes, mounts


def _probe(path: str, port: int, *, period_s: int, failures: int) -> Json:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


@dataclass(frozen=True)
class Pod:
    """What differs between the pods of the roles."""

    role: str
    image: str
    port: int
    config_maps: Mapping[str, str]  # directory -> ConfigMap
    env: Mapping[str, str]
    overrides: PodOverrides
    grace_s: int
    probes: Mapping[str, Json]
    labels: Mapping[str, str]
    store: bool = True
    gpus: int = 0
    affinity: Json | None = None
    tolerations: tuple[Json, ...] = ()
    annotations: Mapping[str, str] | None = None


def _pod_template(run: RunRef, spec: RLRunSpec, urls: Urls, pod: Pod, more: Json) -> Json:
    volumes, mounts = _volumes(pod.config_maps, spec, store=pod.store)
    container: Json = {
        "name": pod.role,
        "image": pod.overrides.image or pod.image,
        "command": ["motley", pod.role],
        "env": _env(run, spec, urls, pod.env, pod.overrides),
        "ports": [{"name": "http", "containerPort": pod.port, "protocol": "TCP"}],
        "volumeMounts": mounts,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **pod.probes,
    }
    if pod.gpus:
        container["resources"] = {
            "limits": {keys.GPU_RESOURCE: str(pod.gpus)},
            "requests": {keys.GPU_RESOURCE: str(pod.gpus)},
        }
    tolerations = [*pod.tolerations, *(item.to_json_dict() for item in pod.overrides.tolerations)]
    metadata: Json = {"labels": {**pod.overrides.labels, **pod.labels}}
    if pod.annotations:
        metadata["annotations"] = dict(pod.annotations)
    body: Json = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": pod.grace_s,
        "containers": [container],
        "volumes": volumes,
        **more,
    }
    if pod.overrides.node_selector:
        body["nodeSelector"] = dict(pod.overrides.node_selector)
    if pod.affinity:
        body["affinity"] = pod.affinity
    if tolerations:
        body["tolerations"] = tolerations
    return {"metadata": metadata, "spec": body}


def _deployment(
    run: RunRef,
    name: str,
    owned_by: Json,
    selector: dict[str, str],
    replicas: int,
    template: Json,
    strategy: Json,
    reads: str,
    settings: Settings,
    more_labels: Mapping[str, str] | None = None,
) -> Json:
    spec = {
        "replicas": replicas,
        "revisionHistoryLimit": 2,
        "progressDeadlineSeconds": 3600,  # a large model takes its time to load
        "selector": {"matchLabels": selector},
        "strategy": strategy,
        "template": template,
    }
    annotations = {keys.START_ANNOTATION: reads, keys.RENDERED_BY_ANNOTATION: rendering(settings)}
    labelled = {**selector, **(more_labels or {})}
    return _object(
        "apps/v1", "Deployment", run, name, owned_by, labelled, metadata={"annotations": annotations}, spec=spec
    )


# What pods read only at their start: a change of it replaces them.


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _set(part: Model | None) -> object:
    """What differs from the defaults, so that a field which a later version adds changes no digest."""
    return None if part is None else part.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def trainer_reads(spec: RLRunSpec) -> dict[str, str]:
    """Part of the spec -> digest, of what the gang reads at its start and a person may change."""
    parts = {
        "trainer": spec.trainer,
        "staleness": spec.staleness,
        "evaluation": spec.evaluation,
        "checkpoint": spec.checkpoint,
        "store": spec.store,
    }
    found = {name: _digest(_set(part)) for name, part in parts.items()}
    return {**found, "rollout.sessions": _digest(spec.rollout.sessions)}


def reads_text(reads: Mapping[str, str]) -> str:
    return ",".join(f"{name}={digest}" for name, digest in sorted(reads.items()))


def rollout_reads(spec: RLRunSpec, urls: Urls) -> str:
    rollout = spec.rollout
    return _digest([rollout.sessions, rollout.workers, _set(rollout.template), urls.router, urls.trainer])


def engine_hash(spec: SamplerGroupSpec) -> str:
    """Of what an engine reads only at its start."""
    read_at_start = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    for name in ("replicas", "minReplicas", "maxReplicas", "turnsPerEngineHour", "queueName"):
        read_at_start.pop(name, None)
    return _digest(read_at_start)


@lru_cache(maxsize=4)
def rendering(settings: Settings) -> str:
    """Of how this version of the operator, with its images, renders pods: one of each role and kind of GPU, hashed."""
    spec = RLRunSpec(
        model=ModelSource(source="/model", context_length=4096),
        tasks=Tasks(source="/tasks"),
        store=Store(url="file:///store", claim_name="store"),
        steps=1,
    )
    groups = [
        SamplerGroupSpec(
            gpu_type=gpu_type, precision=Precision.BF16, capacity_type=capacity_type, run_ref=GroupRunRef(name="run")
        )
        for gpu_type in GpuTypeName
        for capacity_type in CapacityType
    ]
    run, urls = RunRef("namespace", "run", "uid"), Urls("http://router", "http://trainer")
    templates = [
        router_template(run, spec, settings, urls),
        rollout_template(run, spec, settings, urls),
        *(sampler_template(run, spec, settings, urls, "run-group", group) for group in groups),
    ]
    return _digest(templates)


def adopted(manifest: Mapping[str, Any], live: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """As it should be applied over `live`: pods that another version of the operator rendered keep their template while they run
    and read the same at their start. An upgrade of the operator restarts nothing."""
    spec = (live or {}).get("spec", {})
    if live is None or not spec.get("replicas", 0) or "template" not in spec:
        return manifest
    wanted = manifest["metadata"]["annotations"]
    found = live["metadata"].get("annotations", {})
    rendered_by, reads = found.get(keys.RENDERED_BY_ANNOTATION), found.get(keys.START_ANNOTATION)
    if rendered_by == wanted[keys.RENDERED_BY_ANNOTATION] or reads not in (None, wanted[keys.START_ANNOTATION]):
        return manifest
    annotations = {
        keys.START_ANNOTATION: wanted[keys.START_ANNOTATION],
        keys.RENDERED_BY_ANNOTATION: rendered_by or "unknown",
    }
    return hashed(
        {
            **manifest,
            "metadata": {**manifest["metadata"], "annotations": annotations},
            "spec": {**manifest["spec"], "template": spec["template"]},
        }
    )


def router_template(run: RunRef, spec: RLRunSpec, settings: Settings, urls: Urls) -> Json:
    pod = Pod(
        role=keys.ROLE_ROUTER,
        image=settings.image_router,
        port=keys.ROUTER_PORT,
        config_maps={names.RUN_DIR: names.run_config(run.name), names.FLEET_DIR: names.fleet(run.name)},
        env={keys.ENV_FLEET: f"{names.FLEET_DIR}/{keys.FLEET_KEY}"},
        overrides=PodOverrides(),
        grace_s=10,
        probes={
            "readinessProbe": _probe("/health", keys.ROUTER_PORT, period_s=2, failures=3),
            "livenessProbe": _probe("/health", keys.ROUTER_PORT, period_s=10, failures=6),
        },
        labels=labels(run.name, keys.ROLE_ROUTER),
        store=False,
    )
    return _pod_template(run, spec, urls, pod, {})


def router_deployment(run: RunRef, spec: RLRunSpec, settings: Settings, urls: Urls, replicas: int) -> Json:
    """One router, replaced by Recreate: two at once would each place sessions."""
    return _deployment(
        run,
        names.router(run.name),
        run.owner(),
        labels(run.name, keys.ROLE_ROUTER),
        replicas,
        router_template(run, spec, settings, urls),
        {"type": "Recreate"},
        _digest([urls.router, urls.trainer]),
        settings,
    )


def rollout_template(run: RunRef, spec: RLRunSpec, settings: Settings, urls: Urls) -> Json:
    pod = Pod(
        role=keys.ROLE_ROLLOUT,
        image=settings.image_rollout,
        port=keys.ROLLOUT_PORT,
        config_maps={names.RUN_DIR: names.run_config(run.name)},
        env={},
        overrides=spec.rollout.template,
        grace_s=60,
        probes={
            "readinessProbe": _probe("/health", keys.ROLLOUT_PORT, period_s=5, failures=3),
            "livenessProbe": _probe("/health", keys.ROLLOUT_PORT, period_s=20, failures=6),
        },
        labels=labels(run.name, keys.ROLE_ROLLOUT),
        annotations={keys.START_ANNOTATION: rollout_reads(spec, urls)},
    )
    return _pod_template(run, spec, urls, pod, {})


def rollout_deployment(run: RunRef, spec: RLRunSpec, settings: Settings, urls: Urls, replicas: int) -> Json:
    return _deployment(
        run,
        names.rollout(run.name),
        run.owner(),
        labels(run.name, keys.ROLE_ROLLOUT),
        replicas,
        rollout_template(run, spec, settings, urls),
        {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        rollout_reads(spec, urls),
        settings,
    )


def sampler_template(
    run: RunRef, run_spec: RLRunSpec, settings: Settings, urls: Urls, group: str, spec: SamplerGroupSpec
) -> Json:
    priced = {keys.GPU_TYPE_LABEL: spec.gpu_type.value, keys.CAPACITY_TYPE_LABEL: spec.capacity_type.value}
    pod = Pod(
        role=keys.ROLE_SAMPLER,
        image=settings.image_sampler,
        port=keys.SAMPLER_PORT,
        config_maps={names.RUN_DIR: names.run_config(run.name), names.GROUP_DIR: names.group_config(group)},
        env={keys.ENV_GROUP: group, keys.ENV_GROUP_CONFIG: f"{names.GROUP_DIR}/{keys.GROUP_CONFIG_KEY}"},
        overrides=spec.template,
        grace_s=spec.drain_seconds + GRACE_MARGIN_S,
        probes={
            # Half an hour to come up: a large model is read and compiled first.
            "startupProbe": _probe("/motley/alive", keys.SAMPLER_PORT, period_s=2, failures=900),
            "readinessProbe": _probe("/health", keys.SAMPLER_PORT, period_s=2, failures=3),
            "livenessProbe": _probe("/motley/alive", keys.SAMPLER_PORT, period_s=10, failures=12),
        },
        labels={**labels(run.name, keys.ROLE_SAMPLER, group), **priced},
        gpus=spec.gpus_per_engine,
        affinity=placement.node_affinity(spec.gpu_type, spec.capacity_type, spec.precision),
        tolerations=tuple(placement.tolerations(spec.capacity_type)),
        annotations={keys.START_ANNOTATION: engine_hash(spec)},
    )
    return _pod_template(run, run_spec, urls, pod, {})


def sampler_deployment(
    run: RunRef,
    run_spec: RLRunSpec,
    settings: Settings,
    urls: Urls,
    group: str,
    group_uid: str,
    spec: SamplerGroupSpec,
    replicas: int,
) -> Json:
    """The group's engines. A roll-out takes one away before it adds one: GPUs are what there is least of."""
    return _deployment(
        run,
        group,
        owner("SamplerGroup", group, group_uid),
        labels(run.name, keys.ROLE_SAMPLER, group),
        replicas,
        sampler_template(run, run_spec, settings, urls, group, spec),
        {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        _digest([engine_hash(spec), urls.router, urls.trainer]),
        settings,
        {keys.QUEUE_LABEL: spec.queue_name} if spec.queue_name else {},
    )


def trainer_job(run: RunRef, spec: RLRunSpec, settings: Settings, urls: Urls, *, suspend: bool) -> Json:
    """The gang. restartPolicy Never: each attempt is a pod of its own, whose exit and last words stay to be read, that can land on
    another node, and that a podFailurePolicy (which demands Never) can tell from bad configuration and from an eviction."""
    trainer = spec.trainer
    selector = labels(run.name, keys.ROLE_TRAINER)
    priced = {keys.GPU_TYPE_LABEL: trainer.gpu_type.value, keys.CAPACITY_TYPE_LABEL: trainer.capacity_type.value}
    pod = Pod(
        role=keys.ROLE_TRAINER,
        image=settings.image_trainer,
        port=keys.TRAINER_PORT,
        config_maps={names.RUN_DIR: names.run_config(run.name), names.FLEET_DIR: names.fleet(run.name)},
        env={keys.ENV_FLEET: f"{names.FLEET_DIR}/{keys.FLEET_KEY}"},
        overrides=trainer.template,
        grace_s=TRAINER_GRACE_S,
        probes={"readinessProbe": _probe("/health", keys.TRAINER_PORT, period_s=2, failures=3)}
        if trainer.nodes == 1
        else {},
        labels={**selector, **priced},
        gpus=trainer.gpus_per_node,
        affinity=placement.node_affinity(trainer.gpu_type, trainer.capacity_type, Precision.BF16),
        tolerations=tuple(placement.tolerations(trainer.capacity_type)),
    )
    more: Json = {"restartPolicy": "Never"}
    if trainer.nodes > 1:
        more["subdomain"] = names.gang(run.name)
    job = {
        "completionMode": "Indexed",
        "completions": trainer.nodes,
        "parallelism": trainer.nodes,
        "backoffLimit": TRAINER_BACKOFF_LIMIT,
        "suspend": suspend,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": keys.ROLE_TRAINER, "operator": "In", "values": [keys.EXIT_CONFIG]},
                },
                # Of a preempted gang one pod is disrupted; the others save and leave with it.
                {
                    "action": "Ignore",
                    "onExitCodes": {
                        "containerName": keys.ROLE_TRAINER,
                        "operator": "In",
                        "values": [keys.EXIT_STOPPED],
                    },
                },
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": _pod_template(run, spec, urls, pod, more),
    }
    return _object(
        "batch/v1",
        "Job",
        run,
        names.trainer(run.name),
        run.owner(),
        selector,
        metadata={
            "annotations": {
                keys.STEPS_ANNOTATION: str(spec.steps),
                keys.START_ANNOTATION: reads_text(trainer_reads(spec)),
            }
        },
        spec=job,
    )
