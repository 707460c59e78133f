from __future__ import annotations

from datetime import datetime
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from motley_api import records
from motley_api.resources.rlrun import GpuTime, RLRunStatus, StepCost, Totals
from motley_operator.planner import cost, ledger
from motley_operator.planner.cost import EngineRate
from motley_operator.planner.model import PodView
from planner import study
from planner.study import at

PRICES = cost.price_table(study.run_spec().prices)


def test_the_mixed_fleet_costs_286_88_an_hour_and_the_baseline_262_50() -> None:
    """Per hour the mix is dearer: 8*3.95 + 8*4.54 + 8*6.25 + 8*7.10 + 8*2.50 + 8*3.03 + 8*3.95 + 8*4.54 = 286.88."""
    assert cost.usd_per_hour(study.all_engines(), PRICES) == Decimal("286.88")
    baseline = study.run_spec().baseline
    assert baseline is not None
    assert cost.baseline_usd_per_hour(baseline, PRICES) == Decimal("262.50")  # 42 x 6.25


def test_an_hour_of_the_fleet_bills_an_hour_of_the_fleet() -> None:
    pods = study.all_engines()
    assert cost.billed_between(pods, at(0), at(3600), PRICES) == Decimal("286.88")
    gpu_time, until = cost.accrue((), None, at(3605), pods, PRICES)
    assert until == at(3600)  # five seconds settle
    assert cost.billed(gpu_time) == Decimal("286.88")


def test_an_unknown_price_gives_no_number_and_never_zero() -> None:
    pods = study.all_engines()
    prices = {key: price for key, price in PRICES.items() if key[0] != "B300"}
    assert cost.billed_between(pods, at(0), at(3600), prices) is None
    assert cost.usd_per_hour(pods, prices) is None
    gpu_time, _ = cost.accrue((), None, at(3605), pods, prices)
    assert cost.billed(gpu_time) is None
    assert sum(item.gpu_seconds for item in gpu_time) == 64 * 3600  # the time itself is known


def test_time_that_passed_without_a_price_takes_the_price_that_is_set_later() -> None:
    pods = [study.engine_pod("b300-nvfp4", 0)]
    unpriced, until = cost.accrue((), None, at(1805), pods, {})
    priced, _ = cost.accrue(unpriced, until, at(3605), pods, PRICES)
    assert cost.billed(priced) == Decimal("7.10")


def test_a_changed_price_does_not_touch_the_past() -> None:
    pods = [study.engine_pod("b300-nvfp4", 0)]
    first, until = cost.accrue((), None, at(1805), pods, PRICES)
    second, _ = cost.accrue(first, until, at(3605), pods, {("B300", "OnDemand"): Decimal(10)})
    assert cost.billed(second) == Decimal("8.55")  # half an hour at 7.10, half an hour at 10


def test_the_trainer_is_shown_apart() -> None:
    gpu_time, _ = cost.accrue((), None, at(3605), [*study.all_engines(), study.trainer_pod()], PRICES)
    assert cost.billed(gpu_time, "sampler") == Decimal("286.88")
    assert cost.billed(gpu_time, "trainer") == Decimal("50.00")  # 8 x 6.25


def test_a_pod_costs_from_its_node_until_its_containers_end() -> None:
    pending = study.engine_pod("h100-fp8", 0, scheduled=None)
    ended = study.engine_pod("h100-fp8", 1, scheduled_s=600, finished=at(2400))
    assert cost.billed_between([pending, ended], at(0), at(3600), PRICES) == Decimal("3.95") / 2


def test_a_pod_stuck_on_a_lost_node_stops_costing_at_its_deletion_time() -> None:
    stuck = study.engine_pod("h100-fp8", 0, deletion=at(1800))
    assert cost.billed_between([stuck], at(0), at(7200), PRICES) == Decimal("3.95") / 2
    assert not stuck.serves


def test_the_accounting_rests_when_nothing_runs() -> None:
    pods = [study.engine_pod("h100-fp8", 0, finished=at(60))]
    first, until = cost.accrue((), None, at(100), pods, PRICES)
    assert cost.accrue(first, until, at(10_000), pods, PRICES) == (first, until)
    assert not cost.unsettled(pods, until, at(10_000))
    assert cost.unsettled(pods, at(30), at(10_000))


seconds = st.integers(0, 5_000)


@st.composite
def pods(draw: st.DrawFn) -> list[PodView]:
    found = []
    for number in range(draw(st.integers(1, 6))):
        name = draw(st.sampled_from(sorted(study.FLEET)))
        start = draw(seconds)
        end = draw(st.none() | st.floats(start, start + 4_000, allow_nan=False))
        deletion = draw(st.none() | st.integers(start, start + 4_000))
        found.append(
            study.engine_pod(
                name,
                number,
                scheduled_s=start,
                finished=None if end is None else at(end),
                deletion=None if deletion is None else at(deletion),
            )
        )
    return found


