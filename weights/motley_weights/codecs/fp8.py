"""Block-wise FP8 as DeepSeek-V3 and Qwen3-FP8 checkpoints store it.

A weight [n, k] becomes E4M3 codes [n, k] and one float32 scale per 128 x 128 block, [ceil(n/128), ceil(k/128)]; blocks
at the right and lower edge may be partial. value = code x scale ("scale_inv": what the matmul multiplies by).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 128
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
# Smallest normal float32: a scale below it would lose bits, or vanish and divide by zero.
_SCALE_MIN = torch.finfo(torch.float32).tiny
# Elements worked on at a time, per thread: float32 temporaries stay in the cache, whatever the size of the tensor.
_BAND_ELEMENTS = 1 << 19
_SMALL_ELEMENTS = 1 << 17  # what is quantised together with others of its shape


def blocks(length: int) -> int:
    """Number of blocks that cover `length` elements."""
    return -(-length // BLOCK)


def quantise(weights: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """weights [n, k] bfloat16 or float32 -> (codes [n, k] E4M3, scale_inv [ceil(n/128), ceil(k/128)] float32) of each.

    scale = amax / 448 in float32; code = round-to-nearest-even(value / scale). A block of zeros has scale 1. Many small weights
    of one shape cost little more than one of their size together.
    """
    alike: dict[tuple[int, int], list[int]] = {}
    for i, weight in enumerate(weights):
        n, k = weight.shape
        # One below the other, if no block then reaches from one into the next. Large ones gain nothing, and would be copied.
        together = weight.numel() <= _SMALL_ELEMENTS and (n <= BLOCK or n % BLOCK == 0)
        alike.setdefault((n, k) if together else (-1, i), []).append(i)
    results: list[tuple[Tensor, Tensor]] = [None] * len(weights)  # type: ignore[list-item]
    for members in alike.values():
        first = weights[members[0]]
        n = first.shape[0]
        stacked = torch.cat([weights[i] for i in members]) if len(members) > 1 else first
        codes, scale_inv = _quantise(stacked, min(BLOCK, n))
        for place, i in enumerate(members):
            rows = slice(place * blocks(n), (place + 1) * blocks(n))
            results[i] = codes[place * n : (place + 1) * n], scale_inv[rows]
    return results


def _quantise(weight: Tensor, height: int) -> tuple[Tensor, Tensor]:
    """weight [n, k] -> codes [n, k], scale_inv [ceil(n / height), ceil(k / 128)]: blocks of `height` rows."""
    n, k = weight.shape
    width = min(BLOCK, k)
    codes = torch.empty(n, k, dtype=E4M3, device=weight.device)
    if weight.numel() == 0:
        return codes, torch.empty(blocks(n), blocks(k), dtype=torch.float32, device=weight.device)
    scale_inv = torch.empty(-(-n // height), blocks(k), dtype=torch.float32, device=weight.device)
    band = max(1, _BAND_ELEMENTS * torch.get_num_threads() // (k * height)) * height
    # Working memory is allocated once: the allocator maps pieces of this size anew each time, page by page.
    values = torch.empty(
        min(band, len(scale_inv) * height), blocks(k) * width, dtype=torch.float32, device=weight.device
    )
    for start in range(0, n, band):
        rows = weight[start : start + band]
        padded = _padded(rows, height, width)
        scale = _scales(padded, height, width, values)
        quotients = values[: padded.shape[0]].copy_(padded).view(-1, height, padded.shape[1])
        quotients.div_(scale.repeat_interleave(width, dim=1).unsqueeze(1))
        # A scale that was rounded down leaves quotients a hair above 448, which is what they are rounded to.
        codes[start : start + band] = values[: rows.shape[0], :k]
        scale_inv[start // height : start // height + scale.shape[0]] = scale
    return codes, scale_inv


def _scales(padded: Tensor, height: int, width: int, spare: Tensor) -> Tensor:
    """[rows, columns], whole blocks -> amax / 448 of each block in float32, [row blocks, column blocks].

    Magnitudes are compared as integers: floats without their sign bit have the same order. `spare`: memory to work in.
    """
    word = torch.int16 if padded.dtype == torch.bfloat16 else torch.int32
    magnitudes = spare.view(-1).view(word)[: padded.numel()].view(padded.shape)
    torch.bitwise_and(padded.view(word), torch.iinfo(word).max, out=magnitudes)
    tallest = magnitudes.view(-1, height, padded.shape[1]).amax(dim=1)  # of each column in its row block
    amax = tallest.view(tallest.shape[0], -1, width).amax(dim=2).view(padded.dtype).to(torch.float32)
    return torch.where(amax == 0, 1.0, (amax / E4M3_MAX).clamp_(min=_SCALE_MIN))


def dequantise(codes: Tensor, scale_inv: Tensor) -> Tensor:
    """The float32 values [n, k] of codes [n, k] and scale_inv [ceil(n/128), ceil(k/128)]."""
    n, k = codes.shape
    values = codes.to(torch.float32)
    values *= scale_inv.repeat_interleave(BLOCK, dim=1)[:, :k].repeat_interleave(BLOCK, dim=0)[:n]
    return values


def _padded(values: Tensor, height: int, width: int) -> Tensor:
    """Zeros beyond the edge, up to whole blocks."""
    n, k = values.shape
    pad_n, pad_k = -n % height, -k % width
    return torch.nn.functional.pad(values, (0, pad_k, 0, pad_n)) if pad_n or pad_k else values
