"""Every named choice: a worked number, and value and gradient against the oracle over random small vocabularies."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from losses import oracle
from losses.test_losses_against_oracle import as_tokens, random_case
from motley_trainer.losses import (
    Clip,
    DriftMask,
    GeometricMask,
    Level,
    Mis,
    Objective,
    OldPolicy,
    RatioMask,
    Reduction,
    Support,
    Tis,
    Tokens,
    Unweighted,
    VTrace,
    gspo,
    ppo_clip,
    reference_kl,
    sequence_log_ratio,
    token_coefficients,
    token_losses,
    vtrace_targets,
    vtrace_weights,
)

F64 = torch.float64
TWO_SEQUENCES = torch.tensor([0, 0, 1, 1])


def logs(*ratios: float) -> torch.Tensor:
    return torch.tensor(ratios, dtype=F64).log()


def close(got: torch.Tensor, want: list[float]) -> None:
    torch.testing.assert_close(got, torch.tensor(want, dtype=F64), rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------------------ worked numbers
def test_levels_take_the_ratio_of_a_token_a_sequence_or_its_geometric_mean():
    # sequence 0: 2 x 8 = 16, root 4; sequence 1: .5 x .5 = .25, root .5
    ratios = logs(2, 8, 0.5, 0.5)
    close(sequence_log_ratio(ratios, TWO_SEQUENCES, Level.TOKEN).exp(), [2, 8, 0.5, 0.5])
    close(sequence_log_ratio(ratios, TWO_SEQUENCES, Level.SEQUENCE).exp(), [16, 16, 0.25, 0.25])
    close(sequence_log_ratio(ratios, TWO_SEQUENCES, Level.GEOMETRIC).exp(), [4, 4, 0.5, 0.5])


def test_weights_at_each_level():
    ratios = logs(2, 8, 0.5, 0.5)
    per_sequence = sequence_log_ratio(ratios, TWO_SEQUENCES, Level.SEQUENCE)
    close(Tis(5.0).of(per_sequence), [5, 5, 0.25, 0.25])  # min(16, 5), min(.25, 5)
    close(Mis(0.2, 5.0).of(per_sequence), [0, 0, 0.25, 0.25])  # 16 is outside
    close(Mis(0.5, 5.0).of(sequence_log_ratio(ratios, TWO_SEQUENCES, Level.GEOMETRIC)), [4, 4, 0.5, 0.5])


def test_ratio_and_geometric_masks_keep_or_drop_whole_sequences():
    ratios, advantage = logs(2, 8, 0.5, 0.5), torch.ones(4, dtype=F64)
    assert RatioMask(0.2, 10.0).keeps(ratios, advantage, TWO_SEQUENCES).tolist() == [False, False, True, True]
    assert GeometricMask(0.9, 5.0).keeps(ratios, advantage, TWO_SEQUENCES).tolist() == [True, True, False, False]


def test_drift_mask_drops_only_negative_sequences_that_the_trainer_left():
    # mean log q/p: sequence 0 of ratios (.5, .5): .693; sequence 1 of (2, 2): -.693
    ratios = logs(0.5, 0.5, 2, 2)
    for advantage, want in (([-1.0] * 4, [False, False, True, True]), ([1.0] * 4, [True] * 4)):
        keeps = DriftMask(0.5).keeps(ratios, torch.tensor(advantage), TWO_SEQUENCES)
        assert keeps.tolist() == want
    assert DriftMask(0.7).keeps(ratios, -torch.ones(4), TWO_SEQUENCES).all()


def test_vtrace_targets_of_a_worked_sequence():
    # ratios (2, .5), caps 1: rho = c = (1, .5). rewards (0, 1), values (.2, .4), bootstrap 0, discount 1.
    # delta = (1 (0+.4-.2), .5 (1+0-.4)) = (.2, .3); v_1 = .4+.3 = .7, v_0 = .2+.2+1*.3 = .7
    # advantages: 1 (0+.7-.2) = .5, .5 (1+0-.4) = .3
    target, advantage = vtrace_targets(
        logs(2, 0.5), torch.tensor([0.0, 1.0], dtype=F64), torch.tensor([0.2, 0.4], dtype=F64), 0.0
    )
    close(target, [0.7, 0.7])
    close(advantage, [0.5, 0.3])


def test_vtrace_weights_of_a_worked_sequence():
    # ratios (2, .5, .8), caps 1: w = (1 x .5 x .8, .5 x .8, .8) = (.4, .4, .8)
    close(vtrace_weights(logs(2, 0.5, 0.8), torch.zeros(3, dtype=torch.long), VTrace()), [0.4, 0.4, 0.8])
    # a token's own ratio up to 3, later ones up to 1: (2 x .5 x .8, .5 x .8, .8)
    close(vtrace_weights(logs(2, 0.5, 0.8), torch.zeros(3, dtype=torch.long), VTrace(3.0, 1.0)), [0.8, 0.4, 0.8])


def test_gspo_clips_the_sequence_as_one():
    # ratios (1.5, .96): geometric mean 1.2; clip .1: A=+1 -> -1.1 and no gradient, A=-1 -> 1.2 and gradient 1.2 each
    logp = logs(1.5, 0.96).requires_grad_(True)
    for sign, want_loss, want_grad in ((1.0, -1.1, 0.0), (-1.0, 1.2, 1.2)):
        logp.grad = None
        loss = gspo(
            logp,
            torch.zeros(2, dtype=F64),
            torch.full((2,), sign, dtype=F64),
            torch.zeros(2, dtype=torch.long),
            clip_low=0.1,
            clip_high=0.1,
        )
        loss.sum().backward()
        close(loss.detach(), [want_loss] * 2)
        close(logp.grad, [want_grad] * 2)


def test_gspo_over_the_sequence_mean_is_the_gradient_of_the_sequence_s_ratio():
    # d/dlogp of -(p/old)^(1/T) A is -s A / T for each of T tokens: by autograd of the sequence-level formula itself
    logp = logs(0.7, 0.9, 0.8).requires_grad_(True)
    old, advantage = logs(0.6, 0.95, 0.8), torch.tensor(0.5, dtype=F64)
    (want,) = torch.autograd.grad(-(logp - old).mean().exp() * advantage, logp)
    one = torch.zeros(3, dtype=torch.long)
    coefficients = token_coefficients(
        one, torch.ones(3, dtype=torch.bool), sequences=1, reduction=Reduction.SEQUENCE_MEAN
    )
    losses = gspo(logp, old, advantage.expand(3), one, clip_low=0.5, clip_high=0.5)
    (got,) = torch.autograd.grad((losses * coefficients).sum(), logp)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_clip_higher_leaves_more_room_above():
    # DAPO: ratio 1.25 within [.8, 1.28] is not clipped, with .2 on both sides it is
    logp, zero, one = logs(1.25), torch.zeros(1, dtype=F64), torch.ones(1, dtype=F64)
    assert ppo_clip(logp, zero, one, clip_low=0.2, clip_high=0.28).item() == pytest.approx(-1.25)
    assert ppo_clip(logp, zero, one, clip_low=0.2, clip_high=0.2).item() == pytest.approx(-1.2)


def test_reference_kl_is_k3_and_pulls_towards_the_reference():
    # p = .5, reference = .25: r = .5: .5 - 1 + ln 2 = .193147; d/dlogp = 1 - r = .5
    logp = logs(0.5).requires_grad_(True)
    penalty = reference_kl(logp, logs(0.25))
    penalty.sum().backward()
    assert penalty.item() == pytest.approx(0.193147, abs=1e-6)
    assert logp.grad.item() == pytest.approx(0.5)
    assert reference_kl(logs(0.3), logs(0.3)).item() == 0.0
    assert reference_kl(torch.tensor([-91.0]), torch.tensor([-2.0])).isfinite().all()


def test_reference_kl_averages_to_the_exact_divergence():
    # by enumeration: sum_v p_v k3(v) = KL(p || ref)
    p, reference = torch.tensor([0.5, 0.3, 0.2], dtype=F64), torch.tensor([0.2, 0.3, 0.5], dtype=F64)
    want = (p * (p / reference).log()).sum()
    assert (p * reference_kl(p.log(), reference.log())).sum().item() == pytest.approx(want.item(), abs=1e-12)


def test_entropy_bonus_of_a_worked_policy():
    # p = (.8, .2), bonus .1, A = 0: loss -.1 H, H = .500402; dH/dz_0 = -.8 (ln .8 + H) = -.221807
    z = torch.tensor([[0.8, 0.2]], dtype=F64).log().requires_grad_(True)
    for replay in (True, False):
        z.grad = None
        tokens = as_tokens([([0, 1], [0.5, 0.5], 0)], [0.0])
        losses, _ = token_losses(z, tokens, Objective(replay=replay, entropy_bonus=0.1))
        losses.sum().backward()
        assert losses.item() == pytest.approx(-0.0500402, abs=1e-7)
        torch.testing.assert_close(z.grad[0], torch.tensor([0.0221807, -0.0221807], dtype=F64), rtol=0, atol=1e-7)


# ------------------------------------------------------------------------------------------------ against the oracle
def case_with_sequences(seed: int, tokens: int) -> tuple[np.ndarray, list, Tokens, list[int], np.ndarray]:
    """Random tokens of up to three sequences whose tokens lie mixed; each sequence has one advantage."""
    z, rows, _ = random_case(seed, vocabulary=6, tokens=tokens, complete=True, mismatch=0.7)
    rng = np.random.default_rng(seed + 1)
    sequences = rng.integers(0, 3, tokens).tolist()
    advantages = rng.normal(size=3)[sequences]
    given = replace(as_tokens(rows, advantages), sequence_N=torch.tensor(sequences))
    return z, rows, given, sequences, advantages


def weight_functions():
    return {"tis": (Tis(1.5), oracle.tis(1.5)), "mis": (Mis(0.6, 1.6), oracle.mis(0.6, 1.6))}


def run(z: np.ndarray, given: Tokens, objective: Objective) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
    logits = torch.tensor(z, requires_grad=True)
    losses, stats = token_losses(logits, given, objective)
    losses.sum().backward()
    return losses.detach().numpy(), logits.grad.numpy(), stats.weight_N


def check(got: tuple, want: list[tuple[float, np.ndarray]]) -> None:
    np.testing.assert_allclose(got[0], [loss for loss, _ in want], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(got[1], np.stack([grad for _, grad in want]), rtol=1e-9, atol=1e-9)


def raw(z, rows, *, replay):
    """(p, log-ratio) of every token."""
    ps = [oracle.trainer_probs(z[n], support, replay=replay) for n, (support, _, _) in enumerate(rows)]
    return ps, [math.log(p[y] / q[s.index(y)]) for p, (s, q, y) in zip(ps, rows, strict=True)]


@pytest.mark.parametrize("replay", [True, False], ids=["replay", "whole"])
@pytest.mark.parametrize("weight", ["tis", "mis"])
@pytest.mark.parametrize("level", list(Level))
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000), tokens=st.integers(1, 7))
def test_weights_at_every_level_equal_the_oracle(level, weight, replay, seed, tokens):
    ours, f = weight_functions()[weight]
    z, rows, given, sequences, advantages = case_with_sequences(seed, tokens)
    ps, log_ratios = raw(z, rows, replay=replay)
    ratios = oracle.sequence_ratios(log_ratios, sequences, level.value)
    got = run(z, given, Objective(weight=ours, level=level, centre=False, replay=replay))
    check(got, [oracle.policy_gradient(ps[n], rows[n][2], advantages[n], f(ratios[n])) for n in range(tokens)])


@pytest.mark.parametrize("kind", ["ratio", "geometric", "drift"])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000), tokens=st.integers(1, 7))
def test_sequence_masks_on_top_of_token_weights_equal_the_oracle(kind, seed, tokens):
    z, rows, given, sequences, advantages = case_with_sequences(seed, tokens)
    ps, log_ratios = raw(z, rows, replay=True)
    product = oracle.sequence_ratios(log_ratios, sequences, "Sequence")
    mean = oracle.sequence_ratios(log_ratios, sequences, "Geometric")
    mask, keeps = {
        "ratio": (RatioMask(0.5, 2.0), lambda n: 0.5 <= product[n] <= 2.0),
        "geometric": (GeometricMask(0.8, 1.25), lambda n: 0.8 <= mean[n] <= 1.25),
        "drift": (DriftMask(0.1), lambda n: not (advantages[n] < 0 and -math.log(mean[n]) > 0.1)),
    }[kind]
    got = run(z, given, Objective(weight=Tis(2.0), sequence_mask=mask, centre=False))
    weights = [min(math.exp(log_ratios[n]), 2.0) * keeps(n) for n in range(tokens)]
    check(got, [oracle.policy_gradient(ps[n], rows[n][2], advantages[n], weights[n]) for n in range(tokens)])
    np.testing.assert_allclose(got[2], weights, rtol=1e-9)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), length=st.integers(1, 6), rho=st.sampled_from([1.0, 2.0]))
def test_vtrace_equals_the_double_sum(seed, length, rho):
    rng = np.random.default_rng(seed)
    log_ratios, rewards, values = rng.normal(size=(3, length))
    want = oracle.vtrace(list(log_ratios), list(rewards), list(values), 0.3, 0.9, rho, 1.0)
    got = vtrace_targets(
        torch.tensor(log_ratios), torch.tensor(rewards), torch.tensor(values), 0.3, discount=0.9, rho_cap=rho
    )
    np.testing.assert_allclose(got[0], want[0], rtol=1e-10)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-10)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), tokens=st.integers(1, 9), rho=st.sampled_from([1.0, 2.0]))
def test_vtrace_weights_are_its_advantages_for_one_last_reward_and_a_constant_baseline(seed, tokens, rho):
    # reward 1 at the end, value .25 everywhere, but 0 after the end: advantage = weight x (1 - .25)
    rng = np.random.default_rng(seed)
    sequences, log_ratios = rng.integers(0, 3, tokens), rng.normal(size=tokens)
    got = vtrace_weights(torch.tensor(log_ratios), torch.tensor(sequences), VTrace(rho=rho)).numpy()
    for sequence in set(sequences.tolist()):
        mine = np.flatnonzero(sequences == sequence)
        rewards = [0.0] * (len(mine) - 1) + [1.0]
        _, want = oracle.vtrace(log_ratios[mine].tolist(), rewards, [0.25] * len(mine), 0.0, 1.0, rho, 1.0)
        np.testing.assert_allclose(got[mine] * 0.75, want, rtol=1e-9)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000), tokens=st.integers(1, 7))
def test_vtrace_losses_equal_the_oracle(seed, tokens):
    z, rows, given, sequences, advantages = case_with_sequences(seed, tokens)
    ps, log_ratios = raw(z, rows, replay=True)
    weights = [0.0] * tokens
    for sequence in set(sequences):
        mine = [n for n in range(tokens) if sequences[n] == sequence]
        rewards = [0.0] * (len(mine) - 1) + [1.0]
        _, found = oracle.vtrace([log_ratios[n] for n in mine], rewards, [0.0] * len(mine), 0.0, 1.0, 1.0, 1.0)
        for n, weight in zip(mine, found, strict=True):
            weights[n] = weight
    got = run(z, given, Objective(weight=VTrace(), centre=False))
    check(got, [oracle.policy_gradient(ps[n], rows[n][2], advantages[n], weights[n]) for n in range(tokens)])


@pytest.mark.parametrize("level", [Level.TOKEN, Level.SEQUENCE], ids=["ppo", "gspo"])
@pytest.mark.parametrize("old", list(OldPolicy))
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000), tokens=st.integers(1, 7))
def test_clips_equal_the_oracle(old, level, seed, tokens):
    z, rows, given, sequences, advantages = case_with_sequences(seed, tokens)
    ps, log_ratios = raw(z, rows, replay=True)
    if old is OldPolicy.TRAINER:  # an old policy beside this one, and its own weight against the sampler
        rng = np.random.default_rng(seed + 2)
        shift = rng.normal(size=tokens) * 0.4
        old_logp = np.array([math.log(ps[n][rows[n][2]]) - shift[n] for n in range(tokens)])
        given = replace(given, old_logp_N=torch.tensor(old_logp))
        weight, clip_logs = Tis(2.0), shift.tolist()
        scale = [min(math.exp(log_ratios[n] - shift[n]), 2.0) for n in range(tokens)]
    else:
        weight, clip_logs, scale = Unweighted(), log_ratios, [1.0] * tokens
    clip = Clip(0.2, 0.28, old=old, level=level)
    got = run(z, given, Objective(weight=weight, clip=clip, centre=False))
    kind = "Token" if level is Level.TOKEN else "Geometric"
    ratios = oracle.sequence_ratios(clip_logs, sequences, kind)
    want = [oracle.clipped(ps[n], rows[n][2], advantages[n], ratios[n], 0.2, 0.28) for n in range(tokens)]
    check(got, [(scale[n] * loss, scale[n] * grad) for n, (loss, grad) in enumerate(want)])


@pytest.mark.parametrize("replay", [True, False], ids=["replay", "head"])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000), vocabulary=st.integers(2, 8), temperature=st.sampled_from([1.0, 0.6]))
def test_entropy_bonus_equals_the_oracle(replay, seed, vocabulary, temperature):
    z, rows, advantages = random_case(seed, vocabulary=vocabulary, tokens=3, complete=replay)
    given = replace(as_tokens(rows, advantages), temperature_N=torch.full((3,), temperature, dtype=F64))
    bonus = run(z, given, Objective(replay=replay, entropy_bonus=0.3))
    plain = run(z, given, Objective(replay=replay))
    for n, (support, _, _) in enumerate(rows):
        h, grad = oracle.entropy(oracle.trainer_probs(z[n] / temperature, support, replay=replay))
        assert bonus[0][n] - plain[0][n] == pytest.approx(-0.3 * h, abs=1e-9)
        np.testing.assert_allclose(bonus[1][n] - plain[1][n], -0.3 * grad / temperature, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("replay", [True, False], ids=["replay", "head"])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000), vocabulary=st.integers(2, 8), temperature=st.sampled_from([1.0, 0.6]))
def test_a_reference_penalty_equals_the_oracle(replay, seed, vocabulary, temperature):
    z, rows, advantages = random_case(seed, vocabulary=vocabulary, tokens=3, complete=replay)
    z_ref = z + np.random.default_rng(seed).normal(size=z.shape)
    want = [
        oracle.k3(z[n] / temperature, z_ref[n] / temperature, support, y, replay=replay)
        for n, (support, _, y) in enumerate(rows)
    ]
    given = replace(as_tokens(rows, advantages), temperature_N=torch.full((3,), temperature, dtype=F64))
    # The reference's own log-probs as the trainer gets them: the same function on the reference's logits.
    _, of_reference = token_losses(torch.tensor(z_ref), given, Objective(replay=replay))
    given = replace(given, reference_logp_N=of_reference.logp_N)
    penalised = run(z, given, Objective(replay=replay, reference_kl=0.3))
    plain = run(z, given, Objective(replay=replay))
    for n, (value, grad) in enumerate(want):
        assert penalised[0][n] - plain[0][n] == pytest.approx(0.3 * value, abs=1e-9)
        np.testing.assert_allclose(penalised[1][n] - plain[1][n], 0.3 * grad / temperature, rtol=1e-8, atol=1e-9)


def test_a_reference_penalty_needs_the_reference_s_log_probs():
    z, rows, advantages = random_case(1, vocabulary=5, tokens=3, complete=True)
    with pytest.raises(ValueError, match="reference_logp_N"):
        token_losses(torch.tensor(z), as_tokens(rows, advantages), Objective(reference_kl=0.1))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), vocabulary=st.integers(3, 8))
def test_a_sampled_token_beside_the_head_does_not_enter_the_centre(seed, vocabulary):
    """The head is the sampler's top K whatever was drawn: a token outside it is carried, with its own weight, alone."""
    rng = np.random.default_rng(seed)
    z, noise = rng.normal(size=(2, vocabulary)) * 1.5
    q_all = oracle.softmax(z + noise)
    order = np.argsort(-q_all).tolist()
    head, y = order[: vocabulary - 2], order[-1]
    q = q_all[head].tolist()
    ids = torch.tensor([*head, y])
    support = Support(
        torch.zeros(len(ids), dtype=torch.long),
        ids,
        torch.tensor([*q, q_all[y]], dtype=F64).log(),
        torch.tensor([len(ids) - 1]),
        torch.tensor([True] * len(head) + [False]),
    )
    one = torch.ones(1, dtype=F64)
    given = Tokens(torch.arange(1), 0.7 * one, one, support)
    got = run(z[None], given, Objective(replay=False))
    p, f = oracle.softmax(z), oracle.mis(0.5, 5.0)
    rho = max(1 - sum(q), 1e-6) / max(1 - sum(p[v] for v in head), 1e-6)
    want_loss, want_grad = oracle.policy_gradient(p, y, 0.7, f(p[y] / q_all[y]))
    for v, qv in zip(head, q, strict=True):
        c = qv * f(p[v] / qv) - rho * f(1 / rho) * p[v]
        want_loss += 0.7 * c * math.log(p[v])
        want_grad = want_grad + 0.7 * c * oracle.score(p, v)
    check(got, [(want_loss, want_grad)])


