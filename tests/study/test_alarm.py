"""The guard over a recorded run."""

from __future__ import annotations

from dataclasses import replace

from motley_api.records import Ratio
from motley_api.resources.rlrun import Guard
from study.test_summary import record

from benchmarks.study.alarm import CANDIDATES, Alarm, figures, leave_one_seed_out, watch


def test_a_warning_before_the_fall_is_in_time() -> None:
    # early KL .02; above 3 x .02 from step 11 on: warned at 12 (patience 2), paused at 13; reward falls from step 15 on
    steps = [record(step, 0.9) for step in range(1, 11)]
    steps += [record(step, 0.9, kl=Ratio(0.1 * 1000, 1000.0)) for step in range(11, 15)]
    steps += [record(step, 0.1, kl=Ratio(0.1 * 1000, 1000.0)) for step in range(15, 25)]
    found = watch(steps, Guard())
    assert (found.warned, found.paused, found.fell, found.collapsed) == (12, 13, 16, 16)
    assert (found.warned_in_time, found.paused_in_time) == (True, True)
    assert found.why.startswith("KL 0.1 against 0.02")


def test_a_pause_of_a_steady_run_is_a_false_alarm() -> None:
    steps = [record(step, 0.9, kl=Ratio(0.02 * (1 if step < 10 else 9) * 1000, 1000.0)) for step in range(1, 25)]
    found = watch(steps, Guard())
    assert (found.warned_in_time, found.paused_in_time) == (None, None)
    assert found.steady
    assert figures([found]).false_pauses == 1
    assert figures([watch(steps, Guard(kl_growth="20"))]).false_pauses == 0


def test_a_warning_without_a_pause_before_the_fall_counts_as_half_the_work() -> None:
    # above from step 14 on: warned at 15, paused at 16, when the reward's mean over five steps has fallen to .58 of .9
    steps = [record(step, 0.9) for step in range(1, 14)]
    steps += [record(step, 0.9, kl=Ratio(0.1 * 1000, 1000.0)) for step in range(14, 15)]
    steps += [record(step, 0.1, kl=Ratio(0.1 * 1000, 1000.0)) for step in range(15, 25)]
    found = figures([watch(steps, Guard())])
    assert (found.collapsing, found.warned_in_time, found.paused_in_time, found.median_lead_steps) == (1, 1, 0, 0)


def alarm(**changes: int | None) -> Alarm:
    return replace(Alarm(collapsed=None, fell=None, warned=None, paused=None, why=""), **changes)


def test_thresholds_are_chosen_without_the_seed_that_they_are_measured_on() -> None:
    caught, missed, false = (
        alarm(collapsed=20, fell=20, warned=15, paused=17),
        alarm(collapsed=20, fell=20),
        alarm(warned=9, paused=9),
    )
    # Candidate 0 is right on seeds 0 and 1 and wrong on seed 2; candidate 1 the other way about.
    seen = {0: {0: [caught], 1: [alarm()], 2: [missed]}, 1: {0: [missed], 1: [false], 2: [caught]}}
    chosen = {item.seed: item for item in leave_one_seed_out(seen)}
    assert chosen[2].chosen == CANDIDATES[0]
    assert (chosen[2].found.collapsing, chosen[2].found.paused_in_time) == (1, 0)
    assert chosen[0].chosen == CANDIDATES[0]  # a collapse missed, against a steady run paused and warned of
    assert chosen[1].chosen == CANDIDATES[1]  # a collapse missed each: the one nearer to the defaults
