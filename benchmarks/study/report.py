"""Tables, plots, CSVs and numbers out of recorded ledgers."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from motley_api.resources.rlrun import Guard
from motley_operator.planner import guard

from benchmarks.study import ledger, plots, tables
from benchmarks.study.alarm import CANDIDATES, Alarm, HeldOut, figures, leave_one_seed_out, watch
from benchmarks.study.plan import Arm
from benchmarks.study.summary import Summary, summarise, to_csv
from benchmarks.study.tables import Run, by_arm

START, END = "<!-- generated: python -m benchmarks.study -->", "<!-- end of what is generated -->"
STABLE_ARMS = ("sc_mis", "sc_mis_topp", "homogeneous_sc_mis_topp")  # that the study found stable


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
                early_kl = guard.mean(start.kl) if start else None
                found.append(Run(name, seed, steps, summarise(steps, early_kl), watch(steps, config)))
    return found


def result(runs: Sequence[Run]) -> dict[str, Any]:
    """The command's last line."""
    found = figures([run.alarm for run in runs])
    return {
        "runs": len(runs),
        "arms": {
            arm: {
                "finalReward": _mean(members, lambda s: s.final_reward),
                "bestReward": _mean(members, lambda s: s.best_reward),
                "klGrowth": _mean(members, lambda s: s.kl_growth),
                "gradNorm": _mean(members, lambda s: s.largest_grad_norm),
                "collapsedSeeds": [run.seed for run in members if run.summary.collapsed is not None],
            }
            for arm, members in by_arm(runs).items()
        },
        "alarm": {
            "collapsing": found.collapsing,
            "pausedInTime": found.paused_in_time,
            "warnedInTime": found.warned_in_time,
            "steady": found.steady,
            "falseWarnings": found.false_warnings,
            "falsePauses": found.false_pauses,
            "falseQuarantines": found.false_quarantines,
        },
    }


def _mean(runs: Sequence[Run], of: Callable[[Summary], float]) -> float | None:
    value = fmean(of(run.summary) for run in runs)
    return round(value, 4) if math.isfinite(value) else None


def write(runs: Sequence[Run], docs: Path) -> None:
    """docs/study/*.csv and *.png, and the generated parts of docs/study.md, whose prose a person writes."""
    folder = docs / "study"
    folder.mkdir(parents=True, exist_ok=True)
    for arm, members in by_arm(runs).items():
        (folder / f"{arm}.csv").write_text(_with_seeds(members))
    (folder / "runs.csv").write_text(_rows(runs))
    plots.draw(runs, folder)
    page = docs / "study.md"
    text = page.read_text() if page.exists() else "# The study in miniature\n"
    page.write_text(fill(text, sections(runs)))


def sections(runs: Sequence[Run]) -> Mapping[str, str]:
    """By heading, in the order of the page."""
    seeds = sorted({run.seed for run in runs})
    rows: dict[str, list[Alarm]] = {"all": [run.alarm for run in runs]}
    rows["of the arms that the study found stable"] = [run.alarm for run in runs if run.arm in STABLE_ARMS]
    rows |= {f"seed {seed}": [run.alarm for run in runs if run.seed == seed] for seed in seeds}
    return {
        "Reward": tables.outcomes(runs),
        "Mismatch": tables.mismatch(runs),
        "Groups": tables.group_table(runs),
        "The guard on these runs": "\n\n".join([tables.figures_table(rows), tables.alarm_table(runs)]),
        "Size and growth": tables.separation_table(runs),
        "Its thresholds on seeds that they were not chosen on": tables.held_out_table(held_out(runs)),
    }


def held_out(runs: Sequence[Run]) -> list[HeldOut]:
    """Empty for a single seed: nothing can be left out."""
    seeds = sorted({run.seed for run in runs})
    if len(seeds) < 2:
        return []
    seen: dict[int, dict[int, list[Alarm]]] = {}
    for place, candidate in enumerate(CANDIDATES):
        for run in runs:
            seen.setdefault(place, {}).setdefault(run.seed, []).append(watch(run.steps, candidate))
    return leave_one_seed_out(seen)


def fill(text: str, parts: Mapping[str, str]) -> str:
    """Each part goes between the page's markers, in order; a page without markers gets all of them, with their headings, at its end."""
    if START not in text:
        return text + "".join(f"\n## {title}\n\n{START}\n\n{part}\n\n{END}\n" for title, part in parts.items())
    out, rest = [], text
    for part in parts.values():
        before, _, after = rest.partition(START)
        _, _, rest = after.partition(END)
        out.append(f"{before}{START}\n\n{part}\n\n{END}")
    return "".join(out) + rest


def _with_seeds(members: Sequence[Run]) -> str:
    out = ""
    for run in members:
        header, *lines = to_csv(run.steps).splitlines()
        out += "" if out else f"seed,{header}\n"
        out += "".join(f"{run.seed},{line}\n" for line in lines)
    return out


def _rows(runs: Sequence[Run]) -> str:
    """One row a run: its summary and its alarm."""
    out = io.StringIO()
    rows = [
        {"arm": run.arm, "seed": run.seed, **asdict(run.summary), **asdict(replace(run.alarm, why=""))} for run in runs
    ]
    names = [name for name in rows[0] if name != "why"]
    writer = csv.DictWriter(out, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in row.items()} for row in rows
    )
    return out.getvalue()
