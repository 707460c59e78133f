"""The finished run as a page: reward, KL a group, cost a step, shares, versions and lag, from the run's own ledger and status.

Reads records and Kubernetes objects; draws with matplotlib; writes report.png, report.html and report.json.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import msgspec
from motley_api.records import GroupStep, Ratio, StepRecord

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# One colour a precision, one marker a group of it: which precision a line is comes before which group.
PRECISION_COLOURS = {"BF16": "#2f6f9f", "FP8": "#c77d1e", "NVFP4": "#3f8f5b"}
MARKERS = "osD^vPX*"
INK, FAINT = "#22252a", "#d9dce1"


@dataclass(frozen=True)
class Glimpse:
    """The RLRun's status at one moment of the run."""

    unix_s: float
    status: dict[str, Any]


@dataclass(frozen=True)
class Finished:
    """All that the report is made of."""

    run: dict[str, Any]  # the RLRun object at the end
    steps: list[StepRecord]  # the surviving lineage, in order
    glimpses: list[Glimpse]
    late_group: dict[str, Any]  # {name, appliedAtStep, firstSampleStep}
    seconds: dict[str, float]  # {setup, run}
    peak_memory_mib: float
    notes: list[str] = field(default_factory=list)


def read_ledger(folder: Path) -> list[StepRecord]:
    """Steps of <store>/<run>/ledger, the newest attempt of each, in order."""
    newest: dict[int, StepRecord] = {}
    for path in sorted(folder.glob("step-*.json")):
        record = msgspec.json.decode(path.read_bytes(), type=StepRecord)
        if record.step not in newest or newest[record.step].attempt <= record.attempt:
            newest[record.step] = record
    return [newest[step] for step in sorted(newest)]


def mean(ratio: Ratio) -> float:
    return ratio.num / ratio.den if ratio.den else float("nan")


def pooled(ratios: Sequence[Ratio]) -> float:
    return mean(Ratio(sum(r.num for r in ratios), sum(r.den for r in ratios)))


def _group_rows(finished: Finished) -> list[dict[str, Any]]:
    by_name: dict[str, list[GroupStep]] = {}
    for step in finished.steps:
        for group in step.groups:
            by_name.setdefault(group.name, []).append(group)
    rows = []
    for group in _status(finished).get("groups", []):
        series = by_name.get(group["name"], [])
        rows.append(
            {
                "name": group["name"],
                "gpuType": group["gpuType"],
                "precision": group["precision"],
                "engines": max(
                    (
                        g.get("ready", 0)
                        for glimpse in finished.glimpses
                        for g in _groups(glimpse)
                        if g["name"] == group["name"]
                    ),
                    default=0,
                ),
                "share": _last_share(finished, group["name"]),
                "samples": sum(g.samples for g in series),
                "kl": pooled([g.kl for g in series]),
                "outOfRange": pooled([g.out_of_range for g in series]),
                "version": max((g.version for g in series), default=-1),
            }
        )
    return rows


def _status(finished: Finished) -> dict[str, Any]:
    return finished.run.get("status", {})


def _groups(glimpse: Glimpse) -> list[dict[str, Any]]:
    return glimpse.status.get("groups", [])


def _last_share(finished: Finished, name: str) -> float:
    """Percent of new sessions while the run still sampled."""
    for glimpse in reversed(finished.glimpses):
        for group in _groups(glimpse):
            if group["name"] == name and float(group.get("sharePercent", 0)) > 0:
                return float(group["sharePercent"])
    return 0.0


def summary(finished: Finished) -> dict[str, Any]:
    """report.json."""
    rewards = [mean(step.reward) for step in finished.steps]
    window = min(5, len(rewards))
    status = _status(finished)
    return {
        "status": status.get("status", ""),
        "steps": len(finished.steps),
        "reward": {
            "first": sum(rewards[:window]) / window if window else None,
            "last": sum(rewards[-window:]) / window if window else None,
            "perStep": rewards,
        },
        "groups": _group_rows(finished),
        "costPerStep": status.get("costPerStep"),
        "totals": status.get("totals"),
        "lateGroup": finished.late_group,
        "seconds": finished.seconds,
        "peakMemoryMiB": round(finished.peak_memory_mib),
        "decisions": status.get("decisions", []),
        "notes": finished.notes,
    }


