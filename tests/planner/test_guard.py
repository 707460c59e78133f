from __future__ import annotations

from collections.abc import Sequence

import pytest
from motley_api import records
from motley_api.resources.rlrun import Guard, GuardAction, GuardStatus
from motley_operator.planner import guard
from planner import study


def steps_of(
    kls: Sequence[float], groups: dict[str, Sequence[float]] | None = None, **more: object
) -> list[records.StepRecord]:
    """One record a step with these KLs, of the run and of each group."""
    return [
        study.step(
            number,
            kl=kl,
            groups=[
                records.GroupStep(name=name, view="bf16", samples=64, kl=records.Ratio(values[number - 1], 1.0))
                for name, values in (groups or {}).items()
            ],
            **more,  # type: ignore[arg-type]
        )
        for number, kl in enumerate(kls, 1)
    ]


def follow(
    steps: Sequence[records.StepRecord], config: Guard, groups: Sequence[str] = (), generation: int = 1
) -> list[guard.Verdict]:
    """The verdict after each step, each from the status that the one before it left."""
    held: GuardStatus | None = None
    verdicts = []
    for upto in range(1, len(steps) + 1):
        verdict = guard.judge(config, generation, held, guard.series(steps[:upto]), groups)
        verdicts.append(verdict)
        held = verdict.status
    return verdicts


def first_step(verdicts: Sequence[guard.Verdict], action: GuardAction) -> int | None:
    return next((number for number, verdict in enumerate(verdicts, 1) if verdict.status.action is action), None)


FLAT = [0.01] * 5


def test_a_large_but_steady_mismatch_raises_nothing() -> None:
    """A mixed fleet's KL is several times a homogeneous one's, with the same result."""
    verdicts = follow(steps_of([0.3, 0.28, 0.31, 0.33, 0.29, *([0.35] * 30)]), Guard())
    assert all(verdict.status.action is None for verdict in verdicts)
    assert verdicts[-1].healthy is True


def test_growth_warns_after_patience_and_pauses_after_half_as_long_again() -> None:
    # early level 0.01, limit 4x; above from step 6 on: p = 2 -> warning at 7, pause after 1.5 x 2 = 3 steps
    verdicts = follow(steps_of([*FLAT, 0.05, 0.05, 0.06, 0.08]), Guard())
    assert first_step(verdicts, GuardAction.WARN) == 7
    assert first_step(verdicts, GuardAction.PAUSE) == 8
    assert "KL 0.06 against 0.01 early (limit 4x)" in verdicts[7].message
    patient = follow(steps_of([*FLAT, *([0.05] * 8)]), Guard(patience_steps=5))
    # warned after 5; paused after 7.5, so 8
    assert (first_step(patient, GuardAction.WARN), first_step(patient, GuardAction.PAUSE)) == (10, 13)


def test_a_creeping_log_prob_difference_is_caught_before_the_nan() -> None:
    """Difference 0.011 -> 0.2 over 40 steps, KL about half its square, then NaN at step 41."""
    differences = [0.011 * (0.2 / 0.011) ** (number / 39) for number in range(40)]
    steps = steps_of([*(0.5 * difference**2 for difference in differences), float("nan")])
    paused = first_step(follow(steps, Guard(kl_floor="0.0002")), GuardAction.PAUSE)
    assert paused is not None
    assert paused < 41


def test_one_spike_is_not_growth() -> None:
    verdicts = follow(steps_of([*FLAT, 0.5, 0.01, 0.5, 0.01, 0.01]), Guard())
    assert all(verdict.status.action is None for verdict in verdicts)


def test_growth_below_the_floor_raises_nothing() -> None:
    """A mismatch of rounding noise may grow a hundredfold and still be noise."""
    verdicts = follow(steps_of([1e-6] * 5 + [1e-4] * 10), Guard())
    assert all(verdict.status.action is None for verdict in verdicts)


def test_nothing_is_judged_before_the_early_level_is_known() -> None:
    verdicts = follow(steps_of([0.01, 0.5, 0.9, 0.9]), Guard())
    assert [verdict.healthy for verdict in verdicts] == [None] * 4


