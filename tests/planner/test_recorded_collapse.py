"""The guard over two runs of the study's miniature, as it recorded them: one that collapsed and one that did not.

ledgers/collapse.jsonl: plain GRPO on the mixed fleet, seed 0. ledgers/stable.jsonl: the default recipe, seed 0. Both are output of
`python -m benchmarks.study` without what the guard does not read (`ledger.fixture`). Two of forty runs: docs/study.md has figures over all.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import msgspec
from motley_api.records import StepRecord
from motley_api.resources.rlrun import Guard
from planner.test_guard import follow

LEDGERS = Path(__file__).parent / "ledgers"
WINDOW_STEPS = 5


def read(name: str) -> list[StepRecord]:
    lines = (LEDGERS / f"{name}.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=StepRecord) for line in lines]


def rewards(steps: list[StepRecord]) -> list[float]:
    return [step.reward.num / step.reward.den for step in steps]


def fallen_by_a_third(steps: list[StepRecord]) -> int | None:
    """The first step whose reward, over five steps, is a third below the best that it has been."""
    best = 0.0
    for end in range(WINDOW_STEPS, len(steps) + 1):
        value = fmean(rewards(steps)[end - WINDOW_STEPS : end])
        best = max(best, value)
        if value <= best * 2 / 3:
            return end
    return None


def test_a_collapse_raises_the_alarm_before_reward_has_fallen_by_a_third() -> None:
    steps = read("collapse")
    fell = fallen_by_a_third(steps)
    assert fell is not None
    assert fmean(rewards(steps)[-WINDOW_STEPS:]) < 0.05  # it did not come back
    groups = sorted({group.name for group in steps[0].groups})
    verdicts = follow(steps, Guard(), groups)
    paused = next(step for step, verdict in enumerate(verdicts, 1) if verdict.paused)
    assert paused < fell
    assert not any(verdict.status.groups for verdict in verdicts[:paused])  # no single group is to blame


def test_a_stable_run_raises_nothing() -> None:
    steps = read("stable")
    assert fallen_by_a_third(steps) is None
    groups = sorted({group.name for group in steps[0].groups})
    verdicts = follow(steps, Guard(), groups)
    assert [verdict.news for verdict in verdicts if verdict.news] == []
    assert verdicts[-1].healthy is True
