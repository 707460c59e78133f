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
    for start in range(0, n, band):
        rows = weight[start : start + band]
        tiles = _tiles(rows.to(torch.float32))
        amax = tiles.abs().amax(dim=(1, 3))
        scale = torch.where(amax == 0, 1.0, (amax / E4M3_MAX).clamp_(min=_SCALE_MIN))
        tiles = (tiles / scale[:, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX)
        codes[start : start + band] = tiles.flatten(0, 1).flatten(1, 2)[: rows.shape[0], :k].to(E4M3)
        scale_inv[start // BLOCK : start // BLOCK + scale.shape[0]] = scale
    return codes, scale_inv


def dequantise(codes: Tensor, scale_inv: Tensor) -> Tensor:
    """The float32 values [n, k] of codes [n, k] and scale_inv [ceil(n/128), ceil(k/128)]."""
    n, k = codes.shape
    tiles = _tiles(codes.to(torch.float32)) * scale_inv[:, None, :, None]
    return tiles.flatten(0, 1).flatten(1, 2)[:n, :k].contiguous()


def _tiles(values: Tensor) -> Tensor:
    """[n, k] -> [row blocks, 128, column blocks, 128], zeros beyond the edge."""
    n, k = values.shape
    pad_n, pad_k = -n % BLOCK, -k % BLOCK
    if pad_n or pad_k:
        values = torch.nn.functional.pad(values, (0, pad_k, 0, pad_n))
    return values.view(blocks(n), BLOCK, blocks(k), BLOCK)
