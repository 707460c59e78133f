"""From trajectories to tensors, and sums that do not depend on how a batch is cut."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from motley_api.resources.rlrun import Algorithm
from motley_trainer.batches import build_microbatch, build_sequences, plan_microbatches, share_of_rank
from motley_trainer.recipe import learning_rate, recipe_of
from motley_trainer.tally import lag_bucket
from trainer.kit import make_trajectory, make_work

RECIPE = recipe_of(Algorithm())


def trajectories(prompts=2, samples=4, **changes):
    return [make_trajectory(make_work(p), s, **changes) for p in range(1, prompts + 1) for s in range(samples)]


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=30), budget=st.integers(1, 200))
def test_microbatches_hold_every_sequence_once_within_the_budget(lengths, budget):
    plans = plan_microbatches(lengths, max_tokens=budget)
    assert sorted(index for plan in plans for index in plan) == list(range(len(lengths)))
    for plan in plans:
        assert len(plan) == 1 or len(plan) * max(lengths[index] for index in plan) <= budget
    longest = [max(lengths[index] for index in plan) for plan in plans]
    assert longest == sorted(longest)


@given(plan=st.lists(st.integers(), unique=True, max_size=12), size=st.integers(1, 4))
def test_ranks_share_a_microbatch_without_overlap(plan, size):
    shares = [share_of_rank(plan, rank=rank, size=size) for rank in range(size)]
    assert sorted(index for share in shares for index in share) == sorted(plan)
    assert max(map(len, shares)) <= -(-len(plan) // size)


def test_a_generated_token_is_predicted_by_the_row_before_it():
    sequences = build_sequences(trajectories(), RECIPE, step=1)
    micro = build_microbatch(sequences, [1, 3], rows=3, multiple=4, length=33, device=torch.device("cpu"))
    assert micro.tokens.shape == (3, 36)
    assert (micro.tokens[2] == 0).all()
    flat = micro.tokens.flatten()
    chosen = micro.trained.support.ids_C[micro.trained.support.chosen_N]
    assert torch.equal(flat[micro.trained.rows_N + 1], chosen)
    assert micro.trained.rows_N.unique().numel() == micro.trained.rows_N.numel()
    assert set(micro.sequence_N.tolist()) == {1, 3}


def test_advantages_and_lags_of_a_batch():
    # rewards 0,1,0,1 in both prompts: advantages -.5,.5,-.5,.5. Step 5 trains version 4; samples of version 1: lag 3.
    sequences = build_sequences(trajectories(version=1), RECIPE, step=5)
    assert [s.advantage for s in sequences] == [-0.5, 0.5] * 4
    assert {s.lag for s in sequences} == {3}
    assert sum(float(s.coefficients.sum()) for s in sequences) == pytest.approx(1.0)


def test_staleness_counts_from_the_oldest_turn():
    trajectory = make_trajectory(make_work(), 1)
    turns = [
        msgspec.structs.replace(turn, start_version=version, end_version=version + 1)
        for turn, version in zip(trajectory.turns, (5, 6), strict=True)
    ]
    (first, _) = build_sequences(
        [msgspec.structs.replace(trajectory, turns=turns), make_trajectory(make_work(), 0)], RECIPE, step=9
    )
    assert first.lag == 8 - 5


def test_a_token_without_a_log_prob_loses_its_coefficient_and_the_others_share_it():
    trajectory = make_trajectory(make_work(), 1)
    logprobs = np.frombuffer(trajectory.logprobs, "<f4").copy()
    logprobs[2] = np.nan
    broken = msgspec.structs.replace(trajectory, logprobs=logprobs.tobytes())
    first, second = build_sequences([broken, make_trajectory(make_work(), 0)], RECIPE, step=1)
    assert first.coefficients[2] == 0
    tokens = first.coefficients.numel() - 1 + second.coefficients.numel()
    assert first.coefficients[0].item() == pytest.approx(1 / tokens)


def test_recipes_follow_the_spec():
    final = recipe_of(Algorithm())
    assert final.objective.centre
    assert final.objective.replay
    assert (final.range_low, final.range_high) == (0.5, 5.0)
    assert final.objective.clip is None
    plain = recipe_of(
        Algorithm.model_validate(
            {
                "advantage": "GroupMeanStd",
                "importanceSampling": {"mode": "None"},
                "scoreCentering": "Disabled",
                "clip": {},
                "maskReplay": "Disabled",
                "lossReduction": "SequenceMean",
            }
        )
    )
    assert (plain.objective.clip.low, plain.objective.clip.high) == (0.2, 0.2)
    assert plain.normalise_std
    assert plain.reduction == "SequenceMean"


def test_warm_up_grows_linearly_then_stays():
    assert [learning_rate(1.0, 4, step) for step in (1, 2, 4, 9)] == [0.25, 0.5, 1.0, 1.0]
    assert learning_rate(1.0, 0, 1) == 1.0


@pytest.mark.parametrize(("lag", "want"), [(0, "0-1"), (1, "0-1"), (2, "2-3"), (5, "4-5"), (6, "6+"), (40, "6+")])
def test_lag_buckets(lag, want):
    assert lag_bucket(lag) == want
