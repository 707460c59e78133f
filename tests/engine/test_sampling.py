"""The distribution that is drawn from, and reported, is the one asked for."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from motley_sampler.engines.reference.sampling import Filter, FilterBatch, draw

FILTERS = st.builds(
    Filter,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.97, 1.0]),
    top_k=st.sampled_from([-1, 1, 2, 5, 64]),
)


def _brute_force(logits: list[float], chosen: Filter) -> dict[int, float]:
    """token -> q, by the definition, one token at a time in float64."""
    temperature = chosen.temperature or 1.0
    weights = [math.exp(value / temperature) for value in logits]
    total = sum(weights)
    order = sorted(range(len(logits)), key=lambda token: -weights[token])
    limit = 1 if chosen.temperature == 0 else len(logits) if chosen.top_k < 1 else chosen.top_k
    kept: dict[int, float] = {}
    mass = 0.0
    for token in order[:limit]:
        if mass > chosen.top_p:
            break
        kept[token] = weights[token] / total
        mass += kept[token]
    return {token: p / mass for token, p in kept.items()}


@settings(max_examples=60, deadline=None)
@given(filters=st.lists(FILTERS, min_size=1, max_size=4), seed=st.integers(0, 10_000))
def test_support_and_its_logprobs_equal_brute_force(filters: list[Filter], seed: int) -> None:
    rng = random.Random(seed)
    logits = [[rng.gauss(0, 2) for _ in range(30)] for _ in filters]
    drawn = draw(torch.tensor(logits), FilterBatch.of(filters, 30), [0.5] * len(filters), [True] * len(filters))
    for row, chosen in enumerate(filters):
        want = _brute_force(logits[row], chosen)
        got = dict(zip(drawn.candidate_ids[row], drawn.candidate_logprobs[row], strict=True))
        assert set(got) == set(want)
        assert {token: math.exp(value) for token, value in got.items()} == pytest.approx(want, abs=1e-5)
        assert sum(math.exp(value) for value in got.values()) == pytest.approx(1, abs=1e-5)
        assert drawn.tokens[row] in got
        assert drawn.support_logprobs[row] == got[drawn.tokens[row]]


def test_tokens_come_as_often_as_q_says() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0]])
    batch = FilterBatch.of([Filter(1.0, 0.9, -1)], 5)
    # softmax = .6364 .2341 .0861 .0317 .0117; the mass before the third is .8705 <= .9, before the fourth .9566 > .9:
    # three are kept, of mass .9566, so q = .6652 .2447 .0900.
    want = [0.6652, 0.2447, 0.0900]
    draws = 2000
    # Stratified uniforms: the counts then miss q x draws by at most one.
    counts = [0] * 5
    for index in range(draws):
        counts[draw(logits, batch, [(index + 0.5) / draws], [False]).tokens[0]] += 1
    assert [count / draws for count in counts[:3]] == pytest.approx(want, abs=1.5 / draws)
    assert counts[3:] == [0, 0]


def test_the_largest_uniform_never_leaves_the_support() -> None:
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    batch = FilterBatch.of([Filter(1.0, 0.7, 10)] * 50, 40)
    drawn = draw(logits, batch, [1 - 2**-53] * 50, [True] * 50)
    assert all(token in ids for token, ids in zip(drawn.tokens, drawn.candidate_ids, strict=True))
    assert all(token == ids[-1] for token, ids in zip(drawn.tokens, drawn.candidate_ids, strict=True))


def test_candidates_are_listed_only_for_those_who_ask() -> None:
    batch = FilterBatch.of([Filter(1.0, 1.0, 5)] * 2, 10)
    drawn = draw(torch.zeros(2, 10), batch, [0.1, 0.1], [False, True])
    assert [len(ids) for ids in drawn.candidate_ids] == [0, 5]


def test_logits_that_are_not_finite_are_said_to_be() -> None:
    logits = torch.zeros(2, 10)
    logits[0, 3] = float("nan")
    drawn = draw(logits, FilterBatch.of([Filter(1.0, 1.0, 5)] * 2, 10), [0.1, 0.1], [True, True])
    assert drawn.finite == [False, True]


def test_a_token_whose_probability_underflows_is_no_candidate() -> None:
    logits = torch.tensor([[0.0, -1.0, -200.0]])
    drawn = draw(logits, FilterBatch.of([Filter(1.0, 1.0, -1)], 3), [0.999999], [True])
    assert drawn.candidate_ids == [[0, 1]]
    assert all(math.isfinite(value) for value in drawn.candidate_logprobs[0])
