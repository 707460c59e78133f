"""Policy-gradient losses on tokens that another sampler drew: pure functions on torch tensors, no framework.

Legend: R = rows of logits, V = vocabulary, N = trained tokens, C = candidates over all N tokens, S = sequences.
p is the trainer's policy now, q the distribution the sampler drew from, y the sampled token, A the detached advantage.
Everything is unreduced and in float32 (float64 stays float64), whatever the dtype of the logits.
"""

from motley_trainer.losses.advantage import group_advantages
from motley_trainer.losses.objective import Objective, Tokens, token_losses, token_losses_from_hidden
from motley_trainer.losses.policy import (
    Clip,
    OldPolicy,
    gspo,
    policy_gradient,
    ppo_clip,
    reference_kl,
    score_centred,
)
from motley_trainer.losses.reduction import Reduction, token_coefficients
from motley_trainer.losses.sequences import (
    DriftMask,
    GeometricMask,
    RatioMask,
    SequenceMask,
    sequence_log_ratio,
    vtrace_targets,
    vtrace_weights,
)
from motley_trainer.losses.stats import TokenStats, ess
from motley_trainer.losses.support import (
    Support,
    build_head_support,
    build_support,
    log_softmax_over_support,
    segment_sum,
)
from motley_trainer.losses.vocab import VocabShard, candidate_logits, gather_logits
from motley_trainer.losses.weights import Level, Mis, Tis, TokenWeight, Unweighted, VTrace

__all__ = [
    "Clip",
    "DriftMask",
    "GeometricMask",
    "Level",
    "Mis",
    "Objective",
    "OldPolicy",
    "RatioMask",
    "Reduction",
    "SequenceMask",
    "Support",
    "Tis",
    "TokenStats",
    "TokenWeight",
    "Tokens",
    "Unweighted",
    "VTrace",
    "VocabShard",
    "build_head_support",
    "build_support",
    "candidate_logits",
    "ess",
    "gather_logits",
    "group_advantages",
    "gspo",
    "log_softmax_over_support",
    "policy_gradient",
    "ppo_clip",
    "reference_kl",
    "score_centred",
    "segment_sum",
    "sequence_log_ratio",
    "token_coefficients",
    "token_losses",
    "token_losses_from_hidden",
    "vtrace_targets",
    "vtrace_weights",
]
