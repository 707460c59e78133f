"""The guard over a recorded run."""

from __future__ import annotations

from motley_api.records import Ratio
from motley_api.resources.rlrun import Guard
from study.test_summary import record

from benchmarks.study.alarm import watch


def test_a_warning_before_the_fall_is_in_time() -> None:
    # early KL .02; above 3 x .02 from step 11 on: warned at 12 (patience 2), paused at 13; reward falls from step 15 on
    steps = [record(step, 0.9) for step in range(1, 11)]
    steps += [record(step, 0.9, kl=Ratio(0.1 * 1000, 1000.0)) for step in range(11, 15)]
    steps += [record(step, 0.1, kl=Ratio(0.1 * 1000, 1000.0)) for step in range(15, 25)]
    found = watch(steps, Guard())
    assert (found.warned, found.paused, found.fell, found.collapsed) == (12, 13, 16, 16)
    assert found.in_time is True
    assert found.delay_steps == 4
    assert found.why.startswith("KL 0.1 against 0.02")


def test_a_pause_of_a_steady_run_is_a_false_alarm() -> None:
    steps = [record(step, 0.9, kl=Ratio(0.02 * (1 if step < 10 else 9) * 1000, 1000.0)) for step in range(1, 25)]
    found = watch(steps, Guard())
    assert found.in_time is None
    assert found.false_alarm
    assert not watch(steps, Guard(kl_growth="20")).false_alarm
