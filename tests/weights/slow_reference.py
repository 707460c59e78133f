"""The two quantised formats again, from their descriptions, one number at a time and in exact fractions. Slow on
purpose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor


def e4m3_value(code: int) -> Fraction:
    """OCP FP8 E4M3: 1 sign, 4 exponent bits (bias 7), 3 mantissa bits; code 0x7f is NaN and the largest value is
    448.
    """
    sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
    magnitude = (
        Fraction(mantissa, 8) * Fraction(2) ** -6
        if exponent == 0
        else (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    )
    return -magnitude if sign else magnitude


E4M3_MAGNITUDES = [e4m3_value(code) for code in range(127)]
E2M1_MAGNITUDES = [Fraction(v) for v in ("0", "0.5", "1", "1.5", "2", "3", "4", "6")]


def nearest(value: Fraction, magnitudes: Sequence[Fraction]) -> int:
    """Index of the nearest magnitude to |value|; ties go to the even index, beyond the largest to the largest."""
    distance = [abs(abs(value) - magnitude) for magnitude in magnitudes]
    best = min(distance)
    tied = [index for index, d in enumerate(distance) if d == best]
    return next((index for index in tied if index % 2 == 0), tied[0])


def fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(codes as uint8 [n, k], scale_inv float32 [ceil(n/128), ceil(k/128)]) of weight [n, k]."""
    values = weight.to(torch.float32).numpy()
    n, k = values.shape
    codes = np.zeros((n, k), np.uint8)
    scales = np.ones((math.ceil(n / 128), math.ceil(k / 128)), np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            rows, columns = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            largest = np.abs(values[rows, columns]).max()
            if largest > 0:
                scales[i, j] = largest / np.float32(448)
            for r in range(*rows.indices(n)):
                for c in range(*columns.indices(k)):
                    scaled = values[r, c] / scales[i, j]  # float32, rounded once
                    code = nearest(Fraction(float(scaled)), E4M3_MAGNITUDES)
                    codes[r, c] = code | (0x80 if np.signbit(scaled) else 0)
    return torch.from_numpy(codes), torch.from_numpy(scales)


def fp8_value(codes: Tensor, scale_inv: Tensor) -> Tensor:
    """float32 [n, k]: each code times the scale of its block."""
    table = torch.tensor([float(e4m3_value(code)) if code & 127 != 127 else math.nan for code in range(256)])
    n, k = codes.shape
    spread = scale_inv.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return table[codes.to(torch.int64)] * spread


def nvfp4_value(packed: Tensor, scales: Tensor, scale_2: float) -> Tensor:
    """float32 [n, k] by ModelOpt's description: low half first, value x E4M3 block scale x tensor scale."""
    n, half = packed.shape
    values = torch.empty(n, 2 * half)
    scale_codes = scales.view(torch.uint8)
    for row in range(n):
        for column in range(2 * half):
            byte = int(packed[row, column // 2])
            code = byte >> 4 if column % 2 else byte & 15
            magnitude = float(E2M1_MAGNITUDES[code & 7])
            block = np.float32(float(e4m3_value(int(scale_codes[row, column // 16])))) * np.float32(scale_2)
            values[row, column] = float(np.float32(-magnitude if code & 8 else magnitude) * block)
    return values