def seen_by(pod: PodView, now: datetime) -> PodView | None:
    """The pod as it looked at `now`: not there yet, or its end not known yet."""
    from dataclasses import replace

    if pod.scheduled is None or pod.scheduled > now:
        return None
    return replace(
        pod,
        finished=pod.finished if pod.finished is not None and pod.finished <= now else None,
        deletion=pod.deletion if pod.deletion is not None and pod.deletion <= now else None,
    )


@settings(deadline=None, max_examples=60)
@given(pods(), st.lists(st.floats(0, 12_000, allow_nan=False), max_size=8))
def test_accounting_across_restarts_equals_accounting_without(fleet: list[PodView], restarts: list[float]) -> None:
    """Each restart knows only what status holds; a last look at the end sees the same as one look at everything."""
    gpu_time: tuple[GpuTime, ...] = ()
    until: datetime | None = None
    for moment in [*sorted(restarts), 20_000.0]:
        now = at(moment)
        visible = [pod for pod in (seen_by(pod, now) for pod in fleet) if pod is not None]
        status = Totals(
            gpu_time=list(gpu_time), accounted_until=until.isoformat() if until else None
        )  # all that is kept
        accounted = datetime.fromisoformat(status.accounted_until) if status.accounted_until else None
        gpu_time, until = cost.accrue(status.gpu_time, accounted, now, visible, PRICES)
    want, _ = cost.accrue((), None, at(20_000), fleet, PRICES)
    assert cost.billed(gpu_time) == cost.billed(want)
    assert {item.gpu_type: item.gpu_seconds for item in gpu_time} == {item.gpu_type: item.gpu_seconds for item in want}


# Work-priced.


def group_step(name: str, **more: object) -> records.GroupStep:
    return records.GroupStep(name=name, view="bf16", **more)  # type: ignore[arg-type]


def rate(name: str, turns_per_hour: int | None) -> EngineRate:
    gpu, _, gpus, engines, sessions = study.FLEET[name]
    hourly = PRICES[gpu, "OnDemand"] * gpus
    return EngineRate(name, hourly, Decimal(turns_per_hour) if turns_per_hour else None, sessions, engines)


def bill(groups: list[records.GroupStep], rates: list[EngineRate], **spec: object) -> cost.StepBill:
    return cost.step_bill(
        study.step(1, groups=groups),
        at(0),
        at(60),
        pods=[*study.all_engines(), study.trainer_pod()],
        prices=PRICES,
        rates={item.group: item for item in rates},
        baseline=study.run_spec(**spec).baseline,
        capacity_sessions=1376,
    )


def test_work_is_turns_times_the_price_of_an_engine_hour_over_its_turns() -> None:
    found = bill(
        [group_step("b300-nvfp4", turns=1000, samples=10), group_step("h100-bf16", turns=500, samples=10)],
        [rate("b300-nvfp4", 14_200), rate("h100-bf16", 7_900)],
        baseline={"gpuType": "B200", "engines": 42, "sessionsPerEngine": 32, "turnsPerEngineHour": 6_250},
    )
    # b300: 7.10 / 14200 = 0.0005 a turn -> 0.50; h100-bf16: 2 x 3.95 / 7900 = 0.001 a turn -> 0.50
    assert found.work_priced == Decimal("1.0")
    assert found.baseline == Decimal("1.5")  # 6.25 / 6250 = 0.001 a turn, 1500 turns
    assert cost.saving_percent(found.work_priced, found.baseline) == Decimal(100) / 3
    assert found.sampler == pytest.approx(Decimal("286.88") / 60)
    assert found.trainer == pytest.approx(Decimal(50) / 60)
    assert found.idle == found.sampler - Decimal("1.0")  # type: ignore[operator]
    # the baseline sized to 1376 sessions, for a minute: 262.50 x 1376 / 1344 / 60
    assert found.baseline_billed == pytest.approx(Decimal("262.50") * 1376 / 1344 / 60)


def test_discarded_work_is_priced_beside_the_useful_work() -> None:
    found = bill([group_step("b300-nvfp4", turns=1000, samples=10, discarded=2)], [rate("b300-nvfp4", 14_200)])
    assert found.work_priced == Decimal("0.5")
    assert found.discarded == Decimal("0.1")  # 2 samples x 100 turns x 0.0005


def test_a_groups_dollars_are_useful_masked_stale_discarded_or_idle_and_nothing_else() -> None:
    found = bill(
        [
            group_step(
                "b300-nvfp4",
                turns=1000,
                samples=10,
                discarded=4,
                stale=1,
                generated_tokens=80_000,
                masked_tokens=2_000,
            ),
            group_step("h100-fp8", turns=0, samples=0, discarded=1),
        ],
        [rate("b300-nvfp4", 14_200), rate("h100-fp8", 7_900)],
    )
    b300, h100 = found.groups["b300-nvfp4"], found.groups["h100-fp8"]
    # 0.0005 a turn, 100 turns a sample; 2,000 of 80,000 tokens had no weight
    assert (b300.work, b300.masked) == (Decimal("0.5"), Decimal("0.0125"))
    assert (b300.discarded, b300.stale) == (Decimal("0.2"), Decimal("0.05"))
    # 3.95 / 7900 a turn; none of its own samples was trained on, so 100 turns as the step's samples took
    assert (h100.work, h100.discarded, h100.stale) == (0, Decimal("0.05"), 0)
    for part in (b300, h100):
        assert part.work is not None
        assert part.discarded is not None
        assert part.idle is not None
        assert part.work + part.discarded + part.idle == part.billed
    assert found.groups["a100-bf16"].idle == found.groups["a100-bf16"].billed  # delivered nothing
    assert (found.masked, found.stale) == (Decimal("0.0125"), Decimal("0.05"))
    assert found.sampler == pytest.approx(sum(part.billed or 0 for part in found.groups.values()))


