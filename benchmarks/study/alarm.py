"""The operator's own guard over recorded runs: when it warned, when it would have paused, and whether that was in time. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from motley_api.records import StepRecord
from motley_api.resources.rlrun import Guard, GuardAction, GuardStatus
from motley_operator.planner import guard

from benchmarks.study.summary import collapse_step, fall_step, mean


@dataclass(frozen=True)
class Alarm:
    """Steps count from 1. warned, paused: the first step after which the guard held to that, None: never."""

    collapsed: int | None
    fell: int | None  # reward a third below its best
    warned: int | None
    paused: int | None
    why: str

    @property
    def delay_steps(self) -> int | None:
        """From the warning to the fall; negative: the warning came after it."""
        return None if self.fell is None or self.warned is None else self.fell - self.warned

    @property
    def in_time(self) -> bool | None:
        """None: there was nothing to catch."""
        return None if self.collapsed is None else self.warned is not None and self.warned < self.collapsed

    @property
    def false_alarm(self) -> bool:
        return self.collapsed is None and self.fell is None and self.paused is not None


def watch(steps: Sequence[StepRecord], config: Guard) -> Alarm:
    """The guard's verdict after every step, each from the status that the one before it left."""
    names = sorted({group.name for step in steps for group in step.groups})
    held: GuardStatus | None = None
    warned = paused = None
    why = ""
    for upto in range(1, len(steps) + 1):
        verdict = guard.judge(config, 1, held, guard.series(steps[:upto]), names)
        held = verdict.status
        entropy_only = verdict.message.startswith("entropy")
        if warned is None and held.action is not None and not entropy_only:
            warned, why = steps[upto - 1].step, verdict.message
        if paused is None and held.action is GuardAction.PAUSE:
            paused = steps[upto - 1].step
    rewards = [mean(step.reward) for step in steps]
    return Alarm(collapse_step(rewards), fall_step(rewards), warned, paused, why)