def _style(axes: Any, title: str, ylabel: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK, pad=8)
    axes.set_ylabel(ylabel, fontsize=9, color=INK)
    axes.grid(True, color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _look(finished: Finished) -> dict[str, dict[str, Any]]:
    """Line style of each group."""
    count: dict[str, int] = {}
    looks = {}
    for group in _status(finished).get("groups", []):
        index = count.setdefault(group["precision"], 0)
        count[group["precision"]] += 1
        looks[group["name"]] = {
            "color": PRECISION_COLOURS[group["precision"]],
            "marker": MARKERS[index % len(MARKERS)],
            "markersize": 3.5,
            "linewidth": 1.1,
            "alpha": 0.9,
        }
    return looks


def _draw_reward(axes: Any, finished: Finished) -> None:
    steps = [record.step for record in finished.steps]
    rewards = [mean(record.reward) for record in finished.steps]
    smooth = [sum(rewards[max(0, i - 4) : i + 1]) / len(rewards[max(0, i - 4) : i + 1]) for i in range(len(rewards))]
    axes.plot(steps, rewards, color="#9aa3ad", linewidth=0.9, label="batch")
    axes.plot(steps, smooth, color=INK, linewidth=2, label="mean of five")
    axes.set_ylim(0, 1)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    _style(axes, "Reward: share of episodes whose hidden tests pass", "reward")


def _series(finished: Finished, value: Any) -> dict[str, tuple[list[int], list[float]]]:
    found: dict[str, tuple[list[int], list[float]]] = {}
    for record in finished.steps:
        for group in record.groups:
            number = value(group)
            if number == number:
                xs, ys = found.setdefault(group.name, ([], []))
                xs.append(record.step)
                ys.append(number)
    return found


def _draw_groups(axes: Any, finished: Finished, value: Any, title: str, ylabel: str, *, log: bool = False) -> None:
    looks = _look(finished)
    for name, (xs, ys) in sorted(_series(finished, value).items()):
        axes.plot(xs, ys, label=name, **looks.get(name, {}))
    if log:
        axes.set_yscale("log")
    _style(axes, title, ylabel)


def _draw_cost(axes: Any, finished: Finished) -> None:
    keys = {
        "billedUSD": ("billed", INK, "-"),
        "workPricedUSD": ("by work", "#3f8f5b", "-"),
        "baselineUSD": ("baseline, by work", "#b3413b", "--"),
    }
    for key, (label, colour, line) in keys.items():
        points = [
            (glimpse.status["step"], float(glimpse.status["costPerStep"][key]))
            for glimpse in finished.glimpses
            if glimpse.status.get("step") and key in glimpse.status.get("costPerStep", {})
        ]
        if points:
            axes.plot(
                [p[0] for p in points], [p[1] for p in points], color=colour, linestyle=line, linewidth=1.6, label=label
            )
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, frameon=False)
    _style(axes, "Cost of a step (mean of the last ten)", "US$")


def _draw_shares(axes: Any, finished: Finished) -> None:
    looks = _look(finished)
    for name in looks:
        points = [
            (glimpse.status.get("step", 0), float(group.get("sharePercent", 0)))
            for glimpse in finished.glimpses[:-1]
            for group in _groups(glimpse)
            if group["name"] == name and glimpse.status.get("step")
        ]
        axes.plot([p[0] for p in points], [p[1] for p in points], label=name, **looks[name])
    applied = finished.late_group.get("appliedAtStep")
    if applied is not None:
        axes.axvline(applied, color=INK, linewidth=0.8, linestyle=":")
        axes.annotate(
            f"{finished.late_group['name']}\nis applied",
            (applied, axes.get_ylim()[1]),
            fontsize=7,
            va="top",
            xytext=(3, -2),
            textcoords="offset points",
        )
    _style(axes, "Shares of new sessions", "percent")


