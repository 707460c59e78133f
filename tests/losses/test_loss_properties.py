"""Properties that hold for every input, and the worked numbers of the literature's formulas."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from motley_trainer.losses import (
    Clip,
    Mis,
    Objective,
    Reduction,
    Support,
    Tis,
    Tokens,
    Unweighted,
    build_support,
    ess,
    group_advantages,
    log_softmax_over_support,
    policy_gradient,
    ppo_clip,
    token_coefficients,
    token_losses,
)
from motley_trainer.losses.policy import centre_coefficients, tail_log_ratio
from motley_trainer.losses.stats import k3

F64 = torch.float64
WEIGHTS = [Unweighted(), Tis(2.0), Mis(0.5, 5.0)]


def full_support(logq_NV: torch.Tensor, sampled_N: torch.Tensor) -> Support:
    n, v = logq_NV.shape
    return Support(
        torch.arange(n).repeat_interleave(v),
        torch.arange(v).repeat(n),
        logq_NV.reshape(-1),
        torch.arange(n) * v + sampled_N,
    )


def tokens_of(support: Support, advantage: float | torch.Tensor = 1.0, **kw) -> Tokens:
    n = support.tokens
    advantage_N = advantage if isinstance(advantage, torch.Tensor) else torch.full((n,), advantage, dtype=F64)
    return Tokens(torch.arange(n), advantage_N, torch.ones(n, dtype=F64), support, **kw)


def gradient(logits, tokens, objective, coefficients=None):
    leaf = logits.clone().requires_grad_(True)
    losses, stats = token_losses(leaf, tokens, objective)
    (losses if coefficients is None else losses * coefficients).sum().backward()
    return losses.detach(), leaf.grad, stats


# ------------------------------------------------------------------------------------------------ worked numbers
def test_head_coefficients_of_the_worked_example():
    # q_H=[.5,.3], p_H=[.4,.4]: tails .2 and .2, rho=1, alpha=1 -> [.5-.4, .3-.4] = [.1,-.1]
    support = Support(
        torch.tensor([0, 0]), torch.tensor([0, 1]), torch.tensor([0.5, 0.3], dtype=F64).log(), torch.tensor([0])
    )
    logp_C = torch.tensor([0.4, 0.4], dtype=F64).log()
    log_rho, _, _ = tail_log_ratio(logp_C, support)
    assert log_rho.exp().item() == pytest.approx(1.0, abs=1e-12)
    got = centre_coefficients(logp_C, support, Unweighted(), complete=False)
    torch.testing.assert_close(got, torch.tensor([0.1, -0.1], dtype=F64), rtol=1e-12, atol=1e-12)
    same = centre_coefficients(support.logq_C, support, Unweighted(), complete=False)
    torch.testing.assert_close(same, torch.zeros(2, dtype=F64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("rho", [0.3, 0.7, 1.0, 1.9, 4.0])
def test_tail_coefficient_is_rho_times_f_of_one_over_rho(rho):
    log_rho = torch.tensor([math.log(rho)], dtype=F64)
    assert Unweighted().tail(log_rho).item() == pytest.approx(rho)
    assert Tis(2.0).tail(log_rho).item() == pytest.approx(rho * min(1 / rho, 2.0))
    want_mis = 1.0 if 1 / 5 <= rho <= 1 / 0.5 else 0.0
    assert Mis(0.5, 5.0).tail(log_rho).item() == want_mis


def test_constant_advantage_moves_the_mean_score_unless_centred():
    # p=(.6,.4), q=(.5,.5), A=1. E_q[-score] in logits = -(q - p) = (.1,-.1) uncentred; 0 centred.
    logits = torch.tensor([[0.6, 0.4]], dtype=F64).log().expand(2, 2).clone()
    q = torch.full((2, 2), 0.5, dtype=F64).log()
    support = full_support(q, torch.tensor([0, 1]))  # both outcomes once: the expectation, exactly
    _, grad, _ = gradient(logits, tokens_of(support), Objective(weight=Unweighted(), centre=False))
    torch.testing.assert_close(grad.mean(0), torch.tensor([0.1, -0.1], dtype=F64), rtol=1e-12, atol=1e-12)
    _, grad, _ = gradient(logits, tokens_of(support), Objective(weight=Unweighted(), centre=True))
    torch.testing.assert_close(grad.mean(0), torch.zeros(2, dtype=F64), rtol=0, atol=1e-12)


def test_raw_ratios_are_reported_before_truncation():
    # logp - logq = ln of these; mean 4.5359; TIS(5): (.606531+5+.818731)/3 = 2.1418; MIS: (.606531+0+.818731)/3 = .4751
    log_ratio = torch.tensor([0.606531, 12.182494, 0.818731], dtype=F64).log()
    assert log_ratio.exp().mean().item() == pytest.approx(4.5359, abs=5e-5)
    assert Tis(5.0).of(log_ratio).mean().item() == pytest.approx(2.1418, abs=5e-5)
    assert Mis(0.5, 5.0).of(log_ratio).mean().item() == pytest.approx(0.4751, abs=5e-5)
    logp = torch.tensor([-1.0, -0.1, -2.0], dtype=F64)
    logits = torch.stack([logp, torch.log1p(-logp.exp())], 1)
    support = Support(torch.arange(3), torch.zeros(3, dtype=torch.long), logp - log_ratio, torch.arange(3))
    # ratio 12.18 makes log q = -.1 - 2.5; all log q are <= 0 except the first two rows' natural values
    _, stats = token_losses(logits, tokens_of(support, recorded=False), Objective(centre=False, replay=False))
    torch.testing.assert_close(stats.log_ratio_N, log_ratio, rtol=1e-9, atol=1e-9)
    assert stats.weight_N.tolist()[1] == 0.0


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("centre", [True, False])
def test_a_ratio_that_overflows_gives_finite_loss_and_gradient(weight, centre):
    # two tokens: trainer -2, sampler -91 (ratio e^89 > float32's largest number), beside an ordinary one
    logits = torch.tensor([[-2.0, math.log1p(-math.exp(-2))], [0.0, 0.0]])
    logq = torch.tensor([[-91.0, -1e-30], [math.log(0.5), math.log(0.5)]])
    support = full_support(logq, torch.tensor([0, 0]))
    objective = Objective(weight=weight, centre=centre, replay=True)
    tokens = Tokens(torch.arange(2), torch.ones(2), torch.ones(2), support)
    losses, grad, stats = gradient(logits, tokens, objective)
    assert losses.isfinite().all()
    assert grad.isfinite().all()
    if isinstance(weight, Mis) and not centre:
        assert losses[0] == 0
        assert (grad[0] == 0).all()
        assert (grad[1] != 0).any()
    assert stats.log_ratio_N[0].item() == pytest.approx(89.0, rel=1e-5)
    assert k3(stats.log_ratio_N).isfinite().all()


def test_replay_takes_the_kept_mass_out_of_every_ratio():
    # V=3, p=q=(.6,.295,.105) before the filter; top-p keeps the first two: mass .895, q=(.6,.295)/.895
    probs = torch.tensor([[0.6, 0.295, 0.105]], dtype=F64)
    support = Support(torch.tensor([0, 0]), torch.tensor([0, 1]), (probs[0, :2] / 0.895).log(), torch.tensor([0]))
    for replay, want_ratio in ((False, 0.895), (True, 1.000)):
        _, stats = token_losses(probs.log(), tokens_of(support), Objective(replay=replay, centre=False))
        assert stats.log_ratio_N.exp().item() == pytest.approx(want_ratio, abs=1e-12)


def test_same_weights_at_temperature_give_ratio_one():
    logits = torch.tensor([[1.0, -0.5, 0.2]], dtype=F64)
    support = full_support((logits / 0.6).log_softmax(-1), torch.tensor([2]))
    tokens = Tokens(torch.arange(1), torch.ones(1, dtype=F64), torch.full((1,), 0.6, dtype=F64), support)
    _, stats = token_losses(logits, tokens, Objective())
    assert stats.log_ratio_N.item() == pytest.approx(0.0, abs=1e-12)


def test_ppo_clip_takes_the_pessimistic_branch():
    # ratio 1.5, clip .2: A=+1 -> -min(1.5, 1.2) = -1.2; A=-1 -> -min(-1.5, -1.2) = 1.5; clip_high .28: -1.28
    old = torch.zeros(2, dtype=F64)
    logp = torch.full((2,), math.log(1.5), dtype=F64)
    advantage = torch.tensor([1.0, -1.0], dtype=F64)
    torch.testing.assert_close(ppo_clip(logp, old, advantage), torch.tensor([-1.2, 1.5], dtype=F64), rtol=1e-12, atol=0)
    assert ppo_clip(logp, old, advantage, clip_high=0.28)[0].item() == pytest.approx(-1.28)


def test_first_ppo_step_has_the_policy_gradient():
    # ratio 1: value -A, gradient that of -A log p
    logits = torch.randn(4, 5, dtype=F64, generator=torch.Generator().manual_seed(0))
    support = full_support(logits.log_softmax(-1), torch.tensor([0, 1, 2, 3]))
    advantage = torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=F64)
    plain = Objective(weight=Unweighted(), centre=False, clip=Clip(0.2, 0.2))
    losses, grad, _ = gradient(logits, tokens_of(support, advantage), plain)
    _, want_grad, _ = gradient(logits, tokens_of(support, advantage), Objective(weight=Unweighted(), centre=False))
    torch.testing.assert_close(losses, -advantage)
    torch.testing.assert_close(grad, want_grad, rtol=1e-10, atol=1e-12)


def test_ess_of_equal_weights_is_the_count_and_of_one_weight_is_one():
    num, den = ess(torch.tensor([2.0, 2.0, 2.0, 2.0]))
    assert num / den == pytest.approx(1.0)
    num, den = ess(torch.tensor([0.0, 0.0, 0.0, 7.0]))
    assert num / den == pytest.approx(0.25)


# ------------------------------------------------------------------------------------------------ advantage
def test_advantage_subtracts_the_mean_of_the_prompt_and_leaves_out_the_ungraded():
    rewards = torch.tensor([1.0, 0.0, float("nan"), 1.0, 1.0])
    prompts = torch.tensor([0, 0, 0, 1, 1])
    want = torch.tensor([0.5, -0.5, 0.0, 0.0, 0.0])  # prompt 0: mean of (1, 0) = .5, the NaN does not vote
    torch.testing.assert_close(group_advantages(rewards, prompts), want)
    # population std of (.5,-.5) is .5: +-1
    got = group_advantages(rewards, prompts, normalise_std=True)
    torch.testing.assert_close(got, torch.tensor([1.0, -1.0, 0.0, 0.0, 0.0]), rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------ properties
def random_logits(seed: int, n: int, v: int, scale: float = 1.5) -> torch.Tensor:
    return torch.randn(n, v, dtype=F64, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("weight", WEIGHTS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 9999), n=st.integers(1, 6), v=st.integers(2, 8))
def test_equal_policies_need_no_correction(weight, seed, n, v):
    logits = random_logits(seed, n, v)
    support = full_support(logits.log_softmax(-1), torch.arange(n) % v)
    _, centred, stats = gradient(logits, tokens_of(support), Objective(weight=weight))
    _, plain, _ = gradient(logits, tokens_of(support), Objective(weight=Unweighted(), centre=False))
    torch.testing.assert_close(centred, plain, rtol=1e-9, atol=1e-10)
    assert stats.correction_N.abs().max() < 1e-12
    assert stats.kl_N.abs().max() < 1e-12


@pytest.mark.parametrize("weight", WEIGHTS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 9999), v=st.integers(2, 8))
def test_constant_reward_has_zero_expected_gradient_under_centering(weight, seed, v):
    # every token of the vocabulary as the sampled one, weighted by its probability q: the expectation, by enumeration
    logits = random_logits(seed, 1, v).expand(v, v).clone()
    logq = random_logits(seed + 1, 1, v).log_softmax(-1)
    support = full_support(logq.expand(v, v), torch.arange(v))
    _, grad, _ = gradient(logits, tokens_of(support, 0.7), Objective(weight=weight), logq[0].exp())
    assert grad.sum(0).abs().max() < 1e-10


def test_constant_reward_drifts_without_centering():
    logits = random_logits(1, 1, 5).expand(5, 5).clone()
    logq = random_logits(2, 1, 5).log_softmax(-1)
    support = full_support(logq.expand(5, 5), torch.arange(5))
    _, grad, _ = gradient(logits, tokens_of(support), Objective(weight=Mis(0.5, 5.0), centre=False), logq[0].exp())
    assert grad.sum(0).abs().max() > 1e-2


@pytest.mark.parametrize("objective", [Objective(), Objective(replay=False), Objective(weight=Tis(2.0), centre=False)])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 9999), bad=st.sampled_from([float("nan"), float("inf"), float("-inf"), 0.5]))
def test_a_token_without_a_finite_log_prob_equals_that_token_left_out(objective, seed, bad):
    logits = random_logits(seed, 4, 5)
    logq = random_logits(seed + 1, 4, 5).log_softmax(-1)
    clean = full_support(logq, torch.tensor([0, 1, 2, 3]))
    broken = logq.clone()
    broken[2, 1] = bad
    poisoned = logits.clone()
    poisoned[2] = float("nan")  # whatever its logits hold, too
    losses, grad, stats = gradient(poisoned, tokens_of(full_support(broken, torch.tensor([0, 1, 2, 3]))), objective)
    want_losses, want_grad, _ = gradient(logits, tokens_of(clean), objective)
    keep = torch.tensor([0, 1, 3])
    assert stats.kept_N.tolist() == [True, True, False, True]
    assert losses[2] == 0
    assert (grad[2] == 0).all()
    torch.testing.assert_close(losses[keep], want_losses[keep], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad[keep], want_grad[keep], rtol=1e-12, atol=1e-12)


def test_all_tokens_dropped_gives_zero_and_a_usable_gradient():
    logits = random_logits(0, 2, 3)
    support = full_support(torch.full((2, 3), float("nan"), dtype=F64), torch.tensor([0, 1]))
    losses, grad, stats = gradient(logits, tokens_of(support), Objective())
    assert losses.tolist() == [0.0, 0.0]
    assert (grad == 0).all()
    assert not stats.kept_N.any()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 9999), n=st.integers(2, 7))
def test_permuting_padding_and_splitting_change_nothing(seed, n):
    v = 6
    logits, logq = random_logits(seed, n, v), random_logits(seed + 1, n, v).log_softmax(-1)
    sampled = torch.arange(n) % v
    advantage = torch.linspace(-1, 1, n, dtype=F64)
    want, want_grad, _ = gradient(logits, tokens_of(full_support(logq, sampled), advantage), Objective())

    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    got, grad, _ = gradient(
        logits[order], tokens_of(full_support(logq[order], sampled[order]), advantage[order]), Objective()
    )
    torch.testing.assert_close((got, grad), (want[order], want_grad[order]), rtol=1e-12, atol=1e-12)

    padded = torch.cat([torch.full((3, v), float("nan"), dtype=F64), logits])  # rows that no token names
    tokens = Tokens(torch.arange(n) + 3, advantage, torch.ones(n, dtype=F64), full_support(logq, sampled))
    got, grad, _ = gradient(padded, tokens, Objective())
    torch.testing.assert_close((got, grad[3:]), (want, want_grad), rtol=1e-12, atol=1e-12)
    assert (grad[:3] == 0).all()

    parts = [
        gradient(logits[s], tokens_of(full_support(logq[s], sampled[s]), advantage[s]), Objective())[0]
        for s in (slice(0, n // 2), slice(n // 2, n))
    ]
    torch.testing.assert_close(torch.cat(parts), want, rtol=1e-12, atol=1e-12)


def test_one_token_supports_cost_nothing_and_move_nothing():
    logits = random_logits(0, 2, 4)
    support = build_support(
        torch.tensor([3, 1]), torch.zeros(2), torch.tensor([0, 0]), torch.tensor([]), torch.tensor([])
    )
    losses, grad, stats = gradient(logits, tokens_of(support), Objective())
    assert losses.tolist() == [0.0, 0.0]
    assert (grad == 0).all()
    assert stats.log_ratio_N.tolist() == [0.0, 0.0]


def test_replay_does_not_read_logits_outside_the_support():
    logits = random_logits(0, 1, 4)
    logits[0, 3] = float("nan")
    support = Support(
        torch.tensor([0, 0]), torch.tensor([0, 2]), torch.tensor([0.5, 0.5], dtype=F64).log(), torch.tensor([1])
    )
    losses, grad, _ = gradient(logits, tokens_of(support), Objective())
    assert losses.isfinite().all()
    assert grad.isfinite().all()
    assert grad[0, 3] == 0


# -------------------- support, reduction, refusals
def test_support_from_the_wire_expands_one_token_sets():
    support = build_support(
        torch.tensor([7, 2, 9]),
        torch.zeros(3),
        torch.tensor([0, 2, 1]),
        torch.tensor([4, 2, 9]),
        torch.tensor([-0.7, -0.6, 0.0]),
    )
    assert support.token_C.tolist() == [0, 1, 1, 2]
    assert support.ids_C.tolist() == [7, 4, 2, 9]
    assert support.chosen_N.tolist() == [0, 2, 3]
    kept = support.select(torch.tensor([False, True, True]))
    assert kept.token_C.tolist() == [0, 0, 1]
    assert kept.chosen_N.tolist() == [1, 2]
    assert kept.ids_C.tolist() == [4, 2, 9]


@pytest.mark.parametrize(("ids", "occurs"), [([4, 5], 0), ([2, 2], 2)])
def test_a_sampled_token_must_be_in_its_support_once(ids, occurs):
    with pytest.raises(ValueError, match=f"sampled id 2 of token 0 occurs {occurs} times"):
        build_support(
            torch.tensor([2]), torch.zeros(1), torch.tensor([2]), torch.tensor(ids), torch.tensor([-0.7, -0.7])
        )


def test_log_softmax_over_support_is_stable_for_large_logits():
    got = log_softmax_over_support(torch.tensor([1000.0, 1000.0, -1000.0]), torch.tensor([0, 0, 1]), 2)
    torch.testing.assert_close(got, torch.tensor([-math.log(2), -math.log(2), 0.0]))


def test_reductions_weigh_tokens_or_sequences_equally():
    sequence = torch.tensor([0, 0, 0, 1, 1])
    trained = torch.tensor([True, True, True, True, False])
    token = token_coefficients(sequence, trained, sequences=3, reduction=Reduction.TOKEN_MEAN)
    assert token.tolist() == [0.25, 0.25, 0.25, 0.25, 0.0]
    by_sequence = token_coefficients(sequence, trained, sequences=3, reduction=Reduction.SEQUENCE_MEAN)
    torch.testing.assert_close(by_sequence, torch.tensor([1 / 9, 1 / 9, 1 / 9, 1 / 3, 0.0], dtype=F64))


def test_centering_without_candidates_is_refused():
    support = build_support(torch.tensor([1]), torch.tensor([-0.5]), None, None, None)
    with pytest.raises(ValueError, match="candidates"):
        token_losses(random_logits(0, 1, 3), tokens_of(support, recorded=False), Objective())


def test_clip_with_centering_is_refused():
    with pytest.raises(ValueError, match="clip"):
        Objective(clip=Clip())


def test_policy_gradient_weight_is_detached():
    logp = torch.tensor([-1.0], dtype=F64, requires_grad=True)
    policy_gradient(logp, torch.tensor([-1.2], dtype=F64), torch.tensor([2.0], dtype=F64), Tis(5.0)).backward()
    # d/dlogp of -A w logp with w held: -2 * e^.2
    assert logp.grad.item() == pytest.approx(-2 * math.exp(0.2))
