from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from decimal import Decimal

from hypothesis import given, settings
from hypothesis import strategies as st
from motley_operator.planner import rebalance
from motley_operator.planner.rebalance import Need, Option
from planner import study


def option(name: str, **more: object) -> Option:
    """A group of the study, from 0 to 64 engines."""
    gpu, _, gpus, engines, sessions = study.FLEET[name]
    made = Option(
        name=name,
        pool=(gpu, "OnDemand"),
        gpus_per_engine=gpus,
        sessions=sessions,
        engines=engines,
        minimum=0,
        maximum=64,
        usd_per_hour=Decimal(study.PRICES[gpu]) * gpus,
    )
    return replace(made, **more)  # type: ignore[arg-type]


def fleets(options: Sequence[Option]) -> Iterator[dict[str, int]]:
    ranges = [range(low, high + 1) for low, high in (one.bounds for one in options)]
    for counts in itertools.product(*ranges):
        yield {one.name: count for one, count in zip(options, counts, strict=True)}


def allowed(options: Sequence[Option], need: Need, engines: dict[str, int]) -> bool:
    for pool, limit in need.gpus.items():
        mine = [one for one in options if one.pool == pool]
        asked = sum(one.bounds[0] * one.gpus_per_engine for one in mine)
        if sum(engines[one.name] * one.gpus_per_engine for one in mine) > max(limit, asked):
            return False
    gpus = sum(engines[one.name] * one.gpus_per_engine for one in options)
    dollars = sum(engines[one.name] * (one.usd_per_hour or 0) for one in options)
    return (need.gpu_cap is None or gpus <= need.gpu_cap) and (
        need.usd_per_hour is None or dollars <= need.usd_per_hour
    )


def worth(options: Sequence[Option], need: Need, engines: dict[str, int]) -> tuple[Decimal, Decimal]:
    """(shortage as shares of what is wanted, dollars over the horizon with the moves): the smaller the better."""
    sessions = sum(engines[one.name] * one.sessions for one in options)
    short = max(Decimal(0), 1 - Decimal(sessions) / need.sessions) if need.sessions else Decimal(0)
    if need.turns_per_hour:
        turns = sum(engines[one.name] * (one.turns_per_hour or 0) * one.effective for one in options)
        short += max(Decimal(0), 1 - Decimal(turns) / need.turns_per_hour)
    dollars = sum((engines[one.name] * (one.usd_per_hour or Decimal(0)) for one in options), Decimal(0))
    return short, need.hours * dollars + rebalance.moving_usd(options, engines)


cents = st.integers(0, 2000).map(lambda value: Decimal(value) / 100)
POOLS = (("H100", "OnDemand"), ("B200", "OnDemand"), ("B200", "Spot"))


@st.composite
def instances(draw: st.DrawFn) -> tuple[list[Option], Need]:
    options = []
    for number in range(draw(st.integers(1, 3))):
        low, span = draw(st.integers(0, 2)), draw(st.integers(0, 4))
        options.append(
            Option(
                name=f"g{number}",
                pool=draw(st.sampled_from(POOLS)),
                gpus_per_engine=draw(st.integers(1, 4)),
                sessions=draw(st.integers(1, 48)),
                engines=draw(st.integers(0, 6)),
                minimum=low,
                maximum=low + span,
                usd_per_hour=draw(st.none() | cents),
                turns_per_hour=Decimal(draw(st.integers(1, 500))),
                effective=Decimal(draw(st.integers(1, 10))) / 10,
                placeable=draw(st.none() | st.integers(0, 5)),
                start_usd=draw(cents) / 4,
                leave_usd=draw(cents) / 4,
            )
        )
    pools = draw(st.sets(st.sampled_from(POOLS)))
    need = Need(
        sessions=draw(st.integers(0, 300)),
        turns_per_hour=draw(st.none() | st.integers(1, 3000).map(Decimal)),
        gpus={pool: draw(st.integers(0, 12)) for pool in sorted(pools)},
        gpu_cap=draw(st.none() | st.integers(0, 20)),
        usd_per_hour=draw(st.none() | st.integers(0, 150).map(Decimal)),
        hours=draw(st.sampled_from((Decimal("0.5"), Decimal(1), Decimal(8)))),
    )
    return options, need


@settings(max_examples=60, deadline=None)
@given(instances())
def test_the_program_finds_what_trying_every_fleet_finds(instance: tuple[list[Option], Need]) -> None:
    options, need = instance
    found = rebalance.solve(options, need)
    possible = [engines for engines in fleets(options) if allowed(options, need, engines)]
    if not possible:
        assert found.refused
        assert dict(found.engines) == {one.name: one.engines for one in options}
        return
    assert not found.refused
    assert allowed(options, need, dict(found.engines))
    want_short, want_dollars = min(worth(options, need, engines) for engines in possible)
    short, dollars = worth(options, need, dict(found.engines))
    assert abs(short - want_short) <= Decimal("0.00001")
    if want_short == 0:
        assert found.met
        assert abs(dollars - want_dollars) <= Decimal("0.0001") + want_dollars * Decimal(repr(rebalance.GAP))
    assert found.proven


def test_the_studys_sessions_are_cheapest_on_h200_in_fp8_where_there_is_no_end_of_it() -> None:
    # $/session-hour: B300 7.10/48 = 0.148, h200-fp8 4.54/32 = 0.142, B200 6.25/32 = 0.195, H100 3.95/16 = 0.247 and above.
    # 1,344 = 42 x 32: 42 engines of h200-fp8 at 4.54 cost 190.68
    found = rebalance.solve([option(name) for name in study.FLEET], Need(sessions=1344))
    assert {name: count for name, count in found.engines.items() if count} == {"h200-fp8": 42}
    assert (found.usd_per_hour, found.met) == (Decimal("190.68"), True)


