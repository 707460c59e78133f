"""What a group's numbers look like: rounding of weights, activations and KV, and the order in which sums are taken.

Legend: N = tokens, K = contraction, O = outputs, E = experts.

Tensor cores multiply low-precision operands and add in FP32, so a product of dequantised operands in FP32 is what they compute,
up to the order of the additions. Kernels differ in three more ways, which `KernelProfile` names: how many pieces the
contraction is split into, whether the pieces meet in BF16, and whether attention probabilities are rounded before they meet V.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor
from torch.nn import functional

E4M3_MAX = 448.0
E4M3_MIN = 2.0**-9  # smallest above zero
E2M1_MAX = 6.0
FP8_GROUP = 128  # block-wise FP8 kernels quantise activations in groups of 1 x 128
NVFP4_BLOCK = 16


class Compute(StrEnum):
    """Of activations between operations."""

    BF16 = "BF16"
    FP32 = "FP32"  # no rounding anywhere: the oracle


class Quant(StrEnum):
    """Of one linear layer's operands, decided by what its weight is in the view."""

    NONE = "none"
    FP8 = "fp8"
    NVFP4 = "nvfp4"


@dataclass(frozen=True)
class KernelProfile:
    """One GPU type's kernels. Not a measurement of any: a stand-in that differs between types the way kernels do."""

    split_k: int = 1
    bf16_partials: bool = False
    bf16_probabilities: bool = True
    fp32_head: bool = False


# FlashAttention-style kernels (FA3 on Hopper, TRT-LLM's on Blackwell) feed P to the tensor cores in BF16; the split counts
# follow the number of SMs, which is what cuBLAS heuristics and hand-written split-K kernels look at.
PROFILES: dict[str, KernelProfile] = {
    "A100-40GB": KernelProfile(split_k=2, bf16_partials=True),
    "A100-80GB": KernelProfile(split_k=2, bf16_partials=True),
    "H100": KernelProfile(split_k=1),
    "H200": KernelProfile(split_k=4),
    "B200": KernelProfile(split_k=2),
    "B300": KernelProfile(split_k=4, bf16_partials=True),
    "RTX-PRO-6000": KernelProfile(split_k=8, bf16_partials=True),
}


@dataclass(frozen=True)
class Arithmetic:
    """Everything about an engine's numbers that is not in its weights."""

    compute: Compute = Compute.BF16
    fp8_kv: bool = False
    profile: KernelProfile = KernelProfile()

    @property
    def exact(self) -> bool:
        return self.compute is Compute.FP32


def arithmetic_for(gpu_type: str, kv_cache_precision: str, *, fp32_head: bool = False) -> Arithmetic:
    """Arithmetic of a group. An unknown GPU type gets the plain profile: it has no kernels of its own to imitate."""
    base = PROFILES.get(gpu_type, KernelProfile())
    profile = KernelProfile(base.split_k, base.bf16_partials, base.bf16_probabilities, fp32_head)
    return Arithmetic(Compute.BF16, kv_cache_precision == "FP8", profile)


def split(x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """torch's unflatten, which has no types."""
    found: Tensor = x.unflatten(dim, sizes)
    return found


def bf16(x: Tensor) -> Tensor:
    """Rounds to the nearest BF16, ties to even; stays float32."""
    return x.bfloat16().float()


def e4m3(x: Tensor) -> Tensor:
    """Rounds to the nearest FP8 E4M3, saturating at 448; stays float32."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def quantise_fp8(x: Tensor) -> Tensor:
    """[..., K] -> the same, as a block-wise FP8 kernel sees activations: E4M3 with an FP32 scale per 1 x 128 group."""
    width = x.shape[-1]
    if width <= FP8_GROUP:
        return _fp8_groups(x)
    pad = -width % FP8_GROUP
    padded = functional.pad(x, (0, pad)) if pad else x
    grouped = _fp8_groups(split(padded, -1, (-1, FP8_GROUP))).flatten(-2)
    return grouped[..., :width] if pad else grouped


def _fp8_groups(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp_min_(1e-10).div_(E4M3_MAX)
    return (x / scale).to(torch.float8_e4m3fn).float().mul_(scale)


def e2m1(x: Tensor) -> Tensor:
    """Rounds to the nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives, ties to the even code."""
    x = x.clamp(-E2M1_MAX, E2M1_MAX)
    magnitude = x.abs()
    # The spacing is .5 below 2, 1 below 4, 2 above: round() to the even multiple is round to the even code.
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return (x / step).round_().mul_(step)


def quantise_nvfp4(x: Tensor, input_scale: float = 1.0) -> Tensor:
    """[..., K] -> the same, as W4A4 kernels see activations: E2M1 with an E4M3 scale per block of 16.

    input_scale: the module's calibrated global scale, from the view. It is static, so a sequence's numbers do not depend on
    what else is in the batch.
    """
    if x.shape[-1] % NVFP4_BLOCK:
        raise ValueError(f"NVFP4 needs a width divisible by {NVFP4_BLOCK}, got {x.shape[-1]}")
    blocks = split(x, -1, (-1, NVFP4_BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True).div_(E2M1_MAX * input_scale).clamp_(E4M3_MIN, E4M3_MAX)
    scale = scale.to(torch.float8_e4m3fn).float().mul_(input_scale)
    return e2m1(blocks / scale).mul_(scale).flatten(-2)


class Linear:
    """y = x W^T with this engine's arithmetic. w_OK float32 [O, K], or [E, O, K] for all experts of a layer at once."""

    def __init__(self, w_OK: Tensor, quant: Quant, arithmetic: Arithmetic, *, input_scale: float = 1.0) -> None:
        self.quant = quant
        self.input_scale = input_scale
        self.rounds = not arithmetic.exact
        self.bf16_partials = arithmetic.profile.bf16_partials
        width = w_OK.shape[-1]
        pieces = 1 if arithmetic.exact or width % arithmetic.profile.split_k else arithmetic.profile.split_k
        self.pieces = pieces
        w_KO = w_OK.transpose(-1, -2).contiguous()
        # [pieces, (E,) K / pieces, O], so that a batched product needs no copy of the weights at each step.
        self.weight = w_KO if pieces == 1 else split(w_KO, -2, (pieces, -1)).movedim(-3, 0).contiguous()

    def quantise(self, x: Tensor) -> Tensor:
        """Activations as this layer's kernel sees them; the caller shares the result between layers that read the same x."""
        if self.quant is Quant.NONE or not self.rounds:
            return x
        return quantise_fp8(x) if self.quant is Quant.FP8 else quantise_nvfp4(x, self.input_scale)

    def __call__(self, x: Tensor) -> Tensor:
        y = self.accumulate(self.quantise(x))
        return bf16(y) if self.rounds else y

    def accumulate(self, x: Tensor) -> Tensor:
        """The product of quantised activations, not yet rounded: [N, K] -> [N, O], or [E, N, K] -> [E, N, O]."""
        if self.pieces == 1:
            return x @ self.weight
        partial = split(x, -1, (self.pieces, -1)).movedim(-2, 0) @ self.weight
        if self.bf16_partials:
            partial = bf16(partial)
        return partial.sum(0)