# ------------------------------------------------------------------------------------------------ by enumeration
def enumerated(objective: Objective, reward, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean gradient of the loss over all sequences of two tokens drawn from q, gradient of E_p[-reward]): a policy that
    draws both tokens from the same three, trained on another one's samples, with nothing left to chance."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(2, 3, dtype=F64, generator=generator)
    logq = torch.randn(2, 3, dtype=F64, generator=generator).log_softmax(-1)
    outcomes = list(itertools.product(range(3), repeat=2))
    leaf = z.clone().requires_grad_(True)
    exact = sum(leaf[0].log_softmax(0)[a].exp() * leaf[1].log_softmax(0)[b].exp() * -reward(a, b) for a, b in outcomes)
    (want,) = torch.autograd.grad(exact, leaf)
    total = torch.zeros_like(z)
    for a, b in outcomes:
        support = Support(
            torch.tensor([0, 0, 0, 1, 1, 1]),
            torch.tensor([0, 1, 2] * 2),
            logq.reshape(-1),
            torch.tensor([a, 3 + b]),
        )
        tokens = Tokens(
            torch.arange(2),
            torch.full((2,), reward(a, b), dtype=F64),
            torch.ones(2, dtype=F64),
            support,
            sequence_N=torch.zeros(2, dtype=torch.long),
        )
        leaf = z.clone().requires_grad_(True)
        losses, _ = token_losses(leaf, tokens, objective)
        losses.sum().backward()
        total += (logq[0, a] + logq[1, b]).exp() * leaf.grad
    return total, want


