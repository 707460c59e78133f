from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from motley_api import records
from motley_operator.planner import shares
from planner import study


def capacity(name: str, ready: int, sessions: int, **more: bool) -> shares.GroupCapacity:
    return shares.GroupCapacity(name, "bf16", ready, sessions, **more)


def test_the_studys_fleet_splits_as_the_study_says() -> None:
    groups = [capacity(name, engines, sessions) for name, (_, _, _, engines, sessions) in study.FLEET.items()]
    fleet = shares.fleet(groups, generation=1, paused=False)
    # capacity / 1376: 128 -> 9.30%, 256 -> 18.60%, 384 -> 27.91%, 48 -> 3.49%; floors sum to 93*3+186*2+279+34*2=998, and the
    # largest remainders are 48/1376 (34.88, twice: a100, rtx6000)
    want_milli = {
        "a100-bf16": 35,
        "b200-nvfp4": 186,
        "b300-nvfp4": 279,
        "h100-bf16": 93,
        "h100-fp8": 93,
        "h200-bf16": 93,
        "h200-fp8": 186,
        "rtx6000-bf16": 35,
    }
    assert {group.name: group.share_milli for group in fleet.groups} == want_milli
    assert sum(group.capacity_sessions for group in fleet.groups) == 1376


def test_a_group_without_a_ready_engine_gets_no_session() -> None:
    fleet = shares.fleet([capacity("a", 0, 16), capacity("b", 1, 16)], generation=1, paused=False)
    assert [(group.name, group.share_milli) for group in fleet.groups] == [("a", 0), ("b", 1000)]


def test_without_any_ready_engine_all_shares_are_zero() -> None:
    fleet = shares.fleet([capacity("a", 0, 16), capacity("b", 0, 16)], generation=1, paused=False)
    assert [group.share_milli for group in fleet.groups] == [0, 0]


def test_a_throttled_group_gets_half_of_what_its_capacity_would_and_a_quarantined_one_nothing() -> None:
    groups = [capacity("a", 1, 16, throttled=True), capacity("b", 1, 16), capacity("c", 1, 16, quarantined=True)]
    fleet = shares.fleet(groups, generation=1, paused=False)
    # weights 8 : 16 : 0 -> 333.3 : 666.7, the remainder goes to b
    assert [(group.share_milli, group.quarantined) for group in fleet.groups] == [(333, False), (667, False), (0, True)]


def test_ties_go_to_the_first_name() -> None:
    assert shares.apportion({"c": 1, "a": 1, "b": 1}) == {"c": 333, "a": 334, "b": 333}


def test_a_negative_weight_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weights must be >= 0.*'a'"):
        shares.apportion({"a": -1})


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=4), st.integers(0, 10_000), min_size=1, max_size=64))
def test_shares_sum_to_a_thousand_and_are_within_one_of_exact(weights: dict[str, int]) -> None:
    split = shares.apportion(weights)
    whole = sum(weights.values())
    assert sum(split.values()) == (1000 if whole else 0)
    if whole:
        assert all(abs(split[name] - 1000 * weight / whole) < 1 for name, weight in weights.items())


def fleet_of(generation: int, share: int = 1000, *, paused: bool = False) -> records.Fleet:
    item = records.GroupShare(name="a", view="bf16", capacity_sessions=16, share_milli=share)
    return records.Fleet(generation=generation, groups=[item], paused=paused)


def test_an_unchanged_fleet_keeps_its_generation() -> None:
    before = fleet_of(7)
    assert shares.next_fleet(before, fleet_of(0), heard_generation=7) is before


def test_a_changed_fleet_gets_the_next_generation() -> None:
    assert shares.next_fleet(fleet_of(7), fleet_of(0, share=0), heard_generation=5).generation == 8
    assert shares.next_fleet(fleet_of(7), fleet_of(0, paused=True), heard_generation=5).generation == 8


def test_a_lost_fleet_document_is_replaced_above_what_the_router_has_heard() -> None:
    """Otherwise the router would refuse it as old."""
    assert shares.next_fleet(None, fleet_of(0), heard_generation=41).generation == 42
    assert shares.next_fleet(fleet_of(3), fleet_of(0), heard_generation=41).generation == 42
