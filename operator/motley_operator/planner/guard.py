"""Growth of the mismatch between samplers and trainer, and what to do about it.

What predicts a collapse is that the mismatch grows, not that it is large: a mixed fleet's KL is a few times a homogeneous one's
with the same result. So every signal is compared with its own early level, that of the first `earlySteps` steps after the
ramp: an asynchronous run starts without lag, and while its samples become as stale as they will be, the mismatch grows manyfold
whatever the policy does. A run that drifts from its start has no healthy early level; a ceiling on out-of-range tokens is for it.
A group answers for what it has grown beyond the rest of the fleet: what all of them do is the run's affair.

Steps in a row above a threshold (`patienceSteps` = p) lead to
    a group:  p: throttled (half its share)   2p: quarantined (no sessions, its samples are refused)
    the run:  p: warning                    1.5p: paused, unless single groups are to blame; then 4p, so that they go first
capped by `guard.action`. Quarantine and pause hold until a person edits the spec; a throttle ends when its group has been below
every threshold for 2p steps. Constants below were measured on recorded runs: see docs/guard.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from itertools import islice
from statistics import fmean

from motley_api import records
from motley_api.records import Ratio
from motley_api.resources.rlrun import Guard, GuardAction, GuardStatus

# A step belongs to the ramp while its samples are older, on average, than this part of the steps done before it (at a mean lag of 4: up
# to step 7), for at most so many steps.
RAMP_SHARE = 2 / 3
LONGEST_RAMP_STEPS = 32
# Samples that must stand behind a level. A few tokens hold most of a KL: from a handful of episodes it jumps threefold by itself.
# Steps with fewer are pooled: of a small group, or of a small batch.
SAMPLES_PER_LEVEL = 64

RESIDUE = 1e-9  # what subtracting sums may leave of nothing
NOTHING = Ratio()
ORDER = (GuardAction.WARN, GuardAction.THROTTLE, GuardAction.QUARANTINE, GuardAction.PAUSE)


@dataclass(frozen=True)
class Level:
    """What is watched, over one step or several in a row; 0/0 where nothing was measured."""

    step: int  # the last one
    samples: int | None = None  # trained on; None: not known, taken for enough
    kl: Ratio = NOTHING  # nats per token
    tail_ratio: Ratio = NOTHING
    out_of_range: Ratio = NOTHING  # share of tokens, 0..1
    entropy: Ratio = NOTHING
    format_errors: Ratio = NOTHING  # share of episodes that ended by them, 0..1
    lag: Ratio = NOTHING  # steps between the samples' weights and the step's

    @property
    def ramping(self) -> bool:
        lag = mean(self.lag)
        return lag is not None and lag > RAMP_SHARE * (self.step - 1)


REST = ("kl", "out_of_range", "lag")  # what of a group's fellows it is compared with
MEASURES = tuple(field.name for field in fields(Level) if field.name not in ("step", "samples"))


def pool(levels: Sequence[Level], measures: Sequence[str] = MEASURES) -> Level:
    """Several levels as one, in these measures. One whose sum is not a number counts as not measured."""

    def of(name: str) -> Ratio:
        known = [ratio for level in levels if not math.isnan((ratio := getattr(level, name)).num)]
        return Ratio(sum(ratio.num for ratio in known), sum(ratio.den for ratio in known))

    samples = [level.samples for level in levels if level.samples is not None]
    return Level(
        step=levels[-1].step,
        samples=sum(samples) if len(samples) == len(levels) else None,
        **{name: of(name) for name in measures},
    )


def enough(levels: Sequence[Level]) -> bool:
    """Whether they are enough for one level."""
    return (
        any(level.samples is None for level in levels)
        or sum(level.samples or 0 for level in levels) >= SAMPLES_PER_LEVEL
    )


@dataclass(frozen=True)
class Series:
    """Steps in ascending order, for the run and for each group."""

    run: tuple[Level, ...]
    groups: Mapping[str, tuple[Level, ...]]


def mean(ratio: Ratio) -> float | None:
    return ratio.num / ratio.den if ratio.den else None


def _of_group(record: records.StepRecord, group: records.GroupStep) -> Level:
    return Level(
        step=record.step,
        samples=group.samples,
        kl=group.kl,
        out_of_range=group.out_of_range,
        entropy=group.entropy,
        format_errors=Ratio(float(group.format_error_ends), float(group.samples + group.discarded)),
        lag=group.lag,
    )


def _of_run(record: records.StepRecord) -> Level:
    return Level(
        step=record.step,
        samples=sum(group.samples for group in record.groups) if record.groups else None,
        kl=record.kl,
        tail_ratio=record.tail_ratio,
        out_of_range=record.out_of_range,
        entropy=record.entropy,
        format_errors=record.format_error_ends,
        lag=record.lag,
    )


def series(steps: Iterable[records.StepRecord]) -> Series:
    """From the ledger. A step that was repeated counts once, as its newest attempt saw it."""
    newest: dict[int, records.StepRecord] = {}
    for record in steps:
        if record.step not in newest or newest[record.step].attempt <= record.attempt:
            newest[record.step] = record
    ordered = [newest[step] for step in sorted(newest)]
    groups: dict[str, list[Level]] = {}
    for record in ordered:
        for group in record.groups:
            groups.setdefault(group.name, []).append(_of_group(record, group))
    return Series(
        run=tuple(_of_run(record) for record in ordered),
        groups={name: tuple(levels) for name, levels in groups.items()},
    )


@dataclass(frozen=True)
class Thresholds:
    """spec.guard as numbers."""

    kl_growth: float
    tail_ratio: float
    out_of_range_growth: float
    format_errors: float
    entropy_fall: float
    kl_floor: float
    out_of_range_floor: float
    out_of_range_ceiling: float
    early_steps: int
    patience_steps: int

    @classmethod
    def of(cls, guard: Guard) -> Thresholds:
        return cls(
            kl_growth=float(guard.kl_growth),
            tail_ratio=float(guard.tail_ratio),
            out_of_range_growth=float(guard.out_of_range_growth),
            format_errors=guard.format_error_percent / 100,
            entropy_fall=float(guard.entropy_fall),
            kl_floor=float(guard.kl_floor),
            out_of_range_floor=float(guard.out_of_range_floor_percent) / 100,
            out_of_range_ceiling=float(guard.out_of_range_ceiling_percent) / 100,
            early_steps=guard.early_steps,
            patience_steps=guard.patience_steps,
        )


def early(levels: Sequence[Level], steps: int) -> Level | None:
    """The level that a series started from: of its first `steps` steps after the ramp, or of as many more as it takes for enough
    samples. None until then: without an early level nothing can have grown."""
    ramp = max((place for place, level in enumerate(levels[:LONGEST_RAMP_STEPS], 1) if level.ramping), default=0)
    last = LONGEST_RAMP_STEPS + steps  # all that the operator is sure to remember of a series' beginning
    for end in range(ramp + steps, min(len(levels), last) + 1):
        if enough(levels[ramp:end]) or end == last:
            return pool(levels[ramp:end])
    return None


def _grown(now: Ratio, before: Ratio, times: float, floor: float) -> bool:
    """At least `times` its early level, and at least `floor`; without a floor, nothing grows from 0."""
    value, start = mean(now), mean(before)
    return value is not None and start is not None and value >= max(floor, times * start) and max(floor, start) > 0


def alarms(level: Level, start: Level, limits: Thresholds) -> tuple[str, ...]:
    """What is above its threshold at one step, with the numbers."""
    found = []
    if _grown(level.kl, start.kl, limits.kl_growth, limits.kl_floor):
        found.append(f"KL {mean(level.kl):.4g} against {mean(start.kl):.4g} early (limit {limits.kl_growth:g}x)")
    # A tail ratio of 1 is no mismatch; below it the sampler has less mass in the tail, where it draws nothing then.
    if _grown(level.tail_ratio, start.tail_ratio, limits.tail_ratio, limits.tail_ratio):
        found.append(
            f"tail ratio {mean(level.tail_ratio):.4g} against {mean(start.tail_ratio):.4g} early"
            f" (limit {limits.tail_ratio:g}x)"
        )
    outside, before = mean(level.out_of_range), mean(start.out_of_range)
    if _grown(level.out_of_range, start.out_of_range, limits.out_of_range_growth, limits.out_of_range_floor):
        found.append(
            f"out-of-range tokens {100 * (outside or 0):.3g}% against {100 * (before or 0):.3g}% early"
            f" (limit {limits.out_of_range_growth:g}x)"
        )
    elif outside is not None and outside >= limits.out_of_range_ceiling:
        found.append(f"out-of-range tokens {100 * outside:.3g}% (limit {100 * limits.out_of_range_ceiling:g}%)")
    errors = mean(level.format_errors)
    if errors is not None and errors >= limits.format_errors:
        found.append(f"{100 * errors:.3g}% of episodes ended by format errors (limit {100 * limits.format_errors:g}%)")
    return tuple(found)


def beyond_the_rest(seen: Series, early_steps: int) -> Mapping[str, tuple[Level, ...]]:
    """Every group's levels, their KL and out-of-range share divided by what those of all other groups together have grown to since
    their early level, where they have grown. Time goes with the number of groups, not its square."""
    together: dict[int, list[Level]] = {}
    for levels in seen.groups.values():
        for level in levels:
            together.setdefault(level.step, []).append(_finite(level))
    sums = {step: pool(levels, REST) for step, levels in sorted(together.items())}
    found = {}
    for name, levels in seen.groups.items():
        own = {level.step: _finite(level) for level in levels}
        rest = {
            step: _without(whole, own.get(step))
            for step, whole in sums.items()
            if step not in own or len(together[step]) > 1
        }
        start = early(tuple(rest.values()), early_steps)
        found[name] = tuple(_beyond(level, rest.get(level.step), start) for level in levels)
    return found


def _finite(level: Level) -> Level:
    if math.isfinite(level.kl.num + level.out_of_range.num):
        return level
    kl, outside = (ratio if math.isfinite(ratio.num) else NOTHING for ratio in (level.kl, level.out_of_range))
    return replace(level, kl=kl, out_of_range=outside)


def _without(whole: Level, part: Level | None) -> Level:
    """`whole` is a sum that `part` is in; None: it is not."""
    if part is None:
        return whole

    def less(name: str) -> Ratio:
        all_of, one = getattr(whole, name), getattr(part, name)
        return Ratio(max(0.0, all_of.num - one.num), max(0.0, all_of.den - one.den))

    samples = None if whole.samples is None or part.samples is None else whole.samples - part.samples
    return Level(step=whole.step, samples=samples, **{name: less(name) for name in REST})


def _beyond(level: Level, rest: Level | None, start: Level | None) -> Level:
    if rest is None or start is None or level.step <= start.step:
        return level

    def less(own: Ratio, now: Ratio, before: Ratio) -> Ratio:
        value, early_value = mean(now), mean(before)
        if value is None or early_value is None or early_value < RESIDUE or value <= early_value:
            return own
        return Ratio(own.num * early_value / value, own.den)

    return replace(
        level,
        kl=less(level.kl, rest.kl, start.kl),
        out_of_range=less(level.out_of_range, rest.out_of_range, start.out_of_range),
    )


def _taken_off(whole: Sequence[Level], own: Sequence[Level]) -> str:
    """What the numbers of a group's alarm are short of, at its newest step."""
    if not own or not own[-1].kl.num > 0 or whole[-1].kl.num < 1.05 * own[-1].kl.num:
        return ""
    return f", the other groups' growth of {whole[-1].kl.num / own[-1].kl.num:.2g}x taken off"


