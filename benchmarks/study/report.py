"""Table, plots and numbers out of recorded ledgers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from motley_api.records import StepRecord
from motley_api.resources.rlrun import Guard
from motley_operator.planner import guard

from benchmarks.study import ledger
from benchmarks.study.alarm import Alarm, watch
from benchmarks.study.plan import Arm, Settings
from benchmarks.study.summary import Summary, group_shares, mean, summarise, to_csv

START, END = "<!-- generated: python -m benchmarks.study -->", "<!-- end of what is generated -->"

# What the study saw on the mixed fleet (its own arms), in its own units: pass@1 on its main suite.
STUDY = {
    "grpo": "collapses: 0.414 at step 40, 0.256 at 120; 62% format errors",
    "grpo_mis": "0.811 at 120, entropy collapse, 0.734 at 180",
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


def load(folder: Path, known: Mapping[str, Arm], seeds: Sequence[int], config: Guard | None = None) -> list[Run]:
    """Every finished run there, in the order of arms and seeds."""
    config = config or Guard()
    found = []
    for name in known:
        for seed in seeds:
            path = folder / f"{name}-s{seed}.jsonl"
            if path.exists():
                steps = ledger.read(path)
                start = guard.early(guard.series(steps).run, config.early_steps)
                found.append(
                    Run(name, seed, steps, summarise(steps, start.kl if start else None), watch(steps, config))
                )
    return found


def result(runs: Sequence[Run]) -> dict[str, Any]:
    """The command's last line."""
    by_arm = _by_arm(runs)
    caught = [run.alarm.in_time for run in runs if run.alarm.in_time is not None]
    steady = [run for run in runs if run.alarm.collapsed is None and run.alarm.fell is None]
    return {
        "runs": len(runs),
        "arms": {
            arm: {
                "finalReward": _mean(members, lambda s: s.final_reward),
                "bestReward": _mean(members, lambda s: s.best_reward),
                "klGrowth": _mean(members, lambda s: s.kl_growth),
                "gradNorm": _mean(members, lambda s: s.grad_norm),
                "collapsedSeeds": [run.seed for run in members if run.summary.collapsed is not None],
            }
            for arm, members in by_arm.items()
        },
        "alarm": {
            "collapsing": len(caught),
            "caughtInTime": sum(caught),
            "steady": len(steady),
            "falseWarnings": sum(run.alarm.warned is not None for run in steady),
            "falsePauses": sum(run.alarm.paused is not None for run in steady),
        },
    }


def _by_arm(runs: Sequence[Run]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.arm, []).append(run)
    return found


def _mean(runs: Sequence[Run], of: Callable[[Summary], float]) -> float | None:
    value = fmean(of(run.summary) for run in runs)
    return round(value, 4) if math.isfinite(value) else None


def write(runs: Sequence[Run], docs: Path, settings: Settings) -> None:
    """docs/study/*.csv and *.png, and the generated part of docs/study.md, whose prose a person writes."""
    folder = docs / "study"
    folder.mkdir(parents=True, exist_ok=True)
    for run in runs:
        (folder / f"{run.arm}-s{run.seed}.csv").write_text(to_csv(run.steps))
    plot(runs, folder / "arms.png")
    page = docs / "study.md"
    text = page.read_text() if page.exists() else f"# The study in miniature\n\n{START}\n{END}\n"
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    body = "\n\n".join([outcomes(runs), group_table(runs), alarm_table(runs)])
    page.write_text(f"{before}{START}\n\n{body}\n\n{END}{after}")


def _seeds(runs: Sequence[Run], of: Callable[[Run], str]) -> str:
    return " / ".join(of(run) for run in runs)


def _step(step: int | None) -> str:
    return "-" if step is None else str(step)


