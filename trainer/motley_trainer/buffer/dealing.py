"""Which prompts to hand out, and when a prompt's group of samples is done with. Pure."""

from __future__ import annotations

import enum
import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

SLACK_PROMPTS = 2  # handed out beyond what fills the sessions, so that none idles between two requests
MAX_DEALS = 3  # of one prompt; then its group is dropped
MIN_GRADED = 2  # a group of one has no mean to differ from


@dataclass(frozen=True)
class Limits:
    """batch_prompts: groups of one step. max_lag_steps: None for no cap."""

    batch_prompts: int
    samples_per_prompt: int
    max_lag_steps: int | None
    steps_total: int


def groups_wanted(limits: Limits, *, sessions: int, step: int) -> int:
    """How many train groups may be alive (handed out, or complete and waiting) at once.

    Enough to fill the sessions, plus one batch that waits for the trainer; never more than what the staleness cap allows
    (a group dealt last is trained after all others), and never more than the steps that are left can use.
    """
    wanted = math.ceil(sessions / limits.samples_per_prompt) + SLACK_PROMPTS + limits.batch_prompts
    if limits.max_lag_steps is not None:
        wanted = min(wanted, (limits.max_lag_steps + 1) * limits.batch_prompts)
    return max(0, min(wanted, (limits.steps_total - step) * limits.batch_prompts))


def task_of(number: int, tasks: Sequence[str], seed: int) -> str:
    """The `number`-th prompt of the run: every epoch goes through all tasks once, in an order of its own."""
    if not tasks:
        raise ValueError("tasks: there is none to deal")
    epoch, place = divmod(number, len(tasks))
    order = list(tasks)
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order[place]


def seed_of(run_seed: int, work: int) -> int:
    """31 bits, the same for the same run seed and work."""
    return int.from_bytes(hashlib.sha256(f"{run_seed}/{work}".encode()).digest()[:4], "little") & 0x7FFFFFFF


class Fate(enum.Enum):
    WAIT = "wait"
    COMPLETE = "complete"  # train on what is graded
    REDEAL = "redeal"
    DROP = "drop"


def fate_of_group(
    *, wanted: int, delivered: int, graded: int, deals: int, now_s: float, deadline_s: float, holder_gone: bool
) -> Fate:
    """What to do with a group: all in -> complete (or dropped without two graded samples); deadline passed -> train partial,
    deal the missing ones again, or drop; holder gone -> deal the missing ones again."""
    enough = graded >= MIN_GRADED
    if delivered >= wanted:
        return Fate.COMPLETE if enough else Fate.DROP
    if now_s >= deadline_s:
        if enough:
            return Fate.COMPLETE
        return Fate.REDEAL if deals < MAX_DEALS else Fate.DROP
    if holder_gone:
        return Fate.REDEAL if deals < MAX_DEALS else Fate.DROP
    return Fate.WAIT


def same_pod(worker: str, other: str) -> bool:
    """Worker names are '<pod>' or '<pod>/<incarnation>'; two incarnations of one pod cannot both be alive."""
    return worker.split("/", 1)[0] == other.split("/", 1)[0]
