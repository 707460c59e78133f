# ruff: noqa: N815  (shapes in suffixes)
"""Log-probabilities out of logits that may be split over the vocabulary, without a second [R, V] tensor in float32,
and out of hidden states without any [R, V] tensor at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Rows are promoted to float32 this many elements at a time: 16 MiB on a GPU, where launches cost; what a core's cache
# holds on a CPU.
CHUNK_ELEMENTS = {"cuda": 1 << 22, "cpu": 1 << 19}

LOWEST = -1e30  # log-probs below have probability 0: an id that was masked to -inf must add 0, not NaN


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
    """Candidate logits and, where wanted, log-normaliser and entropy over the whole vocabulary, with at most one gradient
    buffer of the logits' size and dtype: none where it may overwrite them."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_RV: Tensor,
        rows_N: Tensor,
        token_C: Tensor,
        ids_C: Tensor,
        shard: VocabShard,
        temperature_N: Tensor | None,
        overwrite: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        normalise = temperature_N is not None
        ctx.set_materialize_grads(False)
        local_C, mine_C = shard.locate(ids_C)
        z_C = promoted(logits_RV[rows_N[token_C], local_C])
        z_C = shard.sum(z_C.where(mine_C, torch.zeros_like(z_C)))
        logz_N = entropy_N = z_C.new_zeros(0)
        if temperature_N is not None:
            logz_N, entropy_N = _normaliser(logits_RV, rows_N, temperature_N, shard)
        # Without a normaliser the gradient needs no logit: the graph does not keep them alive.
        kept = (logits_RV,) if normalise or overwrite else ()
        ctx.save_for_backward(rows_N, token_C, local_C, mine_C, logz_N, entropy_N, temperature_N, *kept)
        ctx.like = (logits_RV.shape, logits_RV.dtype, logits_RV.device)
        ctx.overwrite = overwrite
        return z_C, logz_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        rows_N, token_C, local_C, mine_C, logz_N, entropy_N, temperature_N, *kept = ctx.saved_tensors
        shape, dtype, device = ctx.like
        # .data: autograd must not count this as a change of a saved tensor, which it is, on purpose and for the last time.
        grad_RV = kept[0].data if ctx.overwrite else torch.empty(shape, dtype=dtype, device=device)
        grad_C, grad_logz_N, grad_entropy_N = grads
        grad_C = local_C.new_zeros(local_C.numel(), dtype=logz_N.dtype) if grad_C is None else grad_C
        grad_C = grad_C.where(mine_C, torch.zeros_like(grad_C))
        if temperature_N is None:
            grad_RV.zero_()
            grad_RV.index_put_((rows_N[token_C], local_C), grad_C.to(dtype), accumulate=True)
        else:
            outer_N = torch.zeros_like(logz_N) if grad_logz_N is None else grad_logz_N
            softmax = _Softmax(temperature_N, logz_N, entropy_N, outer_N, grad_entropy_N)
            _fill(grad_RV, kept[0], rows_N, token_C, local_C, grad_C, softmax)
        return grad_RV, None, None, None, None, None, None


@dataclass(frozen=True)
class _Softmax:
    """p = softmax(z / temperature): d logz / dz = p / temperature, d entropy / dz = -p (log p + entropy) / temperature."""

    temperature_N: Tensor
    logz_N: Tensor
    entropy_N: Tensor
    grad_logz_N: Tensor
    grad_entropy_N: Tensor | None  # None: no entropy bonus, nearly always

    def gradient(self, z: Tensor, start: int, stop: int) -> Tensor:
        """[stop - start, V] of these tokens' promoted logits over the temperature, which are overwritten."""
        logp = z.sub_(self.logz_N[start:stop, None])
        factor = (self.grad_logz_N / self.temperature_N)[start:stop, None]
        if self.grad_entropy_N is None:
            return logp.exp_().mul_(factor)
        outer = (self.grad_entropy_N / self.temperature_N)[start:stop, None]
        p = logp.exp()
        surprise = logp.clamp_(min=LOWEST).add_(self.entropy_N[start:stop, None])
        return p.mul_(factor - outer * surprise)


