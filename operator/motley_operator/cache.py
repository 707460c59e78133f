"""What the watches told: the last known state of everything that is ours, and pods that went a short while ago.

A watch may miss deletions (after a 410 the framework lists anew and says nothing about what is gone), so after each start of a watch
the cache is compared with a list: see `reconcile_with`. What we write must come back by the watches: see `silence`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from motley_api import keys

from motley_operator.planner import scaling
from motley_operator.planner.model import PodView, parse_time

Json = dict[str, Any]
RunKey = tuple[str, str]  # namespace, RLRun name
Key = tuple[str, str, str]  # kind, namespace, name

TOMBSTONES_KEPT = timedelta(minutes=15)
RUN_KINDS = ("RLRun", "SamplerGroup")
CHILD_KINDS = ("ConfigMap", "Service", "Deployment", "Job")
WATCHED = (*RUN_KINDS, *CHILD_KINDS, "Pod")
LONGEST_SHARED = 64


def run_key(obj: Json) -> RunKey | None:
    """The run that an object belongs to."""
    metadata = obj["metadata"]
    if obj["kind"] == "RLRun":
        return metadata["namespace"], metadata["name"]
    if obj["kind"] == "SamplerGroup":
        name = obj.get("spec", {}).get("runRef", {}).get("name", "")
    else:
        name = (metadata.get("labels") or {}).get(keys.RUN_LABEL, "")
    return (metadata["namespace"], name) if name else None


def slim(obj: Json) -> Json:
    """Without what nobody here reads and everybody would pay memory for."""
    metadata = {key: value for key, value in obj["metadata"].items() if key != "managedFields"}
    if obj["kind"] in scaling.KINDS and (others := scaling.set_by_others(obj["metadata"])):
        metadata["replicasSetBy"] = others
    annotations = {
        key: value
        for key, value in (metadata.get("annotations") or {}).items()
        if key != "kubectl.kubernetes.io/last-applied-configuration"
    }
    if annotations:
        metadata["annotations"] = annotations
    else:
        metadata.pop("annotations", None)
    return {key: shared(value) for key, value in {**obj, "metadata": metadata}.items()}


def shared(value: Any) -> Any:
    """The same value with its keys and short strings held once in the process: thousands of objects repeat them all."""
    if isinstance(value, dict):
        return {sys.intern(key): shared(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shared(item) for item in value]
    return sys.intern(value) if type(value) is str and len(value) <= LONGEST_SHARED else value


def newer(one: str, other: str) -> bool:
    """Whether resourceVersion `one` is newer. Both are decimal numbers of one order, as the API promises since 1.35."""
    return (len(one), one) > (len(other), other)


def pod_view(pod: Json, now: datetime) -> PodView | None:
    """A pod as far as decisions need it; None for one that is of no run."""
    metadata, spec, status = pod["metadata"], pod.get("spec", {}), pod.get("status", {})
    labels = metadata.get("labels") or {}
    if keys.RUN_LABEL not in labels or keys.ROLE_LABEL not in labels:
        return None
    conditions = {item["type"]: item for item in status.get("conditions") or []}
    scheduled = conditions.get("PodScheduled", {})
    bound = parse_time(scheduled.get("lastTransitionTime")) if scheduled.get("status") == "True" else None
    if bound is None and spec.get("nodeName"):
        bound = parse_time(status.get("startTime")) or parse_time(metadata.get("creationTimestamp"))
    containers = status.get("containerStatuses") or []
    ended = [item["state"]["terminated"] for item in containers if item.get("state", {}).get("terminated")]
    before = [item["lastState"]["terminated"] for item in containers if item.get("lastState", {}).get("terminated")]
    last = (ended or before or [None])[-1]
    phase = status.get("phase", "Pending")
    finished = None
    if phase in ("Succeeded", "Failed"):
        ends = [moment for item in ended if (moment := parse_time(item.get("finishedAt"))) is not None]
        # An evicted pod has no container that ended: its last change of condition is the nearest there is.
        changes = [
            moment for item in conditions.values() if (moment := parse_time(item.get("lastTransitionTime"))) is not None
        ]
        finished = max(ends, default=None) or max(changes, default=None) or now
    waiting = next(
        (item["state"]["waiting"].get("reason", "") for item in containers if item.get("state", {}).get("waiting")), ""
    )
    limits = [
        item.get("resources", {}).get("limits", {}).get(keys.GPU_RESOURCE, 0) for item in spec.get("containers", [])
    ]
    # A queue (Kueue) holds pods back with a gate: they have no node either, until its quota allows them.
    waits = scheduled.get("reason") in ("Unschedulable", "SchedulingGated")
    unschedulable = scheduled.get("message") or scheduled["reason"] if waits else ""
    return PodView(
        namespace=sys.intern(metadata["namespace"]),
        name=metadata["name"],
        uid=metadata["uid"],
        run=sys.intern(labels[keys.RUN_LABEL]),
        role=sys.intern(labels[keys.ROLE_LABEL]),
        group=sys.intern(labels.get(keys.GROUP_LABEL, "")),
        gpu_type=sys.intern(labels.get(keys.GPU_TYPE_LABEL, "")),
        capacity_type=sys.intern(labels.get(keys.CAPACITY_TYPE_LABEL, "OnDemand")),
        gpus=sum(int(limit) for limit in limits),
        node=sys.intern(spec.get("nodeName", "")),
        phase=sys.intern(phase),
        ready=conditions.get("Ready", {}).get("status") == "True",
        created=parse_time(metadata.get("creationTimestamp")),
        scheduled=bound,
        finished=finished,
        deletion=parse_time(metadata.get("deletionTimestamp")),
        unschedulable=unschedulable,
        waiting=waiting if waiting not in ("ContainerCreating", "PodInitializing") else "",
        exit_code=last.get("exitCode") if last else None,
        message=(last.get("message") or last.get("reason") or "")[:2000] if last else "",
        restarts=sum(int(item.get("restartCount", 0)) for item in containers),
    )


class Cache:
    """Objects by kind, pods as views, and which run each change concerns."""

    def __init__(
        self, on_change: Callable[[RunKey], None], on_edit: Callable[[RunKey], None] = lambda owner: None
    ) -> None:
        """`on_edit` is told, too, when a run or group is new or its spec changed."""
        self._on_change, self._on_edit = on_change, on_edit
        self._objects: dict[Key, Json] = {}
        self._pods: dict[Key, tuple[PodView, str]] = {}  # view, resourceVersion
        self._runs: dict[RunKey, dict[str, set[Key]]] = {}  # by kind
        self._gone: dict[RunKey, dict[str, PodView]] = {}  # by uid, in the order in which they went
        self._versions: dict[RunKey, int] = {}
        self._numbers = itertools.count(1)
        self._heard: dict[str, str] = {}  # kind -> newest resourceVersion that a watch showed
        self._unheard: dict[str, tuple[str, datetime]] = {}  # kind -> what we wrote, and no watch has shown since then

    # Writing.

    def put(self, obj: Json, now: datetime) -> None:
        """An object as a watch, a list or an answer shows it; an older state than the known one is ignored."""
        metadata = obj["metadata"]
        key = (obj["kind"], metadata["namespace"], metadata["name"])
        owner = run_key(obj)
        edited = False
        if owner is None:
            return
        if obj["kind"] == "Pod":
            known_pod = self._pods.get(key)
            if known_pod is not None and not newer(metadata["resourceVersion"], known_pod[1]):
                return
            view = pod_view(obj, now)
            if view is None:
                return
            if known_pod is not None and known_pod[0].uid != view.uid:
                self._bury(owner, known_pod[0], now)
            changed = known_pod is None or known_pod[0] != view
            self._pods[key] = (view, metadata["resourceVersion"])
        else:
            known = self._objects.get(key)
            if known is not None and not newer(metadata["resourceVersion"], known["metadata"]["resourceVersion"]):
                return
            self._objects[key] = slim(obj)
            changed = True
            before = known["metadata"].get("generation") if known is not None else None
            edited = obj["kind"] in RUN_KINDS and (known is None or before != metadata.get("generation"))
        self._runs.setdefault(owner, {}).setdefault(obj["kind"], set()).add(key)
        if changed:
            self._changed(owner)
        if edited:
            self._on_edit(owner)

    def drop(self, obj: Json, now: datetime) -> None:
        """An object that a watch says is gone."""
        metadata = obj["metadata"]
        key = (obj["kind"], metadata["namespace"], metadata["name"])
        owner = run_key(obj)
        known = (
            self._pods[key][0].uid if key in self._pods else self._objects.get(key, {}).get("metadata", {}).get("uid")
        )
        if owner is None or known not in (None, metadata["uid"]):
            return  # another object of that name lives already
        if obj["kind"] == "Pod":
            self._pods.pop(key, None)
            view = pod_view(obj, now)
            if view is not None:
                self._bury(owner, view, now)
        else:
            self._objects.pop(key, None)
        self._forget(owner, key)
        self._changed(owner)
        if obj["kind"] in RUN_KINDS:
            self._on_edit(owner)

    def _changed(self, owner: RunKey) -> None:
        if owner in self._runs:
            self._versions[owner] = next(self._numbers)
        self._on_change(owner)

    def _bury(self, owner: RunKey, view: PodView, now: datetime) -> None:
        """Its last time still has to be paid for."""
        graves = self._gone.setdefault(owner, {})
        while graves:
            uid, oldest = next(iter(graves.items()))
            if oldest.finished is None or now - oldest.finished < TOMBSTONES_KEPT:
                break
            del graves[uid]
        graves[view.uid] = replace(view, gone=True, ready=False, finished=view.finished or now)

    def _forget(self, owner: RunKey, key: Key) -> None:
        kinds = self._runs.get(owner, {})
        kinds.get(key[0], set()).discard(key)
        if not any(kinds.values()):
            for known in (self._runs, self._gone, self._versions):
                known.pop(owner, None)

    def reconcile_with(
        self, kind: str, listed: Iterable[tuple[str, str, str]], listed_at: datetime, now: datetime
    ) -> int:
        """Forget what a full list of `kind` (namespace, name, uid) no longer has; how many. Objects made since the list stay."""
        there = set(listed)
        self._unheard.pop(kind, None)  # a watch that begins anew does not show what went meanwhile
        forgotten = 0
        for key in [key for key in (self._pods if kind == "Pod" else self._objects) if key[0] == kind]:
            if kind == "Pod":
                view = self._pods[key][0]
                uid, created, owner = view.uid, view.created, (view.namespace, view.run)
            else:
                metadata = self._objects[key]["metadata"]
                uid, created = metadata["uid"], parse_time(metadata["creationTimestamp"])
                owner = run_key(self._objects[key]) or ("", "")
            if (key[1], key[2], uid) in there or (created is not None and created >= listed_at - timedelta(seconds=2)):
                continue
            if kind == "Pod":
                self._bury(owner, self._pods.pop(key)[0], now)
            else:
                del self._objects[key]
            self._forget(owner, key)
            self._changed(owner)
            forgotten += 1
        return forgotten

    # Whether the watches live.

    def wrote(self, obj: Json, now: datetime) -> None:
        """The API server's answer to a write of ours, which the watch of its kind has to show as well."""
        kind, version = obj["kind"], obj["metadata"]["resourceVersion"]
        if kind in WATCHED and newer(version, self._heard.get(kind, "0")):
            self._unheard.setdefault(kind, (version, now))
        self.put(obj, now)

    def heard(self, kind: str, version: str) -> None:
        """A watch showed an object of that resourceVersion."""
        if newer(version, self._heard.get(kind, "0")):
            self._heard[kind] = version
        waiting = self._unheard.get(kind)
        if waiting is not None and not newer(waiting[0], self._heard[kind]):
            del self._unheard[kind]

    def silence(self, now: datetime) -> dict[str, timedelta]:
        """For how long the watch of each kind has owed us what we wrote; nothing for those that owe nothing."""
        return {kind: now - since for kind, (_, since) in self._unheard.items()}

    # Reading.

    def runs(self) -> Iterator[RunKey]:
        return iter(list(self._runs))

    def version(self, owner: RunKey) -> int:
        """Another number whenever something of the run has changed; 0 for one that is not there."""
        return self._versions.get(owner, 0)

    def get(self, kind: str, namespace: str, name: str) -> Json | None:
        return self._objects.get((kind, namespace, name))

    def of_run(self, owner: RunKey, kind: str) -> list[Json]:
        return [self._objects[key] for key in sorted(self._runs.get(owner, {}).get(kind, ())) if key in self._objects]

    def pods(self, owner: RunKey) -> tuple[PodView, ...]:
        keys_of = sorted(self._runs.get(owner, {}).get("Pod", ()))
        gone = self._gone.get(owner, {}).values()
        return (*(self._pods[key][0] for key in keys_of if key in self._pods), *gone)

    def size(self) -> int:
        return len(self._objects) + len(self._pods)


def utc_now() -> datetime:
    return datetime.now(UTC)
