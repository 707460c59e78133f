"""Block-wise FP8 as DeepSeek-V3 and Qwen3-FP8 checkpoints store it.

A weight [n, k] becomes E4M3 codes [n, k] and one float32 scale per 128 x 128 block, [ceil(n/128), ceil(k/128)]; blocks
at the right and lower edge may be partial. value = code x scale ("scale_inv": what the matmul multiplies by).
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
# Smallest normal float32: a scale below it would lose bits, or vanish and divide by zero.
_SCALE_MIN = torch.finfo(torch.float32).tiny
# Elements worked on at a time, per thread: float32 temporaries stay in the cache, whatever the size of the tensor.
_BAND_ELEMENTS = 1 << 17


def blocks(length: int) -> int:
    """Number of blocks that cover `length` elements."""
    return -(-length // BLOCK)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [n, k] bfloat16 or float32 -> (codes [n, k] E4M3, scale_inv [ceil(n/128), ceil(k/128)] float32).

    scale = amax / 448 in float32; code = round-to-nearest-even(value / scale). A block of zeros has scale 1.
    """
    n, k = weight.shape
    codes = torch.empty(n, k, dtype=E4M3, device=weight.device)
    scale_inv = torch.empty(blocks(n), blocks(k), dtype=torch.float32, device=weight.device)
    band = max(1, _BAND_ELEMENTS * torch.get_num_threads() // max(1, k * BLOCK)) * BLOCK
    # Working memory is allocated once: the allocator maps pieces of this size anew each time, page by page.
    values = torch.empty(min(band, blocks(n) * BLOCK), blocks(k) * BLOCK, dtype=torch.float32, device=weight.device)
    for start in range(0, n, band):
        rows = weight[start : start + band]
        padded = _padded(rows)
        scale = _scales(padded, values)
        quotients = (
            values[: padded.shape[0]].copy_(padded).view(-1, BLOCK, padded.shape[1])
        )  # [row blocks, 128, columns]
        quotients.div_(scale.repeat_interleave(BLOCK, dim=1).unsqueeze(1))
        # A scale that was rounded down leaves quotients a hair above 448, which is what they are rounded to.
        codes[start : start + band] = values[: rows.shape[0], :k]
        scale_inv[start // BLOCK : start // BLOCK + scale.shape[0]] = scale
    return codes, scale_inv


def _scales(padded: Tensor, spare: Tensor) -> Tensor:
    """[rows, columns], whole blocks -> amax / 448 of each block in float32, [row blocks, column blocks].

    Magnitudes are compared as integers: floats without their sign bit have the same order. `spare`: memory to work in.
    """
    word = torch.int16 if padded.dtype == torch.bfloat16 else torch.int32
    magnitudes = spare.view(-1).view(word)[: padded.numel()].view(padded.shape)
    torch.bitwise_and(padded.view(word), torch.iinfo(word).max, out=magnitudes)
    tallest = magnitudes.view(-1, BLOCK, padded.shape[1]).amax(dim=1)  # of each column in its row block
    amax = tallest.view(tallest.shape[0], -1, BLOCK).amax(dim=2).view(padded.dtype).to(torch.float32)
    return torch.where(amax == 0, 1.0, (amax / E4M3_MAX).clamp_(min=_SCALE_MIN))


def dequantise(codes: Tensor, scale_inv: Tensor) -> Tensor:
    """The float32 values [n, k] of codes [n, k] and scale_inv [ceil(n/128), ceil(k/128)]."""
    n, k = codes.shape
    values = codes.to(torch.float32)
    values *= scale_inv.repeat_interleave(BLOCK, dim=1)[:, :k].repeat_interleave(BLOCK, dim=0)[:n]
    return values


def _padded(values: Tensor) -> Tensor:
    """Zeros beyond the edge, up to whole blocks."""
    n, k = values.shape
    pad_n, pad_k = -n % BLOCK, -k % BLOCK
    return torch.nn.functional.pad(values, (0, pad_k, 0, pad_n)) if pad_n or pad_k else values