def _fill(
    grad_RV: Tensor,
    logits_RV: Tensor,
    rows_N: Tensor,
    token_C: Tensor,
    local_C: Tensor,
    grad_C: Tensor,
    softmax: _Softmax,
) -> None:
    """Writes the whole gradient; `grad_RV` may be the logits' own memory: every row is read before it is written."""
    chunks = _chunks(rows_N.numel(), logits_RV)
    ends = torch.searchsorted(token_C, torch.tensor([stop for _, stop in chunks], device=token_C.device)).tolist()
    first = 0
    for (start, stop), last in zip(chunks, ends, strict=True):
        part = softmax.gradient(_rows(logits_RV, rows_N, softmax.temperature_N, start, stop), start, stop)
        place = (token_C[first:last] - start, local_C[first:last])
        part.index_put_(place, grad_C[first:last], accumulate=True)
        grad_RV[rows_N[start:stop]] = part.to(grad_RV.dtype)
        first = last
    untrained = torch.ones(grad_RV.shape[0], dtype=torch.bool, device=grad_RV.device)
    untrained[rows_N] = False
    grad_RV[untrained] = 0


def _rows(logits_RV: Tensor, rows_N: Tensor, temperature_N: Tensor, start: int, stop: int) -> Tensor:
    """A promoted copy of some tokens' rows, over their temperature."""
    return promoted(logits_RV.detach()[rows_N[start:stop]]).div_(temperature_N[start:stop, None])


