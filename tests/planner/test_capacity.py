"""Sessions that an engine serves at the latency bound, from loads; the working is beside each number."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from motley_api import records
from motley_operator.measure import KEPT_LOADS, RunMemory
from motley_operator.planner import capacity
from motley_operator.planner.capacity import Capacity, Load, declared_capacity, measured_capacity

BOUND_S = 10.0
# The study's saturated group: 47 of 48 slots over four engines of 12 sessions, KV cache 85-98% full, its prefixes evicted.
SATURATED = Load(
    group="rtx6000-bf16",
    until_unix_s=60.0,
    seconds=60.0,
    engines=4,
    sessions=47 / 4,
    running=9.0,
    queued=0.5,
    kv_used_percent=92.0,
    turns=200,
    tokens=15_400,
    preemptions=12,
    p90_s=8.0,
)


def load(minute: int = 1, **more: Any) -> Load:
    """An engine of 12 sessions at its capacity, with room on all sides."""
    easy = {"sessions": 12.0, "kv_used_percent": 60.0, "queued": 0.0, "preemptions": 0, "p90_s": 5.0}
    return replace(SATURATED, until_unix_s=60.0 * minute, **(easy | more))


def after(*loads: Load, declared: int = 12) -> Capacity:
    return measured_capacity(declared_capacity(declared), loads, BOUND_S)


def test_without_throughput_the_declared_capacity_is_used_and_marked() -> None:
    """Case 34."""
    assert after() == Capacity(Fraction(12), "Declared", 12)
    quiet = after(load(sessions=2.0), load(2, turns=3, sessions=11.0))
    assert (quiet.sessions, quiet.source) == (12, "Declared")


def test_a_saturated_group_is_measured_lower_than_it_was_declared() -> None:
    found = after(SATURATED)
    # 12 set back in 200 turns: x 0.9; KV 92%: x 90/92 = 0.978. The smaller counts: 11.75 x 0.9 = 10.575
    assert (found.sessions, found.source, found.whole) == (Fraction("10.575"), "Measured", 10)
    assert found.tokens_per_second == pytest.approx(15_400 / 60 / 4)
    assert "KV cache 92% full, limit 90%; 12 requests set back in 200 turns" in found.why


@pytest.mark.parametrize(
    ("pressure", "want"),
    [
        ({"kv_used_percent": 98.0}, Fraction("11.02")),  # 12 x 90 / 98 = 11.0204
        ({"p90_s": 12.5}, Fraction("9.6")),  # 12 x 10 / 12.5
        ({"p90_s": 38.0}, Fraction(9)),  # 12 x 10 / 38 = 3.2, but a quarter at most at once
        ({"queued": 3.0}, Fraction(9)),  # 12 x 9 / (9 + 3)
        ({"preemptions": 3}, Fraction("10.8")),  # 1.5% of 200 turns: 12 x 0.9
        ({"preemptions": 2}, Fraction(12)),  # 1% is chance
        ({"kv_used_percent": 89.0}, Fraction(12)),
        ({"turns": 0, "tokens": 0, "p90_s": None, "queued": 9.0}, Fraction(9)),  # nothing came back at all
    ],
)
def test_what_presses_says_how_much_would_have_been_served(pressure: dict[str, Any], want: Fraction) -> None:
    assert after(load(**pressure)).sessions == want


def test_an_engine_at_its_capacity_with_room_is_measured_higher_up_to_half_more() -> None:
    # 12 x 17/16 = 12.75
    assert after(load()).sessions == Fraction("12.75")
    found = declared_capacity(12)
    for minute in range(1, 20):
        found = measured_capacity(found, [load(minute, sessions=float(found.sessions))], BOUND_S)
    assert found.sessions == 18
    assert after(load(p90_s=9.0)).sessions == 12  # under the bound, but without room
    assert after(load(p90_s=None)).sessions == 12  # engines that tell no latency
    assert after(load(sessions=9.0)).sessions == 12  # served with ease, but not at its capacity


def test_sessions_that_are_still_leaving_do_not_lower_it_again() -> None:
    """11.75 sessions stay for a while on an engine of 10.575: the same pressure is not counted twice."""
    loads = [replace(SATURATED, until_unix_s=60.0 * minute) for minute in range(1, 10)]
    assert after(*loads).sessions == Fraction("10.575")
    # Down to it, and still pressed: 10.575 x 90 / 95 = 10.018
    left = load(10, sessions=10.575, kv_used_percent=95.0)
    assert after(*loads, left).sessions == Fraction("10.018")


def test_a_window_is_counted_once_however_often_it_is_seen() -> None:
    once = after(SATURATED)
    assert measured_capacity(once, [SATURATED], BOUND_S) == once


@given(
    st.lists(
        st.builds(
            load,
            st.integers(1, 30),
            sessions=st.floats(0, 30),
            kv_used_percent=st.floats(0, 100),
            queued=st.floats(0, 40),
            running=st.floats(0, 20),
            p90_s=st.none() | st.floats(0, 300),
            turns=st.integers(0, 500),
            preemptions=st.integers(0, 50),
        ),
        max_size=20,
    )
)
@settings(max_examples=200, deadline=None)
def test_it_stays_within_one_session_and_half_more_than_declared_and_moves_a_step_at_a_time(loads: list[Load]) -> None:
    found = declared_capacity(12)
    for one in loads:
        before, found = found, capacity.after(found, one, BOUND_S)
        assert 1 <= found.sessions <= 18
        assert found.sessions >= min(before.sessions, before.sessions * Fraction(3, 4) - Fraction(1, 1000))
        assert found.sessions <= before.sessions * Fraction(17, 16)


def simulate(held: int, declared: int, minutes: int) -> list[Fraction]:
    """An engine that holds `held` sessions at the bound, with latency and cache growing in proportion; sessions follow at once."""
    found, course = declared_capacity(declared), []
    for minute in range(1, minutes):
        there = float(found.sessions)
        pressed = there / held
        one = load(minute, sessions=there, p90_s=10.0 * pressed, kv_used_percent=min(100.0, 90.0 * pressed))
        found = measured_capacity(found, [one], BOUND_S)
        course.append(found.sessions)
    return course


@pytest.mark.parametrize("declared", [16, 20, 24, 40])
def test_it_settles_near_what_an_engine_holds_and_does_not_swing(declared: int) -> None:
    """From 16 (1.5 x 16 = 24 would be the ceiling) up, from 40 down: 20 sessions are held."""
    course = simulate(20, declared, 60)
    assert 16 <= course[-1] <= 20
    assert len(set(course[-40:])) == 1


# From a router's answers to loads.


def engine(name: str, group: str = "g", **more: Any) -> records.EngineState:
    given_ = {"view": "bf16", "url": "http://x", "version": 1, "ready": True, "max_sessions": 12} | more
    return records.EngineState(id=name, group=group, **given_)


def router(*engines: records.EngineState, active: int = 0, total: int = 100) -> records.RouterStatus:
    rows = [
        records.GroupSessions(name=name, active=active, capacity_sessions=0, share_milli=0, engines_ready=1, engines=1)
        for name in sorted({one.group for one in engines})
    ]
    return records.RouterStatus(
        fleet_generation=1, sessions_active=active, sessions_total=total, groups=rows, engines=list(engines)
    )


def counts(**by_bound: int) -> list[int]:
    """{"s10": 3}: three turns in the bucket that ends at 10 s; "slow": the open one."""
    found = [0] * (len(records.TURN_LATENCY_BOUNDS_S) + 1)
    for name, count in by_bound.items():
        found[-1 if name == "slow" else records.TURN_LATENCY_BOUNDS_S.index(float(name[1:]))] = count
    return found


def over_the_wire(status: records.RouterStatus) -> records.RouterStatus:
    """As the operator gets it from the router."""
    return msgspec.json.decode(records.encode_json(status), type=records.RouterStatus)


def test_a_minute_of_answers_makes_one_load_for_each_group() -> None:
    memory = RunMemory()
    before = [
        engine("a", turns=100, generated_tokens=7000, busy_s=50.0, turn_latency_counts=counts(s5=100)),
        engine("b", turns=40, generated_tokens=3000, busy_s=20.0, turn_latency_counts=counts(s5=40), preemptions=1),
    ]
    memory.hear_router(over_the_wire(router(*before, active=24)), 1000.0)
    for second in range(3, 61, 3):
        grown = [
            engine(
                "a",
                turns=100 + second,
                generated_tokens=7000 + 77 * second,
                busy_s=50.0 + second,
                running=8,
                queued=2,
                kv_used_percent=90,
                turn_latency_counts=counts(s5=100 + second * 8 // 10, s20=second * 2 // 10),
            ),
            engine(
                "b",
                turns=40 + second,
                generated_tokens=3000 + 77 * second,
                busy_s=20.0 + second,
                running=4,
                kv_used_percent=70,
                preemptions=1 + second // 30,
                turn_latency_counts=counts(s5=40 + second * 8 // 10, s20=second * 2 // 10),
            ),
        ]
        memory.hear_router(over_the_wire(router(*grown, active=22)), 1000.0 + second)
    (load_,) = memory.loads["g"]
    assert (load_.engines, load_.seconds, load_.until_unix_s) == (2, 60.0, 1060.0)
    assert (load_.sessions, load_.running, load_.queued, load_.kv_used_percent) == (11.0, 6.0, 1.0, 80.0)
    assert (load_.turns, load_.tokens, load_.preemptions) == (120, 2 * 77 * 60, 2)
    # 96 of 120 turns took up to 5 s, 24 from 15 to 20 s. The 108th is half-way into the latter: 17.5 s
    assert load_.p90_s == pytest.approx(17.5)
    assert load_.tokens_per_second == pytest.approx(77.0)


def test_an_engine_that_started_anew_or_came_late_is_left_out() -> None:
    first = router(engine("a", turns=100, busy_s=9.0), engine("b", turns=100, busy_s=9.0), active=8)
    then = router(engine("a", turns=130, busy_s=12.0), engine("b", turns=3, busy_s=1.0), engine("c", turns=9), active=8)
    window, _ = capacity.seen(None, first, 0.0)
    window, loads = capacity.seen(window, then, 60.0)
    assert [(one.engines, one.turns) for one in loads] == [(1, 30)]
    assert window is not None
    assert set(window.first) == {"a", "b", "c"}


def test_a_router_that_restarted_or_fell_silent_begins_another_window() -> None:
    window, _ = capacity.seen(None, router(engine("a"), active=8, total=500), 0.0)
    assert capacity.seen(window, None, 30.0) == (None, ())
    again, loads = capacity.seen(window, router(engine("a"), active=1, total=2), 30.0)
    assert again is not None
    assert (again.began_unix_s, loads) == (30.0, ())
    later, loads = capacity.seen(window, router(engine("a"), active=8, total=600), 3600.0)  # nobody asked for an hour
    assert later is not None
    assert (later.began_unix_s, loads) == (3600.0, ())


def test_only_the_newest_windows_are_kept() -> None:
    memory = RunMemory()
    for minute in range(20):
        memory.hear_router(router(engine("a", turns=minute), active=1), 60.0 * minute)
    assert [one.until_unix_s for one in memory.loads["g"]] == [60.0 * minute for minute in range(20 - KEPT_LOADS, 20)]


@pytest.mark.parametrize(
    ("buckets", "part", "want"),
    [
        ({}, 0.9, None),
        ({"s1": 10}, 0.9, 0.95),  # evenly in (0.5, 1]: 0.5 + 0.5 x 9/10
        ({"s1": 9, "slow": 1}, 0.9, 1.0),
        ({"s1": 5, "slow": 5}, 0.9, 240.0),  # at least
    ],
)
def test_a_quantile_lies_evenly_in_its_bucket(buckets: dict[str, int], part: float, want: float | None) -> None:
    found = capacity.quantile(counts(**buckets), part)
    assert found == (None if want is None else pytest.approx(want))