def test_with_the_gpus_that_the_study_had_the_fleet_is_trimmed_where_sessions_are_dear() -> None:
    # All 1,376 sessions cost 286.88; 32 of them may go. Dearest: a100 5.00/12 = 0.417, rtx 6.06/12 = 0.505 -> 2 x 6.06 for 24.
    have = {"H100": 16, "H200": 16, "B200": 8, "B300": 8, "RTX-PRO-6000": 8, "A100-80GB": 8}
    options = [option(name) for name in study.FLEET]
    need = Need(sessions=1344, gpus={(gpu, "OnDemand"): count for gpu, count in have.items()})
    found = rebalance.solve(options, need)
    used = {
        gpu: sum(found.engines[one.name] * one.gpus_per_engine for one in options if one.pool[0] == gpu) for gpu in have
    }
    assert all(used[gpu] <= have[gpu] for gpu in have)
    # 16 H200 as FP8 serve 512, 8 B300 384, 8 B200 256: 1,152 sessions. 192 are left for H100: 12 x 16 FP8 at 3.95, or 6 x 32 at 7.90.
    want = 16 * Decimal("4.54") + 8 * Decimal("7.10") + 8 * Decimal("6.25") + 12 * Decimal("3.95")
    assert (found.usd_per_hour, found.sessions) == (want, 1344)
    assert any(binding.constraint.startswith("GPUs of H200") for binding in found.binding)


def test_within_the_studys_own_fleet_the_dearest_sessions_go_first() -> None:
    # No group grows. 32 sessions too many: rtx 6.06 for 12 sessions, twice, leaves 8 over; a100 gives 5.00 for 12: 2 rtx = 12.12.
    options = [option(name, maximum=study.FLEET[name][3]) for name in study.FLEET]
    found = rebalance.solve(options, Need(sessions=1344))
    assert found.engines["rtx6000-bf16"] == 2
    assert found.usd_per_hour == Decimal("286.88") - Decimal("12.12")
    assert found.sessions == 1352


def test_a_group_whose_samples_train_half_as_well_costs_twice_as_much() -> None:
    cheap = option("h100-fp8", usd_per_hour=Decimal(3), turns_per_hour=Decimal(100), effective=Decimal("0.5"))
    good = option("h200-fp8", usd_per_hour=Decimal(5), turns_per_hour=Decimal(100))
    need = Need(sessions=1, turns_per_hour=Decimal(1000))
    found = rebalance.solve([cheap, good], need)
    # 20 engines at 3 = 60, or 10 at 5 = 50
    assert dict(found.engines) == {"h100-fp8": 0, "h200-fp8": 10}
    found = rebalance.solve([replace(cheap, effective=Decimal(1)), good], need)
    assert dict(found.engines) == {"h100-fp8": 10, "h200-fp8": 0}


def test_a_saving_that_does_not_pay_for_the_move_is_left() -> None:
    here = option("b200-nvfp4", engines=8)
    there = option("h200-fp8", engines=0, start_usd=Decimal(2))
    # 8 x (6.25 - 4.54) = 13.68 an hour saved; the move costs 16
    assert rebalance.solve([here, there], Need(sessions=256)).engines["h200-fp8"] == 0
    assert rebalance.solve([here, there], Need(sessions=256, hours=Decimal(2))).engines["h200-fp8"] == 8


def test_what_binds_is_named_with_its_worth() -> None:
    options = [option("h200-fp8", maximum=10), option("b200-nvfp4", minimum=2)]
    found = rebalance.solve(options, Need(sessions=640))
    texts = {binding.constraint: binding.usd_per_hour for binding in found.binding}
    # One more session costs 6.25/32; one more H200 engine replaces a B200: 6.25 - 4.54
    assert texts == {"sessions 640": Decimal("0.1953"), "maxReplicas 10 of h200-fp8": Decimal("1.7100")}


def test_a_need_that_cannot_be_met_is_met_as_far_as_it_goes_and_says_what_stops_it() -> None:
    found = rebalance.solve(
        [option("h200-fp8", maximum=10), option("b200-nvfp4")],
        Need(sessions=1344, usd_per_hour=Decimal(100)),
    )
    # 10 x 4.54 = 45.40, 8 x 6.25 = 50: 95.40
    assert (dict(found.engines), found.met) == ({"h200-fp8": 10, "b200-nvfp4": 8}, False)
    assert {binding.constraint for binding in found.binding} == {"dollars an hour 100", "maxReplicas 10 of h200-fp8"}


def test_caps_below_the_minimums_change_nothing_and_say_so() -> None:
    found = rebalance.solve([option("b300-nvfp4", minimum=4)], Need(sessions=48, usd_per_hour=Decimal(20)))
    assert found.engines["b300-nvfp4"] == 8
    assert found.refused == "the minimums cost $28.40/h, the samplers' part of the cap is $20/h"


def test_a_group_without_a_price_stays_as_it_is() -> None:
    found = rebalance.solve([option("a100-bf16", usd_per_hour=None), option("b300-nvfp4")], Need(sessions=96))
    assert dict(found.engines) == {"a100-bf16": 4, "b300-nvfp4": 1}
