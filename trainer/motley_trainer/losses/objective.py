# ruff: noqa: N815  (shapes in suffixes)
"""From logits to one loss per token: which tokens count, which log-probs are compared, which surrogate is taken."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from motley_trainer.losses.policy import (
    Clip,
    OldPolicy,
    centre_coefficients,
    gspo,
    ppo_clip,
    reference_kl,
    score_centred,
    tail_log_ratio,
)
from motley_trainer.losses.sequences import SequenceMask, sequence_log_ratio, vtrace_weights
from motley_trainer.losses.stats import TokenStats, head_kl, k3, support_entropy, support_kl
from motley_trainer.losses.support import Support, log_softmax_over_support, segment_sum
from motley_trainer.losses.vocab import VocabShard, candidate_logits, gather_logits
from motley_trainer.losses.weights import Level, Mis, TokenWeight, Unweighted, VTrace

FINAL_RECIPE_WEIGHT: TokenWeight = Mis(0.5, 5.0)


@dataclass(frozen=True)
class Objective:
    """The choices of the loss. The defaults are the study's final recipe: MIS, score centering, mask replay.

    Errors: ValueError naming the choice that contradicts another. RLRun.spec.algorithm refuses the same ones at apply.
    """

    weight: TokenWeight | VTrace = FINAL_RECIPE_WEIGHT
    level: Level = Level.TOKEN  # what the weight's ratio is taken over
    sequence_mask: SequenceMask | None = None
    centre: bool = True
    replay: bool = True  # candidates are the sampler's whole support: renormalise p over them
    clip: Clip | None = None
    entropy_bonus: float = 0.0  # times the entropy of p, per token
    reference_kl: float = 0.0  # times k3 to the reference policy, per token

    def __post_init__(self) -> None:
        if self.centre:
            self._check_centred()
        if isinstance(self.weight, VTrace | Unweighted) and self.level is not Level.TOKEN:
            raise ValueError(f"level: {self.level} needs the weight Tis or Mis, got {self.weight}")
        if isinstance(self.weight, VTrace) and self.clip is not None:
            raise ValueError("clip: V-trace weighs a plain policy gradient; unset clip or the weight")
        if self.clip is not None and self.clip.old is OldPolicy.SAMPLER and not isinstance(self.weight, Unweighted):
            raise ValueError(
                "clip.old: a clip against the sampler is the correction already; use the weight Unweighted"
            )
        if not self.entropy_bonus >= 0:
            raise ValueError(f"entropy_bonus: must be >= 0, got {self.entropy_bonus}")
        if not self.reference_kl >= 0:
            raise ValueError(f"reference_kl: must be >= 0, got {self.reference_kl}")

    def _check_centred(self) -> None:
        if self.clip is not None:
            raise ValueError("clip: PPO clipping does not apply to a score-centred loss; unset clip or centre")
        if self.sequence_mask is not None or self.level is not Level.TOKEN or isinstance(self.weight, VTrace):
            raise ValueError(
                "centre: the centre is that of one token's weighted score; sequence masks, sequence-level weights and"
                " V-trace depend on the whole sequence and would leave it uncentred"
            )

    @property
    def needs_sequences(self) -> bool:
        sequence_clip = self.clip is not None and self.clip.level is Level.SEQUENCE
        return (
            self.level is not Level.TOKEN
            or self.sequence_mask is not None
            or isinstance(self.weight, VTrace)
            or sequence_clip
        )


@dataclass(frozen=True)
class Tokens:
    """Trained tokens of a microbatch. rows_N: int64[N], the row of the logits that predicts the token (no repeats).
    advantage_N: float[N]. support: see Support. recorded: candidates beyond the sampled token are known.
    temperature_N: float[N], logits are divided by it first. old_logp_N: the old policy's log-prob for PPO clip, or
    None for "this forward" (one optimizer step per batch). reference_logp_N: the reference policy's, over the same
    support, for the KL penalty. sequence_N: int64[N], which sequence a token is of, needed
    by what is decided over sequences; a microbatch holds a sequence whole or not at all."""

    rows_N: Tensor
    advantage_N: Tensor
    temperature_N: Tensor
    support: Support
    recorded: bool = True
    old_logp_N: Tensor | None = None
    reference_logp_N: Tensor | None = None
    sequence_N: Tensor | None = None

    def select(self, keep_N: Tensor) -> Tokens:
        """The tokens where `keep_N` (bool[N]) holds."""
        return replace(
            self,
            rows_N=self.rows_N[keep_N],
            advantage_N=self.advantage_N[keep_N],
            temperature_N=self.temperature_N[keep_N],
            support=self.support.select(keep_N),
            old_logp_N=_at(self.old_logp_N, keep_N),
            reference_logp_N=_at(self.reference_logp_N, keep_N),
            sequence_N=_at(self.sequence_N, keep_N),
        )


def _at(values_N: Tensor | None, keep_N: Tensor) -> Tensor | None:
    return None if values_N is None else values_N[keep_N]


def finite_tokens(support: Support) -> Tensor:
    """bool[N]: every log-prob that the token's loss would use is a finite number <= 0 (up to rounding)."""
    bad_C = ~(support.logq_C.isfinite() & (support.logq_C <= 1e-3))
    return segment_sum(bad_C.float(), support.token_C, support.tokens) == 0


