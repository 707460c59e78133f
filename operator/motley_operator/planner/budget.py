"""Engines under the dollar cap, at every moment: what is to shrink shrinks first, and growth waits for what that frees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal


@dataclass(frozen=True)
class Want:
    """One group's wish."""

    name: str
    replicas: int
    min_replicas: int
    existing: int  # engines that are or were asked for: pods and the Deployment's replicas, whichever is more
    usd_per_engine_hour: Decimal | None


@dataclass(frozen=True)
class Allotment:
    replicas: Mapping[str, int]
    short: Mapping[str, str]  # group -> why it has fewer than it asked for

    @property
    def within(self) -> bool:
        return not self.short


def allot(wants: Sequence[Want], cap_usd_per_hour: Decimal | None, fixed_usd_per_hour: Decimal | None) -> Allotment:
    """Replicas for each group: minimums first, then up to what is wanted, in order of price per engine, then name.

    `fixed` is what costs without being asked (the trainer). With a cap, what has no price gets no engine: unknown fails closed.
    """
    if cap_usd_per_hour is None:
        return Allotment({want.name: want.replicas for want in wants}, {})
    short: dict[str, str] = {}
    if fixed_usd_per_hour is None:
        return Allotment(
            dict.fromkeys((want.name for want in wants), 0),
            {want.name: "the trainer has no price, and budget.usdPerHour is set" for want in wants},
        )
    priced = sorted(
        (want for want in wants if want.usd_per_engine_hour is not None),
        key=lambda want: (want.usd_per_engine_hour, want.name),
    )
    for want in wants:
        if want.usd_per_engine_hour is None:
            short[want.name] = "its GPU type has no price, and budget.usdPerHour is set"
    target = dict.fromkeys((want.name for want in wants), 0)
    left = cap_usd_per_hour - fixed_usd_per_hour
    for bound in ("min_replicas", "replicas"):
        for want in priced:
            assert want.usd_per_engine_hour is not None
            more = max(0, min(getattr(want, bound), want.replicas) - target[want.name])
            affordable = (
                more if want.usd_per_engine_hour == 0 else min(more, max(0, int(left // want.usd_per_engine_hour)))
            )
            target[want.name] += affordable
            left -= affordable * want.usd_per_engine_hour
    # Growth only into what existing engines leave free now; the rest follows when the leaving ones are gone.
    headroom = (
        cap_usd_per_hour
        - fixed_usd_per_hour
        - sum(
            (want.existing * want.usd_per_engine_hour for want in priced if want.usd_per_engine_hour is not None),
            Decimal(0),
        )
    )
    replicas = dict(target)
    for want in priced:
        assert want.usd_per_engine_hour is not None
        if target[want.name] < want.replicas:
            short[want.name] = (
                f"budget.usdPerHour {cap_usd_per_hour} leaves room for {target[want.name]} of {want.replicas} engines"
            )
        growth = target[want.name] - want.existing
        if growth <= 0 or want.usd_per_engine_hour == 0:
            continue
        affordable = min(growth, max(0, int(headroom // want.usd_per_engine_hour)))
        replicas[want.name] = want.existing + affordable
        headroom -= affordable * want.usd_per_engine_hour
        if affordable < growth:
            short[want.name] = f"waits for engines of other groups to leave before it grows to {target[want.name]}"
    return Allotment(replicas, short)
