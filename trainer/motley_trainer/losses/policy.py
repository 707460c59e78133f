"""Per-token surrogate losses. Each is unreduced [N]; its autograd gradient is the negative update direction."""

from __future__ import annotations

import torch
from torch import Tensor

from motley_trainer.losses.support import Support, segment_sum
from motley_trainer.losses.weights import TokenWeight

MASS_FLOOR = 1e-6  # of the mass outside a recorded head


def policy_gradient(logp_N: Tensor, logq_N: Tensor, advantage_N: Tensor, weight: TokenWeight) -> Tensor:
    """-A * sg(f(p_y / q_y)) * log p_y, [N]: importance-weighted policy gradient (TIS, MIS; Unweighted: REINFORCE)."""
    return -advantage_N * weight.of(logp_N.detach() - logq_N) * logp_N


def ppo_clip(
    logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> Tensor:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = p_y / p_old_y, [N] (PPO, arXiv:1707.06347, eq. 7).

    With clip_high > clip_low it is DAPO's clip-higher (arXiv:2503.14476). The old policy is the trainer's own forward.
    """
    # Beyond e^20 the clipped branch rules for A > 0, and for A < 0 the loss is already far outside any trust region:
    # the bound keeps value and gradient finite.
    ratio_N = (logp_N - old_logp_N.detach()).clamp(max=20.0).exp()
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N)


def tail_log_ratio(logp_C: Tensor, support: Support) -> tuple[Tensor, Tensor, Tensor]:
    """(log rho, head mass of p, of q), each [N], detached: rho = max(1 - q(H), 1e-6) / max(1 - p(H), 1e-6)."""
    head_p_N = segment_sum(logp_C.detach().exp(), support.token_C, support.tokens)
    head_q_N = segment_sum(support.logq_C.exp(), support.token_C, support.tokens)
    log_rho_N = (1 - head_q_N).clamp_min(MASS_FLOOR).log() - (1 - head_p_N).clamp_min(MASS_FLOOR).log()
    return log_rho_N, head_p_N, head_q_N


def centre_coefficients(logp_C: Tensor, support: Support, weight: TokenWeight, *, complete: bool) -> Tensor:
    """q_v f(p_v / q_v) - alpha p_v of each candidate, detached, [C]; no tail term where the support is complete."""
    coefficient_C = weight.times_q(logp_C.detach(), support.logq_C)
    if complete:
        return coefficient_C
    log_rho_N, _, _ = tail_log_ratio(logp_C, support)
    return coefficient_C - weight.tail(log_rho_N)[support.token_C] * logp_C.detach().exp()


def score_centred(
    logp_C: Tensor, support: Support, advantage_N: Tensor, weight: TokenWeight, *, complete: bool
) -> Tensor:
    """-A * (sg(f(p_y/q_y)) log p_y - sum_H sg(q_v f(p_v/q_v) - alpha p_v) log p_v), [N] (arXiv:2609.20807).

    logp_C: log p of the candidates: renormalised over the support where it is `complete` (mask replay: no tail, the
    centering is exact), else over the whole vocabulary (a head; outside it q is modelled as rho p). The centre is
    that of the *weighted* score, and it applies to a token whose own weight is 0, too.
    """
    logp_N = logp_C[support.chosen_N]
    weight_N = weight.of(logp_N.detach() - support.logq_C[support.chosen_N])
    coefficient_C = centre_coefficients(logp_C, support, weight, complete=complete)
    return -advantage_N * (weight_N * logp_N - segment_sum(coefficient_C * logp_C, support.token_C, support.tokens))