def token_losses(
    logits_RV: Tensor,
    tokens: Tokens,
    objective: Objective,
    *,
    shard: VocabShard | None = None,
    overwrite_logits: bool = False,
) -> tuple[Tensor, TokenStats]:
    """(losses [N], stats [N]). A dropped token adds exactly 0 to value and gradient, whatever NaN its inputs hold.

    overwrite_logits: backward may write the gradient over the logits, which nobody must read afterwards; without it
    one more tensor of their size and dtype is made. Nothing else here has the vocabulary's size.
    Errors: ValueError when the objective needs candidates or sequences that were not given.
    """
    kept_N = _kept(tokens, objective)
    # Dropped tokens are taken out before any arithmetic: NaN times 0 is NaN, in a gradient, too.
    kept = tokens.select(kept_N)
    support = kept.support
    temperature_N = kept.temperature_N.to(torch.promote_types(logits_RV.dtype, torch.float32))
    z_C, logz_N, entropy_N = gather_logits(
        logits_RV,
        kept.rows_N,
        support.token_C,
        support.ids_C,
        shard=shard,
        temperature_N=None if objective.replay else temperature_N,
        overwrite=overwrite_logits,
    )
    if logz_N is None or entropy_N is None:
        logp_C, entropy_N = _replayed(z_C, kept)
    else:
        logp_C = z_C / temperature_N[support.token_C] - logz_N[support.token_C]
    return _losses(logp_C, entropy_N, kept, kept_N, objective)


def token_losses_from_hidden(
    hidden_RH: Tensor,
    weight_VH: Tensor,
    tokens: Tokens,
    objective: Objective,
    *,
    shard: VocabShard | None = None,
) -> tuple[Tensor, TokenStats]:
    """token_losses(hidden @ weight.T, ...) under mask replay, without a row of logits ever made: only candidates of
    tokens that had a choice are multiplied out, so that memory and time grow with them and not with the vocabulary.

    weight_VH: this rank's rows of the output layer. Errors: ValueError where the objective does not replay.
    """
    if not objective.replay:
        raise ValueError("replay: without it every logit enters the normaliser; use token_losses")
    kept_N = _kept(tokens, objective)
    kept = tokens.select(kept_N)
    z_C = candidate_logits(
        hidden_RH, weight_VH, kept.rows_N, kept.support.token_C, kept.support.ids_C, shard=shard, skip_single=True
    )
    logp_C, entropy_N = _replayed(z_C, kept)
    return _losses(logp_C, entropy_N, kept, kept_N, objective)


def _kept(tokens: Tokens, objective: Objective) -> Tensor:
    if (objective.replay or objective.centre) and not tokens.recorded:
        raise ValueError(
            "candidates: mask replay and score centering need the sampler's candidates, and none were recorded"
        )
    if objective.needs_sequences and tokens.sequence_N is None:
        raise ValueError(
            "sequence_N: sequence-level weights, masks and clips need to know which sequence a token is of"
        )
    if objective.reference_kl and tokens.reference_logp_N is None:
        raise ValueError("reference_logp_N: the KL penalty needs the reference policy's log-probs")
    return finite_tokens(tokens.support)


def _replayed(z_C: Tensor, kept: Tokens) -> tuple[Tensor, Tensor]:
    """(log p [C], entropy [N]), renormalised over the support at the sampler's temperature."""
    z_C = z_C / kept.temperature_N.to(z_C.dtype)[kept.support.token_C]
    logp_C = log_softmax_over_support(z_C, kept.support.token_C, kept.support.tokens)
    return logp_C, support_entropy(logp_C, kept.support)


def _losses(
    logp_C: Tensor, entropy_N: Tensor, kept: Tokens, kept_N: Tensor, objective: Objective
) -> tuple[Tensor, TokenStats]:
    kept = replace(
        kept,
        advantage_N=kept.advantage_N.to(logp_C.dtype),
        support=replace(kept.support, logq_C=kept.support.logq_C.to(logp_C.dtype)),
        old_logp_N=None if kept.old_logp_N is None else kept.old_logp_N.to(logp_C.dtype),
    )
    weight_N = importance_weights(logp_C.detach(), kept, objective)
    loss_N = _surrogate(logp_C, kept, weight_N, objective)
    if objective.entropy_bonus:
        loss_N = loss_N - objective.entropy_bonus * entropy_N
    penalty_N = torch.zeros_like(loss_N)
    if objective.reference_kl and kept.reference_logp_N is not None:
        penalty_N = reference_kl(logp_C[kept.support.chosen_N], kept.reference_logp_N.to(logp_C.dtype))
        loss_N = loss_N + objective.reference_kl * penalty_N
    with torch.no_grad():
        stats = _stats(logp_C, entropy_N, weight_N, penalty_N, kept, kept_N, objective)
    return _spread(loss_N, kept_N), stats


