"""The page's tables, in Markdown. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from motley_api.records import StepRecord

from benchmarks.study.alarm import Alarm, HeldOut, figures
from benchmarks.study.summary import Summary, caught, group_shares, mean, smoothed

# What the study saw on the mixed fleet (its own arms), in its own units: pass@1 on its main suite.
STUDY = {
    "grpo": "collapses: 0.414 at step 40, 0.256 at 120; 62% format errors",
    "grpo_mis": "0.811 at 120, entropy collapse, 0.734 at 180, 68% format errors",
    "grpo_topp": "0.794 at 40, 0.483 at 80",
    "sc": "tail ratio 1.2 to 52 from step 33; 0.402 at 60",
    "sc_mis": "stable: 0.847 at 180",
    "sc_mis_topp": "stable, lowest KL: 0.832 at 200",
    "homogeneous_grpo": "still collapses: 0.442 at 120",
    "homogeneous_sc_mis_topp": "stable: 0.839 at 180",
}


@dataclass(frozen=True)
class Run:
    arm: str
    seed: int
    steps: Sequence[StepRecord]
    summary: Summary
    alarm: Alarm

    @property
    def mixed(self) -> bool:
        return not self.arm.startswith("homogeneous")


def by_arm(runs: Sequence[Run]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.arm, []).append(run)
    return found


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _seeds(runs: Sequence[Run], of: Callable[[Run], str]) -> str:
    return " / ".join(of(run) for run in runs)


def _step(step: int | None) -> str:
    return "-" if step is None else str(step)


def outcomes(runs: Sequence[Run]) -> str:
    """Seeds side by side, never only their mean."""
    rows = [
        [
            f"`{arm}`",
            _seeds(members, lambda r: f"{r.summary.final_reward:.2f}"),
            f"**{fmean(r.summary.final_reward for r in members):.2f}**",
            _seeds(members, lambda r: f"{r.summary.best_reward:.2f}"),
            _seeds(members, lambda r: _step(r.summary.collapsed)),
            _seeds(members, lambda r: f"{100 * r.summary.format_errors:.0f}"),
            STUDY[arm],
        ]
        for arm, members in by_arm(runs).items()
    ]
    seeds = " / ".join(str(seed) for seed in sorted({run.seed for run in runs}))
    return table(
        [
            f"arm (seeds {seeds})",
            "final reward",
            "mean",
            "best reward",
            "collapse at step",
            "episodes ended by format errors, %",
            "the study, at its scale",
        ],
        rows,
    )


def mismatch(runs: Sequence[Run]) -> str:
    rows = [
        [
            f"`{arm}`",
            _seeds(members, lambda r: f"{r.summary.largest_kl:.2f}"),
            _seeds(members, lambda r: f"{r.summary.kl_growth:.1f}"),
            _seeds(members, lambda r: f"{100 * r.summary.largest_out_of_range:.1f}"),
            _seeds(members, lambda r: f"{r.summary.largest_grad_norm:.2f}"),
            _seeds(members, lambda r: f"{r.summary.entropy:.2f}"),
        ]
        for arm, members in by_arm(runs).items()
    ]
    header = [
        "arm",
        "largest KL, nats",
        "KL growth, x early",
        "largest share outside [0.5, 5], %",
        "largest gradient norm",
        "final entropy, nats",
    ]
    return table(header, rows)


def group_table(runs: Sequence[Run]) -> str:
    """By group: mismatch of step 1, where there is no lag and so nothing but precision, and out-of-range tokens of runs that stayed whole
    (a collapsed policy has no typical token). Arms without top-p alone: with it a step's KL is over fewer candidates."""
    plain = [run for run in runs if run.mixed and not run.arm.endswith("topp")]
    whole = [run for run in plain if run.summary.collapsed is None]
    first = [run.steps[0] for run in plain if run.arm == "grpo"]
    control = [run.steps[0] for run in runs if run.arm == "homogeneous_grpo"]
    if not whole or not first or not control:
        return "Wants runs of `grpo` and `homogeneous_grpo`, and one without top-p that did not collapse."
    shares = group_shares([step for run in whole for step in run.steps])
    alone = first_step_kl(first)
    rows = [
        [f"`{name}`", f"{1e3 * alone[name]:.2f}", f"{100 * tokens:.1f}", f"{100 * outside:.1f}", f"{100 * own:.2f}"]
        for name, (tokens, outside, own) in shares.items()
    ]
    fleet, single = _mean_kl(first), _mean_kl(control)
    header = [
        "group",
        "KL at step 1, 10⁻³ nats",
        "of trained tokens, %",
        "of out-of-range tokens, %",
        "its own tokens out of range, %",
    ]
    return (
        table(header, rows)
        + f"\n\nStep 1 is without lag: {len(first)} seeds, mixed fleet {1e3 * fleet:.2f}, homogeneous {1e3 * single:.2f} x 10⁻³ nats"
        f" ({fleet / single:.1f}x). The other columns: the {len(whole)} runs without top-p on the mixed fleet that did not collapse,"
        " all steps."
    )


