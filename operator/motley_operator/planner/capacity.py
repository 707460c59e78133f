"""How many sessions an engine serves at the latency bound: measured from what routers tell, in place of what was declared.

Load is looked at in windows of a minute. What a window says of a group:

- Pressure: the p90 turn latency is above the bound, the KV cache of running requests is nearly full, requests queue, or running
  ones were set back for want of cache. Capacity falls to what would have been served without, by a quarter at most, and not while
  more sessions are there than the capacity already decided: they leave one by one.
- At its capacity with room on all four: it rises by a sixteenth, to one and a half times what was declared at most.
- Else a window under load confirms it, and one without load says nothing.

The gap between pressure and room keeps it from swinging. Before the first window under load a group has its declared capacity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal

from motley_api import records

WINDOW_S = 60.0
LONGEST_GAP_S = 60.0  # between two looks of one window
QUANTILE = 0.9
MIN_TURNS = 20  # fewer say nothing about a p90
KV_FULL_PERCENT, KV_ROOM_PERCENT = 90.0, 80.0
QUEUE_FULL, QUEUE_ROOM = 0.1, 0.05  # waiting requests over running ones
LATENCY_ROOM = 0.8  # of the bound
PREEMPTED_SHARE = 0.01  # of turns; fewer set back are chance
PREEMPTED_FACTOR = 0.9
UNDER_LOAD, AT_CAPACITY, ABOVE_CAPACITY = Fraction(1, 2), Fraction(9, 10), Fraction(21, 20)
MOST_DOWN, STEP_UP, CEILING = Fraction(3, 4), Fraction(1, 16), Fraction(3, 2)

Source = Literal["Declared", "Measured"]


@dataclass(frozen=True)
class Load:
    """One group over one window. Means over the window and the group's engines, but counts, which are of the whole group."""

    group: str
    until_unix_s: float
    seconds: float
    engines: int  # that served all of the window
    sessions: float  # of one engine
    running: float
    queued: float
    kv_used_percent: float
    turns: int
    tokens: int  # generated
    preemptions: int
    p90_s: float | None  # None: engines do not tell, or there was no turn

    @property
    def tokens_per_second(self) -> float:
        """Of one engine."""
        return self.tokens / self.seconds / self.engines


@dataclass(frozen=True)
class Capacity:
    """Of one engine of a group."""

    sessions: Fraction  # a multiple of 1/1000, at least 1
    source: Source
    declared: int
    until_unix_s: float = 0.0  # windows up to here are counted
    tokens_per_second: float | None = None
    p90_s: float | None = None
    why: str = ""  # of the last change

    @property
    def whole(self) -> int:
        """Sessions that one engine may be given."""
        return max(1, int(self.sessions))


def declared_capacity(sessions: int) -> Capacity:
    return Capacity(Fraction(sessions), "Declared", sessions)


def pressures(load: Load, bound_s: float) -> list[tuple[str, float]]:
    """(what is wrong, part of the load that would have been served without it)"""
    found = []
    if load.p90_s is not None and load.turns >= MIN_TURNS and load.p90_s > bound_s:
        found.append((f"p90 turn latency {load.p90_s:.1f} s, bound {bound_s:g} s", bound_s / load.p90_s))
    if load.kv_used_percent >= KV_FULL_PERCENT:
        text = f"KV cache {load.kv_used_percent:.0f}% full, limit {KV_FULL_PERCENT:.0f}%"
        found.append((text, KV_FULL_PERCENT / load.kv_used_percent))
    if load.queued > QUEUE_FULL * max(1.0, load.running):
        text = f"{load.queued:.1f} requests wait at an engine that runs {load.running:.1f}"
        found.append((text, load.running / (load.running + load.queued)))
    if load.preemptions > PREEMPTED_SHARE * load.turns:
        found.append((f"{load.preemptions} requests set back in {load.turns} turns", PREEMPTED_FACTOR))
    return found


def has_room(load: Load, bound_s: float) -> bool:
    return (
        load.turns >= MIN_TURNS
        and load.p90_s is not None
        and load.p90_s <= LATENCY_ROOM * bound_s
        and load.kv_used_percent <= KV_ROOM_PERCENT
        and load.queued <= QUEUE_ROOM * load.running
        and load.preemptions == 0
    )


def _milli(sessions: Fraction) -> Fraction:
    return max(Fraction(1), Fraction(int(sessions * 1000), 1000))


def after(before: Capacity, load: Load, bound_s: float) -> Capacity:
    """Capacity after one more window."""
    there = Fraction(load.sessions)
    wrong = pressures(load, bound_s)
    enough = load.turns >= MIN_TURNS or any("KV" in text or "wait" in text for text, _ in wrong)
    if not enough or not there or (not wrong and there < UNDER_LOAD * before.sessions):
        return before
    known = replace(
        before,
        until_unix_s=load.until_unix_s,
        source="Measured",
        tokens_per_second=load.tokens_per_second,
        p90_s=load.p90_s,
    )
    if wrong and there <= ABOVE_CAPACITY * before.sessions:
        served = there * Fraction(min(factor for _, factor in wrong))
        wanted = _milli(min(before.sessions, max(served, MOST_DOWN * before.sessions)))
        return _changed(known, wanted, load, "; ".join(text for text, _ in wrong))
    if not wrong and there >= AT_CAPACITY * before.sessions and has_room(load, bound_s):
        wanted = _milli(max(before.sessions, min(CEILING * before.declared, before.sessions * (1 + STEP_UP))))
        return _changed(known, wanted, load, f"p90 turn latency {load.p90_s:.1f} s, bound {bound_s:g} s; nothing waits")
    return known