@dataclass(frozen=True)
class Streak:
    """How long a series has been above its thresholds, up to its end; and below, likewise."""

    above: int = 0
    below: int = 0
    why: str = ""


def windows(levels: Sequence[Level]) -> Iterator[Level]:
    """From the newest step back: each step that has enough samples, or as many in a row, each counted once, as it takes for enough."""
    end = len(levels)
    for start in range(len(levels) - 1, -1, -1):
        if enough(levels[start:end]):
            yield pool(levels[start:end])
            end = start


def _counted(levels: Sequence[Level], start: Level, since_step: int) -> list[Level]:
    return [level for level in levels if level.step > max(start.step, since_step)]


def _last(levels: Sequence[Level], start: Level, limits: Thresholds, since_step: int) -> list[Level]:
    """The newest `patience_steps` levels, newest first; none until there are as many."""
    found = list(islice(windows(_counted(levels, start, since_step)), limits.patience_steps))
    return found if len(found) == limits.patience_steps else []


def entropy_fell(last: Sequence[Level], start: Level, limits: Thresholds) -> str:
    """Why there is a warning: entropy has been that low in all of the `last` levels."""
    now, before = [mean(level.entropy) for level in last], mean(start.entropy)
    if not now or not before:
        return ""
    if any(value is None or value * limits.entropy_fall > before for value in now):
        return ""
    return f"entropy {now[0]:.4g} against {before:.4g} early (limit 1/{limits.entropy_fall:g})"


