"""What is compared with what."""

from __future__ import annotations

import pytest
from motley_api.resources.rlrun import Switch

from benchmarks.study.plan import FLEETS, HOMOGENEOUS, MIXED, REFRESH_STEPS, Settings, arms

# Sessions the study gave each group; they sum to 1,376.
CAPACITY = {
    "h100-fp8": 128, "h200-fp8": 256, "b200-nvfp4": 256, "b300-nvfp4": 384,
    "a100-bf16": 48, "rtx6000-bf16": 48, "h100-bf16": 128, "h200-bf16": 128,
}  # fmt: skip


def lags(engines) -> dict[tuple[int, int], int]:
    """Samples by (step of the cycle, lag)."""
    found: dict[tuple[int, int], int] = {}
    for engine in engines:
        for step in range(REFRESH_STEPS):
            key = (step, engine.delay + (step - engine.phase) % REFRESH_STEPS)
            found[key] = found.get(key, 0) + engine.samples
    return found


@pytest.mark.parametrize("fleet", FLEETS)
def test_a_fleet_draws_every_sample_of_a_step(fleet: str) -> None:
    settings = Settings()
    assert sum(e.samples for e in FLEETS[fleet]) == settings.prompts * settings.samples_per_prompt


def test_groups_share_samples_as_the_studys_capacities_do() -> None:
    total = sum(CAPACITY.values())
    assert {engine.group for engine in MIXED} == set(CAPACITY)
    for engine in MIXED:
        assert abs(engine.samples - 64 * CAPACITY[engine.group] / total) < 1


@pytest.mark.parametrize("fleet", FLEETS)
def test_samples_are_about_four_steps_old(fleet: str) -> None:
    found = lags(FLEETS[fleet])
    mean = sum(lag * count for (_, lag), count in found.items()) / sum(found.values())
    assert 3.5 < mean < 4.5


@pytest.mark.parametrize("step", range(REFRESH_STEPS))
def test_no_step_is_much_staler_than_another(step: int) -> None:
    found = [(lag, count) for (at, lag), count in lags(MIXED).items() if at == step]
    assert 2.5 < sum(lag * count for lag, count in found) / 64 < 5.5


def test_the_control_differs_from_the_mixed_fleet_in_precision_alone() -> None:
    assert lags(HOMOGENEOUS) == lags(MIXED)
    assert {(e.view, e.kv_cache_precision, e.gpu_type) for e in HOMOGENEOUS} == {("bf16", "BF16", "B200")}


def test_arms_differ_in_their_corrections_alone() -> None:
    found = arms(Settings())
    assert list(found) == [
        "grpo", "grpo_mis", "grpo_topp", "sc", "sc_mis", "sc_mis_topp", "homogeneous_grpo", "homogeneous_sc_mis_topp",
    ]  # fmt: skip
    corrections = {
        name: (
            arm.algorithm.importance_sampling.mode.value,
            arm.algorithm.score_centering is Switch.ENABLED,
            arm.algorithm.mask_replay is Switch.ENABLED,
            arm.algorithm.sampling.top_p,
        )
        for name, arm in found.items()
    }
    assert corrections["grpo"] == ("None", False, False, "1")
    assert corrections["sc_mis_topp"] == ("MIS", True, True, "0.97")
    assert corrections["homogeneous_grpo"] == corrections["grpo"]
    assert len({repr(arm.algorithm.optimizer) for arm in found.values()}) == 1