def _changed(known: Capacity, wanted: Fraction, load: Load, reason: str) -> Capacity:
    if wanted == known.sessions:
        return known
    why = (
        f"{load.sessions:.1f} sessions an engine over {load.seconds:.0f} s: {reason}"
        f" (KV {load.kv_used_percent:.0f}%, {load.queued:.1f} queued, {load.tokens_per_second:.0f} tokens/s an engine)"
    )
    return replace(known, sessions=wanted, why=why)


def measured_capacity(before: Capacity, history: Iterable[Load], bound_s: float) -> Capacity:
    """Capacity after these windows of one group, oldest first; those counted before are left out, so that asking twice changes nothing."""
    found = before
    for load in sorted(history, key=lambda load: load.until_unix_s):
        if load.until_unix_s > found.until_unix_s:
            found = after(found, load, bound_s)
    return found


# Windows, from what a router says every few seconds.


def quantile(counts: Sequence[int], part: float) -> float | None:
    """Of turns by latency, in seconds; inside a bucket as if they lay evenly in it. None: no turn."""
    total = sum(counts)
    if total <= 0:
        return None
    bounds = records.TURN_LATENCY_BOUNDS_S
    rank, below = part * total, 0
    for index, count in enumerate(counts[: len(bounds)]):
        if count and below + count >= rank:
            low = bounds[index - 1] if index else 0.0
            return low + (bounds[index] - low) * (rank - below) / count
        below += count
    return bounds[-1]  # at least: the last bucket is open


@dataclass(frozen=True)
class _Sums:
    """Of samples, over engines."""

    samples: int = 0
    sessions: float = 0.0
    running: float = 0.0
    queued: float = 0.0
    kv_percent: float = 0.0

    def plus(self, engines: Sequence[records.EngineState], active: int) -> _Sums:
        count = len(engines)
        return _Sums(
            self.samples + 1,
            self.sessions + active / count,
            self.running + sum(engine.running for engine in engines) / count,
            self.queued + sum(engine.queued for engine in engines) / count,
            self.kv_percent + sum(engine.kv_used_percent for engine in engines) / count,
        )


@dataclass(frozen=True)
class Window:
    """What was seen since it began."""

    began_unix_s: float
    first: Mapping[str, records.EngineState]  # serving engines at its beginning
    sessions_total: int  # that the router placed since it started
    looked_unix_s: float  # last
    sums: Mapping[str, _Sums] = field(default_factory=dict)


def _serving(status: records.RouterStatus) -> dict[str, records.EngineState]:
    return {engine.id: engine for engine in status.engines if engine.ready}


def seen(
    window: Window | None, status: records.RouterStatus | None, now_unix_s: float, window_s: float = WINDOW_S
) -> tuple[Window | None, tuple[Load, ...]]:
    """The window with one more look at the router; once it is over, a new one and the loads of every group.

    A router that does not answer or was not asked, or that started anew, begins another window: its counts are not whole yet.
    """
    if status is None:
        return None, ()
    serving = _serving(status)
    anew = Window(now_unix_s, serving, status.sessions_total, now_unix_s)
    if (
        window is None
        or not 0 <= now_unix_s - window.looked_unix_s <= LONGEST_GAP_S
        or status.sessions_total < window.sessions_total
    ):
        return anew, ()
    active = {group.name: group.active for group in status.groups}
    by_group: dict[str, list[records.EngineState]] = {}
    for engine in serving.values():
        by_group.setdefault(engine.group, []).append(engine)
    sums = {
        **window.sums,
        **{
            name: window.sums.get(name, _Sums()).plus(engines, active.get(name, 0))
            for name, engines in by_group.items()
        },
    }
    window = replace(window, sums=sums, sessions_total=status.sessions_total, looked_unix_s=now_unix_s)
    if now_unix_s - window.began_unix_s < window_s:
        return window, ()
    return anew, tuple(
        load for name in sorted(by_group) if (load := _load(name, window, by_group[name], now_unix_s)) is not None
    )


def _load(group: str, window: Window, engines: Sequence[records.EngineState], now_unix_s: float) -> Load | None:
    """None when no engine served all of the window: an engine that started anew counts from zero."""
    pairs = [
        (before, engine)
        for engine in engines
        if (before := window.first.get(engine.id)) is not None
        and before.group == group
        and before.turns <= engine.turns
        and before.busy_s <= engine.busy_s
    ]
    if not pairs:
        return None
    sums = window.sums[group]
    width = len(records.TURN_LATENCY_BOUNDS_S) + 1
    counts = [0] * width
    for before, engine in pairs:
        first = before.turn_latency_counts or [0] * width
        if len(engine.turn_latency_counts) == width == len(first):
            counts = [
                total + new - old for total, new, old in zip(counts, engine.turn_latency_counts, first, strict=True)
            ]
    return Load(
        group=group,
        until_unix_s=float(int(now_unix_s)),  # as status keeps it
        seconds=now_unix_s - window.began_unix_s,
        engines=len(pairs),
        sessions=sums.sessions / sums.samples,
        running=sums.running / sums.samples,
        queued=sums.queued / sums.samples,
        kv_used_percent=sums.kv_percent / sums.samples,
        turns=sum(engine.turns - before.turns for before, engine in pairs),
        tokens=sum(engine.generated_tokens - before.generated_tokens for before, engine in pairs),
        preemptions=sum(engine.preemptions - before.preemptions for before, engine in pairs),
        p90_s=quantile(counts, QUANTILE),
    )