def test_mismatch_that_grows_because_samples_grow_stale_raises_nothing() -> None:
    """As recorded in the study's miniature: no lag at first, about 4 steps from step 6 on, and 80 times the KL."""
    lags = [0, 1, 1.9, 2.6, 3, *([4.1] * 25)]
    kls = [0.0017, 0.0034, 0.019, 0.024, 0.048, *([0.13] * 25)]
    steps = [
        study.step(number, kl=kl, lag=records.Ratio(lag, 1.0))
        for number, (kl, lag) in enumerate(zip(kls, lags, strict=True), 1)
    ]
    verdicts = follow(steps, Guard())
    assert all(verdict.status.action is None for verdict in verdicts)
    # the ramp: 4.1 > 2/3 x (step - 1) up to step 7; the early level is steps 8 to 12
    assert [verdict.healthy for verdict in verdicts][10:12] == [None, True]
    grown = [*steps, *(study.step(number, kl=0.6, lag=records.Ratio(4.1, 1.0)) for number in range(31, 33))]
    assert first_step(follow(grown, Guard()), GuardAction.WARN) == 32  # .6 >= 4 x .13, twice


def test_a_ramp_without_end_ends() -> None:
    steps = [study.step(number, kl=0.01, lag=records.Ratio(number - 1.0, 1.0)) for number in range(1, 40)]
    verdicts = follow(steps, Guard())
    # 32 steps of ramp at most, then 5 of early level
    assert [verdict.healthy for verdict in verdicts][35:37] == [None, True]


def test_a_run_that_was_far_out_from_its_start_is_paused_without_growth() -> None:
    # 4% of tokens early, then 5.2%, 6% and 5.2%: 1.5 times at most. The ceiling is 5.5%: (5.2 + 6) / 2 = 5.6 at step 7. Healthy runs
    # of the study showed 0.3%
    outside = [records.Ratio(share, 1.0) for share in (*[0.04] * 5, 0.052, 0.06, 0.052)]
    steps = [study.step(number, out_of_range=share) for number, share in enumerate(outside, 1)]
    verdicts = follow(steps, Guard())
    assert first_step(verdicts, GuardAction.PAUSE) == 7
    assert verdicts[6].message == "out-of-range tokens 5.6% over 2 steps (limit 5.5%)"
    assert verdicts[5].status.action is None
    for config in (Guard(out_of_range_ceiling_percent="6"), Guard(patience_steps=3)):  # three steps hold 5.47%
        assert all(verdict.status.action is None for verdict in follow(steps, config))


def test_one_step_far_out_is_not_a_reason_to_pause() -> None:
    outside = [records.Ratio(share, 1.0) for share in (*[0.005] * 5, 0.3, 0.005, 0.3, 0.01)]
    steps = [study.step(number, out_of_range=share) for number, share in enumerate(outside, 1)]
    assert all(verdict.status.action is None for verdict in follow(steps, Guard()))


def test_the_tail_ratio_of_an_uncorrected_run_pauses_it_within_a_few_steps() -> None:
    """The study's SC alone: 1.2 -> 52 from step 33 on, noticed by a person nine hours later."""
    tails = [1.2] * 32 + [1.2 + 2.4 * number for number in range(1, 20)]
    steps = [study.step(number, tail_ratio=records.Ratio(tail, 1.0)) for number, tail in enumerate(tails, 1)]
    # 3 x 1.2 = 3.6: reached at step 33 (1.2 + 2.4); patience 2, pause after 3 steps in a row
    assert first_step(follow(steps, Guard()), GuardAction.PAUSE) == 35


def test_a_tail_that_the_sampler_leaves_out_raises_nothing_as_it_comes_back() -> None:
    """Under top-k the sampler has no tail at all: what moves a ratio below 1 is the trainer's own."""
    tails = [0.05] * 10 + [0.15 + 0.05 * number for number in range(10)]
    steps = [study.step(number, tail_ratio=records.Ratio(tail, 1.0)) for number, tail in enumerate(tails, 1)]
    assert all(verdict.status.action is None for verdict in follow(steps, Guard()))


def test_episodes_that_end_by_format_errors_pause_the_run() -> None:
    shares = [0.02] * 10 + [0.62] * 4
    steps = [study.step(number, format_error_ends=records.Ratio(share, 1.0)) for number, share in enumerate(shares, 1)]
    verdicts = follow(steps, Guard())
    assert first_step(verdicts, GuardAction.PAUSE) == 13
    assert "62% of episodes ended by format errors" in verdicts[-1].message


def test_one_drifting_group_is_throttled_then_quarantined_while_the_run_goes_on() -> None:
    run = [*FLAT, *([0.012] * 6)]
    groups = {"good": [0.01] * 11, "bad": [*FLAT, *([0.05] * 6)]}
    verdicts = follow(steps_of(run, groups), Guard(), ["good", "bad"])
    actions = [verdict.action("bad") for verdict in verdicts]
    # above from step 6: throttled at 7, quarantined at 9
    assert actions[:6] == [None] * 6
    assert actions[6:8] == [GuardAction.THROTTLE] * 2
    assert actions[8:] == [GuardAction.QUARANTINE] * 3
    assert all(verdict.action("good") is None and verdict.status.action is None for verdict in verdicts)