def over_ceiling(last: Sequence[Level], limits: Thresholds) -> str:
    """Why there is a pause at once: the `last` levels together are out of range as no run that stays is, and each of them is at
    least half as far: one wild step is none."""
    outside = mean(pool(last).out_of_range) if last else None
    if outside is None or outside < limits.out_of_range_ceiling:
        return ""
    if any((mean(level.out_of_range) or 0.0) < limits.out_of_range_ceiling / 2 for level in last):
        return ""
    return f"out-of-range tokens {100 * outside:.3g}% over {len(last)} steps (limit {100 * limits.out_of_range_ceiling:g}%)"


def streak(levels: Sequence[Level], limits: Thresholds, since_step: int) -> Streak:
    """Steps in a row with the same verdict at the end of the series; early steps and steps up to `since_step` do not count."""
    start = early(levels, limits.early_steps)
    if start is None:
        return Streak()
    above = below = 0
    why: tuple[str, ...] = ()
    for level in windows(_counted(levels, start, since_step)):
        found = alarms(level, start, limits)
        if found and not below:
            above, why = above + 1, why or found
        elif not found and not above:
            below += 1
        else:
            break
    return Streak(above, below, "; ".join(why))


@dataclass(frozen=True)
class Verdict:
    """What the guard holds to now, and what is new about it."""

    status: GuardStatus
    news: tuple[tuple[str, str, str], ...] = ()  # (subject: "" for the run or a group's name, action or "Lifted", why)
    healthy: bool | None = None  # None: no early level yet
    message: str = ""

    def action(self, group: str) -> GuardAction | None:
        return next((held.action for held in self.status.groups if held.name == group), None)

    @property
    def paused(self) -> bool:
        return self.status.action is GuardAction.PAUSE


