"""Two steps of one arm, as the command runs them: a change to the trainer, the engine or the codecs that breaks the study shows here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.study import ledger, plan

ROOT = Path(__file__).resolve().parents[2]


def test_an_arm_runs_on_all_eight_groups_and_says_what_came_of_it(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.study",
        "--arm",
        "sc_mis_topp",
        "--seeds",
        "3",
        "--steps",
        "2",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert (last["runs"], list(last["arms"])) == (1, ["sc_mis_topp"])
    first, second = ledger.read(tmp_path / "sc_mis_topp-s3.jsonl")
    assert {group.name for group in second.groups} == {engine.group for engine in plan.MIXED}
    assert (first.reward.den, second.reward.den) == (64.0, 64.0)
    assert not any(step.skipped or group.dropped_tokens for step in (first, second) for group in step.groups)
    # Nothing lags at the first step, so what is left is precision: NVFP4 is furthest from the trainer, and all are near it.
    kl = {group.name: group.kl.num / group.kl.den for group in first.groups}
    assert first.lag.num == 0.0
    assert 0 < kl["h100-bf16"] < kl["b300-nvfp4"] < 0.05
    assert second.lag.num > 0
    assert (tmp_path / "report/study/sc_mis_topp.csv").read_text().count("\n") == 3
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert again.stdout.splitlines() == done.stdout.splitlines()[-1:]  # nothing is run twice
