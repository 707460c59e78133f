"""Per-token surrogate losses. Each is unreduced [N]; its autograd gradient is the negative update direction."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from motley_trainer.losses.sequences import sequence_log_ratio
from motley_trainer.losses.support import Support, segment_sum
from motley_trainer.losses.weights import Level, TokenWeight

MASS_FLOOR = 1e-6  # of the mass outside a recorded head
LARGEST_LOG_RATIO = 20.0  # of a clipped surrogate, see ppo_clip


class OldPolicy(enum.StrEnum):
    """What the clipped ratio is taken against."""

    TRAINER = "Trainer"  # the trainer's own forward before its update: with one update a batch, the ratio is 1
    SAMPLER = "Sampler"  # q itself: the clip then is the off-policy correction (verl: bypass_mode)


@dataclass(frozen=True)
class Clip:
    """PPO's clip of the ratio at [1 - low, 1 + high]; high > low is DAPO's clip-higher; level SEQUENCE is GSPO."""

    low: float = 0.2
    high: float = 0.2
    old: OldPolicy = OldPolicy.TRAINER
    level: Level = Level.TOKEN

    def __post_init__(self) -> None:
        if not (0 <= self.low < 1 and self.high >= 0):
            raise ValueError(f"clip: want 0 <= low < 1 and high >= 0, got low={self.low} high={self.high}")
        if self.level is Level.GEOMETRIC:
            raise ValueError("clip.level: Token or Sequence (GSPO, whose ratio is the geometric mean already)")


def policy_gradient(logp_N: Tensor, logq_N: Tensor, advantage_N: Tensor, weight: TokenWeight) -> Tensor:
    """-A * sg(f(p_y / q_y)) * log p_y, [N]: importance-weighted policy gradient (TIS, MIS; Unweighted: REINFORCE)."""
    return -advantage_N * weight.of(logp_N.detach() - logq_N) * logp_N


def ppo_clip(
    logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> Tensor:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = p_y / p_old_y, [N] (PPO, arXiv:1707.06347, eq. 7).

    With clip_high > clip_low it is DAPO's clip-higher (arXiv:2503.14476). The old policy is the trainer's own forward.
    """
    return _clipped(logp_N - old_logp_N.detach(), advantage_N, clip_low, clip_high)


def gspo(
    logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor, sequence_N: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """PPO's clip on the sequence's geometric mean ratio s, [N] (GSPO-token, arXiv:2507.18071, eq. 13-17).

    Each token has the value of its sequence and the gradient of its own log p: s_t = sg(s) p_t / sg(p_t). The mean over
    a sequence's tokens, as Reduction.SEQUENCE_MEAN takes it, is the sequence's GSPO loss and gradient.
    """
    s_N = sequence_log_ratio((logp_N - old_logp_N).detach(), sequence_N, Level.GEOMETRIC)
    return _clipped(s_N + (logp_N - logp_N.detach()), advantage_N, clip_low, clip_high)


def _clipped(log_ratio_N: Tensor, advantage_N: Tensor, clip_low: float, clip_high: float) -> Tensor:
    # Beyond e^20 the clipped branch rules for A > 0, and for A < 0 the loss is already far outside any trust region:
    # the bound keeps value and gradient finite.
    ratio_N = log_ratio_N.clamp(max=LARGEST_LOG_RATIO).exp()
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N)


def reference_kl(logp_N: Tensor, reference_logp_N: Tensor) -> Tensor:
    """k3 = r - 1 - log r with r = p_ref / p of the sampled token, [N]: GRPO's penalty (arXiv:2402.03300, eq. 4).

    Unbiased for KL(p || p_ref) where the token was drawn from p; never negative. Differentiable in logp_N only.
    """
    log_ratio_N = (reference_logp_N.detach() - logp_N).clamp(max=LARGEST_LOG_RATIO)
    return log_ratio_N.expm1() - log_ratio_N


def tail_log_ratio(logp_C: Tensor, support: Support) -> tuple[Tensor, Tensor, Tensor]:
    """(log rho, head mass of p, of q), each [N], detached: rho = max(1 - q(H), 1e-6) / max(1 - p(H), 1e-6)."""
    head_p_N = segment_sum(support.in_head(logp_C.detach().exp()), support.token_C, support.tokens)
    head_q_N = segment_sum(support.in_head(support.logq_C.exp()), support.token_C, support.tokens)
    log_rho_N = (1 - head_q_N).clamp_min(MASS_FLOOR).log() - (1 - head_p_N).clamp_min(MASS_FLOOR).log()
    return log_rho_N, head_p_N, head_q_N


def centre_coefficients(logp_C: Tensor, support: Support, weight: TokenWeight, *, complete: bool) -> Tensor:
    """q_v f(p_v / q_v) - alpha p_v of each candidate, detached, [C]; no tail term where the support is complete."""
    coefficient_C = weight.times_q(logp_C.detach(), support.logq_C)
    if complete:
        return coefficient_C
    log_rho_N, _, _ = tail_log_ratio(logp_C, support)
    return support.in_head(coefficient_C - weight.tail(log_rho_N)[support.token_C] * logp_C.detach().exp())


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
