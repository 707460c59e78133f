"""The share rule, the gates on engines, and which sessions move: the pure core."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from motley_api.records import EngineState, Fleet, GroupShare
from motley_sampler.router import placement
from motley_sampler.router.placement import (
    Engine,
    FleetView,
    GroupLoad,
    Limits,
    Pin,
    Placement,
    Refusal,
    choose_group,
    place,
    plan_moves,
)

LIMITS = Limits(engine_timeout_s=10, warm_up_s=15, recovery_s=30)
NOW_S = 1000.0


def engine(name: str, group: str, *, heard_s: float = NOW_S, suspect: bool = False, **state: object) -> Engine:
    given = {"view": "bf16", "url": f"http://{name}", "version": 3, "ready": True, "max_sessions": 4} | state
    return Engine(EngineState(id=name, group=group, **given), heard_s, suspect=suspect)


def fleet(*groups: tuple[str, int], paused: bool = False, quarantined: tuple[str, ...] = ()) -> Fleet:
    return Fleet(
        generation=1,
        paused=paused,
        groups=[
            GroupShare(name=name, view="bf16", capacity_sessions=4, share_milli=share, quarantined=name in quarantined)
            for name, share in groups
        ],
    )


def view(
    document: Fleet | None, *engines: Engine, sessions: dict[str, int] | None = None, started_s: float = 0.0
) -> FleetView:
    """`sessions` is by engine id; a group's count is the sum over its engines."""
    on_engine = sessions or {}
    of_group: dict[str, list[str]] = {}
    in_group: dict[str, int] = {}
    for one in engines:
        of_group.setdefault(one.state.group, []).append(one.state.id)
        in_group[one.state.group] = in_group.get(one.state.group, 0) + on_engine.get(one.state.id, 0)
    return FleetView(document, {one.state.id: one for one in engines}, of_group, on_engine, in_group, started_s)


def decide(seen: FleetView, *, min_version: int = 0) -> Placement | Refusal:
    return place(seen, min_version=min_version, now_s=NOW_S, limits=LIMITS)


# Shares.

shares_strategy = st.lists(st.integers(1, 1000), min_size=1, max_size=12)


def loads(active: dict[str, int], shares: dict[str, int]) -> list[GroupLoad]:
    return [GroupLoad(name, active[name], share) for name, share in shares.items()]


def worst_deviation(active: dict[str, int], shares: dict[str, int]) -> Fraction:
    total, share_total = sum(active.values()), sum(shares.values())
    return max(abs(active[name] - Fraction(total * share, share_total)) for name, share in shares.items())


@given(shares_strategy, st.integers(1, 150))
@settings(max_examples=150, deadline=None)
def test_arrivals_keep_every_group_within_one_session_of_its_exact_share(share_list: list[int], arrivals: int) -> None:
    shares = {f"g{index:02d}": share for index, share in enumerate(share_list)}
    active = dict.fromkeys(shares, 0)
    for _ in range(arrivals):
        active[choose_group(loads(active, shares)).name] += 1
        assert worst_deviation(active, shares) < 1


def test_the_smallest_ratio_alone_would_leave_a_group_more_than_one_session_above_its_share() -> None:
    """Why the quota condition is there: one large group beside forty small ones, 49 sessions.

    By ratio alone the large group (share 500) gets its k-th session at k/500, the small ones (share 12) their first only at
    1/12 > 40/500: the first 41 sessions all go to the large group, whose exact part of 41 is 41 * 500 / 980 = 20.9.
    """
    shares = {"large": 500} | {f"small{index:02d}": 12 for index in range(40)}
    by_ratio, by_rule = dict.fromkeys(shares, 0), dict.fromkeys(shares, 0)
    for _ in range(41):
        by_ratio[min(shares, key=lambda name: (Fraction(by_ratio[name] + 1, shares[name]), name))] += 1
        by_rule[choose_group(loads(by_rule, shares)).name] += 1
    assert by_ratio["large"] == 41
    assert by_rule["large"] == 21
    assert worst_deviation(by_ratio, shares) > 20
    assert worst_deviation(by_rule, shares) < 1


