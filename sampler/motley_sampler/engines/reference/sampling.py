"""The distribution q that a token is drawn from, exactly as reported. Pure.

Legend: B = sequences, V = vocabulary, C = columns kept for the batch (the largest candidate list that any filter allows).

SGLang's order: softmax of logits / temperature; top-k by rank and top-p by the mass of the *full* softmax jointly (a token is
kept while the mass before it is <= top_p); renormalise; draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

GREEDY_TEMPERATURE = 1.0  # of the log-probs reported for greedy requests, as SGLang does


@dataclass(frozen=True)
class Draw:
    """One drawn token per sequence. Candidates are sorted by falling probability."""

    tokens: list[int]  # [B]
    logprobs: list[float]  # [B] of logits / temperature, before the filters: SGLang's output_token_logprobs
    support_logprobs: list[float]  # [B] of q
    candidate_ids: list[list[int]]  # a row per sequence: its candidates, empty unless wanted
    candidate_logprobs: list[list[float]]  # of q
    top: list[list[tuple[float, int]]]  # best log-probs before the filters, with their ids
    finite: list[bool]  # [B]; False: the logits held NaN or infinity, and the draw means nothing


@dataclass(frozen=True)
class Filter:
    """One sequence's sampling parameters. top_k <= 0: off. temperature 0: greedy."""

    temperature: float
    top_p: float
    top_k: int

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    def kept_at_most(self, vocab_size: int) -> int:
        return 1 if self.greedy else vocab_size if self.top_k <= 0 else min(self.top_k, vocab_size)


@dataclass(frozen=True)
class FilterBatch:
    """The filters of a batch as tensors; made once per change of the batch, not per step."""

    temperature: Tensor  # [B, 1]
    top_p: Tensor  # [B, 1]
    top_k: Tensor  # [B, 1]
    columns: int  # C

    @classmethod
    def of(cls, filters: Sequence[Filter], vocab_size: int) -> FilterBatch:
        return cls(
            temperature=torch.tensor([[f.temperature if f.temperature else GREEDY_TEMPERATURE] for f in filters]),
            # 1 keeps everything, also where the float32 sum of the masses before a token ends above 1.
            top_p=torch.tensor([[f.top_p if f.top_p < 1 else 2.0] for f in filters]),
            top_k=torch.tensor([[f.kept_at_most(vocab_size)] for f in filters]),
            columns=max(f.kept_at_most(vocab_size) for f in filters),
        )


def distribution(logits_BV: Tensor, batch: FilterBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log-probs before the filters [B, V], ids [B, C], probabilities before renormalisation [B, C] with 0 outside, counts [B])."""
    logp_BV = (logits_BV / batch.temperature).log_softmax(-1)
    if batch.columns < logp_BV.shape[-1]:
        sorted_BC, ids_BC = logp_BV.topk(batch.columns, -1)
    else:
        sorted_BC, ids_BC = logp_BV.sort(stable=True, dim=-1, descending=True)
    p_BC = sorted_BC.exp()
    before_BC = p_BC.cumsum(-1).sub_(p_BC)
    keep_BC = (before_BC <= batch.top_p).logical_and_(torch.arange(batch.columns) < batch.top_k)
    keep_BC.logical_and_(p_BC > 0)  # what cannot be drawn is no candidate, and has no finite log-prob
    return logp_BV, ids_BC, p_BC.mul_(keep_BC), keep_BC.sum(-1)


def draw(
    logits_BV: Tensor, batch: FilterBatch, uniforms_B: Sequence[float], wanted_B: Sequence[bool], top: int = 0
) -> Draw:
    """Draws by inverting the cumulative sum of q at uniforms_B, each in [0, 1).

    wanted_B: for which sequences to report candidates and their log-probs (a list of lists is what costs time here).
    top: how many of the best tokens before the filters to report, for all.
    """
    logp_BV, ids_BC, p_BC, counts_B = distribution(logits_BV, batch)
    mass_BC = p_BC.cumsum(-1)
    total_B1 = mass_BC[:, -1:]
    target_B1 = torch.tensor(uniforms_B)[:, None] * total_B1
    # Rounding may push the target onto the total: the last candidate is the most that a rank can be.
    rank_B1 = torch.minimum((mass_BC <= target_B1).sum(-1, keepdim=True), counts_B[:, None] - 1).clamp_(min=0)
    token_B1 = ids_BC.gather(1, rank_B1)
    support_BC = p_BC.div_(total_B1).log_()
    counts = [count if wanted else 0 for count, wanted in zip(counts_B.tolist(), wanted_B, strict=True)]
    width = max(counts)
    return Draw(
        tokens=token_B1[:, 0].tolist(),
        logprobs=logp_BV.gather(1, token_B1)[:, 0].tolist(),
        support_logprobs=support_BC.gather(1, rank_B1)[:, 0].tolist(),
        candidate_ids=_ragged(ids_BC[:, :width], counts),
        candidate_logprobs=_ragged(support_BC[:, :width], counts),
        top=_best(logp_BV, top),
        finite=logp_BV[:, 0].isfinite().tolist(),
    )


def _ragged(rows_BC: Tensor, counts: Sequence[int]) -> list[Any]:
    return [row[:count] for row, count in zip(rows_BC.tolist(), counts, strict=True)]


def _best(logp_BV: Tensor, top: int) -> list[list[tuple[float, int]]]:
    if top == 0:
        return [[] for _ in range(logp_BV.shape[0])]
    values, ids = logp_BV.topk(top, -1)
    return [list(zip(*pair, strict=True)) for pair in zip(values.tolist(), ids.tolist(), strict=True)]
