"""Which version a late engine serves, and for which steps."""

from __future__ import annotations

import pytest

from benchmarks.study.versions import Ring, steps_due


def ring(depth: int, newest: int) -> Ring[str]:
    made: Ring[str] = Ring(depth)
    for version in range(newest + 1):
        made.publish(version, f"v{version}")
    return made


def test_an_engine_serves_what_was_newest_so_many_versions_ago() -> None:
    assert ring(3, 10).behind(3) == (7, "v7")
    assert ring(3, 10).behind(0) == (10, "v10")


def test_a_young_run_serves_its_first_version() -> None:
    assert ring(3, 1).behind(3) == (0, "v0")


def test_versions_that_no_engine_may_need_are_forgotten() -> None:
    made = ring(2, 9)
    assert len(made._held) == 3
    with pytest.raises(ValueError, match="delay must be 0 to 2, got 3"):
        made.behind(3)


def test_a_version_that_was_left_out_is_refused() -> None:
    with pytest.raises(ValueError, match="version must be 3, got 4"):
        ring(2, 2).publish(4, "v4")


@pytest.mark.parametrize("phase", [0, 2, 5])
def test_every_step_is_drawn_once_whatever_the_phase(phase: int) -> None:
    drawn = [later for step in range(1, 31) for later in steps_due(step, phase=phase, period=6)]
    assert drawn[:30] == list(range(1, 31))


def test_an_engine_refreshes_at_its_phase_and_draws_up_to_its_next_refresh() -> None:
    # phase 2 of 6: refreshes where (step - 1) % 6 == 2, that is at 3, 9, 15; the start draws for steps 1 and 2 as well
    drawn = {step: list(steps_due(step, phase=2, period=6)) for step in range(1, 12)}
    assert {step: steps for step, steps in drawn.items() if steps} == {
        1: [1, 2],
        3: [3, 4, 5, 6, 7, 8],
        9: [9, 10, 11, 12, 13, 14],
    }
