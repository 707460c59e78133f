"""Dollars: exact, in Decimal, from integer GPU time.

Two ways to price a step, both shown:
- billed: time that pods held GPUs, times price. From the moment a pod is bound to its node until its containers ended.
- work-priced: for each group, the turns that it served for the step, times its cost per turn, which is the price of an engine-hour
  over the turns that one engine serves in an hour at the latency bound. Idle time and the trainer are left out.

An unknown price gives no number: `None`, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from motley_api import keys, records
from motley_api.resources import CapacityType, GpuTypeName
from motley_api.resources.rlrun import Baseline, GpuTime, Price

from motley_operator.planner.model import PodView, microseconds

HOUR_S = 3600
CENTS = Decimal("0.000001")  # what status shows
MOST_USD = Decimal("999999999")  # what a decimal string of the schema can say
SETTLE = timedelta(seconds=5)  # a watch may be late: time is accounted once it is this old
PriceKey = tuple[str, str]  # GPU type, capacity type


def price_table(prices: Iterable[Price]) -> dict[PriceKey, Decimal]:
    return {(price.gpu_type.value, price.capacity_type.value): Decimal(price.usd_per_gpu_hour) for price in prices}


def add(*amounts: Decimal | None) -> Decimal | None:
    """Sum, unknown if any part is."""
    known = [amount for amount in amounts if amount is not None]
    return sum(known, Decimal(0)) if len(known) == len(amounts) else None


def usd(amount: Decimal | None) -> str | None:
    """As status writes it: six decimals at most, plain; no more than the schema holds."""
    if amount is None:
        return None
    text = format(min(amount, MOST_USD).quantize(CENTS), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


# Billed.


def _whole(moment: datetime) -> datetime:
    return moment.replace(microsecond=0)


def _overlap(pod: PodView, start: datetime | None, end: datetime) -> timedelta:
    if pod.scheduled is None or pod.gpus == 0:
        return timedelta(0)
    begin = pod.scheduled if start is None else max(pod.scheduled, start)
    return max(timedelta(0), pod.held_until(end) - begin)


def accrue(
    before: Sequence[GpuTime],
    accounted_until: datetime | None,
    now: datetime,
    pods: Iterable[PodView],
    prices: Mapping[PriceKey, Decimal],
) -> tuple[tuple[GpuTime, ...], datetime | None]:
    """GPU time up to `now` less a settling time, and that moment.

    Whole seconds, so that any split of the time gives the same sum: whoever calls this, however often, from whatever earlier
    result. Time that passed while its type had no price takes the price that is known now. The moment stays while nothing runs,
    so that the status of a finished run rests.
    """
    until = _whole(now.astimezone(UTC)) - SETTLE
    if accounted_until is not None and until <= accounted_until:
        return tuple(before), accounted_until
    seconds: dict[tuple[str, str, str, str | None], int] = {}
    booked = 0

    def book(role: str, gpu_type: str, capacity_type: str, price: str | None, gpu_seconds: int) -> None:
        known = prices.get((gpu_type, capacity_type))
        priced = price if price is not None else (format(known.normalize(), "f") if known is not None else None)
        key = (role, gpu_type, capacity_type, priced)
        seconds[key] = seconds.get(key, 0) + gpu_seconds

    for item in before:
        book(item.role, item.gpu_type.value, item.capacity_type.value, item.usd_per_gpu_hour, item.gpu_seconds)
    for pod in pods:
        held = _overlap(pod, accounted_until, until)
        if held > timedelta(0) and pod.gpu_type:
            role = keys.ROLE_TRAINER if pod.role == keys.ROLE_TRAINER else keys.ROLE_SAMPLER
            book(role, pod.gpu_type, pod.capacity_type, None, pod.gpus * int(held.total_seconds()))
            booked += int(held.total_seconds())
    return (
        tuple(
            GpuTime(
                role=role,
                gpu_type=GpuTypeName(gpu_type),
                capacity_type=CapacityType(capacity_type),
                usd_per_gpu_hour=price,
                gpu_seconds=total,
            )
            for (role, gpu_type, capacity_type, price), total in sorted(seconds.items(), key=lambda item: str(item[0]))
        ),
        until if booked else accounted_until,
    )


def unsettled(pods: Iterable[PodView], accounted_until: datetime | None, now: datetime) -> bool:
    """Whether some pod's time is still to be accounted."""
    return any(_overlap(pod, accounted_until, now) >= timedelta(seconds=1) for pod in pods)


