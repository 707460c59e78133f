"""NVFP4 in ModelOpt's checkpoint layout.

A weight [n, k] becomes E2M1 codes, two in a byte, [n, k/2] (the element of even index in the low four bits); one E4M3
scale per 16 elements of a row, [n, k/16]; one float32 scale per tensor. value = code x block scale x tensor scale.

Source of the arithmetic: ModelOpt's NVFP4QTensor (weights_scaling_factor_2 = amax / (6 x 448), block scales clamped to
[2^-9, 448], ties to the even mantissa). Engines fold q, k, v (and gate, up) into one matrix and keep one tensor scale
of them, the largest, so those tensors are quantised with the amax of all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from motley_weights.codecs import bits
from motley_weights.codecs.bits import Array

BLOCK = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN = 2.0**-9  # smallest E4M3 above zero
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Elements worked on at a time: what an operation leaves is still in the cache for the next, whatever the tensor's size.
_BAND_ELEMENTS = 1 << 17
_SMALL_ELEMENTS = 1 << 17  # what is quantised together with others
_MAGNITUDE = 0x7FFF_FFFF  # all bits of a float32 but its sign
_HALF_LESS_ONE = (1 << 21) - 1  # what rounding to even adds below the kept bit, besides that bit itself
_CODE_OF_ZERO = 252 << 22  # 1.0 has bits 254 << 22 and code 2
_HALVES = 2.0**22  # float32 beyond it has steps of 0.5: adding it rounds to halves, ties to even
_BITS_OF_HALVES = (127 + 22) << 23
_VALUE_OF_CODE = torch.tensor(E2M1_VALUES + tuple(-value for value in E2M1_VALUES), dtype=torch.float32)
_MIDPOINTS = torch.tensor([(low + high) / 2 for low, high in itertools.pairwise(E2M1_VALUES)])
_SCALES = 127  # E4M3 bytes from 0 to 448; a block's scale is never 0
_SCALE_OF_BYTE = torch.arange(_SCALES, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
_FOUR_TIMES = 0x0001_0001_0001_0001  # copies 16 bits into each quarter of 64


def tensor_scales(amaxes: Sequence[float]) -> Tensor:
    """The float32 that maps each `amax`, a largest magnitude, to code 6 under block scale 448; 1 for 0. Shape [amaxes]."""
    amax = torch.tensor(amaxes, dtype=torch.float32)
    scale = (amax / (E2M1_MAX * E4M3_MAX)).clamp_(min=torch.finfo(torch.float32).tiny)
    return scale.masked_fill_(amax == 0.0, 1.0)


def quantise(weights: Sequence[Tensor], scales_2: Tensor) -> list[tuple[Tensor, Tensor]]:
    """weights [n, k] bfloat16, k a multiple of 16, and their tensor scales [weights] -> (packed uint8 [n, k/2], block scales
    E4M3 [n, k/16]) of each, on the CPU. Many small ones cost little more than one of their size together.

    The code of an element, to_e2m1(value / (block scale x tensor scale)), grows with its magnitude, and a bfloat16 has few
    magnitudes: for each of the 126 block scales there are seven of them at which the code goes up. They are found once, by
    that formula (`_first_magnitudes`); the elements are then compared with those of their block, 16 bits at a time.
    """
    results: list[tuple[Tensor, Tensor]] = [None] * len(weights)  # type: ignore[list-item]
    small = [i for i, weight in enumerate(weights) if weight.numel() <= _SMALL_ELEMENTS]
    alone = [[i] for i, weight in enumerate(weights) if weight.numel() > _SMALL_ELEMENTS]
    for members in [small, *alone] if small else alone:
        quantised = _quantise([weights[i] for i in members], scales_2[members])
        for i, result in zip(members, quantised, strict=True):
            results[i] = result
    return results


def _quantise(weights: Sequence[Tensor], scales_2: Tensor) -> list[tuple[Tensor, Tensor]]:
    """`quantise`, all at once."""
    counts = [weight.numel() // BLOCK for weight in weights]
    divisors = _SCALE_OF_BYTE * scales_2.unsqueeze(1)  # [weights, scales]
    divisors[:, 0] = divisors[:, 1]  # never used
    first = _first_magnitudes(divisors.flatten()).astype(np.uint64) * np.uint64(_FOUR_TIMES)
    weight_of_block = np.repeat(np.arange(len(weights)), counts) if len(weights) > 1 else None
    parts = [bits.words(weight).view(np.int64).reshape(-1, BLOCK // 4) for weight in weights]
    quarters = np.concatenate(parts) if len(weights) > 1 else parts[0]
    packed = np.empty((len(quarters), BLOCK // 4), np.uint16)
    scales = np.empty(len(quarters), np.uint8)
    band = max(1, _BAND_ELEMENTS // BLOCK)
    room = _Room(min(band, len(quarters)))
    for start in range(0, len(quarters), band):
        here = slice(start, start + band)
        owner = 0 if weight_of_block is None else weight_of_block[here]
        raw = room.raw(quarters[here])
        scales[here] = _block_scales(room.magnitudes(raw), scales_2[owner])
        packed[here] = room.codes(raw, first, scales[here].astype(np.intp) + _SCALES * owner).T
    return [
        (
            torch.from_numpy(packed[end - count : end].view(np.uint8).reshape(weight.shape[0], -1)),
            torch.from_numpy(scales[end - count : end].reshape(weight.shape[0], -1)).view(torch.float8_e4m3fn),
        )
        for weight, count, end in zip(weights, counts, np.cumsum(counts).tolist(), strict=True)
    ]


def _first_magnitudes(divisors: Tensor) -> Array:
    """divisors float32 [D] -> uint16 [8, D], bits of bfloat16. Row j > 0: the smallest magnitude with a code of at least j;
    row 0: the smallest whose quotient is not 0, which keeps its sign.
    """
    near = (_MIDPOINTS.unsqueeze(1) * divisors).view(torch.int32) >> 16  # [7, D]: it, or one or two below
    both = torch.stack((near, near + 1))
    codes = to_e2m1((both << 16).view(torch.float32) / divisors)
    first = near + (codes < torch.arange(1, 8).view(1, 7, 1)).sum(0)
    return np.concatenate((_first_not_zero(divisors), first.numpy().astype(np.uint16)))


def _first_not_zero(divisors: Tensor) -> Array:
    """1, unless a divisor is so large that quotients vanish: beyond 2^16, far above any weight."""
    every = (torch.arange(0x7F80, dtype=torch.int32) << 16).view(torch.float32)
    first = torch.ones(1, len(divisors), dtype=torch.int32)
    for i in torch.nonzero(every[1] / divisors == 0).flatten().tolist():
        first[0, i] = (every / divisors[i] == 0).sum()
    return first.numpy().astype(np.uint16)


class _Room:
    """Working memory for a band of blocks, made once: the allocator maps pieces of this size anew each time, page by page.

    Everything lies as [4, blocks x 4], quarters of blocks first: operations then run over contiguous memory, and what belongs
    to one block lies in the same columns.
    """

    def __init__(self, blocks: int) -> None:
        self._raw = np.empty(blocks * 4, np.int64)
        self._magnitudes = np.empty(blocks * BLOCK, np.uint16)
        self._codes = np.empty(blocks * BLOCK, np.uint8)
        self._reached = np.empty(blocks * BLOCK, np.bool_)
        self._first = np.empty(blocks, np.uint64)

    def raw(self, quarters: Array) -> Array:
        """[blocks, 4] -> bits of bfloat16, uint16 [4, blocks x 4]."""
        turned = self._raw[: quarters.size].reshape(4, -1)
        np.copyto(turned, quarters.T)
        return turned.view(np.uint16)

    def magnitudes(self, raw: Array) -> Array:
        self._shaped = self._magnitudes[: raw.size].reshape(raw.shape)
        return np.bitwise_and(raw, bits.MAGNITUDE, out=self._shaped)

    def codes(self, raw: Array, first: Array, index: Array) -> Array:
        """Packed codes, two bytes as uint16 [4, blocks]. first [8, D]: `_first_magnitudes`, four times; index: into D."""
        codes = self._codes[: raw.size].reshape(raw.shape)
        reached = self._reached[: raw.size].reshape(raw.shape)
        np.greater_equal(raw, self._chosen(first[0], index) | np.uint16(bits.SIGN), out=codes.view(np.bool_))
        np.left_shift(codes.view(np.uint32), 3, out=codes.view(np.uint32))
        for row in first[1:]:
            np.greater_equal(self._shaped, self._chosen(row, index), out=reached)
            np.add(codes, reached.view(np.uint8), out=codes)
        pairs = codes.view(np.uint16)  # the even element in the low byte
        np.bitwise_or(pairs, pairs >> 4, out=pairs)
        packed: Array = pairs.astype(np.uint8).view(np.uint16)
        return packed

    def _chosen(self, row: Array, index: Array) -> Array:
        return row.take(index, out=self._first[: index.size], mode="clip").view(np.uint16)


def _block_scales(magnitudes: Array, scale_2: Tensor) -> Array:
    """uint16 [4, blocks x 4] -> bytes of E4M3 [blocks]. scale_2: of the tensor, float32 [] or [blocks]."""
    tall = np.maximum(np.maximum(magnitudes[0], magnitudes[1]), np.maximum(magnitudes[2], magnitudes[3])).reshape(-1, 4)
    top = np.maximum(np.maximum(tall[:, 0], tall[:, 1]), np.maximum(tall[:, 2], tall[:, 3]))
    scale = torch.from_numpy(top.view(np.int16)).view(torch.bfloat16).to(torch.float32).div_(E2M1_MAX * scale_2)
    scale.masked_fill_(scale == 0, 1.0).clamp_(E4M3_MIN, E4M3_MAX)
    stored: Array = scale.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return stored


def dequantise(packed: Tensor, scales: Tensor, scale_2: Tensor) -> Tensor:
    """The float32 values [n, k] of packed codes [n, k/2], block scales [n, k/16] and the tensor scale."""
    block_scale = scales.to(torch.float32) * scale_2.to(torch.float32)
    values = _VALUE_OF_CODE.to(packed.device)[unpack(packed).to(torch.int32)]
    return (values.view(*scales.shape, BLOCK) * block_scale.unsqueeze(2)).flatten(1)


def to_e2m1(values: Tensor) -> Tensor:
    """Nearest E2M1 codes (int32 0..15, sign in bit 3) of float32, ties to the even mantissa, magnitudes above 6 become
    6.

    At 1 and above, E2M1 is float32 rounded to one bit of mantissa: done on the bits, where a carry into the exponent is
    right. Below 1 the codes are the number of halves; there the bits give less or the same.
    """
    magnitudes = values.view(torch.int32) & _MAGNITUDE
    codes = magnitudes + (magnitudes >> 22 & 1) + (_HALF_LESS_ONE - _CODE_OF_ZERO) >> 22
    halves = (magnitudes.view(torch.float32) + _HALVES).view(torch.int32) - _BITS_OF_HALVES
    codes = torch.maximum(codes.clamp_(max=7), halves.clamp_(max=2))
    return codes | ((values + 0.0).view(torch.int32) >> 28 & 8)  # -0.0 becomes +0.0


def unpack(packed: Tensor) -> Tensor:
    """[n, k/2] bytes -> [n, k] codes."""
    return torch.stack((packed & 0x0F, packed >> 4), dim=2).flatten(1)
