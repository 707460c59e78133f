"""Log-probabilities out of logits that may be split over the vocabulary, without a second [R, V] tensor in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 1 << 22  # rows are promoted to float32 this many logits at a time (16 MiB)


@dataclass(frozen=True)
class VocabShard:
    """The part of the vocabulary this rank holds: ids [start, start + size), and the group that holds the rest."""

    start: int
    size: int
    group: dist.ProcessGroup | None = None  # None: the whole vocabulary is here

    def sum(self, x: Tensor) -> Tensor:
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def max(self, x: Tensor) -> Tensor:
        if self.group is not None:
            dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.group)
        return x

    def locate(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(index into the local columns, whether the id is here)."""
        local = ids - self.start
        mine = (local >= 0) & (local < self.size)
        return local.where(mine, torch.zeros_like(local)), mine


def promoted(x: Tensor) -> Tensor:
    """float32, or float64 where it came as float64 (the tests' oracles)."""
    return x if x.dtype == torch.float64 else x.float()


class _GatherLogits(torch.autograd.Function):
    """Candidate logits and, where wanted, the log-normaliser over the whole vocabulary, with one gradient buffer."""

    @staticmethod
    def forward(
        ctx: Any, logits_RV: Tensor, rows_N: Tensor, token_C: Tensor, ids_C: Tensor, shard: VocabShard, normalise: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        local_C, mine_C = shard.locate(ids_C)
        z_C = promoted(logits_RV[rows_N[token_C], local_C])
        z_C = shard.sum(z_C.where(mine_C, torch.zeros_like(z_C)))
        logz_N = entropy_N = torch.zeros(0)
        if normalise:
            logz_N, entropy_N = _normaliser(logits_RV, rows_N, shard)
        ctx.save_for_backward(logits_RV, rows_N, token_C, local_C, mine_C, logz_N)
        ctx.normalise = normalise
        ctx.mark_non_differentiable(entropy_N)
        return z_C, logz_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_C, grad_logz_N, _ = grads
        logits_RV, rows_N, token_C, local_C, mine_C, logz_N = ctx.saved_tensors
        grad_RV = torch.zeros_like(logits_RV)
        grad_C = grad_C.where(mine_C, torch.zeros_like(grad_C))
        if not ctx.normalise:
            grad_RV.index_put_((rows_N[token_C], local_C), grad_C.to(grad_RV.dtype), accumulate=True)
            return grad_RV, None, None, None, None, None
        for start, stop in _chunks(rows_N.numel(), logits_RV.shape[1]):
            rows = rows_N[start:stop]
            part = promoted(logits_RV[rows]).sub_(logz_N[start:stop, None]).exp_().mul_(grad_logz_N[start:stop, None])
            here = (token_C >= start) & (token_C < stop)
            part.index_put_((token_C[here] - start, local_C[here]), grad_C[here], accumulate=True)
            grad_RV[rows] = part.to(grad_RV.dtype)
        return grad_RV, None, None, None, None, None


def _chunks(rows: int, columns: int) -> list[tuple[int, int]]:
    size = max(1, CHUNK_ELEMENTS // columns)
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


def _normaliser(logits_RV: Tensor, rows_N: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """log sum exp over the whole vocabulary and the entropy of the softmax, each [N]."""
    logz, entropy = [], []
    for start, stop in _chunks(rows_N.numel(), logits_RV.shape[1]):
        z = promoted(logits_RV[rows_N[start:stop]])
        top = shard.max(z.amax(1))
        shifted = z.sub_(top[:, None])
        weights = shifted.exp()
        total = shard.sum(weights.sum(1))
        # An id that was masked to -inf has weight 0 and must add 0, not NaN.
        shifted = shifted.masked_fill_(weights == 0, 0.0)
        mean = shard.sum((weights.mul_(shifted)).sum(1)) / total
        logz.append(top + total.log())
        entropy.append(total.log() - mean)
    if not logz:
        return logits_RV.new_zeros(0), logits_RV.new_zeros(0)
    return torch.cat(logz), torch.cat(entropy)


def gather_logits(
    logits_RV: Tensor,
    rows_N: Tensor,
    token_C: Tensor,
    ids_C: Tensor,
    *,
    shard: VocabShard | None = None,
    normalise: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Logits of candidate `ids_C` of token `token_C`, whose logits are row `rows_N[token]`.

    rows_N must not repeat. Returns (z [C], log-normaliser [N], entropy [N], detached); the last two are None unless
    `normalise`. Under tensor parallelism every rank of `shard.group` calls this with the same indexes and must go on to
    compute the same loss: each then gets the gradient of its own columns.
    """
    shard = shard or VocabShard(0, logits_RV.shape[1])
    if shard.size != logits_RV.shape[1]:
        raise ValueError(f"shard holds {shard.size} ids but logits have {logits_RV.shape[1]} columns")
    z_C, logz_N, entropy_N = _GatherLogits.apply(logits_RV, rows_N, token_C, ids_C, shard, normalise)
    return (z_C, logz_N, entropy_N) if normalise else (z_C, None, None)
