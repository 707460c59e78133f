# ruff: noqa: N815  (shapes in suffixes)
"""The candidates that a sampler drew from, ragged: a few bytes a token, where [N, 128] arrays cost a kilobyte."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Support:
    """Candidates of N tokens, flat and in token order. Every token has at least one, its sampled token among them.

    token_C: int64[C], which token (0 .. N-1, non-decreasing). ids_C: int64[C]. logq_C: float[C], natural log of q.
    chosen_N: int64[N], index into C of the sampled token. head_C: bool[C], false for a sampled token that is carried
    beside a top-K head it is not of, so that the head does not depend on what was drawn; None: all are of it.
    """

    token_C: Tensor
    ids_C: Tensor
    logq_C: Tensor
    chosen_N: Tensor
    head_C: Tensor | None = None

    @property
    def tokens(self) -> int:
        return self.chosen_N.numel()

    def select(self, keep_N: Tensor) -> Support:
        """The support of the tokens where `keep_N` (bool[N]) holds, renumbered."""
        keep_C = keep_N[self.token_C]
        renumbered_N = keep_N.long().cumsum(0) - 1
        renumbered_C = keep_C.long().cumsum(0) - 1
        return Support(
            token_C=renumbered_N[self.token_C[keep_C]],
            ids_C=self.ids_C[keep_C],
            logq_C=self.logq_C[keep_C],
            chosen_N=renumbered_C[self.chosen_N[keep_N]],
            head_C=None if self.head_C is None else self.head_C[keep_C],
        )

    def in_head(self, values_C: Tensor) -> Tensor:
        """values_C, 0 where a candidate is not of the head."""
        return values_C if self.head_C is None else values_C * self.head_C


def build_support(
    sampled_N: Tensor, logq_N: Tensor, counts_N: Tensor | None, ids_C: Tensor | None, logq_C: Tensor | None
) -> Support:
    """From the wire form. counts_N = 0 stands for the one-token support {sampled token} with log-prob 0; no counts at
    all for "the sampler drew from the whole vocabulary": then only the sampled token is known.

    Errors: ValueError naming the first token whose sampled id is not among its candidates.
    """
    tokens = sampled_N.numel()
    if counts_N is None or ids_C is None or logq_C is None:
        every_N = torch.arange(tokens)
        return Support(every_N, sampled_N.long(), logq_N, every_N)
    stored_N = _agreeing(counts_N, ids_C, logq_C)
    size_N = stored_N.clamp_min(1)
    token_C = torch.arange(tokens).repeat_interleave(size_N)
    all_ids_C = sampled_N.long()[token_C]
    all_logq_C = torch.zeros(token_C.numel(), dtype=logq_C.dtype)
    stored_C = (stored_N > 0)[token_C]
    all_ids_C[stored_C] = ids_C.long()
    all_logq_C[stored_C] = logq_C
    hit_C = all_ids_C == sampled_N.long()[token_C]
    hits_N = segment_sum(hit_C.long(), token_C, tokens)
    if bool((hits_N != 1).any()):
        bad = int((hits_N != 1).nonzero()[0])
        raise ValueError(
            f"candidates: sampled id {int(sampled_N[bad])} of token {bad} occurs {int(hits_N[bad])} times, want once"
        )
    return Support(token_C, all_ids_C, all_logq_C, hit_C.nonzero()[:, 0])


def build_head_support(sampled_N: Tensor, logq_N: Tensor, counts_N: Tensor, ids_C: Tensor, logq_C: Tensor) -> Support:
    """From the wire form of a head: the likeliest candidates of each token, and beside them, where it is none of them, the
    sampled token with its own log-prob.

    Errors: ValueError naming the first token that has no candidates or the sampled id twice.
    """
    tokens = sampled_N.numel()
    size_N = _agreeing(counts_N, ids_C, logq_C)
    token_C = torch.arange(tokens).repeat_interleave(size_N)
    hits_N = segment_sum((ids_C == sampled_N[token_C]).long(), token_C, tokens)
    if bool(((size_N == 0) | (hits_N > 1)).any()):
        bad = int(((size_N == 0) | (hits_N > 1)).nonzero()[0])
        raise ValueError(
            f"candidates: the head of token {bad} has {int(size_N[bad])} candidates, and its sampled id {int(hits_N[bad])}"
            " times; want at least one, and the id at most once"
        )
    beside = (hits_N == 0).nonzero()[:, 0]
    token_C = torch.cat([token_C, beside])
    order_C = token_C.argsort(stable=True)
    token_C = token_C[order_C]
    all_ids_C = torch.cat([ids_C.long(), sampled_N[beside].long()])[order_C]
    head_C = torch.arange(order_C.numel())[order_C] < ids_C.numel()
    return Support(
        token_C,
        all_ids_C,
        torch.cat([logq_C, logq_N[beside]])[order_C],
        (all_ids_C == sampled_N.long()[token_C]).nonzero()[:, 0],
        head_C,
    )


def _agreeing(counts_N: Tensor, ids_C: Tensor, logq_C: Tensor) -> Tensor:
    """counts_N as int64. Errors: ValueError where the three do not speak of as many candidates."""
    total = int(counts_N.long().sum())
    if not total == ids_C.numel() == logq_C.numel():
        raise ValueError(f"candidates: counts sum to {total}, ids {ids_C.numel()}, logprobs {logq_C.numel()}")
    return counts_N.long()


def segment_sum(values_C: Tensor, token_C: Tensor, tokens: int) -> Tensor:
    """Sum of each token's candidates, [N]."""
    return torch.zeros(tokens, dtype=values_C.dtype, device=values_C.device).index_add(0, token_C, values_C)


def log_softmax_over_support(z_C: Tensor, token_C: Tensor, tokens: int) -> Tensor:
    """log p renormalised over each token's candidates (mask replay), [C].

    A one-token support gives exactly 0 with exactly zero gradient.
    """
    top_N = torch.full((tokens,), -torch.inf, dtype=z_C.dtype, device=z_C.device)
    top_N = top_N.scatter_reduce(0, token_C, z_C.detach(), "amax")
    shifted_C = z_C - top_N[token_C]
    return shifted_C - segment_sum(shifted_C.exp(), token_C, tokens).log()[token_C]
