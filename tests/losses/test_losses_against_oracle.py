"""Value and gradient of every choice against a dense float64 oracle, over random small vocabularies."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from losses import oracle
from motley_trainer.losses import Mis, Objective, Support, Tis, Tokens, Unweighted, token_losses, vocab

WEIGHTS = {
    "none": (Unweighted(), oracle.unweighted),
    "tis": (Tis(2.0), oracle.tis(2.0)),
    "mis": (Mis(0.5, 5.0), oracle.mis(0.5, 5.0)),
}


def random_case(seed: int, *, vocabulary: int, tokens: int, complete: bool, mismatch: float = 1.0):
    """Logits, and per token a support with q: the sampler's own (noisy) softmax, filtered or cut to a head."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(tokens, vocabulary)) * 2
    rows = []
    for n in range(tokens):
        q_all = oracle.softmax(z[n] + mismatch * rng.normal(size=vocabulary))
        size = int(rng.integers(1, vocabulary + 1))
        support = sorted(np.argsort(-q_all)[:size].tolist())
        q = q_all[support] / (q_all[support].sum() if complete else 1.0)
        y = int(rng.choice(support, p=q / q.sum()))
        rows.append((support, q.tolist(), y))
    return z, rows, rng.normal(size=tokens)


def as_tokens(rows, advantages, dtype=torch.float64) -> Tokens:
    token, ids, logq, chosen = [], [], [], []
    for n, (support, q, y) in enumerate(rows):
        chosen.append(len(ids) + support.index(y))
        token += [n] * len(support)
        ids += support
        logq += np.log(q).tolist()
    support = Support(torch.tensor(token), torch.tensor(ids), torch.tensor(logq, dtype=dtype), torch.tensor(chosen))
    return Tokens(
        rows_N=torch.arange(len(rows)),
        advantage_N=torch.tensor(advantages, dtype=dtype),
        temperature_N=torch.ones(len(rows), dtype=dtype),
        support=support,
    )


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("centre", [True, False], ids=["centred", "uncentred"])
@pytest.mark.parametrize("replay", [True, False], ids=["replay", "head"])
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000), vocabulary=st.integers(2, 9), tokens=st.integers(1, 5))
def test_value_and_gradient_equal_the_oracle(weight, centre, replay, seed, vocabulary, tokens):
    ours, f = WEIGHTS[weight]
    z, rows, advantages = random_case(seed, vocabulary=vocabulary, tokens=tokens, complete=replay)
    logits = torch.tensor(z, requires_grad=True)
    losses, _ = token_losses(logits, as_tokens(rows, advantages), Objective(weight=ours, centre=centre, replay=replay))
    losses.sum().backward()
    for n, (support, q, y) in enumerate(rows):
        function = oracle.centred if centre else oracle.weighted
        want_loss, want_grad = function(z[n], support, q, y, advantages[n], f, replay=replay)
        assert losses[n].item() == pytest.approx(want_loss, rel=1e-9, abs=1e-9)
        np.testing.assert_allclose(logits.grad[n].numpy(), want_grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("replay", [True, False], ids=["replay", "head"])
def test_float32_and_bfloat16_logits_stay_close_to_float64(replay):
    z, rows, advantages = random_case(3, vocabulary=7, tokens=40, complete=replay, mismatch=0.1)
    z = torch.tensor(z).bfloat16().double().numpy()  # values that bfloat16 holds exactly
    objective = Objective(replay=replay)
    want, _ = token_losses(torch.tensor(z), as_tokens(rows, advantages), objective)
    for dtype in (torch.float32, torch.bfloat16):
        got, stats = token_losses(torch.tensor(z, dtype=dtype), as_tokens(rows, advantages, torch.float32), objective)
        assert got.dtype == torch.float32
        assert stats.kl_N.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5)


def test_chunked_normaliser_equals_one_pass(monkeypatch):
    z, rows, advantages = random_case(5, vocabulary=8, tokens=9, complete=False)
    results = []
    for chunk in (1 << 22, 16):  # 16 elements: two rows at a time
        monkeypatch.setitem(vocab.CHUNK_ELEMENTS, "cpu", chunk)
        logits = torch.tensor(z, requires_grad=True)
        losses, stats = token_losses(logits, as_tokens(rows, advantages), Objective(replay=False))
        losses.sum().backward()
        results.append((losses.detach(), logits.grad, stats.entropy_N))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


def test_temperature_divides_the_logits_before_the_softmax():
    z, rows, advantages = random_case(6, vocabulary=6, tokens=4, complete=True)
    for replay in (True, False):
        tokens = as_tokens(rows, advantages)
        cooled = Tokens(tokens.rows_N, tokens.advantage_N, torch.full((4,), 0.6, dtype=torch.float64), tokens.support)
        got, _ = token_losses(torch.tensor(z), cooled, Objective(replay=replay))
        want, _ = token_losses(torch.tensor(z / 0.6), tokens, Objective(replay=replay))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_exact_kl_over_a_complete_support_and_a_lower_bound_over_a_head():
    z, rows, advantages = random_case(8, vocabulary=9, tokens=30, complete=True)
    _, stats = token_losses(torch.tensor(z), as_tokens(rows, advantages), Objective())
    for n, (support, q, _) in enumerate(rows):
        p = oracle.trainer_probs(z[n], support, replay=True)
        want_kl = sum(qv * np.log(qv / p[v]) for v, qv in zip(support, q, strict=True))
        want_entropy = -sum(p[v] * np.log(p[v]) for v in support)
        assert stats.kl_N[n].item() == pytest.approx(want_kl, abs=1e-10)
        assert stats.entropy_N[n].item() == pytest.approx(want_entropy, abs=1e-10)


def test_head_kl_counts_the_tail_as_one_outcome():
    # V=3, p=(.5,.3,.2), q=(.4,.4,.2); head = the first two: same tail mass, rho=1, so KL = .4 ln(.4/.5) + .4 ln(.4/.3)
    z = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log()
    tokens = as_tokens([([0, 1], [0.4, 0.4], 0)], [1.0])
    _, stats = token_losses(z, tokens, Objective(replay=False))
    want_kl = 0.4 * np.log(0.4 / 0.5) + 0.4 * np.log(0.4 / 0.3)
    assert stats.kl_N[0].item() == pytest.approx(want_kl, abs=1e-12)
    assert stats.tail_ratio_N[0].item() == pytest.approx(1.0)
    assert stats.head_p_N[0].item() == pytest.approx(0.8)
    assert stats.head_q_N[0].item() == pytest.approx(0.8)
    # full entropy of p, not only of its head
    assert stats.entropy_N[0].item() == pytest.approx(-(0.5 * np.log(0.5) + 0.3 * np.log(0.3) + 0.2 * np.log(0.2)))