def draw(finished: Finished, path: Path) -> None:
    figure, grid = plt.subplots(2, 3, figsize=(16, 8.4), constrained_layout=True)
    _draw_reward(grid[0][0], finished)
    _draw_groups(grid[0][1], finished, lambda g: mean(g.kl), "Sampler-trainer KL, a group", "nats a token", log=True)
    _draw_cost(grid[0][2], finished)
    _draw_shares(grid[1][0], finished)
    _draw_groups(
        grid[1][1], finished, lambda g: mean(g.lag), "Lag: steps between a sample's start and its use", "steps"
    )
    _draw_groups(
        grid[1][2],
        finished,
        lambda g: float(g.version) if g.samples else float("nan"),
        "Weights version that each group sampled with",
        "version",
    )
    for axes in grid.flat:
        axes.set_xlabel("step", fontsize=9, color=INK)
    handles, labels = grid[0][1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    name = finished.run["metadata"]["name"]
    figure.suptitle(
        f"RLRun {name}: {len(finished.steps)} steps on {len(_status(finished).get('groups', []))} sampler groups",
        fontsize=13,
        color=INK,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _table(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "<p>none</p>"
    head = "".join(f"<th>{html.escape(key)}</th>" for key in rows[0])

    def cell(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else html.escape(str(value))

    body = "".join("<tr>" + "".join(f"<td>{cell(value)}</td>" for value in row.values()) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def render_html(finished: Finished, picture: bytes) -> str:
    facts = summary(finished)
    reward = facts["reward"]
    cost = [{"": "a step", **(facts["costPerStep"] or {})}]
    totals = [facts["totals"]] if facts["totals"] else []
    decisions = [{key: decision.get(key, "") for key in ("time", "what", "why")} for decision in facts["decisions"]]
    first, last = (f"{reward[key]:.2f}" if reward[key] is not None else "–" for key in ("first", "last"))
    return f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>RLRun {html.escape(finished.run["metadata"]["name"])}</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;color:{INK};max-width:1180px;margin:2rem auto;padding:0 1rem}}
table{{border-collapse:collapse;font-size:13px;margin:.5rem 0 1.5rem;display:block;overflow-x:auto}}
th,td{{border-bottom:1px solid {FAINT};padding:.3rem .7rem;text-align:left}}img{{max-width:100%}}</style>
<h1>RLRun {html.escape(finished.run["metadata"]["name"])}: {html.escape(facts["status"])}</h1>
<p>{facts["steps"]} steps; reward {first} over the first five steps, {last} over the last five; set-up {facts["seconds"]["setup"]:.0f} s,
run {facts["seconds"]["run"]:.0f} s; at most {facts["peakMemoryMiB"]} MiB for the whole cluster.</p>
<img alt="reward, KL, cost, shares, lag and versions" src="data:image/png;base64,{base64.b64encode(picture).decode()}">
<h2>Groups</h2>{_table(facts["groups"])}
<h2>Cost a step</h2>{_table(cost)}
<h2>Totals</h2>{_table(totals)}
<h2>Decisions</h2>{_table(decisions)}
</html>"""


def write(finished: Finished, folder: Path) -> dict[str, Any]:
    """Writes report.png, report.html and report.json into `folder`; returns what report.json holds."""
    folder.mkdir(parents=True, exist_ok=True)
    draw(finished, folder / "report.png")
    (folder / "report.html").write_text(render_html(finished, (folder / "report.png").read_bytes()))
    facts = summary(finished)
    (folder / "report.json").write_text(json.dumps(facts, indent=2) + "\n")
    return facts
