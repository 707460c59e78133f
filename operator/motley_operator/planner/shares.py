"""Which part of new sessions each group gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from motley_api import records

THROTTLE = Fraction(1, 2)  # of its capacity's worth of sessions: what the guard leaves to a throttled group


def apportion(weights: Mapping[str, int | Fraction], total: int = 1000) -> dict[str, int]:
    """Split `total` in proportion to `weights` by largest remainders; ties by name. All zero when there is no weight."""
    negative = [name for name, weight in weights.items() if weight < 0]
    if negative:
        raise ValueError(f"weights must be >= 0, got {negative}")
    whole = sum((Fraction(weight) for weight in weights.values()), Fraction(0))
    if whole == 0:
        return dict.fromkeys(weights, 0)
    exact = {name: Fraction(weight) * total / whole for name, weight in weights.items()}
    shares = {name: int(part) for name, part in exact.items()}
    left = total - sum(shares.values())
    by_remainder = sorted(exact, key=lambda name: (shares[name] - exact[name], name))
    for name in by_remainder[:left]:
        shares[name] += 1
    return shares


@dataclass(frozen=True)
class GroupCapacity:
    """One group as the split sees it."""

    name: str
    view: str
    ready_engines: int
    sessions_per_engine: int | Fraction  # declared, or as measured
    most_per_engine: int = 0  # sessions that the router may give one engine; 0: what the engine says itself
    throttled: bool = False
    quarantined: bool = False

    @property
    def sessions(self) -> int:
        return int(self.ready_engines * self.sessions_per_engine)

    @property
    def weight(self) -> Fraction:
        if self.quarantined:
            return Fraction(0)
        return self.ready_engines * Fraction(self.sessions_per_engine) * (THROTTLE if self.throttled else Fraction(1))


def fleet(groups: Sequence[GroupCapacity], *, generation: int, paused: bool) -> records.Fleet:
    """Shares in proportion to the capacity of ready engines: a group without one gets no new session."""
    shares = apportion({group.name: group.weight for group in groups})
    return records.Fleet(
        generation=generation,
        groups=[
            records.GroupShare(
                name=group.name,
                view=group.view,
                capacity_sessions=group.sessions,
                share_milli=shares[group.name],
                quarantined=group.quarantined,
                sessions_per_engine=group.most_per_engine,
            )
            for group in sorted(groups, key=lambda group: group.name)
        ],
        paused=paused,
    )


def next_fleet(before: records.Fleet | None, wanted: records.Fleet, heard_generation: int) -> records.Fleet:
    """`before` when nothing changed, else `wanted` with a generation above every one that anybody has heard."""
    if before is not None and before.generation >= heard_generation:
        same = records.Fleet(generation=before.generation, groups=wanted.groups, paused=wanted.paused)
        if same == before:
            return before
    newest = max(heard_generation, before.generation if before is not None else 0)
    return records.Fleet(generation=newest + 1, groups=wanted.groups, paused=wanted.paused)
