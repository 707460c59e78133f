"""BF16 tensors as the integers that they are made of: their magnitudes have the same order, and cost half of float32's memory.
Pure.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SIGN, MAGNITUDE = 0x8000, 0x7FFF  # of the 16 bits of a bfloat16
INFINITY = 0x7F80  # the smallest magnitude that is no number
_CHUNK = 1 << 17

Array = npt.NDArray[Any]


def words(tensor: Tensor) -> Array:
    """uint16 [elements] of a bfloat16 tensor; its own memory where it is contiguous and on the CPU."""
    flat: Array = tensor.detach().cpu().contiguous().view(torch.int16).numpy().reshape(-1).view(np.uint16)
    return flat


def largest_magnitude(bits: Array) -> int:
    """The magnitude's bits; INFINITY or above when anything is not finite. 0 for no elements."""
    spare = np.empty(min(_CHUNK, bits.size), np.uint16)
    largest = 0
    for start in range(0, bits.size, _CHUNK):
        chunk = bits[start : start + _CHUNK]
        largest = max(largest, int(np.bitwise_and(chunk, MAGNITUDE, out=spare[: chunk.size]).max()))
    return largest


def value(magnitude: int) -> float:
    """Of a magnitude's bits."""
    return float(np.array(magnitude << 16, np.uint32).view(np.float32))
