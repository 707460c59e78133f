"""What the planner sees, and what it decides.

A Snapshot holds everything known of one RLRun at one moment; a Plan is what should be done about it. Both are values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from motley_api import keys, records
from motley_api.resources import RLRunSpec, RLRunStatus, SamplerGroupSpec, SamplerGroupStatus

from motley_operator.planner.capacity import Load

Object = Mapping[str, Any]  # a Kubernetes object as JSON


@dataclass(frozen=True)
class PodView:
    """One pod of ours, as far as decisions need it. A pod that is gone stays for a while, with `finished` set."""

    namespace: str
    name: str
    uid: str
    run: str
    role: str
    group: str = ""
    gpu_type: str = ""
    capacity_type: str = "OnDemand"
    gpus: int = 0
    node: str = ""
    phase: str = "Pending"
    ready: bool = False
    created: datetime | None = None
    scheduled: datetime | None = None  # bound to a node: from here on it costs
    finished: datetime | None = None  # its containers ended, or the pod is gone
    deletion: datetime | None = None  # metadata.deletionTimestamp: when it should be gone, grace included
    gone: bool = False
    unschedulable: str = ""  # the scheduler's message
    waiting: str = ""  # reason of a container that cannot start
    exit_code: int | None = None  # of the last container that ended
    message: str = ""  # its last words
    restarts: int = 0

    @property
    def exists(self) -> bool:
        return not self.gone

    @property
    def serves(self) -> bool:
        """Counts for capacity: ready, and not on its way out."""
        return self.ready and self.deletion is None and not self.gone

    @property
    def holds(self) -> bool:
        """Holds its GPUs: bound, not finished."""
        return not self.gone and self.finished is None

    def held_until(self, now: datetime) -> datetime:
        """End of the time it costs. A pod past its deletion time sits on a lost node: it stopped costing then."""
        ends = [moment for moment in (self.finished, self.deletion, now) if moment is not None]
        return min(ends)


@dataclass(frozen=True)
class NodeView:
    """One node: labels, and GPUs that could be had on it."""

    name: str
    labels: Mapping[str, str]
    allocatable_gpus: int
    held_gpus: int | None = 0  # by pods of anybody; None: not known
    ready: bool = True
    taints: tuple[tuple[str, str, str], ...] = ()  # key, value, effect
    dra_gpus: tuple[tuple[str, int], ...] = ()  # product name as a ResourceSlice has it, whole GPUs

    @property
    def free_gpus(self) -> int:
        """What is not known is not free."""
        if not self.ready or self.held_gpus is None:
            return 0
        return max(0, self.allocatable_gpus - self.held_gpus)


@dataclass(frozen=True)
class GroupView:
    """One SamplerGroup of the run."""

    name: str
    uid: str
    generation: int
    spec: SamplerGroupSpec
    status: SamplerGroupStatus
    inline: bool  # declared in the run's samplerGroups
    owned: bool  # has the run among its owners
    deleting: bool = False
    error: str = ""  # the spec cannot be read


@dataclass(frozen=True)
class ReplicasWrite:
    """Somebody else changed spec.replicas of a group or of its Deployment."""

    kind: str
    manager: str  # with the subresource it wrote through
    time: datetime
    replicas: int


@dataclass(frozen=True)
class Settings:
    """What the operator was started with."""

    image_sampler: str = "motley-sampler:dev"
    image_trainer: str = "motley-trainer:dev"
    image_rollout: str = "motley-rollout:dev"
    image_router: str = "motley-rollout:dev"


@dataclass(frozen=True)
class Snapshot:
    """All that is known of one run."""

    namespace: str
    name: str
    uid: str
    generation: int
    deleting: bool
    spec: RLRunSpec
    raw_spec: Object
    status: RLRunStatus
    groups: tuple[GroupView, ...] = ()
    removed_groups: tuple[str, ...] = ()  # SamplerGroups that the run made and no longer lists
    children: Mapping[tuple[str, str], Object] = field(default_factory=dict)  # (kind, name) -> live object
    pods: tuple[PodView, ...] = ()
    nodes: tuple[NodeView, ...] | None = None  # None: not looked at, or not allowed to
    nodes_error: str = ""  # why they could not be looked at
    resize_due: bool = True  # False: looked at a short while ago, and nothing was to be changed
    has_token: bool = False
    fresh_token: str = ""  # random; becomes the token of a run without one
    router: records.RouterStatus | None = None
    router_error: str = ""
    loads: tuple[Load, ...] = ()  # of the last minutes, by group and time
    trainer: records.TrainerStatus | None = None
    trainer_error: str = ""
    steps: tuple[
        records.StepRecord, ...
    ] = ()  # the ledger as far as it is remembered: first steps and last steps, ascending
    errors: Mapping[tuple[str, str], str] = field(
        default_factory=dict
    )  # (kind, name) -> what the API server said last time
    replicas_writes: Mapping[tuple[str, str], tuple[ReplicasWrite, ...]] = field(default_factory=dict)  # of others
    failed_creates: Mapping[tuple[str, str], str] = field(default_factory=dict)  # quota and the like, from events
    settings: Settings = Settings()
    created: datetime | None = None  # the RLRun; earlier steps in its store are those of a run that it goes on with

    def child(self, kind: str, name: str) -> Object | None:
        return self.children.get((kind, name))


@dataclass(frozen=True)
class Apply:
    """Server-side apply of one object."""

    manifest: Object
    why: str = ""


@dataclass(frozen=True)
class Create:
    """Create once; an object of that name that exists is left as it is."""

    manifest: Object


@dataclass(frozen=True)
class Patch:
    """Merge patch of one object, for what server-side apply cannot say: one field of a Job whose template is immutable."""

    api_version: str
    kind: str
    name: str
    body: Object
    why: str = ""


@dataclass(frozen=True)
class Delete:
    api_version: str
    kind: str
    name: str
    uid: str
    why: str = ""


@dataclass(frozen=True)
class PushFleet:
    """PUT /v1/fleet: the ConfigMap reaches a pod's files late, this at once."""

    role: str
    url: str
    fleet: records.Fleet


Action = Apply | Create | Patch | Delete | PushFleet


@dataclass(frozen=True)
class EventOut:
    """A Kubernetes Event on the run or on one of its groups."""

    kind: str
    name: str
    uid: str
    type: str  # Normal | Warning
    reason: str
    message: str


@dataclass(frozen=True)
class Plan:
    actions: tuple[Action, ...] = ()
    status: RLRunStatus | None = None  # as it should read; None: leave it
    group_statuses: Mapping[str, SamplerGroupStatus] = field(default_factory=dict)
    events: tuple[EventOut, ...] = ()
    active: bool = False  # something moves by itself: look again soon


def parse_time(text: str | None) -> datetime | None:
    """RFC 3339 as Kubernetes writes it, with or without fractions."""
    return datetime.fromisoformat(text) if text else None


def format_time(moment: datetime) -> str:
    """RFC 3339 in UTC, whole seconds: metav1.Time."""
    return moment.astimezone(UTC).replace(microsecond=0).strftime("%Y-%m-%dT%H:%M:%SZ")


def microseconds(span: timedelta) -> int:
    return (span.days * 86_400 + span.seconds) * 1_000_000 + span.microseconds


def view_of(spec: SamplerGroupSpec) -> str:
    return keys.VIEW_OF_PRECISION[spec.precision.value]