def test_untruncated_sequence_weights_give_the_policy_gradient_exactly():
    def reward(a: int, b: int) -> float:
        return float(a == b) + 0.5 * a

    got, want = enumerated(Objective(weight=Tis(1e9), level=Level.SEQUENCE, centre=False), reward, seed=3)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    token_level, _ = enumerated(Objective(weight=Tis(1e9), centre=False), reward, seed=3)
    assert (token_level - want).abs().max() > 1e-3  # token-level ratios are biased on a reward of both tokens


@pytest.mark.parametrize("weight", [Unweighted(), Tis(2.0), Mis(0.5, 5.0)])
def test_centred_losses_do_not_see_a_constant_added_to_the_reward(weight):
    def reward(a: int, b: int) -> float:
        return float(a == b)

    objective = Objective(weight=weight)
    plain, _ = enumerated(objective, reward, seed=5)
    shifted, _ = enumerated(objective, lambda a, b: reward(a, b) + 3.0, seed=5)
    torch.testing.assert_close(plain, shifted, rtol=1e-9, atol=1e-12)
    uncentred = Objective(weight=weight, centre=False)
    one, two = (
        enumerated(uncentred, reward, seed=5)[0],
        enumerated(uncentred, lambda a, b: reward(a, b) + 3.0, seed=5)[0],
    )
    assert (one - two).abs().max() > 1e-2


