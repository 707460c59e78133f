"""How per-token losses become one number. The coefficient of every token is fixed for the whole batch beforehand, so
that splitting the batch over microbatches or ranks changes nothing."""

from __future__ import annotations

import enum

import torch
from torch import Tensor


class Reduction(enum.StrEnum):
    TOKEN_MEAN = "TokenMean"  # every trained token of the batch counts the same
    SEQUENCE_MEAN = "SequenceMean"  # every sequence counts the same, its tokens share its part


def token_coefficients(sequence_N: Tensor, trained_N: Tensor, *, sequences: int, reduction: Reduction) -> Tensor:
    """float64[N]: what to multiply each token's loss with before summing; 0 where `trained_N` (bool) is false.

    sequence_N: int64[N]. `sequences`: how many sequences the batch has, those without a trained token included.
    """
    if reduction is Reduction.TOKEN_MEAN:
        return trained_N.double() / max(1, int(trained_N.sum()))
    count_S = torch.zeros(sequences, dtype=torch.float64).index_add(0, sequence_N, trained_N.double())
    return trained_N.double() / count_S.clamp_min(1)[sequence_N] / max(1, sequences)