def test_groups_to_blame_go_before_the_whole_run_is_paused() -> None:
    run = [*FLAT, *([0.05] * 8)]
    groups = {"good": [0.01] * 13, "bad": [*FLAT, *([0.3] * 8)]}
    verdicts = follow(steps_of(run, groups), Guard(), ["good", "bad"])
    assert verdicts[8].action("bad") is GuardAction.QUARANTINE  # step 9
    assert first_step(verdicts, GuardAction.PAUSE) == 13  # 4 x patience, instead of 8


def test_a_run_is_paused_at_once_when_most_of_its_samples_drift() -> None:
    grown = [
        *FLAT,
        *([0.3] * 8),
    ]  # each of the two beyond the other and the good one together: 30 / ((.3 + .01) / 2 / .01) = 1.9 times
    groups = {"good": [0.01] * 13, "bad": grown, "worse": grown}
    verdicts = follow(steps_of(grown, groups), Guard(), list(groups))
    assert first_step(verdicts, GuardAction.PAUSE) == 8


def test_a_group_that_grows_with_the_fleet_is_not_to_blame_for_it() -> None:
    # all grow fivefold: the run's affair. One grows tenfold more: 50 / 5 = 10 times beyond the rest, against a limit of 4
    grown = [*FLAT, *([0.05] * 8)]
    alike = follow(steps_of(grown, {"a": grown, "b": grown, "c": grown}), Guard(), ["a", "b", "c"])
    assert first_step(alike, GuardAction.PAUSE) == 8
    assert not any(verdict.status.groups for verdict in alike)
    groups = {"a": grown, "b": grown, "c": [*FLAT, *([0.5] * 8)]}
    one_more = follow(steps_of(grown, groups), Guard(), list(groups))
    assert {name for verdict in one_more for name in groups if verdict.action(name)} == {"c"}
    assert (
        first_step(one_more, GuardAction.PAUSE) == 8
    )  # a and b are far above their early levels too: throwing c out saves nothing
    # .5 / 5, in words that say so
    (why,) = {why for verdict in one_more for name, action, why in verdict.news if (name, action) == ("c", "Throttle")}
    assert why == "KL 0.1 against 0.01 early (limit 4x), the other groups' growth of 5x taken off"


def test_a_group_without_numbers_says_nothing_about_the_others() -> None:
    grown = [*FLAT, *([0.05] * 8)]
    groups = {"good": [0.01] * 13, "bad": grown, "broken": [*FLAT, *([float("nan")] * 4), *([float("inf")] * 4)]}
    verdicts = follow(steps_of([0.02] * 13, groups), Guard(), list(groups))
    assert verdicts[8].action("bad") is GuardAction.QUARANTINE
    assert verdicts[-1].action("broken") is GuardAction.QUARANTINE  # inf is above every limit
    assert verdicts[-1].action("good") is None


def small_group(kls: Sequence[float], samples: int) -> list[records.StepRecord]:
    return [
        study.step(
            number,
            groups=[
                records.GroupStep(name="large", view="bf16", samples=64, kl=records.Ratio(0.01, 1.0)),
                records.GroupStep(name="small", view="bf16", samples=samples, kl=records.Ratio(kl, 1.0)),
            ],
        )
        for number, kl in enumerate(kls, 1)
    ]


def test_a_few_bad_samples_of_a_small_group_raise_nothing() -> None:
    # 16 samples a step: four steps to a level. Steps 9 and 10 are in one of them or in two: (2 x .09 + 2 x .01) / 4 = .05 is above .03
    # once, (.089 + 3 x .01) / 4 is not
    verdicts = follow(small_group([*([0.01] * 8), 0.09, 0.089, *([0.01] * 12)], 16), Guard(), ["large", "small"])
    assert GuardAction.QUARANTINE not in {verdict.action("small") for verdict in verdicts}
    assert GuardAction.THROTTLE not in {verdict.action("small") for verdict in verdicts}


def test_a_small_group_that_drifts_is_throttled_when_enough_samples_say_so() -> None:
    # 32 samples a step: two steps to a level. Above from step 6 on: throttled after two levels, quarantined after four
    verdicts = follow(small_group([*FLAT, *([0.05] * 8)], 32), Guard(), ["large", "small"])
    assert [verdict.action("small") for verdict in verdicts].index(GuardAction.THROTTLE) + 1 == 9
    assert [verdict.action("small") for verdict in verdicts].index(GuardAction.QUARANTINE) + 1 == 13


