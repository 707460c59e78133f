# ruff: noqa: N815  (shapes in suffixes)
"""From logits to one loss per token: which tokens count, which log-probs are compared, which surrogate is taken."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from motley_trainer.losses.policy import centre_coefficients, policy_gradient, ppo_clip, score_centred, tail_log_ratio
from motley_trainer.losses.stats import TokenStats, head_kl, k3, support_entropy, support_kl
from motley_trainer.losses.support import Support, log_softmax_over_support, segment_sum
from motley_trainer.losses.vocab import VocabShard, gather_logits
from motley_trainer.losses.weights import Mis, TokenWeight, Unweighted

FINAL_RECIPE_WEIGHT: TokenWeight = Mis(0.5, 5.0)


@dataclass(frozen=True)
class Objective:
    """The choices of the loss. The defaults are the study's final recipe: MIS, score centering, mask replay."""

    weight: TokenWeight = FINAL_RECIPE_WEIGHT
    centre: bool = True
    replay: bool = True  # candidates are the sampler's whole support: renormalise p over them
    clip_low: float | None = None  # PPO clip; only without centering
    clip_high: float | None = None

    def __post_init__(self) -> None:
        if self.centre and self.clip_low is not None:
            raise ValueError("clip: PPO clipping does not apply to a score-centred loss; unset clip or scoreCentering")
        if (self.clip_low is None) != (self.clip_high is None):
            raise ValueError("clip: give both clip_low and clip_high, or neither")


@dataclass(frozen=True)
class Tokens:
    """Trained tokens of a microbatch. rows_N: int64[N], the row of the logits that predicts the token (no repeats).
    advantage_N: float[N]. support: see Support. recorded: candidates beyond the sampled token are known.
    temperature_N: float[N], logits are divided by it first. old_logp_N: the old policy's log-prob for PPO clip, or
    None for "this forward" (one optimizer step per batch)."""

    rows_N: Tensor
    advantage_N: Tensor
    temperature_N: Tensor
    support: Support
    recorded: bool = True
    old_logp_N: Tensor | None = None


def finite_tokens(support: Support) -> Tensor:
    """bool[N]: every log-prob that the token's loss would use is a finite number <= 0 (up to rounding)."""
    bad_C = ~(support.logq_C.isfinite() & (support.logq_C <= 1e-3))
    return segment_sum(bad_C.float(), support.token_C, support.tokens) == 0


def token_losses(
    logits_RV: Tensor, tokens: Tokens, objective: Objective, *, shard: VocabShard | None = None
) -> tuple[Tensor, TokenStats]:
    """(losses [N], stats [N]). A dropped token adds exactly 0 to value and gradient, whatever NaN its inputs hold.

    Errors: ValueError when replay or centering is asked for and no candidates were recorded.
    """
    if (objective.replay or objective.centre) and not tokens.recorded:
        raise ValueError(
            "candidates: mask replay and score centering need the sampler's candidates, and none were recorded"
        )
    kept_N = finite_tokens(tokens.support)
    # Dropped tokens are taken out before any arithmetic: NaN times 0 is NaN, in a gradient, too.
    support = tokens.support.select(kept_N)
    logp_C, entropy_N = _log_probs(
        logits_RV, tokens.rows_N[kept_N], tokens.temperature_N[kept_N], support, replay=objective.replay, shard=shard
    )
    advantage_N = tokens.advantage_N[kept_N].to(logp_C.dtype)
    support = Support(support.token_C, support.ids_C, support.logq_C.to(logp_C.dtype), support.chosen_N)
    old_N = None if tokens.old_logp_N is None else tokens.old_logp_N[kept_N].to(logp_C.dtype)
    loss_N = _surrogate(logp_C, support, advantage_N, old_N, objective)
    with torch.no_grad():
        stats = _stats(logp_C, support, entropy_N, kept_N, tokens.recorded, objective)
    return _spread(loss_N, kept_N), stats


