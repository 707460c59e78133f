"""What is new in the ledger since the status was last written, and what it cost.

The cursor is the last entry of status.stepCosts. A step that a resumed trainer repeats is a new record of a newer attempt: it costs
again, and is counted as repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal

from motley_api import records
from motley_api.resources.rlrun import Baseline, GroupCost, RLRunStatus, StepCost, Totals

from motley_operator.planner import cost
from motley_operator.planner.cost import EngineRate, PriceKey, StepBill
from motley_operator.planner.model import PodView, format_time

KEPT_STEP_COSTS = 10


def cursor(status: RLRunStatus) -> tuple[int, int]:
    """(attempt, step) of the last step that was counted; (-1, 0) before the first."""
    return (status.step_costs[-1].attempt, status.step_costs[-1].step) if status.step_costs else (-1, 0)


def fresh(
    steps: Iterable[records.StepRecord], status: RLRunStatus, since: datetime | None = None
) -> tuple[records.StepRecord, ...]:
    """Records that status has not counted, in the order they happened. Those from before `since` are another run's, whose folder
    this one goes on with: it paid for none of them."""
    attempt, step = cursor(status)
    own = (record for record in steps if since is None or moment(record.finished_unix_s) >= since)
    ordered = sorted(own, key=lambda record: (record.attempt, record.step))
    return tuple(
        record for record in ordered if record.attempt > attempt or (record.attempt == attempt and record.step > step)
    )


def repeated(new: Sequence[records.StepRecord], status: RLRunStatus) -> int:
    """Steps among `new` that an earlier attempt had done already."""
    reached = cursor(status)[1]
    count = 0
    for record in new:
        count += record.step <= reached
        reached = max(reached, record.step)
    return count


def lineage(steps: Iterable[records.StepRecord]) -> tuple[records.StepRecord, ...]:
    """Without the steps that a later attempt, which began before them, has undone or will do again."""
    kept: list[records.StepRecord] = []
    began: int | None = None  # the first step of the attempts seen so far, from the newest on
    for record in sorted(steps, key=lambda record: (-record.attempt, record.step)):
        if not kept or record.attempt != kept[-1].attempt:
            bound = began
            began = record.step if began is None else min(began, record.step)
        if bound is None or record.step < bound:
            kept.append(record)
    return tuple(sorted(kept, key=lambda record: record.step))


def moment(unix_s: float) -> datetime:
    return datetime.fromtimestamp(unix_s, UTC)


def step_started(record: records.StepRecord, steps: Iterable[records.StepRecord]) -> datetime:
    """A step's time begins where the one before it ended, so that restarts in between are part of it."""
    before = [other.finished_unix_s for other in steps if other.finished_unix_s < record.finished_unix_s]
    return moment(max(before, default=record.started_unix_s))


def bills(
    new: Sequence[records.StepRecord],
    steps: Sequence[records.StepRecord],
    *,
    pods: Sequence[PodView],
    prices: Mapping[PriceKey, Decimal],
    rates: Mapping[str, EngineRate],
    baseline: Baseline | None,
    capacity_sessions: int,
) -> tuple[StepBill, ...]:
    return tuple(
        cost.step_bill(
            record,
            step_started(record, steps),
            moment(record.finished_unix_s),
            pods=pods,
            prices=prices,
            rates=rates,
            baseline=baseline,
            capacity_sessions=capacity_sessions,
        )
        for record in new
    )


def step_cost(bill: StepBill) -> StepCost:
    saving = cost.saving_percent(bill.work_priced, bill.baseline)
    return StepCost(
        step=bill.step,
        attempt=bill.attempt,
        seconds=cost.usd(bill.seconds) or "0",
        billed_usd=cost.usd(bill.billed),
        sampler_usd=cost.usd(bill.sampler),
        trainer_usd=cost.usd(bill.trainer),
        work_priced_usd=cost.usd(bill.work_priced),
        masked_usd=cost.usd(bill.masked),
        idle_usd=cost.usd(bill.idle),
        discarded_usd=cost.usd(bill.discarded),
        stale_usd=cost.usd(bill.stale),
        baseline_usd=cost.usd(bill.baseline),
        baseline_billed_usd=cost.usd(bill.baseline_billed),
        saving_percent=percent(saving),
    )


