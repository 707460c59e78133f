"""What a run's ledger comes to: levels of every step, and when reward fell. Pure."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from motley_api.records import Ratio, StepRecord

WINDOW_STEPS = 5  # rewards are averaged over so many steps: one step's 64 episodes share eight prompts
FALLEN_SHARE = 1 / 3


def mean(ratio: Ratio) -> float:
    return ratio.num / ratio.den if ratio.den else math.nan


def smoothed(values: Sequence[float], window: int = WINDOW_STEPS) -> list[float]:
    """Mean of each value and those up to `window` - 1 before it; NaN until there are that many."""
    return [math.nan if end < window else fmean(values[end - window : end]) for end in range(1, len(values) + 1)]


def fall_step(rewards: Sequence[float], *, window: int = WINDOW_STEPS, share: float = FALLEN_SHARE) -> int | None:
    """The first step (1, 2, ...) at which smoothed reward is `share` below the best it has been; None when it never is."""
    best = -math.inf
    for step, value in enumerate(smoothed(rewards, window), 1):
        if math.isnan(value):
            continue
        best = max(best, value)
        if value <= (1 - share) * best and best > 0:
            return step
    return None


def collapse_step(rewards: Sequence[float], *, window: int = WINDOW_STEPS, share: float = FALLEN_SHARE) -> int | None:
    """`fall_step` of a run that did not come back: its last smoothed reward is still that far below its best."""
    known = [value for value in smoothed(rewards, window) if not math.isnan(value)]
    if not known or known[-1] > (1 - share) * max(known):
        return None
    return fall_step(rewards, window=window, share=share)


def caught(before_fall: Sequence[float], steady: Sequence[float], allowed: int) -> int:
    """How many collapsing runs exceeded, before their fall, the lowest limit that at most `allowed` steady runs exceed. Arguments: each
    run's largest value. Errors: ValueError unless there are more than `allowed` steady runs."""
    if not 0 <= allowed < len(steady):
        raise ValueError(f"allowed must be 0 to {len(steady) - 1}, got {allowed}")
    limit = sorted(steady, reverse=True)[allowed]
    return sum(value > limit for value in before_fall)


@dataclass(frozen=True)
class Summary:
    """One arm with one seed. Means over the last WINDOW_STEPS steps unless they say otherwise."""

    steps: int
    final_reward: float
    best_reward: float  # of any WINDOW_STEPS steps in a row
    fell: int | None
    collapsed: int | None
    kl: float
    largest_kl: float  # of any WINDOW_STEPS steps in a row, as are the next two
    kl_growth: float  # largest_kl over the guard's early level
    largest_out_of_range: float
    entropy: float
    grad_norm: float
    largest_grad_norm: float
    format_errors: float


def _largest(values: Sequence[float]) -> float:
    """Of the smoothed values; of the values themselves when there are fewer than a window of them."""
    return max((value for value in smoothed(values) if not math.isnan(value)), default=max(values))


def summarise(steps: Sequence[StepRecord], early_kl: float | None) -> Summary:
    """Errors: ValueError for an empty ledger."""
    if not steps:
        raise ValueError("steps: want at least one record")
    rewards = [mean(step.reward) for step in steps]
    last = steps[-WINDOW_STEPS:]
    largest_kl = _largest([mean(step.kl) for step in steps])
    return Summary(
        steps=len(steps),
        final_reward=fmean(rewards[-WINDOW_STEPS:]),
        best_reward=_largest(rewards),
        fell=fall_step(rewards),
        collapsed=collapse_step(rewards),
        kl=fmean(mean(step.kl) for step in last),
        largest_kl=largest_kl,
        kl_growth=largest_kl / early_kl if early_kl else math.nan,
        largest_out_of_range=_largest([mean(step.out_of_range) for step in steps]),
        entropy=fmean(mean(step.entropy) for step in last),
        grad_norm=fmean(step.grad_norm for step in last),
        largest_grad_norm=max(step.grad_norm for step in steps),
        format_errors=fmean(mean(step.format_error_ends) for step in last),
    )


def group_shares(steps: Sequence[StepRecord]) -> Mapping[str, tuple[float, float, float]]:
    """By group over all steps: (its part of trained tokens, its part of out-of-range tokens, out-of-range share of its own)."""
    sums: dict[str, tuple[float, float]] = {}
    for step in steps:
        for group in step.groups:
            outside, tokens = sums.get(group.name, (0.0, 0.0))
            sums[group.name] = (outside + group.out_of_range.num, tokens + group.out_of_range.den)
    outside_all = sum(outside for outside, _ in sums.values())
    tokens_all = sum(tokens for _, tokens in sums.values())
    return {
        name: (
            tokens / tokens_all if tokens_all else math.nan,
            outside / outside_all if outside_all else math.nan,
            outside / tokens if tokens else math.nan,
        )
        for name, (outside, tokens) in sorted(sums.items())
    }


def to_csv(steps: Sequence[StepRecord]) -> str:
    """One row a step; the groups' KL and out-of-range share in columns of their own."""
    groups = sorted({group.name for step in steps for group in step.groups})
    names = [
        "step",
        "reward",
        "kl",
        "outOfRange",
        "entropy",
        "gradNorm",
        "formatErrorEnds",
        "lag",
        "essRatio",
        "trainedTokens",
    ]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names + [f"kl/{g}" for g in groups] + [f"outOfRange/{g}" for g in groups])
    for step in steps:
        by_name = {group.name: group for group in step.groups}
        values = [mean(r) for r in (step.reward, step.kl, step.out_of_range, step.entropy)]
        values += [
            step.grad_norm,
            mean(step.format_error_ends),
            mean(step.lag),
            step.metrics.get("ess_ratio", math.nan),
        ]
        values.append(float(sum(group.trained_tokens for group in step.groups)))
        values += [mean(by_name[g].kl) if g in by_name else math.nan for g in groups]
        values += [mean(by_name[g].out_of_range) if g in by_name else math.nan for g in groups]
        writer.writerow([step.step, *(f"{value:.4g}" for value in values)])
    return out.getvalue()
