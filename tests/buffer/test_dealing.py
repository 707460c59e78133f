"""Which prompts are handed out, and when a group is done with: pure decisions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from motley_trainer.buffer.dealing import Fate, Limits, fate_of_group, groups_wanted, same_pod, seed_of, task_of

LIMITS = Limits(batch_prompts=8, samples_per_prompt=8, max_lag_steps=None, steps_total=100)


def test_groups_alive_fill_the_sessions_and_one_waiting_batch():
    # 48 sessions / 8 samples = 6, + 2 slack + 8 of a waiting batch
    assert groups_wanted(LIMITS, sessions=48, step=0) == 16


def test_groups_alive_never_exceed_what_the_staleness_cap_can_use():
    capped = Limits(batch_prompts=8, samples_per_prompt=8, max_lag_steps=0, steps_total=100)
    assert groups_wanted(capped, sessions=1000, step=0) == 8
    capped = Limits(batch_prompts=8, samples_per_prompt=8, max_lag_steps=2, steps_total=100)
    assert groups_wanted(capped, sessions=1000, step=0) == 24


def test_groups_alive_never_exceed_what_is_left_to_train():
    assert groups_wanted(LIMITS, sessions=1000, step=99) == 8
    assert groups_wanted(LIMITS, sessions=1000, step=100) == 0


@given(tasks=st.integers(1, 12), epochs=st.integers(1, 3), seed=st.integers(0, 99))
def test_every_epoch_deals_each_task_once(tasks, epochs, seed):
    names = [f"t{number}" for number in range(tasks)]
    for epoch in range(epochs):
        dealt = [task_of(epoch * tasks + place, names, seed) for place in range(tasks)]
        assert sorted(dealt) == sorted(names)


def test_orders_differ_between_epochs_and_seeds_and_repeat_for_the_same():
    names = [f"t{number}" for number in range(20)]

    def order(epoch, seed):
        return [task_of(epoch * 20 + place, names, seed) for place in range(20)]

    assert order(0, 1) == order(0, 1)
    assert order(0, 1) != order(1, 1)
    assert order(0, 1) != order(0, 2)
    assert seed_of(1, 5) == seed_of(1, 5) != seed_of(1, 6)


BASE = {"wanted": 8, "delivered": 5, "graded": 5, "deals": 1, "now_s": 10.0, "deadline_s": 20.0, "holder_gone": False}


@pytest.mark.parametrize(
    ("change", "want"),
    [
        ({}, Fate.WAIT),
        ({"delivered": 8, "graded": 8}, Fate.COMPLETE),
        ({"delivered": 8, "graded": 2}, Fate.COMPLETE),  # six infrastructure failures
        ({"delivered": 8, "graded": 1}, Fate.DROP),  # one sample has no mean to differ from
        ({"now_s": 20.0}, Fate.COMPLETE),  # deadline: partial
        ({"now_s": 20.0, "graded": 1}, Fate.REDEAL),
        ({"now_s": 20.0, "graded": 1, "deals": 3}, Fate.DROP),
        ({"holder_gone": True}, Fate.REDEAL),
        ({"holder_gone": True, "deals": 3}, Fate.DROP),
    ],
)
def test_fate_of_a_group(change, want):
    assert fate_of_group(**(BASE | change)) is want


def test_incarnations_of_a_pod_share_its_name():
    assert same_pod("rollout-0/a1", "rollout-0/b2")
    assert not same_pod("rollout-0/a1", "rollout-1/a1")