# ------------------------------------------------------------------------------------------------ refusals
@pytest.mark.parametrize(
    ("choices", "field"),
    [
        ({"sequence_mask": DriftMask(0.1)}, "centre"),
        ({"level": Level.SEQUENCE}, "centre"),
        ({"weight": VTrace()}, "centre"),
        ({"clip": Clip()}, "clip"),
        ({"centre": False, "weight": Unweighted(), "level": Level.GEOMETRIC}, "level"),
        ({"centre": False, "weight": VTrace(), "clip": Clip()}, "clip"),
        ({"centre": False, "clip": Clip(old=OldPolicy.SAMPLER)}, r"clip\.old"),
        ({"entropy_bonus": -0.1}, "entropy_bonus"),
        ({"reference_kl": -0.1}, "reference_kl"),
    ],
)
def test_contradictions_are_refused_by_name(choices, field):
    with pytest.raises(ValueError, match=field):
        Objective(**choices)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Clip(low=1.0),
        lambda: Clip(level=Level.GEOMETRIC),
        lambda: VTrace(rho=0.5),
        lambda: Mis(2.0, 1.0),
        lambda: Tis(0.0),
    ],
)
def test_bounds_that_make_no_sense_are_refused(make):
    with pytest.raises(ValueError, match=r"want|cap|bounds|clip"):
        make()


@pytest.mark.parametrize(
    "objective",
    [
        Objective(level=Level.SEQUENCE, centre=False),
        Objective(sequence_mask=DriftMask(), centre=False),
        Objective(weight=VTrace(), centre=False),
        Objective(weight=Unweighted(), clip=Clip(level=Level.SEQUENCE), centre=False),
    ],
)
def test_sequence_choices_without_sequences_are_an_error(objective):
    z, rows, advantages = random_case(0, vocabulary=4, tokens=2, complete=True)
    with pytest.raises(ValueError, match="sequence_N"):
        token_losses(torch.tensor(z), as_tokens(rows, advantages), objective)
