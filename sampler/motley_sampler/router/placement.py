"""Where a session goes, and which sessions move when engines leave. Pure: knowledge and time come in, decisions go out.

The share rule is the quota method of Balinski and Young ("The quota method of apportionment", 1975), one seat per
session. With n sessions on the open groups, shares s_g and S their sum, a new session goes to the group with the
smallest (active_g + 1) / s_g among those still below their share of n + 1 sessions: active_g * S < (n + 1) * s_g.
Ties go by name. While sessions only arrive, every group holds between floor and ceiling of n * s_g / S: within one
session of exact proportion, whatever the shares and however many groups (the smallest ratio alone, or the largest
deficit alone, does not give that). Sessions also end, in any order; no rule undoes that without moving sessions, so
what holds then is: a group at or above its share never gets the next session.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from motley_api.records import EngineState, Fleet, GroupShare

# Why a group or an engine takes no new session, the most hopeful first: a refusal names the first of any group.
FULL = "Full"  # every ready engine holds what it may: as the operator measured, else max_sessions
SATURATED = "Saturated"  # key-value cache, queue or preemptions say that more would thrash
VERSION_BEHIND = "VersionBehind"
NOT_READY = "NotReady"
SUSPECT = "Suspect"  # a connect failed since its last heartbeat
DRAINING = "Draining"
TIMED_OUT = "TimedOut"
VIEW_MISMATCH = "ViewMismatch"
NO_ENGINE = "NoEngine"
QUARANTINED = "Quarantined"
NO_SHARE = "NoShare"
PAUSED = "Paused"
NO_FLEET = "NoFleet"
_HOPE = (
    FULL,
    SATURATED,
    VERSION_BEHIND,
    NOT_READY,
    SUSPECT,
    DRAINING,
    TIMED_OUT,
    VIEW_MISMATCH,
    NO_ENGINE,
    QUARANTINED,
    NO_SHARE,
)
_SOON = frozenset({FULL, SATURATED, VERSION_BEHIND, SUSPECT})


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What counts as dead, full or recovering. Times in seconds."""

    engine_timeout_s: float = 10.0
    """An engine unheard of for this long has left. Engines report every second."""
    warm_up_s: float = 15.0
    """For this long after its own start the router believes leases of engines that have not reported yet."""
    recovery_s: float = 30.0
    """For this long after its own start, one lease's life, sessions may exist that the router has not relearned: an
    engine's load is then at least what the engine itself says."""
    kv_full_percent: int = 95
    preemption_hold_s: float = 10.0
    """No new sessions for this long after an engine's preemption count grew."""
    suspect_hold_s: float = 60.0
    """The longest that an engine stays suspect although it is heard of: heartbeats that come say nothing of an address that
    nobody reaches. The first suspicion ends with the next heartbeat, each further one lasts twice as long as the last."""
    remember_ended_s: float = 30.0
    """For this long a session that its holder ended is not relearned from a late renewal."""
    remember_expired_s: float = 600.0
    """For this long the renewal of a lease that ran out is refused: its place was given away."""
    forget_engine_s: float = 120.0
    """A timed-out engine stays visible in status for this long."""


@dataclasses.dataclass(frozen=True, slots=True)
class Engine:
    """An engine as last heard of."""

    state: EngineState
    heard_s: float
    preempted_s: float = -math.inf  # when its preemption count was last seen to grow
    suspect: bool = False
    suspicions: int = 0  # in a row, none of them long ago
    suspected_s: float = -math.inf  # when the last one began

    def timed_out(self, now_s: float, limits: Limits) -> bool:
        return now_s - self.heard_s > limits.engine_timeout_s


def suspected(engine: Engine, now_s: float, limits: Limits) -> Engine:
    """A connect failed. Many sessions that fail together are one suspicion."""
    if engine.suspect:
        return engine
    long_ago = now_s - engine.suspected_s > 2 * limits.suspect_hold_s
    count = 1 if long_ago else engine.suspicions + 1
    return dataclasses.replace(engine, suspect=True, suspicions=count, suspected_s=now_s)