def outcomes(runs: Sequence[Run]) -> str:
    """Seeds side by side, never only their mean."""
    rows = [
        "| arm | final reward | best | collapse at step | KL, last 5 steps | KL growth | outside [0.5, 5] % | entropy"
        " | gradient norm (largest) | format-error ends % | the study, at its scale |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for arm, members in _by_arm(runs).items():
        cells = [
            arm,
            _seeds(members, lambda r: f"{r.summary.final_reward:.2f}"),
            _seeds(members, lambda r: f"{r.summary.best_reward:.2f}"),
            _seeds(members, lambda r: _step(r.summary.collapsed)),
            _seeds(members, lambda r: f"{r.summary.kl:.3f}"),
            _seeds(members, lambda r: f"{r.summary.kl_growth:.1f}x"),
            _seeds(members, lambda r: f"{100 * r.summary.out_of_range:.1f}"),
            _seeds(members, lambda r: f"{r.summary.entropy:.2f}"),
            _seeds(members, lambda r: f"{r.summary.grad_norm:.2f} ({r.summary.largest_grad_norm:.2f})"),
            _seeds(members, lambda r: f"{100 * r.summary.format_errors:.0f}"),
            STUDY[arm],
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def group_table(runs: Sequence[Run]) -> str:
    """Out-of-range tokens by group, over the arms on the mixed fleet that did not collapse (a collapsed policy has no typical token)."""
    mixed = [run for run in runs if not run.arm.startswith("homogeneous") and run.summary.collapsed is None]
    if not mixed:
        return "No run on the mixed fleet stayed whole."
    shares = group_shares([step for run in mixed for step in run.steps])
    rows = [
        f"Out-of-range tokens by group, over the {len(mixed)} runs on the mixed fleet that did not collapse:",
        "",
        "| group | of trained tokens % | of out-of-range tokens % | its own tokens out of range % |",
        "|---|---|---|---|",
    ]
    rows += [f"| {name} | {100 * a:.1f} | {100 * b:.1f} | {100 * c:.2f} |" for name, (a, b, c) in shares.items()]
    return "\n".join(rows)


def alarm_table(runs: Sequence[Run]) -> str:
    rows = [
        "| run | reward a third below its best at | for good | guard warned at | paused at | first reason |",
        "|---|---|---|---|---|---|",
    ]
    for run in runs:
        a = run.alarm
        rows.append(
            f"| {run.arm} s{run.seed} | {_step(a.fell)} | {_step(a.collapsed)} | {_step(a.warned)} | {_step(a.paused)} | {a.why or '-'} |"
        )
    return "\n".join(rows)


PANELS: tuple[tuple[str, Callable[[StepRecord], float], bool], ...] = (
    ("reward", lambda s: mean(s.reward), False),
    ("KL(q||p), nats a token", lambda s: mean(s.kl), True),
    ("tokens outside [0.5, 5]", lambda s: mean(s.out_of_range), True),
    ("entropy, nats a token", lambda s: mean(s.entropy), False),
    ("gradient norm", lambda s: s.grad_norm, True),
    ("episodes ended by format errors", lambda s: mean(s.format_error_ends), False),
)


def plot(runs: Sequence[Run], path: Path) -> None:
    """Thick: mean over seeds. Thin: each seed."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(15, 7.5))
    for index, (arm, members) in enumerate(_by_arm(runs).items()):
        style = {"color": f"C{index}", "linestyle": "--" if arm.startswith("homogeneous") else "-"}
        for axis, (title, of, log) in zip(axes.flat, PANELS, strict=True):
            curves = [[of(step) for step in run.steps] for run in members]
            for curve in curves:
                axis.plot(range(1, len(curve) + 1), curve, linewidth=0.4, alpha=0.5, **style)
            together = [fmean(values) for values in zip(*curves, strict=False)]
            axis.plot(range(1, len(together) + 1), together, linewidth=1.8, label=arm, **style)
            axis.set_title(title, fontsize=10)
            if log:
                axis.set_yscale("log")
    axes.flat[0].legend(fontsize=7)
    for axis in axes[1]:
        axis.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)