def billed(gpu_time: Iterable[GpuTime], role: str | None = None) -> Decimal | None:
    """Dollars of that GPU time; None when part of it has no price."""
    total = Decimal(0)
    for item in gpu_time:
        if role is not None and item.role != role:
            continue
        if item.usd_per_gpu_hour is None:
            if item.gpu_seconds:
                return None
            continue
        total += item.gpu_seconds * Decimal(item.usd_per_gpu_hour)
    return total / HOUR_S


def billed_between(
    pods: Iterable[PodView], start: datetime, end: datetime, prices: Mapping[PriceKey, Decimal]
) -> Decimal | None:
    """Dollars that these pods cost in [start, end)."""
    total = Decimal(0)
    for pod in pods:
        held = _overlap(pod, start, end)
        if held <= timedelta(0):
            continue
        price = prices.get((pod.gpu_type, pod.capacity_type))
        if price is None:
            return None
        total += pod.gpus * price * microseconds(held)
    return total / (HOUR_S * 1_000_000)


def usd_per_hour(pods: Iterable[PodView], prices: Mapping[PriceKey, Decimal]) -> Decimal | None:
    """What the pods that hold GPUs cost an hour, now."""
    total = Decimal(0)
    for pod in pods:
        if pod.gpus and pod.holds and pod.scheduled is not None:
            price = prices.get((pod.gpu_type, pod.capacity_type))
            if price is None:
                return None
            total += pod.gpus * price
    return total


# Work-priced.


@dataclass(frozen=True)
class EngineRate:
    """What one engine of a group costs and serves."""

    group: str
    usd_per_hour: Decimal | None
    turns_per_hour: Decimal | None  # at the latency bound: declared, else measured
    sessions: int
    engines: int = 1
    last_usd_per_turn: Decimal | None = None  # of a group that left: its last samples arrive after it

    @property
    def usd_per_turn(self) -> Decimal | None:
        if self.last_usd_per_turn is not None:
            return self.last_usd_per_turn
        if self.usd_per_hour is None or not self.turns_per_hour:
            return None
        return self.usd_per_hour / self.turns_per_hour


def measured_turns_per_hour(engines: Iterable[records.EngineState]) -> Decimal | None:
    """3600 x turns / busy seconds over a group's engines: what an engine serves in an hour with work at hand.

    Engines that were never full serve more at the latency bound than this says, so a measured cost per turn is an upper bound.
    """
    turns, busy_us = 0, 0
    for engine in engines:
        turns += engine.turns
        busy_us += round(engine.busy_s * 1_000_000)
    return Decimal(turns) * HOUR_S * 1_000_000 / busy_us if turns and busy_us else None


def baseline_usd_per_turn(
    baseline: Baseline, prices: Mapping[PriceKey, Decimal], rates: Iterable[EngineRate]
) -> Decimal | None:
    """Cost of one turn on the baseline.

    From its declared turns per engine-hour; else its sessions are taken to be served as fast as this fleet's are on average
    (sessions per engine are chosen for equal speed): turns per session-hour of the fleet x the baseline's sessions per engine.
    """
    price = prices.get((baseline.gpu_type.value, CapacityType.ON_DEMAND.value))
    if price is None:
        return None
    if baseline.turns_per_engine_hour is not None:
        turns = Decimal(baseline.turns_per_engine_hour)
    else:
        known = [rate for rate in rates if rate.turns_per_hour]
        slots = sum(rate.sessions * rate.engines for rate in known)
        if not slots:
            return None
        served = sum((rate.turns_per_hour * rate.engines for rate in known if rate.turns_per_hour), Decimal(0))
        turns = served / slots * baseline.sessions_per_engine
    return price * baseline.gpus_per_engine / turns


def baseline_usd_per_hour(baseline: Baseline, prices: Mapping[PriceKey, Decimal]) -> Decimal | None:
    """The declared baseline fleet, whole."""
    price = prices.get((baseline.gpu_type.value, CapacityType.ON_DEMAND.value))
    return None if price is None else price * baseline.gpus_per_engine * baseline.engines


@dataclass(frozen=True)
class GroupBill:
    """What one group cost for one step; None is unknown. billed = work + discarded + idle."""

    billed: Decimal | None  # pods x time
    work: Decimal | None  # of the samples trained on
    masked: Decimal | None  # of that, the tokens whose weight was 0
    discarded: Decimal | None  # work that was delivered and not trained on
    stale: Decimal | None  # of that, what was too old

    @property
    def idle(self) -> Decimal | None:
        if self.billed is None or self.work is None or self.discarded is None:
            return None
        return max(Decimal(0), self.billed - self.work - self.discarded)


