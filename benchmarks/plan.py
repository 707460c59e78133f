"""The planner's integer program: time for 64 groups, and agreement with trying every fleet on small instances.

make bench-plan            the last line is JSON: {"seconds64": worst of the seeds, "matchesBruteForce": true}

A solve takes one thread. Of each instance the best of three tries counts: the others waited for a core that something else held,
which the processor seconds beside them show.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from decimal import Decimal

from motley_operator.planner import rebalance
from motley_operator.planner.rebalance import Need, Option

# GPU type: list price and sessions an engine, after the study's fleet
TYPES = {
    "H100": ("3.95", 16),
    "H200": ("4.54", 32),
    "B200": ("6.25", 32),
    "B300": ("7.10", 48),
    "A100-80GB": ("2.50", 6),
    "RTX-PRO-6000": ("3.03", 6),
}


def instance(seed: int, groups: int, most: int) -> tuple[list[Option], Need]:
    """Groups whose price, speed and effective-sample ratio differ; about two thirds of all sessions are wanted."""
    draw = random.Random(seed)
    options = []
    for number in range(groups):
        gpu = draw.choice(list(TYPES))
        price, sessions = TYPES[gpu]
        low = draw.randint(0, most // 4)
        high = draw.randint(low, most)
        options.append(
            Option(
                name=f"g{number:02d}",
                pool=(gpu, "OnDemand"),
                gpus_per_engine=draw.choice((1, 1, 2)),
                sessions=max(1, sessions + draw.randint(-4, 4)),
                engines=draw.randint(low, high),
                minimum=low,
                maximum=high,
                usd_per_hour=Decimal(price) * draw.randint(80, 120) / 100,
                turns_per_hour=Decimal(400 * sessions + draw.randint(0, 800)),
                effective=Decimal(draw.randint(60, 100)) / 100,
                start_usd=Decimal(draw.randint(0, 200)) / 100,
                leave_usd=Decimal(draw.randint(0, 100)) / 100,
            )
        )
    most_sessions = sum(option.sessions * option.maximum for option in options)
    most_turns = sum(rebalance.effective_turns(option) * option.maximum for option in options)
    gpus = {(gpu, "OnDemand"): draw.randint(2, 2 + most * groups // 4) for gpu in TYPES}
    price = sum((option.usd_per_hour or Decimal(0)) * option.maximum for option in options)
    need = Need(
        sessions=most_sessions * 2 // 3,
        turns_per_hour=most_turns * 6 // 10,
        gpus=gpus,
        usd_per_hour=price * draw.randint(60, 100) // 100,
    )
    return options, need


def brute_force(options: list[Option], need: Need) -> tuple[Decimal, Decimal] | None:
    """(shortage, dollars) of the best fleet among all."""
    best = None
    for counts in itertools.product(*(range(low, high + 1) for low, high in (one.bounds for one in options))):
        fleet = dict(zip((one.name for one in options), counts, strict=True))
        if fits(options, need, fleet):
            value = worth(options, need, fleet)
            best = value if best is None else min(best, value)
    return best


def fits(options: list[Option], need: Need, fleet: dict[str, int]) -> bool:
    for pool, limit in need.gpus.items():
        mine = [one for one in options if one.pool == pool]
        asked = sum(one.minimum * one.gpus_per_engine for one in mine)
        if sum(fleet[one.name] * one.gpus_per_engine for one in mine) > max(limit, asked):
            return False
    dollars = sum(fleet[one.name] * (one.usd_per_hour or Decimal(0)) for one in options)
    return need.usd_per_hour is None or dollars <= need.usd_per_hour


def worth(options: list[Option], need: Need, fleet: dict[str, int]) -> tuple[Decimal, Decimal]:
    made = rebalance.fleet_of(options, need, fleet)
    short = max(Decimal(0), 1 - Decimal(made.sessions) / need.sessions) if need.sessions else Decimal(0)
    if need.turns_per_hour:
        short += max(Decimal(0), 1 - (made.turns_per_hour or Decimal(0)) / need.turns_per_hour)
    return short, made.usd_per_hour * need.hours + made.moving_usd


def matches(seed: int) -> bool:
    options, need = instance(seed, groups=3, most=6)
    best, found = brute_force(options, need), rebalance.solve(options, need)
    if best is None or found.refused:
        return best is None and bool(found.refused)
    short, dollars = worth(options, need, dict(found.engines))
    close = abs(short - best[0]) < Decimal("0.00001")
    return close and (
        best[0] > 0 or abs(dollars - best[1]) <= Decimal("0.0001") + best[1] * Decimal(repr(rebalance.GAP))
    )


TRIES = 3


def timed(options: list[Option], need: Need) -> tuple[rebalance.Fleet, float, float]:
    """(the answer, seconds, processor seconds)"""
    found, tries = None, []
    for _ in range(TRIES):
        wall, processor = time.perf_counter(), time.process_time()
        found = rebalance.solve(options, need)
        tries.append((time.perf_counter() - wall, time.process_time() - processor))
    assert found is not None
    return found, *min(tries)


def main() -> None:
    seconds = []
    start = time.perf_counter()
    rebalance.solve(*instance(0, groups=2, most=4))
    print(f"the first solve imports the solver: {time.perf_counter() - start:.2f} s")
    print("| groups | seed | seconds | processor | met | proven | $/h |\n|---|---|---|---|---|---|---|")
    for groups in (8, 64):
        for seed in range(5):
            options, need = instance(seed, groups, most=40)
            found, took, processor = timed(options, need)
            print(
                f"| {groups} | {seed} | {took:.3f} | {processor:.3f} | {found.met} | {found.proven} | {found.usd_per_hour:.2f} |"
            )
            if groups == 64:
                seconds.append(took)
    agree = [matches(seed) for seed in range(100)]
    print(f"{sum(agree)} of {len(agree)} small instances agree with brute force")
    print(json.dumps({"seconds64": round(max(seconds), 3), "matchesBruteForce": all(agree)}))


if __name__ == "__main__":
    main()
