"""The study at paper scale, priced by the operator's own code: 8 groups, 1,344 sessions, 128 x 8 trajectories a step.

    make bench-cost            the last line is JSON: {"billedRatio", "workPricedRatio", "optimisedRatio"}

All three are over the homogeneous fleet (42 x B200, BF16): dollars an hour of the mixed fleet; dollars of work per step of the mixed
fleet; dollars of work per step of the cheapest fleet on the GPU types that the study had, within min/max of examples/study/run.yaml.

Assumed, since the study's table of capacities is not public:
- every session of the mixed fleet makes equally many turns an hour (sessions per engine were chosen for equal speed), as many as on
  B300 NVFP4: 5.4 turns/s over 48 sessions;
- one B200 in BF16 makes 10,318 turns an hour within the latency bound: what the study's saving of 15% implies. The ratio that any
  other figure gives is in the table; 12,139 would make both fleets equal;
- episodes grow from 64 to 130 turns over the run, contexts from 64K to 94K tokens, and an engine's turns an hour fall as contexts
  grow, on every fleet alike.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

from motley_api import keys, records
from motley_operator import preview
from motley_operator.planner import cost
from motley_operator.planner.decide import engine_usd_per_hour
from motley_operator.planner.model import PodView, Snapshot

MANIFEST = Path(__file__).parent.parent / "examples/study/run.yaml"
STEPS = 200
TRAJECTORIES = 128 * 8
TURNS = (64, 130)  # of an episode, first step and last
CONTEXT = (Decimal(64), Decimal(94))  # thousand tokens
START = datetime(2026, 10, 13, tzinfo=UTC)


@dataclass(frozen=True)
class Totals:
    """Dollars over the run."""

    hours: Decimal
    billed: Decimal
    work: Decimal
    baseline: Decimal
    idle: Decimal


def pods(seen: Snapshot, engines: dict[str, int]) -> list[PodView]:
    return [
        PodView(
            namespace="study",
            name=f"{group.name}-{number}",
            uid=f"{group.name}-{number}",
            run=seen.name,
            role=keys.ROLE_SAMPLER,
            group=group.name,
            gpu_type=group.spec.gpu_type.value,
            gpus=group.spec.gpus_per_engine,
            scheduled=START,
        )
        for group in seen.groups
        for number in range(engines[group.name])
    ]


def rates(seen: Snapshot, engines: dict[str, int], slower: Decimal) -> dict[str, cost.EngineRate]:
    prices = cost.price_table(seen.spec.prices)
    return {
        group.name: cost.EngineRate(
            group.name,
            engine_usd_per_hour(group, prices),
            (group.spec.turns_per_engine_hour or 0) / slower,
            group.spec.sessions_per_engine,
            engines[group.name],
        )
        for group in seen.groups
    }


def record(number: int, turns: dict[str, int], finished: datetime, seconds: float) -> records.StepRecord:
    end, nothing = finished.timestamp(), records.Ratio()
    return records.StepRecord(
        run="study",
        step=number,
        attempt=0,
        started_unix_s=end - seconds,
        finished_unix_s=end,
        wait_s=0.0,
        train_s=0.0,
        publish_s=0.0,
        reward=nothing,
        kl=nothing,
        out_of_range=nothing,
        entropy=nothing,
        grad_norm=0.0,
        loss=0.0,
        lag=nothing,
        groups=[records.GroupStep(name=name, view="", samples=1, turns=count) for name, count in turns.items()],
    )


def simulate(seen: Snapshot, engines: dict[str, int], steps: int = STEPS) -> Totals:
    """Every step's bill, summed. Sessions split by capacity; a step takes as long as the fleet needs for its turns."""
    prices, baseline = cost.price_table(seen.spec.prices), seen.spec.baseline
    assert baseline is not None
    assert baseline.turns_per_engine_hour is not None
    held = pods(seen, engines)
    sessions = {group.name: engines[group.name] * group.spec.sessions_per_engine for group in seen.groups}
    now, sums = START, dict.fromkeys(("billed", "work", "baseline", "idle"), Decimal(0))
    for number in range(steps):
        part = Decimal(number) / max(1, steps - 1)
        slower = (CONTEXT[0] + part * (CONTEXT[1] - CONTEXT[0])) / CONTEXT[0]
        turns = round(TRAJECTORIES * (TURNS[0] + part * (TURNS[1] - TURNS[0])))
        served = rates(seen, engines, slower)
        fleet = sum((rate.engines * (rate.turns_per_hour or Decimal(0)) for rate in served.values()), Decimal(0))
        seconds = float(turns * cost.HOUR_S / fleet)
        finished = now + timedelta(seconds=seconds)
        split = {name: round(turns * count / sum(sessions.values())) for name, count in sessions.items() if count}
        slow_baseline = baseline.model_copy(
            update={"turns_per_engine_hour": round(baseline.turns_per_engine_hour / slower)}
        )
        bill = cost.step_bill(
            record(number + 1, split, finished, seconds),
            now,
            finished,
            pods=held,
            prices=prices,
            rates=served,
            baseline=slow_baseline,
            capacity_sessions=sum(sessions.values()),
        )
        values = {"billed": bill.sampler, "work": bill.work_priced, "baseline": bill.baseline, "idle": bill.idle}
        for name, value in values.items():
            assert value is not None
            sums[name] += value
        now = finished
    hours = Decimal((now - START).total_seconds()) / cost.HOUR_S
    return Totals(hours=hours, **sums)


def main() -> None:
    run, late = preview.read_manifest(MANIFEST.read_text())
    seen = preview.snapshot_of(run, late, None)
    plan = preview.preview(seen, "")
    prices, baseline = cost.price_table(seen.spec.prices), seen.spec.baseline
    assert baseline is not None
    assert baseline.turns_per_engine_hour is not None
    hourly = cost.baseline_usd_per_hour(baseline, prices)
    assert hourly is not None
    mixed = simulate(seen, dict(plan.declared.engines))
    best = simulate(seen, dict(plan.optimised.engines))
    print(__doc__)
    print(
        f"| fleet | $/h | sessions | hours for {STEPS} steps | work-priced $ | of the baseline's |\n|---|---|---|---|---|---|"
    )
    for name, fleet, total in (("mixed, as declared", plan.declared, mixed), ("cheapest", plan.optimised, best)):
        share = total.work / total.baseline
        print(
            f"| {name} | {fleet.usd_per_hour:.2f} | {fleet.sessions} | {total.hours:.1f} | {total.work:.2f} | {share:.3f} |"
        )
    print(f"| 42 x B200 BF16 | {hourly:.2f} | {plan.baseline_sessions} | | {mixed.baseline:.2f} | 1 |")
    print("\n| turns an hour of one B200 BF16 | work-priced ratio |\n|---|---|")
    for turns in (9000, 10318, 11000, 12139, 12960):
        print(f"| {turns} | {mixed.work / mixed.baseline * turns / baseline.turns_per_engine_hour:.3f} |")
    print(
        json.dumps(
            {
                "billedRatio": round(float(plan.declared.usd_per_hour / hourly), 3),
                "workPricedRatio": round(float(mixed.work / mixed.baseline), 3),
                "optimisedRatio": round(float(best.work / best.baseline), 3),
            }
        )
    )


if __name__ == "__main__":
    main()
