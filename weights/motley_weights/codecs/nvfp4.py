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
_HALF_LESS_ONE = (1 << 21) - 1  # what rounding to even adds below the kept bit, besides that bit itself
_CODE_OF_ZERO = 252 << 22  # 1.0 has bits 254 << 22 and code 2
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
    """weight [n, k] bfloat16 or float32, k a multiple of 16 -> (packed uint8 [n, k/2], block scales E4M3 [n, k/16])."""
    n, k = weight.shape
    packed = torch.empty(n, k // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(n, k // BLOCK, dtype=torch.float8_e4m3fn, device=weight.device)
    band = max(1, _BAND_ELEMENTS * torch.get_num_threads() // max(1, k))
    for start in range(0, n, band):
        tiles = weight[start : start + band].to(torch.float32).reshape(-1, k // BLOCK, BLOCK)
        block_scale = tiles.abs().amax(dim=2) / (E2M1_MAX * scale_2)
        block_scale = torch.where(block_scale == 0, 1.0, block_scale).clamp_(E4M3_MIN, E4M3_MAX).to(torch.float8_e4m3fn)
        scaled = tiles / (block_scale.to(torch.float32) * scale_2).unsqueeze(2)
        packed[start : start + band] = pack(to_e2m1(scaled.flatten(1)))
        scales[start : start + band] = block_scale
    return packed, scales


def dequantise(packed: Tensor, scales: Tensor, scale_2: Tensor) -> Tensor:
    """The float32 values [n, k] of packed codes [n, k/2], block scales [n, k/16] and the tensor scale."""
    block_scale = scales.to(torch.float32) * scale_2.to(torch.float32)
    values = _VALUE_OF_CODE.to(packed.device)[unpack(packed).to(torch.int32)]
    return (values.view(*scales.shape, BLOCK) * block_scale.unsqueeze(2)).flatten(1)


def to_e2m1(values: Tensor) -> Tensor:
    """Nearest E2M1 codes (uint8 0..15, sign in bit 3) of float32, ties to the even mantissa, magnitudes above 6 become
    6.

    At 1 and above, E2M1 is float32 rounded to one bit of mantissa: done on the bits, where a carry into the exponent is
    right. Below 1 the codes are 0, 0.5 and 1, told apart by the midpoints; there the bits give less or the same.
    """
    bits = values.view(torch.int32) & 0x7FFF_FFFF
    above_one = (bits >> 22).bitwise_and_(1).add_(bits).add_(_HALF_LESS_ONE - _CODE_OF_ZERO).bitwise_right_shift_(22)
    magnitude = bits.view(torch.float32)
    below_one = (magnitude > 0.25).view(torch.uint8) + (magnitude >= 0.75).view(torch.uint8)
    codes = torch.maximum(above_one.clamp_(0, 7).to(torch.uint8), below_one)
    return codes.bitwise_or_((values < 0).view(torch.uint8).bitwise_left_shift_(3))


def pack(codes: Tensor) -> Tensor:
    """[n, k] codes -> [n, k/2] bytes, the even element in the low half. Two codes at a time, as a little-endian
    int16.
    """
    pairs = codes.view(torch.int16)
    return ((pairs >> 4) | pairs).to(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """[n, k/2] bytes -> [n, k] codes."""
    return torch.stack((packed & 0x0F, packed >> 4), dim=2).flatten(1)
