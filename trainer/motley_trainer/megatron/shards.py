"""How whole tensors are cut over tensor-parallel ranks, and put together again. Pure: no process group here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def is_gated(name: str) -> bool:
    """linear_fc1 holds gate rows, then up rows; each rank holds its part of both."""
    return name.endswith("linear_fc1.weight")


def cut(name: str, whole: Tensor, dim: int, rank: int, size: int) -> Tensor:
    """The part of `whole` that `rank` of `size` holds, cut along `dim`.

    Errors: ValueError when it does not divide.
    """
    if size == 1:
        return whole
    if is_gated(name):
        gate, up = whole.chunk(2, dim)
        return torch.cat((_slice(name, gate, dim, rank, size), _slice(name, up, dim, rank, size)), dim)
    return _slice(name, whole, dim, rank, size)


def merge(name: str, parts: Sequence[Tensor], dim: int) -> Tensor:
    """The inverse of `cut` over all ranks."""
    if len(parts) == 1:
        return parts[0]
    if is_gated(name):
        halves = [part.chunk(2, dim) for part in parts]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves], dim)
    return torch.cat(list(parts), dim)


def _slice(name: str, tensor: Tensor, dim: int, rank: int, size: int) -> Tensor:
    if tensor.shape[dim] % size:
        raise ValueError(f"{name}: {tensor.shape[dim]} rows do not divide over tensorParallel {size}")
    return tensor.chunk(size, dim)[rank]
