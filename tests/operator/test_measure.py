from __future__ import annotations

from motley_api import records
from motley_operator.measure import KEPT_LAST_STEPS, RunMemory


def step(number: int, attempt: int = 1) -> records.StepRecord:
    zero = records.Ratio()
    return records.StepRecord(
        run="r",
        step=number,
        attempt=attempt,
        started_unix_s=0.0,
        finished_unix_s=float(number),
        wait_s=0.0,
        train_s=0.0,
        publish_s=0.0,
        reward=zero,
        kl=zero,
        out_of_range=zero,
        entropy=zero,
        grad_norm=0.0,
        loss=0.0,
        lag=zero,
        groups=[],
    )


def trainer(step: int, attempt: int = 1) -> records.TrainerStatus:
    return records.TrainerStatus(
        run="r",
        attempt=attempt,
        steps_total=99,
        step=step,
        weights_version=step,
        durable_version=0,
        buffered=0,
        outstanding=0,
    )


def hear(memory: RunMemory, status: records.TrainerStatus, steps: list[records.StepRecord]) -> None:
    memory.trainer = status
    memory.heard(steps)
    memory.remember(steps, early=5, counted=(0, 0))


def test_nothing_is_asked_for_while_no_step_is_new() -> None:
    memory = RunMemory(trainer=trainer(3))
    assert memory.ask_after() == 0
    hear(memory, trainer(3), [step(1), step(2), step(3)])
    assert memory.ask_after() is None
    memory.trainer = trainer(4)
    assert memory.ask_after() == 3


def test_a_new_attempt_is_asked_for_everything_once() -> None:
    memory = RunMemory()
    hear(memory, trainer(5), [step(number) for number in range(1, 6)])
    memory.trainer = trainer(3, attempt=2)
    assert memory.ask_after() == 0
    hear(memory, trainer(3, attempt=2), [step(1), step(2), step(3)])
    assert memory.ask_after() is None
    memory.trainer = trainer(4, attempt=2)
    assert memory.ask_after() == 3  # the repeated step 4 comes as attempt 2


def test_first_last_and_uncounted_steps_are_kept_and_the_rest_forgotten() -> None:
    memory = RunMemory()
    steps = [step(number) for number in range(1, 501)]
    memory.remember(steps, early=5, counted=(1, 400))
    kept = sorted(number for _, number in memory.steps)
    assert kept == [1, 2, 3, 4, 5, *range(401, 501)]
    memory.remember([], early=5, counted=(1, 500))
    assert sorted(number for _, number in memory.steps) == [1, 2, 3, 4, 5, *range(501 - KEPT_LAST_STEPS, 501)]