def _capped(action: GuardAction | None, cap: GuardAction) -> GuardAction | None:
    return None if action is None else ORDER[min(ORDER.index(action), ORDER.index(cap))]


def _stronger(one: GuardAction | None, other: GuardAction | None) -> GuardAction | None:
    found = [action for action in (one, other) if action is not None]
    return max(found, key=ORDER.index) if found else None


def _group_action(seen: Streak, held: GuardAction | None, guard: Guard) -> GuardAction | None:
    p = guard.patience_steps
    wanted = GuardAction.QUARANTINE if seen.above >= 2 * p else GuardAction.THROTTLE if seen.above >= p else None
    if held is GuardAction.QUARANTINE:
        return held
    if held is not None and wanted is None and seen.below >= 2 * p:
        return None
    return _stronger(held, _capped(wanted, guard.action))


def growth(levels: Sequence[Level], early_steps: int, last: int = 3) -> Decimal | None:
    """KL of the last steps over the early level."""
    start = early(levels, early_steps)
    recent = [value for level in levels[-last:] if (value := mean(level.kl)) is not None]
    if start is None or not (before := mean(start.kl)) or not recent:
        return None
    return Decimal(repr(fmean(recent) / before)).quantize(Decimal("0.01"))


def _fleet_is_sound(seen: Series, limits: Thresholds, since_step: int) -> bool:
    """Whether groups that are below every threshold, and not only beside the rest, drew at least half of the newest samples. One not
    judged yet is not cleared."""
    drawn = {name: levels[-1].samples or 0 for name, levels in seen.groups.items() if levels}
    cleared = [name for name in drawn if streak(seen.groups[name], limits, since_step).below]
    return 2 * sum(drawn[name] for name in cleared) >= sum(drawn.values()) > 0