def _chunks(rows: int, like_RV: Tensor) -> list[tuple[int, int]]:
    elements = CHUNK_ELEMENTS.get(like_RV.device.type, CHUNK_ELEMENTS["cuda"])
    size = max(1, elements // max(1, like_RV.shape[-1]))
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


def _normaliser(logits_RV: Tensor, rows_N: Tensor, temperature_N: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """log sum exp over the whole vocabulary and the entropy of the softmax, each [N]."""
    logz, entropy = [], []
    for start, stop in _chunks(rows_N.numel(), logits_RV):
        z = _rows(logits_RV, rows_N, temperature_N, start, stop)
        top = shard.max(z.amax(1))
        shifted = z.sub_(top[:, None])
        weights = shifted.exp()
        total = shard.sum(weights.sum(1))
        mean = shard.sum(weights.mul_(shifted.clamp_(min=LOWEST)).sum(1)) / total
        logz.append(top + total.log())
        entropy.append(total.log() - mean)
    if not logz:
        return promoted(logits_RV.new_zeros(0)), promoted(logits_RV.new_zeros(0))
    return torch.cat(logz), torch.cat(entropy)


def gather_logits(
    logits_RV: Tensor,
    rows_N: Tensor,
    token_C: Tensor,
    ids_C: Tensor,
    *,
    shard: VocabShard | None = None,
    temperature_N: Tensor | None,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Logits of candidate `ids_C` of token `token_C` (non-decreasing), whose logits are row `rows_N[token]`.

    rows_N must not repeat. Returns (z [C], log sum exp(z / temperature) over the vocabulary [N], the entropy of that
    softmax [N]); the last two are None without a temperature.
    Under tensor parallelism every rank of `shard.group` calls this with the same indexes and must go on to compute the
    same loss: each then gets the gradient of its own columns. `overwrite`: see token_losses.
    """
    shard = shard or VocabShard(0, logits_RV.shape[1])
    if shard.size != logits_RV.shape[1]:
        raise ValueError(f"shard holds {shard.size} ids but logits have {logits_RV.shape[1]} columns")
    z_C, logz_N, entropy_N = _GatherLogits.apply(logits_RV, rows_N, token_C, ids_C, shard, temperature_N, overwrite)
    return (z_C, None, None) if temperature_N is None else (z_C, logz_N, entropy_N)


# ------------------------------------------------------------------------------------------------ from hidden states
class _CandidateLogits(torch.autograd.Function):
    """z = hidden . weight[id] of each candidate; the weight's gradient is summed in float32 over the ids that occur."""

    @staticmethod
    def forward(
        ctx: Any, hidden_RH: Tensor, weight_VH: Tensor, row_C: Tensor, ids_C: Tensor, shard: VocabShard
    ) -> Tensor:
        local_C, mine_C = shard.locate(ids_C)
        ctx.save_for_backward(hidden_RH, weight_VH, row_C[mine_C], local_C[mine_C], mine_C)
        ctx.shard = shard
        z_C = promoted(hidden_RH.new_zeros(0)).new_zeros(ids_C.numel())
        products = [
            (promoted(hidden_RH.detach()[row]) * promoted(weight_VH.detach()[local])).sum(1)
            for row, local in _pairs(row_C[mine_C], local_C[mine_C], hidden_RH)
        ]
        if products:
            z_C[mine_C] = torch.cat(products)
        return shard.sum(z_C)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_RH, weight_VH, row_M, local_M, mine_C = ctx.saved_tensors
        grad_M = grads[0][mine_C]
        rows, row_at_M = row_M.unique(return_inverse=True)
        ids, id_at_M = local_M.unique(return_inverse=True)
        by_row = grad_M.new_zeros(rows.numel(), hidden_RH.shape[1])
        by_id = grad_M.new_zeros(ids.numel(), hidden_RH.shape[1])
        first = 0
        for row, local in _pairs(row_M, local_M, hidden_RH):
            last = first + row.numel()
            scale = grad_M[first:last, None]
            by_row.index_add_(0, row_at_M[first:last], promoted(weight_VH[local]).mul_(scale))
            by_id.index_add_(0, id_at_M[first:last], promoted(hidden_RH[row]).mul_(scale))
            first = last
        grad_RH = torch.zeros_like(hidden_RH)
        grad_RH[rows] = by_row.to(grad_RH.dtype)
        grad_VH = torch.zeros_like(weight_VH)
        grad_VH[ids] = by_id.to(grad_VH.dtype)
        # Every rank holds the part of the hidden states' gradient that came through its own ids.
        return ctx.shard.sum(grad_RH), grad_VH, None, None, None


def _pairs(row_M: Tensor, local_M: Tensor, hidden_RH: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(row_M[start:stop], local_M[start:stop]) for start, stop in _chunks(row_M.numel(), hidden_RH)]


def candidate_logits(
    hidden_RH: Tensor,
    weight_VH: Tensor,
    rows_N: Tensor,
    token_C: Tensor,
    ids_C: Tensor,
    *,
    shard: VocabShard | None = None,
    skip_single: bool = False,
) -> Tensor:
    """(hidden @ weight.T)[rows_N[token_C], ids_C], float32 [C], without the product's other columns.

    skip_single: 0 for the candidate of a token that has no other: its log-prob is 0 whatever its logit is. Under tensor
    parallelism as gather_logits; the gradient of `hidden_RH` is summed over the group.
    """
    shard = shard or VocabShard(0, weight_VH.shape[0])
    if shard.size != weight_VH.shape[0]:
        raise ValueError(f"shard holds {shard.size} ids but weight_VH has {weight_VH.shape[0]} rows")
    if not skip_single:
        z: Tensor = _CandidateLogits.apply(hidden_RH, weight_VH, rows_N[token_C], ids_C, shard)
        return z
    size_N = torch.zeros_like(rows_N).index_add_(0, token_C, torch.ones_like(token_C))
    at_M = (size_N[token_C] > 1).nonzero()[:, 0]
    z_M: Tensor = _CandidateLogits.apply(hidden_RH, weight_VH, rows_N[token_C[at_M]], ids_C[at_M], shard)
    return z_M.new_zeros(ids_C.numel()).index_put((at_M,), z_M)