def test_dollars_beyond_what_the_schema_holds_are_cut_and_never_refused() -> None:
    assert cost.usd(Decimal(10) ** 12) == "999999999"


def test_a_group_without_a_rate_leaves_the_work_price_unknown() -> None:
    found = bill(
        [group_step("b300-nvfp4", turns=1000, samples=10), group_step("h100-bf16", turns=500, samples=10)],
        [rate("b300-nvfp4", 14_200), rate("h100-bf16", None)],
    )
    assert found.work_priced is None
    assert found.idle is None
    assert found.sampler is not None  # what is billed is known all the same


def test_a_group_that_left_is_priced_as_it_was() -> None:
    left = EngineRate("b300-nvfp4", None, None, 0, 0, last_usd_per_turn=Decimal("0.0005"))
    assert bill([group_step("b300-nvfp4", turns=1000, samples=10)], [left]).work_priced == Decimal("0.5")


def test_an_undeclared_baseline_serves_its_sessions_as_fast_as_this_fleet_does() -> None:
    baseline = study.run_spec().baseline
    assert baseline is not None
    # 8 engines x 16 sessions do 8 x 1600 turns an hour: 100 turns a session-hour; 32 sessions -> 3200 turns, 6.25 / 3200 a turn
    found = cost.baseline_usd_per_turn(baseline, PRICES, [rate("h200-bf16", 1600)])
    assert found == Decimal("6.25") / 3200


def test_measured_turns_are_those_of_busy_time() -> None:
    engines = [
        records.EngineState(id=str(n), group="g", view="bf16", url="", version=1, ready=True, turns=turns, busy_s=busy)
        for n, (turns, busy) in enumerate([(100, 60.0), (50, 30.0)])
    ]
    assert cost.measured_turns_per_hour(engines) == 150 * 3600 / 90
    assert cost.measured_turns_per_hour([]) is None


# The ledger.


def counted(*steps: tuple[int, int]) -> RLRunStatus:
    return RLRunStatus(step_costs=[StepCost(step=step, attempt=attempt) for attempt, step in steps])


def test_only_steps_after_the_cursor_are_new() -> None:
    steps = [study.step(number) for number in range(1, 6)]
    assert [record.step for record in ledger.fresh(steps, counted((0, 2), (0, 3)))] == [4, 5]
    assert [record.step for record in ledger.fresh(steps, RLRunStatus())] == [1, 2, 3, 4, 5]


def test_steps_that_a_resumed_trainer_repeats_are_new_and_counted_as_repeated() -> None:
    steps = [
        *(study.step(n) for n in (1, 2, 3)),
        *(study.step(n, attempt=1, finished_s=60 * n + 300) for n in (2, 3, 4)),
    ]
    new = ledger.fresh(steps, counted((0, 3)))
    assert [(record.attempt, record.step) for record in new] == [(1, 2), (1, 3), (1, 4)]
    assert ledger.repeated(new, counted((0, 3))) == 2


def test_the_lineage_is_without_what_a_later_attempt_undid() -> None:
    first = [study.step(number, attempt=1) for number in range(1, 8)]
    second = [study.step(number, attempt=2) for number in (6, 7, 8, 9)]
    third = [study.step(4, attempt=3)]  # taken back to 3
    found = ledger.lineage([*first, *second])
    assert [(record.attempt, record.step) for record in found] == [
        *((1, step) for step in range(1, 6)),
        *((2, step) for step in range(6, 10)),
    ]
    found = ledger.lineage([*third, *second, *first])
    assert [(record.attempt, record.step) for record in found] == [(1, 1), (1, 2), (1, 3), (3, 4)]


def test_a_steps_time_begins_where_the_one_before_it_ended() -> None:
    steps = [study.step(1), study.step(2, finished_s=500)]
    assert ledger.step_started(steps[1], steps) == at(60)
    assert ledger.step_started(steps[0], steps) == at(0)


def test_the_mean_is_over_steps_whose_cost_is_known() -> None:
    costs = [
        StepCost(step=1, billed_usd="2"),
        StepCost(step=2),
        StepCost(step=3, billed_usd="4", work_priced_usd="3", baseline_usd="4"),
    ]
    found = ledger.mean_cost(costs)
    assert found["billed_usd"] == "3"
    assert found["trainer_usd"] is None
    assert found["saving_percent"] == "25.0"
