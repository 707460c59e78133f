from __future__ import annotations

from decimal import Decimal

from hypothesis import given, settings
from hypothesis import strategies as st
from motley_operator.planner.budget import Caps, Want, allot


def want(name: str, replicas: int, price: str | None, *, existing: int = 0, least: int = 0, gpus: int = 1) -> Want:
    return Want(name, replicas, least, existing, None if price is None else Decimal(price), gpus)


def test_without_a_cap_everybody_gets_what_they_ask_for() -> None:
    found = allot([want("a", 8, "3.95"), want("b", 4, None)], Caps())
    assert found.replicas == {"a": 8, "b": 4}
    assert found.within


def test_minimums_come_first_then_the_cheapest_engines() -> None:
    # 30 - 6 (trainer) = 24: one b (7) for its minimum leaves 17; a (4): 4 engines leave 1
    found = allot([want("a", 8, "4"), want("b", 4, "7", least=1)], Caps(Decimal(30), Decimal(6)))
    assert found.replicas == {"a": 4, "b": 1}
    assert "leaves room for 4 of 8 engines" in found.short["a"]
    assert "leaves room for 1 of 4 engines" in found.short["b"]


def test_a_budget_below_one_engine_gives_none_and_says_so() -> None:
    found = allot([want("a", 2, "4")], Caps(Decimal(3), Decimal(0)))
    assert found.replicas == {"a": 0}
    assert found.short == {"a": "budget.usdPerHour 3 leaves room for 0 of 2 engines"}


def test_with_a_cap_what_has_no_price_gets_no_engine() -> None:
    found = allot([want("a", 2, None), want("b", 1, "4")], Caps(Decimal(100), Decimal(0)))
    assert found.replicas == {"a": 0, "b": 1}
    assert "no price" in found.short["a"]
    assert allot([want("b", 1, "4")], Caps(Decimal(100), None)).replicas == {"b": 0}


def test_growth_waits_until_what_shrinks_is_gone() -> None:
    # cap 40: a (5) goes 8 -> 0, b (10) wants 4. While a's eight engines exist they cost 40, so b must wait.
    first = allot([want("a", 0, "5", existing=8), want("b", 4, "10")], Caps(Decimal(40), Decimal(0)))
    assert first.replicas == {"a": 0, "b": 0}
    assert "waits for engines of other groups to leave" in first.short["b"]
    half_way = allot([want("a", 0, "5", existing=4), want("b", 4, "10")], Caps(Decimal(40), Decimal(0)))
    assert half_way.replicas == {"a": 0, "b": 2}
    last = allot([want("a", 0, "5"), want("b", 4, "10", existing=2)], Caps(Decimal(40), Decimal(0)))
    assert last.replicas == {"a": 0, "b": 4}
    assert last.within


def test_a_cap_on_gpus_holds_with_and_without_prices() -> None:
    # 20 - 8 (trainer) = 12: the cheaper a takes 4 x 2, b what is left: 4 of 1
    wanted = [want("a", 4, "5", gpus=2), want("b", 8, "6")]
    found = allot(wanted, Caps(gpus=20, fixed_gpus=8))
    assert found.replicas == {"a": 4, "b": 4}
    assert found.short == {"b": "budget.gpus 20 leaves room for 4 of 8 engines"}
    unpriced = allot([want("a", 4, None, gpus=2)], Caps(gpus=13, fixed_gpus=8))
    assert unpriced.replicas == {"a": 2}
    # Both caps: 30 dollars buy six of a, ten GPUs hold five
    both = allot([want("a", 8, "5", gpus=2)], Caps(Decimal(30), Decimal(0), 10))
    assert both.replicas == {"a": 5}
    # Nothing grows into GPUs that leaving engines still hold, priced or not.
    leaving = [want("a", 0, None, existing=4, gpus=2), want("b", 8, "6")]
    assert allot(leaving, Caps(gpus=10)).replicas == {"a": 0, "b": 2}


wants = st.lists(
    st.tuples(
        st.integers(0, 12), st.integers(0, 12), st.integers(0, 4), st.sampled_from(["0.5", "2.5", "3.95", "7.1", None])
    ),
    min_size=1,
    max_size=8,
)


@settings(deadline=None, max_examples=100)
@given(wants, st.integers(0, 120), st.integers(0, 30), st.none() | st.integers(0, 40))
def test_whatever_shrinks_and_grows_the_fleet_never_goes_over_its_caps(
    rows: list[tuple[int, int, int, str | None]], cap: int, trainer: int, gpu_cap: int | None
) -> None:
    """Play it: apply the allotment, let the leaving engines go one by one, plan again. Only what existed at the start may exceed."""
    asked = [want(f"g{n}", replicas, price, least=least) for n, (replicas, _, least, price) in enumerate(rows)]
    existing = {item.name: row[1] for item, row in zip(asked, rows, strict=True)}

    def cost() -> Decimal:
        priced = [
            (existing[item.name], item.usd_per_engine_hour) for item in asked if item.usd_per_engine_hour is not None
        ]
        return trainer + sum((number * price for number, price in priced), Decimal(0))

    before, held = cost(), sum(existing.values())
    for _ in range(120):
        seen = [
            Want(item.name, item.replicas, item.min_replicas, existing[item.name], item.usd_per_engine_hour)
            for item in asked
        ]
        found = allot(seen, Caps(Decimal(cap), Decimal(trainer), gpu_cap))
        for item in asked:
            if found.replicas[item.name] > existing[item.name]:
                existing[item.name] = found.replicas[item.name]
        assert cost() <= max(Decimal(cap), before)
        assert gpu_cap is None or sum(existing.values()) <= max(gpu_cap, held)
        leaving = next((item.name for item in asked if found.replicas[item.name] < existing[item.name]), None)
        if leaving is not None:
            existing[leaving] -= 1
        before, held = cost(), sum(existing.values())
    # In the end every priced group has its share of the cap, and nothing waits.
    assert not any("waits" in why for why in found.short.values())
    assert cost() <= max(Decimal(cap), Decimal(trainer)) or all(price is None for *_, price in rows)