def group_cost(bill: StepBill, name: str) -> GroupCost | None:
    """One group's part of a step."""
    part = bill.groups.get(name)
    if part is None:
        return None
    return GroupCost(
        step=bill.step,
        billed_usd=cost.usd(part.billed),
        work_priced_usd=cost.usd(part.work),
        masked_usd=cost.usd(part.masked),
        discarded_usd=cost.usd(part.discarded),
        stale_usd=cost.usd(part.stale),
        idle_usd=cost.usd(part.idle),
    )


def percent(value: Decimal | None) -> str | None:
    return None if value is None else format(value.quantize(Decimal("0.1")), "f")


COST_FIELDS = (
    "billed_usd",
    "sampler_usd",
    "trainer_usd",
    "work_priced_usd",
    "masked_usd",
    "idle_usd",
    "discarded_usd",
    "stale_usd",
    "baseline_usd",
    "baseline_billed_usd",
)


def mean_cost(step_costs: Sequence[StepCost]) -> dict[str, str | None]:
    """Field by field, the mean over the kept steps where it is known; the saving over those where both sides are."""
    found: dict[str, str | None] = {}
    for name in COST_FIELDS:
        known = [Decimal(value) for item in step_costs if (value := getattr(item, name)) is not None]
        found[name] = cost.usd(sum(known, Decimal(0)) / len(known)) if known else None
    both = [
        (Decimal(item.work_priced_usd), Decimal(item.baseline_usd))
        for item in step_costs
        if item.work_priced_usd is not None and item.baseline_usd is not None
    ]
    if both:
        work, baseline = (sum(side, Decimal(0)) for side in zip(*both, strict=True))
        found["saving_percent"] = percent(cost.saving_percent(work, baseline))
    return found


def totals(
    before: Totals,
    *,
    new: Sequence[records.StepRecord],
    new_bills: Sequence[StepBill],
    repeated_steps: int,
    pods: Sequence[PodView],
    prices: Mapping[PriceKey, Decimal],
    now: datetime,
) -> Totals:
    """Totals with what is new. Billed dollars come from GPU time, never from adding up dollars."""
    accounted = datetime.fromisoformat(before.accounted_until) if before.accounted_until else None
    gpu_time, until = cost.accrue(before.gpu_time, accounted, now, pods, prices)
    sums: dict[str, str | None] = {}
    for name, attribute in (
        ("work_priced_usd", "work_priced"),
        ("masked_usd", "masked"),
        ("idle_usd", "idle"),
        ("discarded_usd", "discarded"),
        ("stale_usd", "stale"),
        ("baseline_usd", "baseline"),
        ("baseline_billed_usd", "baseline_billed"),
    ):
        text = getattr(before, name)
        start = Decimal(text) if text is not None else Decimal(0) if before.steps == 0 else None
        sums[name] = cost.usd(cost.add(start, *(getattr(bill, attribute) for bill in new_bills)))
        if before.steps == 0 and not new:
            sums[name] = None
    known = {
        name: Decimal(text) if (text := sums[name]) is not None else None
        for name in ("work_priced_usd", "baseline_usd")
    }
    return Totals(
        **sums,
        billed_usd=cost.usd(cost.billed(gpu_time)),
        sampler_usd=cost.usd(cost.billed(gpu_time, "sampler")),
        trainer_usd=cost.usd(cost.billed(gpu_time, "trainer")),
        saving_percent=percent(cost.saving_percent(known["work_priced_usd"], known["baseline_usd"])),
        steps=before.steps + len(new),
        samples=before.samples + sum(group.samples for record in new for group in record.groups),
        generated_tokens=before.generated_tokens
        + sum(group.generated_tokens for record in new for group in record.groups),
        repeated_steps=before.repeated_steps + repeated_steps,
        gpu_seconds=sum(item.gpu_seconds for item in gpu_time),
        gpu_time=list(gpu_time),
        accounted_until=format_time(until) if until is not None else None,
    )