def importance_weights(logp_C: Tensor, kept: Tokens, objective: Objective) -> Tensor:
    """What the surrogate of each token is multiplied with, [N]: f of its ratio, 0 where a mask takes its sequence out."""
    support = kept.support
    numerator_N = logp_C[support.chosen_N]
    if objective.clip is not None and kept.old_logp_N is not None:
        # Decoupled: the clip compares with the trainer's old policy, the weight corrects old policy against sampler.
        numerator_N = kept.old_logp_N
    log_ratio_N = numerator_N - support.logq_C[support.chosen_N]
    if isinstance(objective.weight, VTrace):
        assert kept.sequence_N is not None
        weight_N = vtrace_weights(log_ratio_N, kept.sequence_N, objective.weight)
    elif kept.sequence_N is None:
        weight_N = objective.weight.of(log_ratio_N)
    else:
        weight_N = objective.weight.of(sequence_log_ratio(log_ratio_N, kept.sequence_N, objective.level))
    if objective.sequence_mask is not None:
        assert kept.sequence_N is not None
        keeps_N = objective.sequence_mask.keeps(log_ratio_N, kept.advantage_N, kept.sequence_N)
        weight_N = weight_N.where(keeps_N, torch.zeros_like(weight_N))
    return weight_N


def _surrogate(logp_C: Tensor, kept: Tokens, weight_N: Tensor, objective: Objective) -> Tensor:
    support = kept.support
    if objective.centre:
        assert not isinstance(objective.weight, VTrace)
        return score_centred(logp_C, support, kept.advantage_N, objective.weight, complete=objective.replay)
    logp_N = logp_C[support.chosen_N]
    if objective.clip is None:
        return -kept.advantage_N * weight_N * logp_N
    return weight_N * _clip(logp_N, kept, objective.clip)


def _clip(logp_N: Tensor, kept: Tokens, clip: Clip) -> Tensor:
    if clip.old is OldPolicy.SAMPLER:
        old_N = kept.support.logq_C[kept.support.chosen_N]
    else:
        old_N = logp_N.detach() if kept.old_logp_N is None else kept.old_logp_N
    if clip.level is Level.TOKEN:
        return ppo_clip(logp_N, old_N, kept.advantage_N, clip_low=clip.low, clip_high=clip.high)
    assert kept.sequence_N is not None
    return gspo(logp_N, old_N, kept.advantage_N, kept.sequence_N, clip_low=clip.low, clip_high=clip.high)


def _stats(
    logp_C: Tensor,
    entropy_N: Tensor,
    weight_N: Tensor,
    penalty_N: Tensor,
    kept: Tokens,
    kept_N: Tensor,
    objective: Objective,
) -> TokenStats:
    support = kept.support
    logp_N = logp_C[support.chosen_N]
    log_ratio_N = logp_N - support.logq_C[support.chosen_N]
    log_rho_N, head_p_N, head_q_N = tail_log_ratio(logp_C, support)
    kl_N = _divergence(logp_C, support, log_ratio_N, recorded=kept.recorded, complete=objective.replay)
    columns = {
        "logp_N": logp_N,
        "log_ratio_N": log_ratio_N,
        "weight_N": weight_N,
        "kl_N": kl_N,
        "entropy_N": entropy_N,
        "head_p_N": head_p_N,
        "head_q_N": head_q_N,
        "tail_ratio_N": log_rho_N.exp(),
        "correction_N": _correction(logp_C, support, objective),
        "reference_kl_N": penalty_N,
    }
    return TokenStats(kept_N=kept_N, **{name: _spread(value.detach(), kept_N) for name, value in columns.items()})


def _correction(logp_C: Tensor, support: Support, objective: Objective) -> Tensor:
    if not objective.centre:
        return torch.zeros_like(logp_C[support.chosen_N])
    assert not isinstance(objective.weight, VTrace)
    moved_C = centre_coefficients(logp_C, support, objective.weight, complete=objective.replay)
    # sum_H p grad log p is 0 over a complete support: only the difference to p moves anything.
    moved_C = moved_C - logp_C.exp() if objective.replay else moved_C
    return segment_sum(moved_C.abs(), support.token_C, support.tokens)


def _divergence(logp_C: Tensor, support: Support, log_ratio_N: Tensor, *, recorded: bool, complete: bool) -> Tensor:
    """KL(q || p), as exactly as what was recorded allows, [N]."""
    if complete:
        return support_kl(logp_C, support)
    return head_kl(logp_C, support) if recorded else k3(log_ratio_N).to(logp_C.dtype)


def _spread(values: Tensor, kept_N: Tensor) -> Tensor:
    """Values of the kept tokens back in their places, 0 elsewhere."""
    out_N = torch.zeros(kept_N.numel(), dtype=values.dtype, device=values.device)
    return out_N.index_put((kept_N.nonzero()[:, 0],), values)
