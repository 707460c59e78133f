"""The page's pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from motley_api.records import StepRecord

from benchmarks.study.summary import mean, smoothed
from benchmarks.study.tables import Run, by_arm

# Warm: nothing bounds the ratios. Cold: MIS does. From the Okabe-Ito palette, which colour-blind readers tell apart.
COLOURS = {
    "grpo": "#D55E00",
    "grpo_topp": "#E69F00",
    "sc": "#CC79A7",
    "grpo_mis": "#56B4E9",
    "sc_mis": "#0072B2",
    "sc_mis_topp": "#009E73",
    "homogeneous_grpo": "#D55E00",
    "homogeneous_sc_mis_topp": "#009E73",
}
LABELS = {
    "grpo": "GRPO",
    "grpo_topp": "GRPO + top-p",
    "sc": "SC",
    "grpo_mis": "GRPO + MIS",
    "sc_mis": "SC + MIS",
    "sc_mis_topp": "SC + MIS + top-p",
    "homogeneous_grpo": "GRPO, homogeneous",
    "homogeneous_sc_mis_topp": "SC + MIS + top-p, homogeneous",
}
Measure = tuple[str, Callable[[StepRecord], float], bool]  # title, value, whether on a log scale
REWARD: Measure = ("reward", lambda s: mean(s.reward), False)
KL: Measure = ("KL(q‖p), nats a token", lambda s: mean(s.kl), True)
GRADIENT: Measure = ("gradient norm", lambda s: s.grad_norm, False)
OUTSIDE: Measure = ("tokens outside [0.5, 5], %", lambda s: 100 * mean(s.out_of_range), False)
ENTROPY: Measure = ("entropy, nats a token", lambda s: mean(s.entropy), False)
FORMAT_ERRORS: Measure = ("episodes ended by format errors, %", lambda s: 100 * mean(s.format_error_ends), False)


def draw(runs: Sequence[Run], folder: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True})
    plt.rcParams.update({"grid.color": "#e6e6e6", "axes.axisbelow": True, "figure.dpi": 100})
    _means(plt, [run for run in runs if run.mixed], folder / "arms.png")
    _control(plt, runs, folder / "control.png")
    _seeds(plt, runs, folder / "seeds.png")


def _curve(run: Run, of: Callable[[StepRecord], float], window: int) -> list[float]:
    return smoothed([of(step) for step in run.steps], window)


def _average(curves: Sequence[Sequence[float]]) -> list[float]:
    return [fmean(values) for values in zip(*curves, strict=False)]


def _line(axis: Any, members: Sequence[Run], measure: Measure, window: int = 3, **style: Any) -> None:
    """Mean over seeds of each seed's moving average."""
    title, of, log = measure
    values = _average([_curve(run, of, window) for run in members])
    axis.plot(range(1, len(values) + 1), values, **style)
    axis.set_title(title, fontsize=11, loc="left")
    axis.set_yscale("log" if log else "linear")


def _means(plt: Any, runs: Sequence[Run], path: Path) -> None:
    measures = (REWARD, KL, GRADIENT, OUTSIDE, ENTROPY, FORMAT_ERRORS)
    figure, axes = plt.subplots(2, 3, figsize=(13, 7))
    members = by_arm(runs)
    for axis, measure in zip(axes.flat, measures, strict=True):
        for arm in (arm for arm in COLOURS if arm in members):
            _line(axis, members[arm], measure, color=COLOURS[arm], linewidth=2, label=LABELS[arm])
    _finish(plt, figure, axes, path, columns=6)


def _control(plt: Any, runs: Sequence[Run], path: Path) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), squeeze=False)
    members = by_arm(runs)
    for axis, measure in zip(axes.flat, (REWARD, KL, GRADIENT), strict=True):
        for arm in ("grpo", "homogeneous_grpo", "sc_mis_topp", "homogeneous_sc_mis_topp"):
            if arm in members:
                label = LABELS[arm] if arm.startswith("homogeneous") else f"{LABELS[arm]}, mixed"
                dashes = "--" if arm.startswith("homogeneous") else "-"
                _line(axis, members[arm], measure, color=COLOURS[arm], linewidth=2, linestyle=dashes, label=label)
    _finish(plt, figure, axes, path, columns=4)


def _seeds(plt: Any, runs: Sequence[Run], path: Path) -> None:
    """An arm's reward and KL beside each other, two arms to a row."""
    members = by_arm(runs)
    rows = math.ceil(len(members) / 2)
    figure, axes = plt.subplots(rows, 4, figsize=(15, 2.7 * rows), squeeze=False, sharex=True)
    for index, (arm, runs_of_arm) in enumerate(members.items()):
        left, right = axes[index // 2][2 * (index % 2)], axes[index // 2][2 * (index % 2) + 1]
        for axis, (title, of, log) in ((left, REWARD), (right, KL)):
            for run in runs_of_arm:
                values = _curve(run, of, 3)
                axis.plot(range(1, len(values) + 1), values, color=COLOURS[arm], linewidth=1.1, alpha=0.75)
                for step, marker, size in ((run.alarm.warned, "^", 26), (run.alarm.paused, "s", 24)):
                    if step is not None and axis is left:
                        face = "white" if marker == "^" else "black"
                        axis.scatter(
                            [step], [values[step - 1]], marker=marker, s=size, color=face, edgecolors="black", zorder=3
                        )
            axis.set_title(f"{LABELS[arm]}: {title.split(',')[0]}", fontsize=10, loc="left")
            if log:
                axis.set_yscale("log")
                axis.set_ylim(2e-4, 10)
            else:
                axis.set_ylim(-0.03, 1.03)
    marks = [
        plt.Line2D([], [], color="black", marker=marker, markerfacecolor=face, linestyle="", label=label)
        for marker, face, label in (("^", "white", "the guard warns"), ("s", "black", "the guard pauses"))
    ]
    for axis in axes[-1]:
        axis.set_xlabel("step")
    figure.legend(handles=marks, loc="lower center", ncol=2, frameon=False)
    figure.tight_layout(rect=(0, 0.035, 1, 1))
    figure.savefig(path)
    plt.close(figure)


def _finish(plt: Any, figure: Any, axes: Any, path: Path, *, columns: int) -> None:
    handles, labels = axes.flat[0].get_legend_handles_labels()
    for axis in axes.flat:
        if axis.get_yscale() == "linear":
            axis.set_ylim(bottom=0)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    figure.legend(handles, labels, loc="lower center", ncol=columns, frameon=False, fontsize=10)
    figure.tight_layout(rect=(0, 0.05 if len(axes) > 1 else 0.09, 1, 1))
    figure.savefig(path)
    plt.close(figure)