def test_the_early_level_of_a_small_group_waits_for_enough_samples() -> None:
    # 8 samples a step: eight steps, rather than five
    levels = guard.series(small_group([0.02] * 7 + [0.1] * 3, 8)).groups["small"]
    assert guard.early(levels[:7], 5) is None
    start = guard.early(levels, 5)
    assert start is not None
    assert start.step == 8
    assert guard.mean(start.kl) == pytest.approx(0.03)  # (7 x .02 + .1) / 8


def test_a_step_that_is_not_a_number_counts_as_not_measured() -> None:
    verdicts = follow(small_group([*FLAT, 0.05, float("nan"), *([0.05] * 6)], 32), Guard(), ["large", "small"])
    assert verdicts[-1].action("small") is GuardAction.QUARANTINE


def test_a_throttle_ends_when_the_group_has_been_steady_again() -> None:
    bad = [*FLAT, 0.05, 0.05, *([0.01] * 4)]
    verdicts = follow(steps_of([0.01] * 11, {"bad": bad, "good": [0.01] * 11}), Guard(), ["bad", "good"])
    assert verdicts[6].action("bad") is GuardAction.THROTTLE
    assert verdicts[9].action("bad") is GuardAction.THROTTLE
    assert verdicts[10].action("bad") is None  # 2 x patience below
    assert ("bad", "Lifted") in [item[:2] for item in verdicts[10].news]


@pytest.mark.parametrize(
    ("cap", "want_run", "want_group"), [("Warn", "Warn", "Warn"), ("Throttle", "Throttle", "Throttle")]
)
def test_the_guard_goes_no_further_than_it_may(cap: str, want_run: str, want_group: str) -> None:
    grown = [*FLAT, *([0.1] * 20)]
    verdicts = follow(steps_of(grown, {"a": grown}), Guard(action=GuardAction(cap)), ["a"])
    assert verdicts[-1].status.action == want_run
    assert verdicts[-1].action("a") == want_group


def test_a_pause_holds_until_a_person_edits_the_spec() -> None:
    steps = steps_of([*FLAT, *([0.1] * 5), *([0.01] * 10)])
    verdicts = follow(steps, Guard())
    assert verdicts[9].paused
    assert verdicts[-1].paused  # although the numbers are fine again
    freed = guard.judge(Guard(), 2, verdicts[-1].status, guard.series(steps), ())
    assert freed.status.action is None
    assert freed.status.since_step == 20


def test_after_an_edit_only_later_steps_raise_the_alarm_again() -> None:
    grown = [*FLAT, *([0.1] * 6)]
    held = follow(steps_of(grown), Guard())[-1].status
    assert held.action is GuardAction.PAUSE
    freed = guard.judge(Guard(), 2, held, guard.series(steps_of(grown)), ())
    assert freed.status.action is None
    again = guard.judge(Guard(), 2, freed.status, guard.series(steps_of([*grown, *([0.1] * 4)])), ())
    assert again.status.action is GuardAction.PAUSE  # patience 2, four steps after step 11


def test_falling_entropy_warns_and_never_more() -> None:
    entropies = [0.8] * 5 + [0.05] * 20
    steps = [study.step(number, entropy=records.Ratio(value, 1.0)) for number, value in enumerate(entropies, 1)]
    verdicts = follow(steps, Guard())
    assert [verdict.status.action for verdict in verdicts[:6]] == [
        None
    ] * 6  # low at step 6 for the first time: patience 2
    assert {verdict.status.action for verdict in verdicts[6:]} == {GuardAction.WARN}


def test_a_repeated_step_counts_once() -> None:
    first = steps_of([*FLAT, 0.1, 0.1])
    repeated = [study.step(6, attempt=1, kl=0.01), study.step(7, attempt=1, kl=0.01)]
    found = guard.series([*first, *repeated])
    assert [level.step for level in found.run] == [1, 2, 3, 4, 5, 6, 7]
    assert [guard.mean(level.kl) for level in found.run][-2:] == [0.01, 0.01]


def test_growth_is_the_last_steps_over_the_early_level() -> None:
    levels = guard.series(steps_of([*FLAT, 0.02, 0.03, 0.04])).run
    assert str(guard.growth(levels, 5)) == "3.00"
    assert guard.growth(levels[:4], 5) is None
