"""Policy-gradient losses on tokens that another sampler drew: pure functions on torch tensors, no framework.

Legend: R = rows of logits, V = vocabulary, N = trained tokens, C = candidates over all N tokens, S = sequences.
p is the trainer's policy now, q the distribution the sampler drew from, y the sampled token, A the detached advantage.
Everything is unreduced and in float32 (float64 stays float64), whatever the dtype of the logits.
"""

from motley_trainer.losses.advantage import group_advantages
from motley_trainer.losses.objective import Objective, Tokens, token_losses
from motley_trainer.losses.policy import policy_gradient, ppo_clip, score_centred
from motley_trainer.losses.reduction import Reduction, token_coefficients
from motley_trainer.losses.stats import TokenStats, ess
from motley_trainer.losses.support import Support, build_support, log_softmax_over_support, segment_sum
from motley_trainer.losses.vocab import VocabShard, gather_logits
from motley_trainer.losses.weights import Mis, Tis, TokenWeight, Unweighted

__all__ = [
    "Mis",
    "Objective",
    "Reduction",
    "Support",
    "Tis",
    "TokenStats",
    "TokenWeight",
    "Tokens",
    "Unweighted",
    "VocabShard",
    "build_support",
    "ess",
    "gather_logits",
    "group_advantages",
    "log_softmax_over_support",
    "policy_gradient",
    "ppo_clip",
    "score_centred",
    "segment_sum",
    "token_coefficients",
    "token_losses",
]