def first_step_kl(steps: Sequence[StepRecord]) -> Mapping[str, float]:
    """By group, over its tokens of all these steps."""
    sums: dict[str, tuple[float, float]] = {}
    for step in steps:
        for group in step.groups:
            num, den = sums.get(group.name, (0.0, 0.0))
            sums[group.name] = (num + group.kl.num, den + group.kl.den)
    return {name: num / den for name, (num, den) in sorted(sums.items())}


def _mean_kl(steps: Sequence[StepRecord]) -> float:
    return sum(step.kl.num for step in steps) / sum(step.kl.den for step in steps)


def alarm_table(runs: Sequence[Run]) -> str:
    """Every run whose reward fell or that the guard acted on."""
    rows = []
    for run in runs:
        a = run.alarm
        if a.steady and a.warned is None and not a.throttled:
            continue
        fate = "collapse" if a.collapsed else "dip" if a.fell else "steady"
        groups = f"{a.throttled} / {a.quarantined}" if run.mixed else "-"
        rows.append(
            [
                f"`{run.arm}` {run.seed}",
                fate,
                _step(a.fell),
                _step(a.warned),
                _step(a.paused),
                groups,
                a.why.split(";")[0] or "-",
            ]
        )
    header = [
        "run",
        "fate",
        "reward a third below its best at",
        "warned at",
        "paused at",
        "groups throttled / quarantined until then",
        "why",
    ]
    return table(header, rows)


def figures_table(rows: Mapping[str, Sequence[Alarm]]) -> str:
    cells = []
    for name, alarms in rows.items():
        f = figures(alarms)
        cells.append(
            [
                name,
                f"{f.paused_in_time} of {f.collapsing}",
                f"{f.warned_in_time} of {f.collapsing}",
                f"{f.median_lead_steps:g}" if f.collapsing else "-",
                f"{f.false_pauses} of {f.steady}",
                f"{f.false_warnings} of {f.steady}",
                f"{f.false_entropy_warnings} of {f.steady}",
                f"{f.false_throttles} / {f.false_quarantines}",
                str(f.dipping),
            ]
        )
    header = [
        "runs",
        "collapses paused before the fall",
        "warned before it",
        "pause to fall, median steps",
        "steady runs paused",
        "warned",
        "warned of entropy",
        "their groups throttled / quarantined",
        "dips (either is right)",
    ]
    return table(header, cells)


# The guard judges from the end of its early level on, at the study's lags from step 13.
EARLY, JUDGED_FROM = slice(7, 12), 13
SEPARATION_WINDOW_STEPS = 2
SIGNALS: Mapping[str, Callable[[StepRecord], float]] = {
    "KL": lambda s: mean(s.kl),
    "tokens out of range": lambda s: mean(s.out_of_range),
    "gradient norm": lambda s: s.grad_norm,
    "entropy": lambda s: mean(s.entropy),
}


def _largest(run: Run, of: Callable[[StepRecord], float], upto: int | None, *, growth: bool) -> float:
    """Of two-step means from the first judged step to before `upto`; with growth over the mean of steps 8 to 12."""
    values = [of(step) for step in run.steps]
    judged = smoothed(values, SEPARATION_WINDOW_STEPS)[JUDGED_FROM - 1 : upto and max(JUDGED_FROM, upto - 1)]
    return max(judged) / (fmean(values[EARLY]) if growth else 1)


def separation_table(runs: Sequence[Run], allowed: Sequence[int] = (0, 2, 4)) -> str:
    """What a limit on each signal could do at best, its size and its growth."""
    long = [run for run in runs if len(run.steps) >= JUDGED_FROM]
    falling, steady = [run for run in long if run.alarm.collapsed], [run for run in long if run.alarm.steady]
    if not falling or len(steady) <= max(allowed):
        return f"Wants a collapse and more than {max(allowed)} steady runs."
    rows = []
    for name, of in SIGNALS.items():
        for growth in (False, True):
            before = [_largest(run, of, run.alarm.collapsed, growth=growth) for run in falling]
            whole = [_largest(run, of, None, growth=growth) for run in steady]
            counts = [f"{caught(before, whole, many)} of {len(falling)}" for many in allowed]
            rows.append([f"{name}, over its early level" if growth else name, *counts])
    return table(["a limit on", *(f"{many} of {len(steady)} steady runs exceed it" for many in allowed)], rows)


def held_out_table(found: Sequence[HeldOut]) -> str:
    rows = [
        [
            str(item.seed),
            f"{item.chosen.kl_growth} / {item.chosen.out_of_range_ceiling_percent} / {item.chosen.patience_steps}",
            f"{item.found.paused_in_time} of {item.found.collapsing}",
            f"{item.found.warned_in_time} of {item.found.collapsing}",
            f"{item.found.false_pauses} of {item.found.steady}",
            f"{item.found.false_warnings} of {item.found.steady}",
        ]
        for item in found
    ]
    header = [
        "seed left out",
        "best on the others: klGrowth / outOfRangeCeilingPercent / patienceSteps",
        "its collapses paused before the fall",
        "warned before it",
        "its steady runs paused",
        "warned",
    ]
    return table(header, rows)