@given(shares_strategy, st.lists(st.integers(0, 1_000_000), max_size=120), st.data())
@settings(max_examples=100, deadline=None)
def test_whatever_sessions_ended_the_next_goes_to_a_group_strictly_below_its_share(
    share_list: list[int], events: list[int], data: st.DataObject
) -> None:
    """An even event is an arrival, an odd one ends a session of some group that has one."""
    shares = {f"g{index:02d}": share for index, share in enumerate(share_list)}
    active = dict.fromkeys(shares, 0)
    for event in events:
        held = [name for name, count in active.items() if count]
        if event % 2 and held:
            active[held[event // 2 % len(held)]] -= 1
            continue
        total_after = sum(active.values()) + 1
        chosen = choose_group(loads(active, shares))
        exact = Fraction(total_after * chosen.share_milli, sum(share_list))
        assert chosen.active < exact
        below = [name for name in shares if active[name] < Fraction(total_after * shares[name], sum(share_list))]
        ratio = {name: Fraction(active[name] + 1, shares[name]) for name in below}
        assert chosen.name == min(below, key=lambda name: (ratio[name], name))
        active[chosen.name] += 1


@given(shares_strategy, st.data())
@settings(max_examples=60, deadline=None)
def test_after_departures_arrivals_alone_bring_every_group_back_within_one_session(
    share_list: list[int], data: st.DataObject
) -> None:
    shares = {f"g{index:02d}": share for index, share in enumerate(share_list)}
    active = {name: data.draw(st.integers(0, 8)) for name in shares}
    # Groups above their share wait until the total has grown to where their part is what they hold.
    enough = max(active[name] * sum(share_list) // share + 1 for name, share in shares.items())
    enough = min(enough, 3000) + 2 * len(shares)
    while sum(active.values()) < enough:
        active[choose_group(loads(active, shares)).name] += 1
    if enough < 3000:
        assert worst_deviation(active, shares) < 1


def test_equal_groups_take_turns_by_name() -> None:
    active = {"b": 0, "a": 0, "c": 0}
    order = []
    for _ in range(6):
        name = choose_group(loads(active, {"b": 333, "a": 333, "c": 333})).name
        active[name] += 1
        order.append(name)
    assert order == ["a", "b", "c", "a", "b", "c"]


# Gates.


def test_a_session_goes_to_the_least_loaded_engine_by_its_own_capacity_then_by_name() -> None:
    # 2/8 < 2/4; of the two engines at 2/8 the first by name.
    seen = view(
        fleet(("g", 1000)),
        engine("a", "g", max_sessions=4),
        engine("c", "g", max_sessions=8),
        engine("b", "g", max_sessions=8),
        sessions={"a": 2, "b": 2, "c": 2},
    )
    assert decide(seen) == Placement("g", "b")


@pytest.mark.parametrize(
    ("change", "want_reason"),
    [
        ({"ready": False}, placement.NOT_READY),
        ({"draining": True}, placement.DRAINING),
        ({"heard_s": NOW_S - 10.1}, placement.TIMED_OUT),
        ({"suspect": True}, placement.SUSPECT),
        ({"view": "fp8"}, placement.VIEW_MISMATCH),
        ({"version": 1}, placement.VERSION_BEHIND),
        ({"kv_used_percent": 95}, placement.SATURATED),
        ({"queued": 3}, placement.SATURATED),
        ({"max_sessions": 1}, placement.FULL),
    ],
)
def test_an_engine_that_may_not_take_a_session_is_passed_over_and_names_why(
    change: dict[str, object], want_reason: str
) -> None:
    closed = engine("a", "g", **change)  # type: ignore[arg-type]
    beside_an_open_one = view(fleet(("g", 1000)), closed, engine("b", "g"), sessions={"a": 1, "b": 3})
    assert decide(beside_an_open_one, min_version=2) == Placement("g", "b")
    alone = decide(view(fleet(("g", 1000)), closed, sessions={"a": 1}), min_version=2)
    assert isinstance(alone, Refusal)
    assert (alone.reason, alone.groups) == (want_reason, {"g": want_reason})
    assert alone.retry_after_s >= 1


def test_an_engine_just_inside_each_limit_takes_a_session() -> None:
    at_the_edge = engine("a", "g", heard_s=NOW_S - 10, kv_used_percent=94, queued=2, version=2)
    assert decide(view(fleet(("g", 1000)), at_the_edge, sessions={"a": 3}), min_version=2) == Placement("g", "a")


def test_an_engine_that_preempts_while_its_peer_idles_gets_nothing_until_preemptions_stop() -> None:
    """One replica's cache is full and it preempts: new sessions go to the idle peer, though it has fewer by name and load."""
    preempting = Engine(engine("a", "g").state, NOW_S, preempted_s=NOW_S - 9.9)
    calm = Engine(engine("a", "g").state, NOW_S, preempted_s=NOW_S - 10)
    assert decide(view(fleet(("g", 1000)), preempting, engine("b", "g"), sessions={"b": 3})) == Placement("g", "b")
    assert decide(view(fleet(("g", 1000)), calm, engine("b", "g"), sessions={"b": 3})) == Placement("g", "a")


def test_the_version_gate_never_prefers_a_newer_engine() -> None:
    seen = view(fleet(("g", 1000)), engine("a", "g", version=5), engine("b", "g", version=9))
    assert decide(seen, min_version=5) == Placement("g", "a")


def test_a_closed_group_leaves_its_share_to_the_others_in_their_proportion() -> None:
    # a (share 500) has no engine; b and c share 300 : 200. Of 5 sessions b gets 3 and c 2.
    document = fleet(("a", 500), ("b", 300), ("c", 200))
    counts = {"b": 0, "c": 0}
    for _ in range(5):
        decision = decide(
            view(
                document,
                engine("eb", "b", max_sessions=9),
                engine("ec", "c", max_sessions=9),
                sessions={"eb": counts["b"], "ec": counts["c"]},
            )
        )
        assert isinstance(decision, Placement)
        counts[decision.group] += 1
    assert counts == {"b": 3, "c": 2}


@pytest.mark.parametrize(
    ("document", "want_reason"),
    [
        (None, placement.NO_FLEET),
        (fleet(("g", 1000), paused=True), placement.PAUSED),
        (fleet(("g", 0)), placement.NO_SHARE),
        (fleet(("other", 1000)), placement.NO_ENGINE),
        (fleet(("g", 1000), quarantined=("g",)), placement.QUARANTINED),
        (fleet(), placement.NO_ENGINE),
    ],
)
def test_a_fleet_without_an_open_group_refuses_and_says_why(document: Fleet | None, want_reason: str) -> None:
    refusal = decide(view(document, engine("a", "g")))
    assert isinstance(refusal, Refusal)
    assert refusal.reason == want_reason


def test_a_refusal_names_the_most_hopeful_reason_and_every_groups_own() -> None:
    seen = view(
        fleet(("a", 500), ("b", 500), ("c", 0)),
        engine("ea", "a", ready=False),
        engine("eb", "b", max_sessions=1),
        sessions={"eb": 1},
    )
    refusal = decide(seen)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "Full"
    assert refusal.groups == {"a": "NotReady", "b": "Full", "c": "NoShare"}


def test_a_router_that_just_started_counts_the_requests_that_engines_say_they_hold() -> None:
    busy, idle = engine("a", "g", running=4), engine("b", "g", running=1)
    young, old = NOW_S - 29, NOW_S - 30
    assert decide(view(fleet(("g", 1000)), busy, idle, started_s=young)) == Placement("g", "b")
    assert decide(view(fleet(("g", 1000)), busy, idle, started_s=old)) == Placement("g", "a")


# Moves.


def pins(engine_name: str, group: str, count: int) -> list[Pin]:
    return [Pin(f"{engine_name}/{index}", group, "bf16", engine_name, "http://old") for index in range(count)]


def moved(seen: FleetView, leaving: list[Pin]) -> dict[str, str | None]:
    return {move.pin.session: move.to_engine for move in plan_moves(seen, leaving, now_s=NOW_S, limits=LIMITS)}


def test_sessions_of_a_leaving_engine_spread_over_their_group_by_room() -> None:
    # b holds 1 of 4, c 0 of 4: c, (b=c: b), c, b -> two each.
    seen = view(
        fleet(("g", 1000)),
        engine("a", "g", heard_s=0),
        engine("b", "g"),
        engine("c", "g"),
        engine("elsewhere", "h"),
        sessions={"a": 4, "b": 1},
    )
    assert moved(seen, pins("a", "g", 4)) == {"a/0": "c", "a/1": "b", "a/2": "c", "a/3": "b"}


def test_a_session_never_leaves_its_group_even_when_the_group_has_no_engine_left() -> None:
    seen = view(fleet(("g", 500), ("h", 500)), engine("a", "g", heard_s=0), engine("b", "h"), sessions={"a": 2})
    assert moved(seen, pins("a", "g", 2)) == {"a/0": None, "a/1": None}


def test_a_session_never_moves_to_another_view_of_its_group() -> None:
    seen = view(fleet(("g", 1000)), engine("a", "g", heard_s=0), engine("b", "g", view="fp8"), sessions={"a": 1})
    assert moved(seen, pins("a", "g", 1)) == {"a/0": None}


def test_a_full_engine_still_takes_the_sessions_of_a_leaving_one() -> None:
    seen = view(
        fleet(("g", 1000)), engine("a", "g", heard_s=0), engine("b", "g", max_sessions=1), sessions={"a": 2, "b": 1}
    )
    assert moved(seen, pins("a", "g", 2)) == {"a/0": "b", "a/1": "b"}


def test_a_moved_session_prefers_an_engine_at_its_version_and_avoids_suspects() -> None:
    pin = Pin("s", "g", "bf16", "a", "http://old", min_version=5)
    behind, suspect, right = (
        engine("b", "g", version=4),
        engine("c", "g", version=5, suspect=True),
        engine("d", "g", version=5),
    )
    gone = engine("a", "g", heard_s=0)
    full = {"a": 1, "d": 4}
    assert moved(view(None, gone, behind, suspect, right, sessions=full), [pin]) == {"s": "d"}
    assert moved(view(None, gone, behind, suspect, sessions=full), [pin]) == {"s": "b"}
    assert moved(view(None, gone, suspect, sessions=full), [pin]) == {"s": "c"}


def test_draining_unready_and_suspect_engines_keep_their_sessions() -> None:
    seen = view(
        None,
        engine("draining", "g", draining=True, ready=False),
        engine("unready", "g", ready=False),
        engine("suspect", "g", suspect=True),
        engine("silent", "g", heard_s=NOW_S - 10.1),
        engine("other-group", "h"),
    )
    stays = {
        name: not placement.left(name, "g", seen, NOW_S, LIMITS)
        for name in ("draining", "unready", "suspect", "silent", "other-group", "never-heard-of")
    }
    assert stays == {
        "draining": True,
        "unready": True,
        "suspect": True,
        "silent": False,
        "other-group": False,
        "never-heard-of": False,
    }
