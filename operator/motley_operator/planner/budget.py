"""Engines under the caps on dollars an hour and on GPUs, at every moment: what is to shrink shrinks first, and growth waits for what
that frees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

# Of budget.usdTotal: what is told, what stops growth; at the whole of it the run saves and its pods go.
TOLD_AT, HELD_AT = Decimal("0.8"), Decimal("0.9")


def spent_share(usd_total: str | None, billed_usd: str | None) -> Decimal | None:
    """Of the total that was billed; None without a cap or without prices."""
    if usd_total is None or billed_usd is None:
        return None
    cap = Decimal(usd_total)
    return Decimal(billed_usd) / cap if cap else Decimal(1)


@dataclass(frozen=True)
class Want:
    """One group's wish."""

    name: str
    replicas: int
    min_replicas: int
    existing: int  # engines that are or were asked for: pods and the Deployment's replicas, whichever is more
    usd_per_engine_hour: Decimal | None
    gpus_per_engine: int = 1


@dataclass(frozen=True)
class Caps:
    """None: no cap. What is fixed costs without being asked: the trainer."""

    usd_per_hour: Decimal | None = None
    fixed_usd_per_hour: Decimal | None = None
    gpus: int | None = None
    fixed_gpus: int = 0


@dataclass(frozen=True)
class Allotment:
    replicas: Mapping[str, int]
    short: Mapping[str, str]  # group -> why it has fewer than it asked for

    @property
    def within(self) -> bool:
        return not self.short


@dataclass
class _Purse:
    """What is left under the caps; it may be in debt."""

    usd: Decimal | None
    gpus: int | None

    def affords(self, want: Want, engines: int) -> int:
        price = want.usd_per_engine_hour or Decimal(0)
        if self.usd is not None and price > 0:
            engines = min(engines, max(0, int(self.usd // price)))
        if self.gpus is not None:
            engines = min(engines, max(0, self.gpus // want.gpus_per_engine))
        return engines

    def pay(self, want: Want, engines: int) -> None:
        if self.usd is not None:
            self.usd -= engines * (want.usd_per_engine_hour or Decimal(0))
        if self.gpus is not None:
            self.gpus -= engines * want.gpus_per_engine


def _purse(caps: Caps) -> _Purse:
    return _Purse(
        None if caps.usd_per_hour is None else caps.usd_per_hour - (caps.fixed_usd_per_hour or Decimal(0)),
        None if caps.gpus is None else caps.gpus - caps.fixed_gpus,
    )


def allot(wants: Sequence[Want], caps: Caps) -> Allotment:
    """Replicas for each group: minimums first, then up to what is wanted, in order of price per engine, then name.

    With a cap on dollars, what has no price gets no engine: unknown fails closed.
    """
    if caps.usd_per_hour is not None and caps.fixed_usd_per_hour is None:
        why = "the trainer has no price, and budget.usdPerHour is set"
        return Allotment(dict.fromkeys((want.name for want in wants), 0), {want.name: why for want in wants})
    if caps.usd_per_hour is None and caps.gpus is None:
        return Allotment({want.name: want.replicas for want in wants}, {})
    short: dict[str, str] = {}
    if caps.usd_per_hour is not None:
        why = "its GPU type has no price, and budget.usdPerHour is set"
        short = {want.name: why for want in wants if want.usd_per_engine_hour is None}
    counted = sorted(
        (want for want in wants if want.name not in short),
        key=lambda want: (want.usd_per_engine_hour or Decimal(0), want.name),
    )
    target = dict.fromkeys((want.name for want in wants), 0)
    purse = _purse(caps)
    for bound in ("min_replicas", "replicas"):
        for want in counted:
            more = purse.affords(want, max(0, min(getattr(want, bound), want.replicas) - target[want.name]))
            target[want.name] += more
            purse.pay(want, more)
    return _grown(wants, counted, target, short, caps)


def _grown(
    wants: Sequence[Want], counted: Sequence[Want], target: Mapping[str, int], short: dict[str, str], caps: Caps
) -> Allotment:
    """Growth only into what existing engines leave free now; the rest follows when the leaving ones are gone."""
    purse = _purse(caps)
    for want in wants:
        purse.pay(want, want.existing)
    replicas = dict(target)
    for want in counted:
        if target[want.name] < want.replicas:
            short[want.name] = f"{_told(caps)} leaves room for {target[want.name]} of {want.replicas} engines"
        growth = target[want.name] - want.existing
        if growth <= 0:
            continue
        affordable = purse.affords(want, growth)
        replicas[want.name] = want.existing + affordable
        purse.pay(want, affordable)
        if affordable < growth:
            short[want.name] = f"waits for engines of other groups to leave before it grows to {target[want.name]}"
    return Allotment(replicas, short)


def _told(caps: Caps) -> str:
    parts = [] if caps.usd_per_hour is None else [f"budget.usdPerHour {caps.usd_per_hour}"]
    parts += [] if caps.gpus is None else [f"budget.gpus {caps.gpus}"]
    return " with ".join(parts)