@dataclass(frozen=True)
class StepBill:
    """One optimizer step in dollars; None is unknown."""

    step: int
    attempt: int
    seconds: Decimal
    sampler: Decimal | None
    trainer: Decimal | None
    work_priced: Decimal | None
    masked: Decimal | None  # of work_priced, the tokens whose weight was 0
    idle: Decimal | None  # billed samplers less the work they did, useful or discarded
    discarded: Decimal | None  # work that was delivered and not trained on, beside work_priced
    stale: Decimal | None  # of discarded, what was too old
    baseline: Decimal | None  # the same turns on the baseline
    baseline_billed: Decimal | None  # the baseline, sized to the fleet's sessions, for the same time
    groups: Mapping[str, GroupBill]

    @property
    def billed(self) -> Decimal | None:
        return add(self.sampler, self.trainer)


def group_bill(
    group: records.GroupStep, rate: EngineRate | None, billed: Decimal | None, turns_per_sample: Decimal | None
) -> GroupBill:
    """turns_per_sample: of discarded samples, whose turns are not in the ledger: the group's own, else the step's."""
    per_turn = rate.usd_per_turn if rate is not None else None

    def priced(turns: Decimal | int | None) -> Decimal | None:
        return Decimal(0) if turns == 0 else None if per_turn is None or turns is None else turns * per_turn

    work = priced(group.turns)
    per_sample = Decimal(group.turns) / group.samples if group.samples else turns_per_sample

    def lost(samples: int) -> Decimal | None:
        return priced(0 if samples == 0 else None if per_sample is None else samples * per_sample)

    masked = Decimal(group.masked_tokens) / group.generated_tokens if group.generated_tokens else Decimal(0)
    return GroupBill(
        billed=billed,
        work=work,
        masked=None if work is None else work * min(Decimal(1), masked),
        discarded=lost(group.discarded),
        stale=lost(group.stale),
    )


def step_bill(
    record: records.StepRecord,
    started: datetime,
    finished: datetime,
    *,
    pods: Sequence[PodView],
    prices: Mapping[PriceKey, Decimal],
    rates: Mapping[str, EngineRate],
    baseline: Baseline | None,
    capacity_sessions: int,
) -> StepBill:
    """Price one step that took [started, finished)."""
    trained = sum(group.samples for group in record.groups)
    turns = sum(group.turns for group in record.groups)
    samplers = [pod for pod in pods if pod.role == keys.ROLE_SAMPLER]
    reported = {group.name: group for group in record.groups}
    bills = {
        name: group_bill(
            reported.get(name) or records.GroupStep(name=name, view=""),
            rates.get(name),
            billed_between((pod for pod in samplers if pod.group == name), started, finished, prices),
            Decimal(turns) / trained if trained else None,
        )
        for name in sorted(reported.keys() | {pod.group for pod in samplers})
    }
    sampler = billed_between(samplers, started, finished, prices)
    work_priced, discarded = (add(*(getattr(bill, part) for bill in bills.values())) for part in ("work", "discarded"))
    seconds = Decimal(microseconds(finished - started)) / 1_000_000
    on_baseline = baseline_usd_per_turn(baseline, prices, rates.values()) if baseline else None
    hourly = baseline_usd_per_hour(baseline, prices) if baseline else None
    return StepBill(
        step=record.step,
        attempt=record.attempt,
        seconds=seconds,
        sampler=sampler,
        trainer=billed_between((pod for pod in pods if pod.role == keys.ROLE_TRAINER), started, finished, prices),
        work_priced=work_priced,
        masked=add(*(bill.masked for bill in bills.values())),
        idle=None
        if sampler is None or work_priced is None or discarded is None
        else max(Decimal(0), sampler - work_priced - discarded),
        discarded=discarded,
        stale=add(*(bill.stale for bill in bills.values())),
        baseline=None if on_baseline is None else on_baseline * turns,
        baseline_billed=None
        if hourly is None or baseline is None
        else hourly * seconds / HOUR_S * capacity_sessions / (baseline.engines * baseline.sessions_per_engine),
        groups=bills,
    )


def saving_percent(work_priced: Decimal | None, baseline: Decimal | None) -> Decimal | None:
    """How much cheaper the work is than on the baseline; negative when dearer."""
    if work_priced is None or baseline is None or baseline == 0:
        return None
    return (baseline - work_priced) / baseline * 100