def heard(engine: Engine | None, state: EngineState, now_s: float, limits: Limits) -> Engine:
    """What is known of an engine after a heartbeat."""
    if engine is None:
        return Engine(state, now_s)
    preempted_s = now_s if state.preemptions > engine.state.preemptions else engine.preempted_s
    hold_s = 0.0 if engine.suspicions < 2 else min(limits.suspect_hold_s, 2.0 ** (engine.suspicions - 1))
    suspect = engine.suspect and now_s - engine.suspected_s < hold_s
    return dataclasses.replace(engine, state=state, heard_s=now_s, preempted_s=preempted_s, suspect=suspect)


@dataclasses.dataclass(frozen=True, slots=True)
class Pin:
    """A session's place. `url` is what its lease said, used while the engine itself has not reported."""

    session: str
    group: str
    view: str
    engine: str
    url: str
    min_version: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class FleetView:
    """All that a decision may look at."""

    fleet: Fleet | None
    engines: Mapping[str, Engine]
    engines_of_group: Mapping[str, Iterable[str]]  # group -> engine ids
    sessions_of_engine: Mapping[str, int]  # engine id -> sessions pinned to it
    sessions_of_group: Mapping[str, int]
    started_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    group: str
    engine: str


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """No place now. `groups` names each group's own reason."""

    reason: str
    message: str
    retry_after_s: int
    groups: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """A session whose engine left, and its new engine in the same group. None: there is none, the session is lost."""

    pin: Pin
    to_engine: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class GroupLoad:
    name: str
    active: int
    share_milli: int


def choose_group(open_groups: Sequence[GroupLoad]) -> GroupLoad:
    """The group that the next session goes to, by the rule at the top of this file. Every share must be above 0."""
    if not open_groups:
        raise ValueError("open_groups must not be empty")
    share_total = sum(group.share_milli for group in open_groups)
    sessions_after = sum(group.active for group in open_groups) + 1
    # Never empty: the shares of sessions_after sum to sessions_after, the active sessions to one less.
    below = [group for group in open_groups if group.active * share_total < sessions_after * group.share_milli]
    return min(below, key=lambda group: (Fraction(group.active + 1, group.share_milli), group.name))


def load(engine: Engine, view: FleetView, now_s: float, limits: Limits) -> int:
    """Sessions on an engine. Just after the router's start, not less than the requests the engine says it holds."""
    pinned = view.sessions_of_engine.get(engine.state.id, 0)
    if now_s - view.started_s < limits.recovery_s:
        return max(pinned, engine.state.running + engine.state.queued)
    return pinned


