"""What rank 0 gets for one step (msgpack over the pod's own socket)."""

from __future__ import annotations

import msgspec
from motley_api.records import StepRecord, Trajectory


class GroupTally(msgspec.Struct, frozen=True, kw_only=True):
    """What a sampler group delivered since the last batch and the step will not train on."""

    name: str
    view: str
    discarded: int = 0
    stale: int = 0  # of discarded: too old
    infrastructure_failures: int = 0


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Trajectories of one step, graded, in a fixed order. Prompts are told apart by Trajectory.work."""

    step: int  # the step to train: 1, 2, ...
    waited_s: float
    replayed: bool  # the step was trained before, in an attempt that did not survive
    trajectories: list[Trajectory]
    tallies: list[GroupTally] = []


class Resume(msgspec.Struct, frozen=True, kw_only=True):
    """POST /local/resume: what the gang starts from."""

    step: int  # of the checkpoint; 0 for none
    durable: int  # newest version a checkpoint covers; -1 for none


class Resumed(msgspec.Struct, frozen=True, kw_only=True):
    attempt: int


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """POST /local/commit: a step is done and its weights are published in every view."""

    record: StepRecord


class Durable(msgspec.Struct, frozen=True, kw_only=True):
    """POST /local/durable: a checkpoint is complete. Batches up to `oldest_kept` are no longer needed for a replay."""

    step: int
    oldest_kept: int


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """POST /local/notice: what status should say."""

    condition: str = ""
    message: str = ""
    weights_version: int | None = None
    finished: bool = False
