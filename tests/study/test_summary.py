"""What a ledger comes to."""

from __future__ import annotations

import math

import msgspec
import pytest
from motley_api.records import GroupStep, Ratio, StepRecord
from motley_operator.planner import guard

from benchmarks.study import ledger, summary


def record(step: int, reward: float, **changes: object) -> StepRecord:
    fields: dict[str, object] = {
        "run": "r",
        "step": step,
        "attempt": 0,
        "started_unix_s": 0.0,
        "finished_unix_s": 1.0,
        "wait_s": 0.0,
        "train_s": 0.0,
        "publish_s": 0.0,
        "reward": Ratio(64 * reward, 64.0),
        "kl": Ratio(0.02 * 1000, 1000.0),
        "out_of_range": Ratio(5.0, 1000.0),
        "entropy": Ratio(200.0, 1000.0),
        "grad_norm": 0.1,
        "loss": 0.0,
        "lag": Ratio(min(4.0, (step - 1) / 2), 1.0),  # no staler than half the run: not the guard's ramp
        "groups": [],
    }
    return StepRecord(**(fields | changes))  # type: ignore[arg-type]


def test_reward_is_smoothed_over_whole_windows_only() -> None:
    found = summary.smoothed([0.0, 1.0, 0.5, 0.3], window=3)
    assert all(math.isnan(value) for value in found[:2])
    assert found[2:] == pytest.approx([0.5, 0.6])  # (0 + 1 + .5) / 3, (1 + .5 + .3) / 3


def test_the_step_of_a_fall_is_the_first_a_third_below_the_best() -> None:
    # window 1: best .9, limit .6; .61 is above it, .6 is not
    assert summary.fall_step([0.3, 0.9, 0.61, 0.6, 0.9], window=1) == 4
    assert summary.fall_step([0.3, 0.9, 0.61, 0.61, 0.9], window=1) is None


def test_one_bad_step_is_no_fall() -> None:
    # window 5: (.9 * 4 + 0) / 5 = .72, above .6
    assert summary.fall_step([0.9] * 6 + [0.0] + [0.9] * 6) is None


def test_a_run_that_comes_back_fell_and_did_not_collapse() -> None:
    rewards = [0.9] * 6 + [0.1] * 6 + [0.8] * 6
    assert summary.fall_step(rewards) == 8  # (.9 * 3 + .1 * 2) / 5 = .58 <= .6
    assert summary.collapse_step(rewards) is None


def test_a_run_that_stays_down_collapsed_at_its_fall() -> None:
    assert summary.collapse_step([0.9] * 6 + [0.1] * 12) == 8


def test_a_run_that_never_earned_anything_has_nothing_to_lose() -> None:
    assert summary.fall_step([0.0] * 12) is None


def test_a_summary_takes_its_last_window_and_grows_from_the_early_level() -> None:
    steps = [record(step, 0.2) for step in range(1, 6)]
    steps += [record(step, 0.8, kl=Ratio(0.08 * 1000, 1000.0), grad_norm=0.1 * step) for step in range(6, 11)]
    found = summary.summarise(steps, 0.02)
    assert (found.final_reward, found.best_reward) == pytest.approx((0.8, 0.8))
    assert found.kl_growth == pytest.approx(4.0)  # .08 / .02
    assert (found.grad_norm, found.largest_grad_norm) == pytest.approx((0.8, 1.0))  # mean of .6 to 1.0
    assert found.collapsed is None


def test_groups_are_compared_by_their_tokens_not_by_their_means() -> None:
    groups = [
        GroupStep(name="a", view="fp8", out_of_range=Ratio(3.0, 100.0)),
        GroupStep(name="b", view="bf16", out_of_range=Ratio(1.0, 300.0)),
    ]
    found = summary.group_shares([record(1, 0.5, groups=groups), record(2, 0.5, groups=groups)])
    assert found["a"] == pytest.approx((0.25, 0.75, 0.03))
    assert found["b"] == pytest.approx((0.75, 0.25, 1 / 300))


def test_a_table_has_a_row_for_every_step_and_columns_for_every_group() -> None:
    groups = [GroupStep(name="a", view="fp8", kl=Ratio(3.0, 100.0), out_of_range=Ratio(3.0, 100.0))]
    header, *rows = summary.to_csv([record(1, 0.5), record(2, 0.75, groups=groups)]).splitlines()
    assert header.split(",")[-2:] == ["kl/a", "outOfRange/a"]
    assert rows[0].split(",")[:3] == ["1", "0.5", "0.02"]
    assert rows[1].split(",")[-2:] == ["0.03", "0.03"]
    assert rows[0].split(",")[-2:] == ["nan", "nan"]


def test_a_ledger_reads_back_what_was_appended(tmp_path) -> None:
    path = tmp_path / "run.jsonl"
    steps = [record(1, 0.5, metrics={"ois": 1.0, "ois/group/a": 2.0}), record(2, 0.6)]
    for step in steps:
        ledger.append(path, step)
    found = ledger.read(path)
    assert [step.reward for step in found] == [step.reward for step in steps]
    assert found[0].metrics == {"ois": 1.0}


def test_a_fixture_says_to_the_guard_what_its_record_says() -> None:
    groups = [GroupStep(name="a", view="fp8", samples=64, kl=Ratio(3.0, 100.0), version=0)]
    whole = record(7, 0.5, groups=groups, metrics={"ois": 1.0}, format_error_ends=Ratio(0.0, 64.0))
    line = ledger.fixture(whole)
    assert guard.series([msgspec.json.decode(line, type=StepRecord)]) == guard.series([whole])
    assert len(line) < 0.7 * len(msgspec.json.encode(whole))


def test_a_limit_is_as_low_as_the_false_alarms_allowed() -> None:
    # one false alarm allowed: the limit is the second largest steady value, .4
    assert summary.caught([0.3, 0.5, 0.9], [0.1, 0.4, 0.6], 1) == 2
    assert summary.caught([0.3, 0.5, 0.9], [0.1, 0.4, 0.6], 0) == 1
    with pytest.raises(ValueError, match="allowed must be 0 to 2, got 3"):
        summary.caught([], [0.1, 0.4, 0.6], 3)
