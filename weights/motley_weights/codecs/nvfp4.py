"""NVFP4 in ModelOpt's checkpoint layout.

A weight [n, k] becomes E2M1 codes, two in a byte, [n, k/2] (the element of even index in the low four bits); one E4M3
scale per 16 elements of a row, [n, k/16]; one float32 scale per tensor. value = code x block scale x tensor scale.

Source of the arithmetic: ModelOpt's NVFP4QTensor (weights_scaling_factor_2 = amax / (6 x 448), block scales clamped to
[2^-9, 448], ties to the even mantissa). Engines fold q, k, v (and gate, up) into one matrix and keep one tensor scale
of them, the largest, so those tensors are quantised with the amax of all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN = 2.0**-9  # smallest E4M3 above zero
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Elements worked on at a time, per thread: float32 temporaries stay in the cache, whatever the size of the tensor.
_BAND_ELEMENTS = 1 << 16
_MAGNITUDE = 0x7FFF_FFFF  # all bits of a float32 but its sign
_HALF_LESS_ONE = (1 << 21) - 1  # what rounding to even adds below the kept bit, besides that bit itself
_CODE_OF_ZERO = 252 << 22  # 1.0 has bits 254 << 22 and code 2
_HALVES = 2.0**22  # float32 beyond it has steps of 0.5: adding it rounds to halves, ties to even
_BITS_OF_HALVES = (127 + 22) << 23
_VALUE_OF_CODE = torch.tensor(E2M1_VALUES + tuple(-value for value in E2M1_VALUES), dtype=torch.float32)


def tensor_scale(amax: float) -> Tensor:
    """The float32 scalar that maps `amax`, the largest magnitude, to code 6 under block scale 448. 1 for a tensor of
    zeros.
    """
    if amax == 0.0:
        return torch.ones((), dtype=torch.float32)
    scale = torch.tensor(amax, dtype=torch.float32) / (E2M1_MAX * E4M3_MAX)
    return scale.clamp_(min=torch.finfo(torch.float32).tiny)


def quantise(weight: Tensor, scale_2: Tensor) -> tuple[Tensor, Tensor]:
    """weight [n, k] bfloat16 or float32, k a multiple of 16 -> (packed uint8 [n, k/2], block scales E4M3 [n, k/16]).

    Works on [2, 8, blocks], elements of even index first: what belongs to one block then lies along the first two
    dimensions, and every operation runs over contiguous memory.
    """
    n, k = weight.shape
    packed = torch.empty(n, k // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(n, k // BLOCK, dtype=torch.float8_e4m3fn, device=weight.device)
    band = max(1, _BAND_ELEMENTS * torch.get_num_threads() // max(1, k))
    # Working memory is allocated once: the allocator maps pieces of this size anew each time, page by page.
    memory = torch.empty(3, min(band, n) * k, dtype=torch.int32, device=weight.device)
    for start in range(0, n, band):
        rows = weight[start : start + band]
        values, codes, spare = (part[: rows.numel()].view(2, BLOCK // 2, -1) for part in memory)
        _by_parity(rows, values, spare)
        torch.bitwise_and(values, _MAGNITUDE, out=spare)
        block_scale = spare.amax(dim=(0, 1)).view(torch.float32).div_(E2M1_MAX * scale_2)
        block_scale = torch.where(block_scale == 0, 1.0, block_scale).clamp_(E4M3_MIN, E4M3_MAX).to(torch.float8_e4m3fn)
        _round(values.view(torch.float32).div_(block_scale.to(torch.float32) * scale_2), codes, spare)
        packed[start : start + band] = _packed(codes).view(rows.shape[0], -1)
        scales[start : start + band] = block_scale.view(rows.shape[0], -1)
    return packed, scales


def _by_parity(rows: Tensor, values: Tensor, spare: Tensor) -> None:
    """[n, k] -> bits of float32 [2, 8, blocks]: [parity of the index, index / 2 in the block, block]."""
    if rows.dtype != torch.bfloat16:
        values.view(torch.float32).copy_(rows.reshape(-1, BLOCK // 2, 2).permute(2, 1, 0))
        return
    pairs = spare[0].copy_(rows.reshape(-1).view(torch.int32).view(-1, BLOCK // 2).t())
    # A bfloat16 is the upper half of its float32; the even element is the lower half of a little-endian pair.
    torch.bitwise_left_shift(pairs, 16, out=values[0])
    torch.bitwise_and(pairs, -1 << 16, out=values[1])


def dequantise(packed: Tensor, scales: Tensor, scale_2: Tensor) -> Tensor:
    """The float32 values [n, k] of packed codes [n, k/2], block scales [n, k/16] and the tensor scale."""
    block_scale = scales.to(torch.float32) * scale_2.to(torch.float32)
    values = _VALUE_OF_CODE.to(packed.device)[unpack(packed).to(torch.int32)]
    return (values.view(*scales.shape, BLOCK) * block_scale.unsqueeze(2)).flatten(1)


def to_e2m1(values: Tensor) -> Tensor:
    """Nearest E2M1 codes (int32 0..15, sign in bit 3) of float32, ties to the even mantissa, magnitudes above 6 become
    6.
    """
    codes, spare = (torch.empty_like(values, dtype=torch.int32) for _ in range(2))
    _round(values.clone(), codes, spare)
    return codes


def _round(values: Tensor, codes: Tensor, spare: Tensor) -> None:
    """`to_e2m1` into `codes`, on memory that is there; `values` are lost.

    At 1 and above, E2M1 is float32 rounded to one bit of mantissa: done on the bits, where a carry into the exponent is
    right. Below 1 the codes are the number of halves; there the bits give less or the same.
    """
    bits = torch.bitwise_and(values.view(torch.int32), _MAGNITUDE, out=spare)
    torch.bitwise_right_shift(bits, 22, out=codes).bitwise_and_(1).add_(bits)
    codes.add_(_HALF_LESS_ONE - _CODE_OF_ZERO).bitwise_right_shift_(22).clamp_(max=7)
    bits.view(torch.float32).add_(_HALVES)
    torch.maximum(codes, bits.sub_(_BITS_OF_HALVES).clamp_(max=2), out=codes)
    values.add_(0.0)  # -0.0 becomes +0.0
    codes.bitwise_or_(values.view(torch.int32).bitwise_right_shift_(28).bitwise_and_(8))


def _packed(codes: Tensor) -> Tensor:
    """Codes int32 [2, 8, blocks], by parity, which are lost -> uint8 [blocks, 8], the even element in the low half."""
    octets = codes[0].bitwise_or_(codes[1].bitwise_left_shift_(4)).view(2, 4, -1)
    words = octets[:, 0]
    for i in (1, 2, 3):
        words |= octets[:, i].bitwise_left_shift_(8 * i)
    packed: Tensor = words.t().contiguous().view(torch.uint8)
    return packed


def unpack(packed: Tensor) -> Tensor:
    """[n, k/2] bytes -> [n, k] codes."""
    return torch.stack((packed & 0x0F, packed >> 4), dim=2).flatten(1)