def saturated(engine: Engine, now_s: float, limits: Limits) -> bool:
    """True while one more session would cost the engine's other sessions their cache or make them wait."""
    state = engine.state
    return (
        state.kv_used_percent >= limits.kv_full_percent
        or state.queued > max(2, state.max_sessions // 2)
        or now_s - engine.preempted_s < limits.preemption_hold_s
    )


def not_serving(engine: Engine, now_s: float, limits: Limits) -> str | None:
    """Why an engine can be given no session at all, new or moved. None: it can."""
    if engine.timed_out(now_s, limits):
        return TIMED_OUT
    if engine.state.draining:
        return DRAINING
    if not engine.state.ready:
        return NOT_READY
    return None


def closed_to_new(
    engine: Engine, group: GroupShare, view: FleetView, *, min_version: int, now_s: float, limits: Limits
) -> str | None:
    """Why an engine gets no new session of its group. None: it may."""
    if reason := not_serving(engine, now_s, limits):
        return reason
    if engine.suspect:
        return SUSPECT
    if engine.state.view != group.view:
        return VIEW_MISMATCH
    if engine.state.version < min_version:
        return VERSION_BEHIND
    if saturated(engine, now_s, limits):
        return SATURATED
    if load(engine, view, now_s, limits) >= (group.sessions_per_engine or engine.state.max_sessions):
        return FULL
    return None


def _load_key(engine: Engine, sessions: int) -> tuple[Fraction, str]:
    return Fraction(sessions, max(1, engine.state.max_sessions)), engine.state.id


def _open_engine(
    group: GroupShare, view: FleetView, *, min_version: int, now_s: float, limits: Limits
) -> tuple[Engine | None, str]:
    """A group's least loaded engine that may take a new session, or None and the group's reason."""
    if group.quarantined:
        return None, QUARANTINED
    if group.share_milli <= 0:
        return None, NO_SHARE
    reasons = {NO_ENGINE}
    candidates: list[Engine] = []
    for engine_id in view.engines_of_group.get(group.name, ()):
        engine = view.engines[engine_id]
        reason = closed_to_new(engine, group, view, min_version=min_version, now_s=now_s, limits=limits)
        if reason is None:
            candidates.append(engine)
        else:
            reasons.add(reason)
    if not candidates:
        return None, min(reasons, key=_HOPE.index)
    return min(candidates, key=lambda engine: _load_key(engine, load(engine, view, now_s, limits))), ""


def place(view: FleetView, *, min_version: int, now_s: float, limits: Limits) -> Placement | Refusal:
    """The group and engine of a new session. `min_version` only gates; it never makes one group better than another."""
    if view.fleet is None:
        return Refusal(NO_FLEET, "no fleet document names a group yet", 2)
    if view.fleet.paused:
        return Refusal(PAUSED, f"the fleet is paused (generation {view.fleet.generation})", 5)
    chosen: dict[str, Engine] = {}
    open_groups: list[GroupLoad] = []
    reasons: dict[str, str] = {}
    for group in view.fleet.groups:
        engine, reason = _open_engine(group, view, min_version=min_version, now_s=now_s, limits=limits)
        if engine is None:
            reasons[group.name] = reason
            continue
        chosen[group.name] = engine
        open_groups.append(GroupLoad(group.name, view.sessions_of_group.get(group.name, 0), group.share_milli))
    if not open_groups:
        return _refusal(reasons, min_version)
    name = choose_group(open_groups).name
    return Placement(name, chosen[name].state.id)


def _refusal(reasons: Mapping[str, str], min_version: int) -> Refusal:
    reason = min(reasons.values(), key=_HOPE.index, default=NO_ENGINE)
    told = ", ".join(f"{name}: {why}" for name, why in sorted(reasons.items())) or "the fleet has no groups"
    wanted = f" at weights version {min_version} or newer" if min_version > 0 else ""
    return Refusal(reason, f"no group takes a new session{wanted} ({told})", 1 if reason in _SOON else 2, dict(reasons))


def left(engine_id: str, group: str, view: FleetView, now_s: float, limits: Limits) -> bool:
    """Whether a session pinned to `engine_id` in `group` must look for another engine.

    Draining, unready and suspect engines have not left: their sessions keep their cache. An engine never heard of
    counts as heard of when the router started, so that leases outlive a restart of the router.
    """
    engine = view.engines.get(engine_id)
    if engine is None:
        return now_s - view.started_s > limits.warm_up_s
    return engine.state.group != group or engine.timed_out(now_s, limits)


def rehome(
    pin: Pin, view: FleetView, *, now_s: float, limits: Limits, planned: Mapping[str, int] | None = None
) -> str | None:
    """Another engine of the session's own group and view, the least loaded first; None when there is none.

    Suspects come last, versions below the session's min_version next to last, and engines with room first. An engine
    without room is still taken: waiting in its queue costs less than a lost episode. `planned` adds sessions that a
    plan already gave to engines.
    """
    best: tuple[bool, bool, bool, tuple[Fraction, str]] | None = None
    for engine_id in view.engines_of_group.get(pin.group, ()):
        engine = view.engines[engine_id]
        if engine_id == pin.engine or engine.state.view != pin.view or not_serving(engine, now_s, limits):
            continue
        sessions = load(engine, view, now_s, limits) + (planned or {}).get(engine_id, 0)
        key = (
            engine.suspect,
            engine.state.version < pin.min_version,
            sessions >= engine.state.max_sessions,
            _load_key(engine, sessions),
        )
        if best is None or key < best:
            best = key
    return None if best is None else best[3][1]


def plan_moves(view: FleetView, pins_of_left: Iterable[Pin], *, now_s: float, limits: Limits) -> list[Move]:
    """New engines for the sessions of engines that left, and for no other: the least movement there can be."""
    planned: dict[str, int] = {}
    moves: list[Move] = []
    for pin in sorted(pins_of_left, key=lambda pin: pin.session):
        target = rehome(pin, view, now_s=now_s, limits=limits, planned=planned)
        if target is not None:
            planned[target] = planned.get(target, 0) + 1
        moves.append(Move(pin, target))
    return moves
