"""What the router knows: the fleet document, engines as last heard of, and every session's place. No I/O.

All of it is rebuilt from heartbeats, renewals and the fleet document after a restart. Work per request does not grow
with the number of sessions: expiry is a heap, and counts are kept as sessions come and go. Time is an argument.
"""

from __future__ import annotations

import dataclasses
import heapq

import msgspec
from motley_api.records import EngineState, Fleet, GroupSessions, Lease, RouterStatus

from motley_sampler.router import placement
from motley_sampler.router.placement import Engine, FleetView, Limits, Move, Pin, Placement, Refusal


class LeaseConflictError(Exception):
    """The session is known in another group than the renewal says: two holders, or one that moved a session itself."""


@dataclasses.dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep found: sessions whose holders went silent, moves (lost: to None), engines newly timed out."""

    expired: tuple[str, ...]
    moves: tuple[Move, ...]
    timed_out: tuple[str, ...]


@dataclasses.dataclass(slots=True)
class _Clock:
    """When a session's lease runs out. A session that ended and came again has another clock."""

    ttl_s: float
    expires_s: float


class Table:
    """The router's state. Single-threaded: the event loop owns it."""

    def __init__(self, limits: Limits, *, now_s: float) -> None:
        self.limits = limits
        self.started_s = now_s
        self.fleet: Fleet | None = None
        self.engines: dict[str, Engine] = {}
        self.sessions_total = 0
        self._engines_of_group: dict[str, set[str]] = {}
        self._pins: dict[str, Pin] = {}
        self._pins_of_engine: dict[str, dict[str, Pin]] = {}
        self._sessions_of_engine: dict[str, int] = {}
        self._sessions_of_group: dict[str, int] = {}
        self._clocks: dict[str, _Clock] = {}
        # One entry a session; it may lie before the real deadline, never after. The count breaks ties.
        self._expiry_heap: list[tuple[float, int, str, _Clock]] = []
        self._heap_count = 0
        # Sessions that were ended, and when, oldest first: a renewal that was overtaken by the end must not revive one.
        self._ended: dict[str, float] = {}
        self._expired: dict[str, float] = {}  # sessions whose leases ran out, and when, oldest first
        self._silent: set[str] = set()  # engines whose timeout was already reported
        # The view shows the live mappings: taking one costs nothing, and nothing that looks at it writes.
        self._view = FleetView(
            None, self.engines, self._engines_of_group, self._sessions_of_engine, self._sessions_of_group, now_s
        )

    # What others may look at.

    @property
    def view(self) -> FleetView:
        return self._view

    @property
    def sessions_active(self) -> int:
        return len(self._pins)

    def pin(self, session: str) -> Pin | None:
        return self._pins.get(session)

    def lease(self, session: str) -> Lease | None:
        return self._lease(session) if session in self._pins else None

    def group_sessions(self, now_s: float) -> list[GroupSessions]:
        """Every group that the fleet, an engine or a session names, by name."""
        shares = {group.name: group for group in self.fleet.groups} if self.fleet else {}
        names = (
            shares.keys() | self._engines_of_group.keys() | {name for name, n in self._sessions_of_group.items() if n}
        )
        rows = []
        for name in sorted(names):
            here = [self.engines[engine] for engine in self._engines_of_group.get(name, ())]
            alive = [engine for engine in here if not engine.timed_out(now_s, self.limits)]
            share = shares.get(name)
            rows.append(
                GroupSessions(
                    name=name,
                    active=self._sessions_of_group.get(name, 0),
                    capacity_sessions=share.capacity_sessions if share else 0,
                    share_milli=share.share_milli if share else 0,
                    engines_ready=sum(
                        placement.not_serving(engine, now_s, self.limits) is None and not engine.suspect
                        for engine in alive
                    ),
                    engines=len(alive),
                )
            )
        return rows

    def engine_states(self, now_s: float) -> list[EngineState]:
        """Engines by id, each as it last spoke of itself; one that fell silent reads not ready, reason TimedOut."""
        states = []
        for _, engine in sorted(self.engines.items()):
            state = engine.state
            if engine.timed_out(now_s, self.limits):
                silent_s = now_s - engine.heard_s
                message = f"no heartbeat for {silent_s:.0f} s"
                state = msgspec.structs.replace(state, ready=False, reason=placement.TIMED_OUT, message=message)
            elif engine.suspect:
                message = "a connection failed since the last heartbeat"
                state = msgspec.structs.replace(state, ready=False, reason=placement.SUSPECT, message=message)
            states.append(state)
        return states

    def status(self, now_s: float) -> RouterStatus:
        return RouterStatus(
            fleet_generation=self.fleet.generation if self.fleet else -1,
            sessions_active=self.sessions_active,
            sessions_total=self.sessions_total,
            groups=self.group_sessions(now_s),
            engines=self.engine_states(now_s),
        )

    # The fleet and its engines.

    def set_fleet(self, fleet: Fleet) -> bool:
        """Takes a newer fleet document. False: it differs from the known one without being newer."""
        if self.fleet is not None:
            if fleet == self.fleet:
                return True
            if fleet.generation <= self.fleet.generation:
                return False
        self.fleet = fleet
        self._view = dataclasses.replace(self._view, fleet=fleet)
        return True

    def hear(self, state: EngineState, *, now_s: float) -> tuple[Move, ...]:
        """A heartbeat; it clears a first suspicion. Only an engine that changed its group causes moves: it left the old one."""
        known = self.engines.get(state.id)
        moves: tuple[Move, ...] = ()
        if known is not None and known.state.group != state.group:
            moves = self.forget_engine(state.id, now_s=now_s)
            known = None
        self.engines[state.id] = placement.heard(known, state, now_s, self.limits)
        self._engines_of_group.setdefault(state.group, set()).add(state.id)
        self._silent.discard(state.id)
        return moves

    def forget_engine(self, engine_id: str, *, now_s: float) -> tuple[Move, ...]:
        """An engine said goodbye: its sessions move now."""
        known = self.engines.pop(engine_id, None)
        if known is None:
            return ()
        self._engines_of_group[known.state.group].discard(engine_id)
        if not self._engines_of_group[known.state.group]:
            del self._engines_of_group[known.state.group]
        self._silent.discard(engine_id)
        return self._move_from((engine_id,), now_s)

    def suspect(self, engine_id: str, *, now_s: float) -> None:
        """A connect failed: no new sessions for the engine until it is heard of again. Its old sessions stay."""
        if engine_id in self.engines:
            self.engines[engine_id] = placement.suspected(self.engines[engine_id], now_s, self.limits)

    # Sessions.

    def place(self, session: str, *, min_version: int, ttl_s: float, now_s: float) -> Lease | Refusal:
        """A new session's lease. Asking again for a session that exists gives its lease again (and renews it)."""
        if session in self._pins:
            kept = self._renew_known(session, ttl_s, now_s)
            if kept is not None:
                return kept
        decision = placement.place(self._view, min_version=min_version, now_s=now_s, limits=self.limits)
        if isinstance(decision, Refusal):
            return decision
        state = self.engines[decision.engine].state
        self._ended.pop(session, None)
        self._expired.pop(session, None)
        self._add(Pin(session, decision.group, state.view, state.id, state.url, min_version), ttl_s, now_s)
        self.sessions_total += 1
        return self._lease(session)

    def preview(self, *, min_version: int, now_s: float) -> Placement | Refusal:
        """Where a session would go, without placing it."""
        return placement.place(self._view, min_version=min_version, now_s=now_s, limits=self.limits)

    def renew(self, lease: Lease, *, now_s: float) -> Lease | None:
        """The session's lease as it is now; None when its group has no engine for it any more.

        A session not in the table is relearned from its lease, unless it was ended just now, or the lease ran out here.
        Raises LeaseConflictError when it is known in another group.
        """
        known = self._pins.get(lease.session)
        if known is not None:
            if known.group != lease.group:
                raise LeaseConflictError(
                    f"session {lease.session!r} is in group {known.group!r}; its lease says {lease.group!r}"
                )
            return self._renew_known(lease.session, lease.ttl_s, now_s)
        if lease.session in self._ended or lease.session in self._expired:
            return None
        pin = Pin(lease.session, lease.group, lease.view, lease.engine, lease.url)
        if placement.left(pin.engine, pin.group, self._view, now_s, self.limits):
            target = placement.rehome(pin, self._view, now_s=now_s, limits=self.limits)
            if target is None:
                return None
            pin = dataclasses.replace(pin, engine=target, url=self.engines[target].state.url)
        self._add(pin, lease.ttl_s, now_s)
        return self._lease(lease.session)

    def expired_s(self, session: str, *, now_s: float) -> float | None:
        """For how long a session's lease has run out; None when it has not, or so long ago that it is forgotten."""
        return now_s - self._expired[session] if session in self._expired else None

    def touch(self, session: str, *, now_s: float) -> None:
        """Keeps a session that is being served by this process."""
        if clock := self._clocks.get(session):
            clock.expires_s = max(clock.expires_s, now_s + clock.ttl_s)

    def avoid(self, session: str, *, now_s: float) -> Lease | None:
        """Moves a session off an unreachable engine, inside its group. None: there is no other engine; it stays."""
        pin = self._pins.get(session)
        target = placement.rehome(pin, self._view, now_s=now_s, limits=self.limits) if pin else None
        if pin is None or target is None:
            return None
        self._repin(pin, target)
        return self._lease(session)

    def end(self, session: str, *, now_s: float) -> bool:
        """Ends a session. False: it was not known."""
        self._ended.pop(session, None)
        self._ended[session] = now_s
        self._expired.pop(session, None)
        if session not in self._pins:
            return False
        self._drop(session)
        return True

    def sweep(self, *, now_s: float) -> Swept:
        """Ends sessions whose leases ran out, and moves those whose engine left. Call about once a second."""
        expired = self._expire(now_s)
        while self._ended and now_s - next(iter(self._ended.values())) > self.limits.remember_ended_s:
            del self._ended[next(iter(self._ended))]
        while self._expired and now_s - next(iter(self._expired.values())) > self.limits.remember_expired_s:
            del self._expired[next(iter(self._expired))]
        timed_out = tuple(
            sorted(
                engine_id
                for engine_id, engine in self.engines.items()
                if engine_id not in self._silent and engine.timed_out(now_s, self.limits)
            )
        )
        self._silent.update(timed_out)
        absent = tuple(
            engine_id
            for engine_id, pins in self._pins_of_engine.items()
            if engine_id not in self.engines and pins and now_s - self.started_s > self.limits.warm_up_s
        )
        moves = self._move_from((*timed_out, *absent), now_s)
        for engine_id, engine in list(self.engines.items()):
            if now_s - engine.heard_s > self.limits.forget_engine_s:
                self.forget_engine(engine_id, now_s=now_s)
        return Swept(expired, moves, timed_out)

    # Inside.

    def _expire(self, now_s: float) -> tuple[str, ...]:
        expired = []
        while self._expiry_heap and self._expiry_heap[0][0] <= now_s:
            _, _, session, clock = heapq.heappop(self._expiry_heap)
            if self._clocks.get(session) is not clock:
                continue  # ended before its time
            if clock.expires_s > now_s:
                self._push(session, clock)
                continue
            self._drop(session)
            self._expired[session] = now_s
            expired.append(session)
        return tuple(expired)

    def _push(self, session: str, clock: _Clock) -> None:
        self._heap_count += 1
        heapq.heappush(self._expiry_heap, (clock.expires_s, self._heap_count, session, clock))

    def _move_from(self, engine_ids: tuple[str, ...], now_s: float) -> tuple[Move, ...]:
        pins = [pin for engine_id in engine_ids for pin in self._pins_of_engine.get(engine_id, {}).values()]
        moves = placement.plan_moves(self._view, pins, now_s=now_s, limits=self.limits)
        for move in moves:
            if move.to_engine is None:
                self._drop(move.pin.session)
            else:
                self._repin(move.pin, move.to_engine)
        return tuple(moves)

    def _renew_known(self, session: str, ttl_s: float, now_s: float) -> Lease | None:
        pin = self._pins[session]
        clock = self._clocks[session]
        clock.ttl_s = max(clock.ttl_s, ttl_s)
        self.touch(session, now_s=now_s)
        gone = placement.left(pin.engine, pin.group, self._view, now_s, self.limits)
        if gone and self.avoid(session, now_s=now_s) is None:
            self._drop(session)
            return None
        return self._lease(session)

    def _add(self, pin: Pin, ttl_s: float, now_s: float) -> None:
        self._pins[pin.session] = pin
        clock = self._clocks[pin.session] = _Clock(ttl_s, now_s + ttl_s)
        self._push(pin.session, clock)
        self._sessions_of_group[pin.group] = self._sessions_of_group.get(pin.group, 0) + 1
        self._attach(pin)

    def _drop(self, session: str) -> None:
        pin = self._pins.pop(session)
        del self._clocks[session]
        self._sessions_of_group[pin.group] -= 1
        self._detach(pin)

    def _repin(self, pin: Pin, engine_id: str) -> None:
        self._detach(pin)
        moved = dataclasses.replace(pin, engine=engine_id, url=self.engines[engine_id].state.url)
        self._pins[pin.session] = moved
        self._attach(moved)

    def _attach(self, pin: Pin) -> None:
        self._pins_of_engine.setdefault(pin.engine, {})[pin.session] = pin
        self._sessions_of_engine[pin.engine] = self._sessions_of_engine.get(pin.engine, 0) + 1

    def _detach(self, pin: Pin) -> None:
        pins = self._pins_of_engine[pin.engine]
        del pins[pin.session]
        self._sessions_of_engine[pin.engine] -= 1
        if not pins:
            del self._pins_of_engine[pin.engine], self._sessions_of_engine[pin.engine]

    def _lease(self, session: str) -> Lease:
        pin = self._pins[session]
        engine = self.engines.get(pin.engine)
        return Lease(
            session=session,
            group=pin.group,
            view=pin.view,
            engine=pin.engine,
            url=engine.state.url if engine else pin.url,  # a restarted engine may have a new address
            ttl_s=self._clocks[session].ttl_s,
        )
