"""`motley replay`: guard and cost on a recorded ledger, one step after the other, as the operator would have seen it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
from motley_api import records
from motley_api.resources.rlrun import Guard, GuardStatus

from motley_operator.planner import cost, guard

Json = dict[str, Any]


class LedgerError(Exception):
    """A ledger that cannot be read, with what was expected."""


@dataclass(frozen=True)
class Alarm:
    """What the guard did after one step."""

    step: int
    attempt: int
    subject: str  # "" is the run
    action: str
    why: str
    reward: float | None


@dataclass(frozen=True)
class StepWork:
    step: int
    attempt: int
    turns: int
    work_usd: Decimal | None
    baseline_usd: Decimal | None


@dataclass(frozen=True)
class Replay:
    steps: int
    alarms: tuple[Alarm, ...]
    paused_at: int | None
    best_reward: float | None  # up to the pause, else of all
    last_reward: float | None  # at the pause, else the last
    work: tuple[StepWork, ...]


def read_ledger(path: Path) -> list[records.StepRecord]:
    """Every record of a folder of step-*.json, or of a .jsonl file, in the order they happened."""
    try:
        if path.is_dir():
            texts = [(str(file.name), file.read_bytes()) for file in sorted(path.glob("step-*.json"))]
        else:
            lines = path.read_bytes().splitlines()
            texts = [(f"{path.name}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    except OSError as error:
        raise LedgerError(str(error)) from error
    found = []
    for where, text in texts:
        try:
            found.append(msgspec.json.decode(text, type=records.StepRecord))
        except msgspec.MsgspecError as error:
            raise LedgerError(f"{where}: not a step record: {error}") from error
    if not found:
        raise LedgerError(f"{path}: no step record; expected a folder of step-*.json or a .jsonl file")
    return sorted(found, key=lambda record: (record.attempt, record.step))


def replay(
    steps: Sequence[records.StepRecord],
    rule: Guard,
    rates: Sequence[cost.EngineRate] = (),
    baseline_usd_per_turn: Decimal | None = None,
) -> Replay:
    """Feeds the ledger to the guard step by step; stops feeding it when the run would be paused."""
    alarms: list[Alarm] = []
    held: GuardStatus | None = None
    paused_at = None
    for count, record in enumerate(steps, 1):
        seen = guard.series(steps[:count])
        groups = {group.name for known in steps[:count] for group in known.groups}
        verdict = guard.judge(rule, 1, held, seen, groups)
        held = verdict.status
        reward = guard.mean(record.reward)
        alarms += [
            Alarm(record.step, record.attempt, subject, action, why, reward) for subject, action, why in verdict.news
        ]
        if verdict.paused:
            paused_at = count
            break
    lived = steps[:paused_at] if paused_at else steps
    rewards = [reward for record in lived if (reward := guard.mean(record.reward)) is not None]
    per_turn = {rate.group: rate.usd_per_turn for rate in rates}
    work = []
    for record in steps:
        known = [
            None if (price := per_turn.get(group.name)) is None else price * group.turns
            for group in record.groups
            if group.turns
        ]
        turns = sum(group.turns for group in record.groups)
        base = None if baseline_usd_per_turn is None else baseline_usd_per_turn * turns
        work.append(StepWork(record.step, record.attempt, turns, cost.add(*known), base))
    return Replay(
        steps=len(steps),
        alarms=tuple(alarms),
        paused_at=lived[-1].step if paused_at else None,
        best_reward=max(rewards, default=None),
        last_reward=rewards[-1] if rewards else None,
        work=tuple(work),
    )


def from_manifest(text: str) -> tuple[Guard, list[cost.EngineRate], Decimal | None]:
    """Guard, cost of a turn of each group, and of one on the baseline; from an RLRun."""
    from motley_operator import preview
    from motley_operator.planner.decide import engine_usd_per_hour

    seen = preview.snapshot_of(*preview.read_manifest(text), None)
    prices = cost.price_table(seen.spec.prices)
    rates = []
    for group in seen.groups:
        turns = group.spec.turns_per_engine_hour
        rates.append(
            cost.EngineRate(
                group.name,
                engine_usd_per_hour(group, prices),
                Decimal(turns) if turns else None,
                group.spec.sessions_per_engine,
                max(1, group.spec.replicas),
            )
        )
    baseline = seen.spec.baseline
    return seen.spec.guard, rates, cost.baseline_usd_per_turn(baseline, prices, rates) if baseline else None


def document(found: Replay) -> Json:
    work = cost.add(*(item.work_usd for item in found.work))
    base = cost.add(*(item.baseline_usd for item in found.work))
    saving = cost.saving_percent(work, base)
    return {
        "steps": found.steps,
        "alarms": [
            {
                "step": alarm.step,
                "attempt": alarm.attempt,
                "subject": alarm.subject or "run",
                "action": alarm.action,
                "why": alarm.why,
                "reward": alarm.reward,
            }
            for alarm in found.alarms
        ],
        "pausedAtStep": found.paused_at,
        "bestReward": found.best_reward,
        "lastReward": found.last_reward,
        "turns": sum(item.turns for item in found.work),
        "workPricedUSD": cost.usd(work),
        "baselineUSD": cost.usd(base),
        "savingPercent": None if saving is None else format(saving, ".1f"),
    }


def main(ledger: str, manifest: str, output: str) -> int:
    if output not in ("table", "json"):
        print(f"motley replay: --output must be table or json, got {output!r}", file=sys.stderr)
        return 2
    from motley_operator.preview import ManifestError, read_text

    try:
        rule, rates, base = from_manifest(read_text(manifest)) if manifest else (Guard(), [], None)
        found = replay(read_ledger(Path(ledger)), rule, rates, base)
    except (LedgerError, ManifestError) as error:
        print(f"motley replay: {error}", file=sys.stderr)
        return 1
    shown = document(found)
    if output == "json":
        print(json.dumps(shown, indent=1))
        return 0
    for alarm in shown["alarms"]:
        print(f"step {alarm['step']:>5}  {alarm['action']:<10}  {alarm['subject']}: {alarm['why']}")
    end = f"paused at step {shown['pausedAtStep']}" if shown["pausedAtStep"] else "never paused"
    last, best = (
        "unknown" if value is None else f"{value:.2f}" for value in (shown["lastReward"], shown["bestReward"])
    )
    print(f"{shown['steps']} steps, {end}; reward {last} then, {best} at best")
    priced, compared = (f"${value}" if value else "unknown" for value in (shown["workPricedUSD"], shown["baselineUSD"]))
    print(f"work-priced {priced}, baseline {compared}")
    return 0