def judge(
    guard: Guard,
    generation: int,
    held: GuardStatus | None,
    seen: Series,
    groups: Iterable[str],
    *,
    reached: int = 0,
) -> Verdict:
    """The guard's verdict after the newest step. A new generation of the spec frees what was held: a person has looked.

    reached: the newest step that status knows of. Nobody tells the steps of a run that rests, and they are no news when it goes on.
    """
    limits = Thresholds.of(guard)
    newest = max(reached, seen.run[-1].step if seen.run else 0)
    if held is None:
        held = GuardStatus(generation=generation)
    elif held.generation != generation:
        freed = held.action is GuardAction.PAUSE or bool(held.groups)
        held = GuardStatus(generation=generation, since_step=newest if freed else held.since_step)
    news: list[tuple[str, str, str]] = []

    before = {item.name: item.action for item in held.groups}
    now: dict[str, GuardAction] = {}
    blamed = False
    names = sorted(set(groups))
    own = beyond_the_rest(seen, guard.early_steps)
    for name in names:
        found = streak(own.get(name, ()), limits, held.since_step)
        action = _group_action(found, before.get(name), guard)
        if action is not None:
            now[name] = action
        blamed = blamed or found.above > 0
        if action is not before.get(name):
            news.append(
                (
                    name,
                    action.value if action else "Lifted",
                    found.why + _taken_off(seen.groups[name], own[name])
                    if found.why
                    else f"below its thresholds for {found.below} steps",
                )
            )

    whole = streak(seen.run, limits, held.since_step)
    p = guard.patience_steps
    groups_first = blamed and whole.above > 0 and _fleet_is_sound(seen, limits, held.since_step)
    pause_after = 4 * p if groups_first else math.ceil(1.5 * p)
    start = early(seen.run, limits.early_steps)
    last = _last(seen.run, start, limits, held.since_step) if start else []
    over = "" if groups_first else over_ceiling(last, limits)
    pause = over or whole.above >= pause_after
    wanted = GuardAction.PAUSE if pause else GuardAction.WARN if whole.above >= p else None
    fell = entropy_fell(last, start, limits) if start else ""
    wanted = _stronger(_capped(wanted, guard.action), GuardAction.WARN if fell else None)
    run_action = GuardAction.PAUSE if held.action is GuardAction.PAUSE else wanted
    why = "; ".join(part for part in (whole.why if whole.above >= p else over, fell) if part)
    if run_action is not held.action:
        news.append(("", run_action.value if run_action else "Lifted", why or "below every threshold"))
    return Verdict(
        status=GuardStatus(
            action=run_action,
            groups=[{"name": name, "action": action} for name, action in sorted(now.items())],  # type: ignore[misc]
            since_step=held.since_step,
            generation=generation,
        ),
        news=tuple(news),
        healthy=None if start is None else run_action is None and not now,
        message=why or ", ".join(f"{name}: {action.value}" for name, action in sorted(now.items())),
    )
