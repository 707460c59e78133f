# ruff: noqa: N815  (shapes in suffixes)
"""What one learns of the mismatch from the same numbers the loss uses: raw, before any truncation, and detached."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from motley_trainer.losses.policy import MASS_FLOOR, tail_log_ratio
from motley_trainer.losses.support import Support, segment_sum


@dataclass(frozen=True)
class TokenStats:
    """One value per token [N], detached; 0 where `kept_N` is false. Ratios are raw: no clip, no mask, no truncation.

    kept_N: bool, false for tokens dropped because a sampler log-prob is missing or not finite.
    kl_N: KL(q || p), nats: exact over a complete support; over a head with the tail as one more outcome (a lower
        bound); k3 = r - 1 - log r of the sampled token where nothing but its log-prob is known
        (joschu.net/blog/kl-approx.html).
    """

    kept_N: Tensor
    logp_N: Tensor  # of the sampled token
    log_ratio_N: Tensor
    weight_N: Tensor
    kl_N: Tensor
    entropy_N: Tensor
    head_p_N: Tensor
    head_q_N: Tensor
    tail_ratio_N: Tensor
    correction_N: Tensor  # sum_H |coefficient_v - p_v f|: how far centering moves the gradient; 0 where p = q
    reference_kl_N: Tensor  # k3 to the reference policy; 0 without one


def support_kl(logp_C: Tensor, support: Support) -> Tensor:
    """sum_H q (log q - log p), [N]: KL(q || p) when the support is complete."""
    terms_C = support.in_head(support.logq_C.exp() * (support.logq_C - logp_C))
    return segment_sum(terms_C, support.token_C, support.tokens)


def head_kl(logp_C: Tensor, support: Support) -> Tensor:
    """KL(q || p) with all mass outside the head as one outcome, [N]: never above the true KL."""
    log_rho_N, _, head_q_N = tail_log_ratio(logp_C, support)
    tail_q_N = 1 - head_q_N
    return support_kl(logp_C, support) + torch.where(
        tail_q_N > MASS_FLOOR, tail_q_N * log_rho_N, torch.zeros_like(tail_q_N)
    )


def k3(log_ratio_N: Tensor) -> Tensor:
    """r - 1 - log r in float64, where ratios of exp(89) still fit; [N]."""
    wide_N = log_ratio_N.double()
    return wide_N.expm1() - wide_N


def support_entropy(logp_C: Tensor, support: Support) -> Tensor:
    """-sum_H p log p, [N]."""
    return -segment_sum(logp_C.exp() * logp_C, support.token_C, support.tokens)


def ess(weights_N: Tensor) -> tuple[float, float]:
    """Effective sample size as (numerator, denominator): (sum w)^2, n sum w^2."""
    wide_N = weights_N.double()
    return float(wide_N.sum() ** 2), float(wide_N.numel() * wide_N.square().sum())
