"""The operator's own guard over recorded runs: when it warned, when it would have paused, whether that was in time, and whether its
thresholds hold on seeds that they were not chosen on. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from motley_api.records import StepRecord
from motley_api.resources.rlrun import Guard, GuardAction, GuardStatus
from motley_operator.planner import guard

from benchmarks.study.summary import collapse_step, fall_step, mean


@dataclass(frozen=True)
class Alarm:
    """Steps count from 1. warned, paused: the first step after which the guard held to that, None: never.

    Groups that were throttled or quarantined count up to the pause: after it there is no more run."""

    collapsed: int | None
    fell: int | None  # reward a third below its best
    warned: int | None
    paused: int | None
    why: str  # of the warning
    entropy_warned: int | None = None  # a warning of its own, not counted as the above
    throttled: int = 0
    quarantined: int = 0

    @property
    def warned_in_time(self) -> bool | None:
        """None: there was nothing to catch."""
        return None if self.collapsed is None else self.warned is not None and self.warned < self.collapsed

    @property
    def paused_in_time(self) -> bool | None:
        return None if self.collapsed is None else self.paused is not None and self.paused < self.collapsed

    @property
    def steady(self) -> bool:
        """Reward never fell by a third: any alarm was false."""
        return self.collapsed is None and self.fell is None


def watch(steps: Sequence[StepRecord], config: Guard) -> Alarm:
    """The guard's verdict after every step, each from the status that the one before it left."""
    names = sorted({group.name for step in steps for group in step.groups})
    whole = guard.series(steps)
    held: GuardStatus | None = None
    warned = paused = entropy_warned = None
    why = ""
    actions: list[str] = []
    for level in whole.run:
        verdict = guard.judge(config, 1, held, _upto(whole, level.step), names)
        held = verdict.status
        actions += [action for subject, action, _ in verdict.news if subject]
        entropy_only = verdict.message.startswith("entropy")
        if entropy_only and entropy_warned is None:
            entropy_warned = level.step
        if warned is None and held.action is not None and not entropy_only:
            warned, why = level.step, verdict.message
        if held.action is GuardAction.PAUSE:
            paused = level.step
            break
    rewards = [mean(step.reward) for step in steps]
    return Alarm(
        collapsed=collapse_step(rewards),
        fell=fall_step(rewards),
        warned=warned,
        paused=paused,
        why=why,
        entropy_warned=entropy_warned,
        throttled=actions.count(GuardAction.THROTTLE.value),
        quarantined=actions.count(GuardAction.QUARANTINE.value),
    )


def _upto(whole: guard.Series, step: int) -> guard.Series:
    def cut(levels: Sequence[guard.Level]) -> tuple[guard.Level, ...]:
        return tuple(level for level in levels if level.step <= step)

    return guard.Series(cut(whole.run), {name: cut(levels) for name, levels in whole.groups.items()})


@dataclass(frozen=True)
class Figures:
    """Over several runs. lead: steps from the pause to the fall, of the collapses that were paused."""

    collapsing: int
    warned_in_time: int
    paused_in_time: int
    median_lead_steps: float
    dipping: int  # fell by a third and came back
    steady: int
    false_warnings: int
    false_pauses: int
    false_entropy_warnings: int
    false_throttles: int  # groups, not runs
    false_quarantines: int

    @property
    def errors(self) -> tuple[int, int]:
        """What thresholds are chosen by: collapses missed and steady runs paused; then steady runs warned of."""
        return self.collapsing - self.paused_in_time + self.false_pauses, self.false_warnings


def figures(alarms: Sequence[Alarm]) -> Figures:
    collapsing = [alarm for alarm in alarms if alarm.collapsed is not None]
    steady = [alarm for alarm in alarms if alarm.steady]
    leads = [alarm.collapsed - alarm.paused for alarm in collapsing if alarm.collapsed and alarm.paused]
    return Figures(
        collapsing=len(collapsing),
        warned_in_time=sum(bool(alarm.warned_in_time) for alarm in collapsing),
        paused_in_time=sum(bool(alarm.paused_in_time) for alarm in collapsing),
        median_lead_steps=median(leads) if leads else math.nan,
        dipping=len(alarms) - len(collapsing) - len(steady),
        steady=len(steady),
        false_warnings=sum(alarm.warned is not None for alarm in steady),
        false_pauses=sum(alarm.paused is not None for alarm in steady),
        false_entropy_warnings=sum(alarm.entropy_warned is not None for alarm in steady),
        false_throttles=sum(alarm.throttled for alarm in steady),
        false_quarantines=sum(alarm.quarantined for alarm in steady),
    )


CANDIDATES = tuple(
    Guard(kl_growth=growth, out_of_range_ceiling_percent=ceiling, patience_steps=patience)
    for growth in ("3", "4", "5")
    for ceiling in ("4.5", "5.5", "6.5", "100")
    for patience in (1, 2, 3)
)


@dataclass(frozen=True)
class HeldOut:
    """Thresholds that did best on all other seeds, and what they did on this one."""

    seed: int
    chosen: Guard
    found: Figures


def leave_one_seed_out(alarms: Mapping[int, Mapping[int, Sequence[Alarm]]]) -> list[HeldOut]:
    """alarms: by candidate (its place in CANDIDATES), by seed. Ties go to the candidate nearest to the defaults, then the first."""
    default = Guard()

    def distance(place: int) -> tuple[float, int]:
        one = CANDIDATES[place]
        return (
            abs(math.log(float(one.kl_growth) / float(default.kl_growth)))
            + abs(math.log(float(one.out_of_range_ceiling_percent) / float(default.out_of_range_ceiling_percent)))
            + abs(math.log(one.patience_steps / default.patience_steps)),
            place,
        )

    found = []
    for seed in sorted({seed for by_seed in alarms.values() for seed in by_seed}):

        def errors(place: int, held_out: int = seed) -> tuple[tuple[int, int], tuple[float, int]]:
            rest = [alarm for other, members in alarms[place].items() if other != held_out for alarm in members]
            return figures(rest).errors, distance(place)

        best = min(alarms, key=errors)
        found.append(HeldOut(seed, CANDIDATES[best], figures(alarms[best][seed])))
    return found