def _log_probs(
    logits_RV: Tensor,
    rows_N: Tensor,
    temperature_N: Tensor,
    support: Support,
    *,
    replay: bool,
    shard: VocabShard | None,
) -> tuple[Tensor, Tensor]:
    """(log p of the candidates [C], entropy of p [N], detached), p as the sampler's filter left it under `replay`."""
    if not replay and bool((temperature_N != 1).any()):
        # The normaliser is taken of what is gathered from: scale the rows first (one copy, only on this path).
        scale_R = torch.ones(logits_RV.shape[0], dtype=torch.float32, device=logits_RV.device)
        logits_RV = logits_RV / scale_R.index_put((rows_N,), temperature_N.float())[:, None].to(logits_RV.dtype)
    z_C, logz_N, entropy_N = gather_logits(
        logits_RV, rows_N, support.token_C, support.ids_C, shard=shard, normalise=not replay
    )
    if logz_N is None or entropy_N is None:
        z_C = z_C / temperature_N.to(z_C.dtype)[support.token_C]
        logp_C = log_softmax_over_support(z_C, support.token_C, support.tokens)
        return logp_C, support_entropy(logp_C.detach(), support)
    return z_C - logz_N[support.token_C], entropy_N


def _surrogate(
    logp_C: Tensor, support: Support, advantage_N: Tensor, old_logp_N: Tensor | None, objective: Objective
) -> Tensor:
    if objective.centre:
        return score_centred(logp_C, support, advantage_N, objective.weight, complete=objective.replay)
    logp_N, logq_N = logp_C[support.chosen_N], support.logq_C[support.chosen_N]
    if objective.clip_low is None or objective.clip_high is None:
        return policy_gradient(logp_N, logq_N, advantage_N, objective.weight)
    # Decoupled: the clip compares with the trainer's old policy, the weight corrects old policy against sampler.
    old_N = logp_N.detach() if old_logp_N is None else old_logp_N
    clipped_N = ppo_clip(logp_N, old_N, advantage_N, clip_low=objective.clip_low, clip_high=objective.clip_high)
    return objective.weight.of(old_N - logq_N) * clipped_N


def _stats(
    logp_C: Tensor, support: Support, entropy_N: Tensor, kept_N: Tensor, recorded: bool, objective: Objective
) -> TokenStats:
    log_ratio_N = logp_C[support.chosen_N] - support.logq_C[support.chosen_N]
    log_rho_N, head_p_N, head_q_N = tail_log_ratio(logp_C, support)
    kl_N = _divergence(logp_C, support, log_ratio_N, recorded=recorded, complete=objective.replay)
    correction_N = torch.zeros_like(log_ratio_N)
    if objective.centre:
        moved_C = centre_coefficients(logp_C, support, objective.weight, complete=objective.replay)
        # sum_H p grad log p is 0 over a complete support: only the difference to p moves anything.
        moved_C = moved_C - logp_C.exp() if objective.replay else moved_C
        correction_N = segment_sum(moved_C.abs(), support.token_C, support.tokens)
    weighted = not isinstance(objective.weight, Unweighted)
    columns = {
        "log_ratio_N": log_ratio_N,
        "weight_N": objective.weight.of(log_ratio_N) if weighted else torch.ones_like(log_ratio_N),
        "kl_N": kl_N,
        "entropy_N": entropy_N,
        "head_p_N": head_p_N,
        "head_q_N": head_q_N,
        "tail_ratio_N": log_rho_N.exp(),
        "correction_N": correction_N,
    }
    return TokenStats(kept_N=kept_N, **{name: _spread(value.detach(), kept_N) for name, value in columns.items()})


def _divergence(logp_C: Tensor, support: Support, log_ratio_N: Tensor, *, recorded: bool, complete: bool) -> Tensor:
    """KL(q || p), as exactly as what was recorded allows, [N]."""
    if complete:
        return support_kl(logp_C, support)
    return head_kl(logp_C, support) if recorded else k3(log_ratio_N).to(logp_C.dtype)


def _spread(values: Tensor, kept_N: Tensor) -> Tensor:
    """Values of the kept tokens back in their places, 0 elsewhere."""
    out_N = torch.zeros(kept_N.numel(), dtype=values.dtype, device=values.device)
    return out_N.index_put((kept_N.nonzero()[:, 0],), values)
