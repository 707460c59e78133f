"""What the router remembers: leases, counts, expiry, restarts, and fleets that change under it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from motley_api.records import EngineState, Fleet, GroupShare, Lease
from motley_sampler.router.placement import Limits, Refusal
from motley_sampler.router.table import LeaseConflictError, Table

LIMITS = Limits(engine_timeout_s=10, warm_up_s=15, recovery_s=30, preemption_hold_s=10, forget_engine_s=120)
START_S = 1000.0
LATER_S = START_S + 100  # past warm-up and recovery


def state(name: str, group: str = "g", **more: object) -> EngineState:
    given = {"view": "bf16", "url": f"http://{name}:8200", "version": 1, "ready": True, "max_sessions": 4} | more
    return EngineState(id=name, group=group, **given)  # type: ignore[arg-type]


def fleet_of(shares: dict[str, int], generation: int = 1) -> Fleet:
    return Fleet(
        generation=generation,
        groups=[
            GroupShare(name=name, view="bf16", capacity_sessions=8, share_milli=share) for name, share in shares.items()
        ],
    )


def table_with(*engines: EngineState, shares: dict[str, int] | None = None) -> Table:
    table = Table(LIMITS, now_s=START_S)
    table.set_fleet(fleet_of(shares or {"g": 1000}))
    for one in engines:
        table.hear(one, now_s=LATER_S)
    return table


def placed(table: Table, session: str, *, now_s: float = LATER_S, ttl_s: float = 30) -> Lease:
    lease = table.place(session, min_version=0, ttl_s=ttl_s, now_s=now_s)
    assert isinstance(lease, Lease), lease
    return lease


def test_thirty_renewals_of_one_session_name_one_engine() -> None:
    table = table_with(state("a"), state("b"))
    lease = placed(table, "s")
    for turn in range(30):
        now_s = LATER_S + turn
        table.hear(state("a", queued=9, kv_used_percent=99, preemptions=turn), now_s=now_s)  # saturated: old ones stay
        table.hear(state("b"), now_s=now_s)
        assert table.renew(lease, now_s=now_s) == lease
    assert lease.engine == "a"
    assert placed(table, "next", now_s=LATER_S + 29).engine == "b"


def test_asking_twice_for_a_session_gives_the_same_lease_and_counts_once() -> None:
    table = table_with(state("a"), state("b"))
    assert placed(table, "s") == placed(table, "s")
    assert table.sessions_active == 1
    assert table.sessions_total == 1


def test_an_engine_that_is_full_takes_no_more_and_takes_again_when_a_session_ends() -> None:
    table = table_with(state("a", max_sessions=2))
    placed(table, "s1")
    placed(table, "s2")
    refusal = table.place("s3", min_version=0, ttl_s=30, now_s=LATER_S)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "Full"
    assert table.end("s1", now_s=LATER_S)
    assert not table.end("s1", now_s=LATER_S)
    assert placed(table, "s3").engine == "a"


def test_a_measured_capacity_replaces_what_the_engine_says_in_both_directions() -> None:
    table = table_with(state("a", max_sessions=3))

    def measured(sessions: int, generation: int) -> None:
        share = GroupShare(name="g", view="bf16", capacity_sessions=8, share_milli=1000, sessions_per_engine=sessions)
        assert table.set_fleet(Fleet(generation=generation, groups=[share]))

    measured(1, 2)
    placed(table, "s1")
    refusal = table.place("s2", min_version=0, ttl_s=30, now_s=LATER_S)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "Full"
    measured(5, 3)
    for number in range(2, 6):
        placed(table, f"s{number}")
    assert isinstance(table.place("s6", min_version=0, ttl_s=30, now_s=LATER_S), Refusal)


def test_a_lease_runs_out_unless_renewed() -> None:
    table = table_with(state("a"))
    kept, _ = placed(table, "kept"), placed(table, "dropped")
    table.hear(state("a"), now_s=LATER_S + 29)
    table.renew(kept, now_s=LATER_S + 29)
    assert table.sweep(now_s=LATER_S + 29.9).expired == ()
    table.hear(state("a"), now_s=LATER_S + 30)
    assert table.sweep(now_s=LATER_S + 30).expired == ("dropped",)
    assert table.pin("kept") is not None
    table.hear(state("a"), now_s=LATER_S + 59)
    assert table.sweep(now_s=LATER_S + 59).expired == ("kept",)


def test_a_lease_that_ran_out_is_not_renewed_and_its_session_may_ask_for_a_new_one() -> None:
    """Its place was given away: taken back, the engine would hold one session more than it may."""
    table = table_with(state("a", max_sessions=1))
    lease = placed(table, "slow")
    table.hear(state("a", max_sessions=1), now_s=LATER_S + 31)
    assert table.sweep(now_s=LATER_S + 31).expired == ("slow",)
    placed(table, "next", now_s=LATER_S + 31)
    assert table.renew(lease, now_s=LATER_S + 40) is None
    assert table.expired_s("slow", now_s=LATER_S + 40) == 9
    assert (table.sessions_active, table.view.sessions_of_engine["a"]) == (1, 1)
    table.end("next", now_s=LATER_S + 40)
    table.hear(state("a", max_sessions=1), now_s=LATER_S + 41)
    assert placed(table, "slow", now_s=LATER_S + 41) == lease
    assert table.renew(lease, now_s=LATER_S + 42) == lease
    table.end("slow", now_s=LATER_S + 43)
    table.sweep(now_s=LATER_S + 700)
    assert table._expired == {}


def test_a_session_that_ended_and_came_again_lives_by_its_new_lease() -> None:
    table = table_with(state("a"))
    placed(table, "s")
    table.end("s", now_s=LATER_S)
    placed(table, "s", now_s=LATER_S + 5)
    table.hear(state("a"), now_s=LATER_S + 31)
    assert table.sweep(now_s=LATER_S + 31).expired == ()
    assert table.sweep(now_s=LATER_S + 35).expired == ("s",)


def test_a_renewal_that_was_overtaken_by_the_end_does_not_revive_the_session() -> None:
    table = table_with(state("a"))
    lease = placed(table, "s")
    table.end("s", now_s=LATER_S)
    assert table.renew(lease, now_s=LATER_S + 1) is None
    assert table.sessions_active == 0
    assert placed(table, "s", now_s=LATER_S + 2) == lease  # asked for anew, it lives
    table.end("s", now_s=LATER_S + 3)
    table.hear(state("a"), now_s=LATER_S + 34)
    table.sweep(now_s=LATER_S + 34)
    assert table._ended == {}


def test_hung_engines_are_found_in_one_sweep_however_many_there_are() -> None:
    engines = [state(f"e{index:03d}", max_sessions=1) for index in range(200)]
    table = table_with(*engines, state("alive", max_sessions=300))
    for index in range(200):
        placed(table, f"s{index:03d}")
    on_alive = sum(table.pin(f"s{index:03d}").engine == "alive" for index in range(200))  # type: ignore[union-attr]
    table.hear(state("alive", max_sessions=300), now_s=LATER_S + 10)
    swept = table.sweep(now_s=LATER_S + 10.5)
    assert len(swept.timed_out) == 200
    assert len(swept.moves) == 200 - on_alive
    assert {move.to_engine for move in swept.moves} == {"alive"}
    assert table.sweep(now_s=LATER_S + 10.6) == type(swept)((), (), ())


def test_a_session_whose_group_has_no_engine_left_is_lost_and_its_renewal_says_so() -> None:
    table = table_with(state("a"), state("h1", "h"), shares={"g": 1000, "h": 0})
    lease = placed(table, "s")
    table.hear(state("h1", "h"), now_s=LATER_S + 11)
    (move,) = table.sweep(now_s=LATER_S + 11).moves
    assert (move.pin.session, move.to_engine) == ("s", None)
    assert table.sessions_active == 0
    assert table.renew(lease, now_s=LATER_S + 12) is None


def test_a_silent_engine_that_speaks_again_gets_traffic_again() -> None:
    table = table_with(state("a"))
    table.sweep(now_s=LATER_S + 11)
    assert isinstance(table.place("s", min_version=0, ttl_s=30, now_s=LATER_S + 11), Refusal)
    table.hear(state("a"), now_s=LATER_S + 12)
    assert placed(table, "s", now_s=LATER_S + 12).engine == "a"


def test_a_restarted_engine_gets_no_session_before_it_has_the_weights_that_are_wanted() -> None:
    table = table_with(state("a", version=7), state("b", version=7))
    assert placed(table, "on-a").engine == "a"
    table.hear(state("a", version=-1, ready=False, reason="Loading"), now_s=LATER_S + 1)
    wanted = {"min_version": 7, "ttl_s": 30, "now_s": LATER_S + 2}
    assert [placed(table, f"s{n}", now_s=LATER_S + 1).engine for n in range(2)] == ["b", "b"]
    table.hear(state("a", version=6), now_s=LATER_S + 2)  # applied, but not yet what the trainer asks for
    lease = table.place("s2", **wanted)  # type: ignore[arg-type]
    assert isinstance(lease, Lease)
    assert lease.engine == "b"
    table.hear(state("a", version=7), now_s=LATER_S + 2)
    lease = table.place("s3", **wanted)  # type: ignore[arg-type]
    assert isinstance(lease, Lease)
    assert lease.engine == "a"


def test_an_engine_back_under_a_new_address_is_told_to_its_sessions_at_their_next_renewal() -> None:
    table = table_with(state("a"))
    lease = placed(table, "s")
    table.hear(state("a", url="http://elsewhere:8200", ready=False, version=-1), now_s=LATER_S + 2)
    assert table.renew(lease, now_s=LATER_S + 3) == msgspec.structs.replace(lease, url="http://elsewhere:8200")


def test_a_suspect_engine_gets_no_new_session_until_it_is_heard_of_again_and_keeps_its_old_ones() -> None:
    table = table_with(state("a"), state("b"))
    lease = placed(table, "s")
    table.suspect("a", now_s=LATER_S)
    assert placed(table, "s2").engine == "b"
    assert placed(table, "s3").engine == "b"
    assert table.renew(lease, now_s=LATER_S) == lease
    table.hear(state("a"), now_s=LATER_S + 1)
    assert placed(table, "s4", now_s=LATER_S + 1).engine == "a"


def test_an_engine_that_is_heard_of_and_never_reached_gets_fewer_and_fewer_sessions_and_all_again_once_it_is() -> None:
    """By time of trust, not by failure: a hundred sessions that fail together are one suspicion."""
    table = table_with(state("a"), state("b", max_sessions=200))
    trusted_at = []
    for second in range(121):
        now_s = LATER_S + second
        for name, size in (("a", 4), ("b", 200)):
            table.hear(state(name, max_sessions=size), now_s=now_s)
        lease = placed(table, f"s{second}", now_s=now_s, ttl_s=600)
        if lease.engine == "a":
            trusted_at.append(second)
            for _ in range(100):
                table.suspect("a", now_s=now_s)
            assert table.avoid(f"s{second}", now_s=now_s) is not None
    # Each time it is trusted the next session finds nobody there. Heartbeats come every second: held for
    # 0 (so 1), 2, 4, 8, 16, 32, 60 s.
    assert trusted_at == [0, 1, 3, 7, 15, 31, 63]
    table.end("s120", now_s=LATER_S + 120)
    later_s = LATER_S + 63 + 121
    for name, size in (("a", 4), ("b", 200)):
        table.hear(state(name, max_sessions=size), now_s=later_s)
    table.suspect("a", now_s=later_s)
    table.hear(state("a"), now_s=later_s + 1)  # long after the last one it is a first one again
    table.hear(state("b", max_sessions=200), now_s=later_s + 1)
    assert placed(table, "well", now_s=later_s + 1).engine == "a"


def test_an_engine_whose_preemptions_grow_is_passed_over_until_they_have_stood_still_for_a_while() -> None:
    table = table_with(state("a", preemptions=5), state("b"))
    placed(table, "on-a")
    table.hear(state("a", preemptions=6), now_s=LATER_S + 1)
    assert [placed(table, f"s{n}", now_s=LATER_S + 1).engine for n in range(3)] == ["b", "b", "b"]
    for second in range(2, 11):  # the count stands still from now on
        table.hear(state("a", preemptions=6), now_s=LATER_S + second)
        table.hear(state("b"), now_s=LATER_S + second)
    assert placed(table, "s3", now_s=LATER_S + 10.9).engine == "b"
    assert placed(table, "s4", now_s=LATER_S + 11).engine == "a"


def test_an_engine_that_says_goodbye_has_its_sessions_moved_at_once() -> None:
    table = table_with(state("a"), state("b"))
    lease = placed(table, "s")
    (move,) = table.forget_engine("a", now_s=LATER_S)
    assert move.to_engine == "b"
    assert table.renew(lease, now_s=LATER_S) == msgspec.structs.replace(lease, engine="b", url="http://b:8200")


def test_an_engine_that_comes_back_in_another_group_leaves_its_sessions_to_the_old_group() -> None:
    table = table_with(state("a"), state("b"), shares={"g": 500, "h": 500})
    placed(table, "s")
    (move,) = table.hear(state("a", group="h"), now_s=LATER_S)
    assert (move.pin.group, move.to_engine) == ("g", "b")


def test_an_engine_of_a_group_that_no_fleet_document_names_gets_no_sessions() -> None:
    table = table_with(state("a"), state("new", "late"))
    assert {placed(table, f"s{index}").group for index in range(4)} == {"g"}
    assert isinstance(table.place("s4", min_version=0, ttl_s=30, now_s=LATER_S), Refusal)
    assert table.set_fleet(fleet_of({"g": 500, "late": 500}, generation=2))
    assert placed(table, "s4").group == "late"


# The fleet document.


def test_only_a_higher_generation_replaces_the_fleet() -> None:
    table = Table(LIMITS, now_s=0)
    assert table.set_fleet(fleet_of({"g": 1000}, generation=5))
    assert table.set_fleet(fleet_of({"g": 1000}, generation=5))
    assert not table.set_fleet(fleet_of({"g": 900}, generation=5))
    assert not table.set_fleet(fleet_of({"g": 900}, generation=4))
    assert table.set_fleet(fleet_of({"g": 900}, generation=6))
    assert table.fleet == fleet_of({"g": 900}, generation=6)


# Restart.


def test_a_restarted_router_relearns_leases_before_and_after_their_engines_report() -> None:
    old = table_with(state("a"), state("b"))
    leases = [placed(old, f"s{index}") for index in range(4)]
    new = Table(LIMITS, now_s=LATER_S + 1)
    new.set_fleet(fleet_of({"g": 1000}))
    assert [new.renew(lease, now_s=LATER_S + 2) for lease in leases[:2]] == leases[:2]  # nobody reported yet
    for name in ("a", "b"):
        new.hear(state(name), now_s=LATER_S + 3)
    assert [new.renew(lease, now_s=LATER_S + 4) for lease in leases[2:]] == leases[2:]
    assert new.sessions_active == 4
    assert new.view.sessions_of_engine == old.view.sessions_of_engine
    assert new.view.sessions_of_group == old.view.sessions_of_group


def test_a_lease_of_an_engine_that_never_reports_moves_inside_its_group_once_warm_up_is_over() -> None:
    table = Table(LIMITS, now_s=LATER_S)
    table.set_fleet(fleet_of({"g": 1000}))
    lease = Lease(session="s", group="g", view="bf16", engine="gone", url="http://gone")
    assert table.renew(lease, now_s=LATER_S + 1) == lease
    table.hear(state("a"), now_s=LATER_S + 14)
    assert table.sweep(now_s=LATER_S + 15).moves == ()
    (move,) = table.sweep(now_s=LATER_S + 15.1).moves
    assert move.to_engine == "a"


def test_an_unknown_lease_of_an_unknown_engine_is_refused_after_warm_up() -> None:
    table = table_with(state("a"), shares={"g": 1000})
    lease = Lease(session="s", group="other", view="bf16", engine="gone", url="http://gone")
    assert table.renew(lease, now_s=LATER_S) is None
    assert table.sessions_active == 0


def test_a_lease_that_names_another_group_than_the_session_has_is_a_conflict() -> None:
    table = table_with(state("a"), state("h1", "h"), shares={"g": 1000, "h": 0})
    lease = placed(table, "s")
    with pytest.raises(LeaseConflictError, match="'g'"):
        table.renew(msgspec.structs.replace(lease, group="h", engine="h1"), now_s=LATER_S)


# A fleet that changes.


def test_growing_from_8_to_12_engines_and_draining_to_6_loses_no_session_and_moves_only_those_of_leaving_engines() -> (
    None
):
    def hear(names: list[str], now_s: float, draining: tuple[str, ...] = ()) -> None:
        for name in names:
            table.hear(state(name, max_sessions=8, draining=name in draining, ready=name not in draining), now_s=now_s)

    first, grown = [f"e{index:02d}" for index in range(8)], [f"e{index:02d}" for index in range(12)]
    table = table_with(*(state(name, max_sessions=8) for name in first))
    leases = {f"s{index:02d}": placed(table, f"s{index:02d}", ttl_s=600) for index in range(40)}
    hear(grown, LATER_S + 1)
    assert table.sweep(now_s=LATER_S + 1).moves == ()  # growing moves nobody
    leases |= {f"t{index:02d}": placed(table, f"t{index:02d}", now_s=LATER_S + 1, ttl_s=600) for index in range(20)}
    leaving = tuple(grown[6:])
    hear(grown, LATER_S + 2, draining=leaving)
    assert table.sweep(now_s=LATER_S + 2).moves == ()  # draining moves nobody either
    assert placed(table, "new", now_s=LATER_S + 2, ttl_s=600).engine in grown[:6]
    assert table.end("new", now_s=LATER_S)
    hear(grown[:6], LATER_S + 14)  # the six are past their drain, and gone
    on_leaving = {session for session, lease in leases.items() if lease.engine in leaving}
    moves = table.sweep(now_s=LATER_S + 14).moves
    assert {move.pin.session for move in moves} == on_leaving
    assert all(move.to_engine in grown[:6] for move in moves)
    assert table.sessions_active == 60
    for session, lease in leases.items():
        renewed = table.renew(lease, now_s=LATER_S + 15)
        assert renewed is not None
        assert (renewed.engine == lease.engine) == (session not in on_leaving)


class AnyFleet(RuleBasedStateMachine):
    """Random lives of sessions and engines: groups are for life, only leaving engines' sessions move, counts add up."""

    GROUPS = ("a", "b", "c")

    def __init__(self) -> None:
        super().__init__()
        self.now_s = START_S
        self.table = Table(LIMITS, now_s=START_S)
        self.table.set_fleet(fleet_of({"a": 500, "b": 300, "c": 200}))
        self.leases: dict[str, Lease] = {}
        self.alive: dict[str, EngineState] = {}
        self.count = 0

    @rule(group=st.sampled_from(GROUPS), size=st.integers(1, 5))
    def engine_joins(self, group: str, size: int) -> None:
        self.count += 1
        joined = state(f"{group}{self.count}", group, max_sessions=size)
        self.alive[joined.id] = joined
        self.table.hear(joined, now_s=self.now_s)

    @rule()
    def session_arrives(self) -> None:
        self.count += 1
        before = dict(self.table.view.sessions_of_engine)
        answer = self.table.place(f"s{self.count}", min_version=0, ttl_s=1e9, now_s=self.now_s)
        if isinstance(answer, Lease):
            assert before.get(answer.engine, 0) < self.alive[answer.engine].max_sessions
            self.leases[answer.session] = answer
        else:
            open_engines = [one for one in self.alive.values() if one.ready]
            assert all(before.get(one.id, 0) >= one.max_sessions for one in open_engines)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def session_ends(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.leases)))
        del self.leases[session]
        assert self.table.end(session, now_s=self.now_s)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def engine_drains(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        self.alive[name] = msgspec.structs.replace(self.alive[name], ready=False, draining=True)
        self.table.hear(self.alive[name], now_s=self.now_s)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def engines_die(self, data: st.DataObject) -> None:
        dead = data.draw(st.sets(st.sampled_from(sorted(self.alive)), min_size=1))
        for name in dead:
            del self.alive[name]
        self.now_s += LIMITS.engine_timeout_s + 1
        for one in self.alive.values():
            self.table.hear(one, now_s=self.now_s)
        moves = {move.pin.session: move.to_engine for move in self.table.sweep(now_s=self.now_s).moves}
        assert moves.keys() == {session for session, lease in self.leases.items() if lease.engine in dead}
        for session, target in moves.items():
            lease = self.leases.pop(session)
            fit = [one for one in self.alive.values() if one.group == lease.group and one.ready]
            assert (target is None) == (not fit)  # lost only when the group has nobody
            if target is not None:
                assert self.alive[target].group == lease.group
                self.leases[session] = msgspec.structs.replace(lease, engine=target, url=self.alive[target].url)

    @rule()
    def holders_renew(self) -> None:
        for lease in self.leases.values():
            assert self.table.renew(lease, now_s=self.now_s) == lease

    @rule()
    def router_restarts(self) -> None:
        fleet = self.table.fleet
        assert fleet is not None
        self.table = Table(LIMITS, now_s=self.now_s)
        self.table.set_fleet(fleet)
        for lease in self.leases.values():
            assert self.table.renew(lease, now_s=self.now_s) == lease
        for one in self.alive.values():
            assert self.table.hear(one, now_s=self.now_s) == ()

    @invariant()
    def counts_add_up(self) -> None:
        by_engine: dict[str, int] = {}
        by_group: dict[str, int] = {}
        for lease in self.leases.values():
            by_engine[lease.engine] = by_engine.get(lease.engine, 0) + 1
            by_group[lease.group] = by_group.get(lease.group, 0) + 1
        assert dict(self.table.view.sessions_of_engine) == by_engine
        assert {name: n for name, n in self.table.view.sessions_of_group.items() if n} == by_group
        assert self.table.sessions_active == len(self.leases)


TestAnyFleet = AnyFleet.TestCase
TestAnyFleet.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60))
@settings(max_examples=50, deadline=None)
def test_the_heap_holds_no_more_entries_than_sessions_that_were_placed_in_one_lease_life(steps: list[int]) -> None:
    """0 places and ends a session at once, 1 renews one, 2 lets a lease's life pass: afterwards only live sessions remain."""
    table = table_with(state("a", max_sessions=1000))
    now_s = LATER_S
    lease = placed(table, "kept")
    for index, step in enumerate(steps):
        if step == 0:
            placed(table, f"s{index}", now_s=now_s)
            table.end(f"s{index}", now_s=LATER_S)
        elif step == 1:
            table.renew(lease, now_s=now_s)
        else:
            now_s += 20
            table.hear(state("a", max_sessions=1000), now_s=now_s)
            table.renew(lease, now_s=now_s)
            now_s += 15
            table.hear(state("a", max_sessions=1000), now_s=now_s)
            table.sweep(now_s=now_s)
            assert len(table._expiry_heap) == table.sessions_active == 1
