"""The table of views, and encode / decode over it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from motley_api.keys import VIEW_BF16, VIEW_FP8, VIEW_NVFP4
from torch import Tensor

from motley_weights.codecs import bits, fp8, nvfp4
from motley_weights.codecs.modules import fusion_group, is_quantised
from motley_weights.errors import CodecError, NonFiniteWeightsError

# Changes when the same tensor would encode to other bytes: versions made by different encoders are no base of each
# other's deltas.
ENCODER_VERSION = "1"

# Activation scale of a module nobody calibrated: ModelOpt writes amax / (6 x 448), so 1 stands for a largest activation
# of 2688, and block scales, which are computed at run time, do the rest. It is also what engines assume where a
# checkpoint has none.
UNCALIBRATED_INPUT_SCALE = 1.0

_WEIGHT = ".weight"
_SCALE_INV = "_scale_inv"
_NVFP4_SUFFIXES = (".weight_scale", ".weight_scale_2", ".input_scale")


@dataclasses.dataclass(frozen=True)
class ViewCodec:
    """One view's two directions. `quantise(tensors, amaxes)`: what is stored for each name; amax is the largest magnitude over
    its fusion group.
    """

    view: str
    quantise: Callable[[Mapping[str, Tensor], Sequence[float]], dict[str, dict[str, Tensor]]]
    dequantise: Callable[[str, Mapping[str, Tensor]], Tensor]
    scale_suffixes: tuple[str, ...] = ()  # of stored tensors that only describe another one
    k_multiple: int = 1  # what a quantised weight's input dimension must divide by


def encode(view: str, name: str, tensor_bf16: Tensor) -> dict[str, Tensor]:
    """The tensors that view `view` stores for the BF16 tensor `name`, under their names in the checkpoint.

    Members of a fusion group (q, k, v; gate, up) that are encoded one by one keep a scale of their own; a publisher
    uses `encode_group`. Raises CodecError for an unknown view, another dtype or a shape that the view cannot hold, and
    NonFiniteWeightsError for NaN or infinity.
    """
    return encode_group(view, {name: tensor_bf16})


def encode_group(
    view: str, group: Mapping[str, Tensor], *, magnitudes: Mapping[str, float] | None = None
) -> dict[str, Tensor]:
    """`encode` for several tensors at once; those of one fusion group among them share a tensor scale. Small tensors are
    cheaper together: each alone costs a tenth of a millisecond and more.

    magnitudes: `absolute_max` of each, when the caller already has it (it encodes the same tensors for several views).
    """
    chosen = codec(view)
    for name, tensor in group.items():
        _check_input(chosen, name, tensor)
    if magnitudes is None:
        magnitudes = {name: absolute_max(name, tensor) for name, tensor in group.items()}
    shared: dict[object, float] = {}
    for name in group:
        key = fusion_group(name) or name
        shared[key] = max(shared.get(key, 0.0), magnitudes[name])
    linear = {name: tensor for name, tensor in group.items() if is_quantised(name)}
    quantised = chosen.quantise(linear, [shared[fusion_group(name) or name] for name in linear]) if linear else {}
    stored: dict[str, Tensor] = {}
    for name, tensor in group.items():
        stored.update(quantised.get(name) or {name: tensor})
    return stored


def decode(view: str, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """float32 tensors under plain Hugging Face names, of all or some of a view's stored tensors.

    Raises CodecError when a scale is missing, a scale has no weight, or a dtype or shape is not the view's.
    """
    chosen = codec(view)
    plain = [name for name in stored if not name.endswith(chosen.scale_suffixes or ("\0",))]
    decoded: dict[str, Tensor] = {}
    for name in plain:
        if is_quantised(name):
            decoded[name] = chosen.dequantise(name, stored)
        elif stored[name].dtype == torch.bfloat16:
            decoded[name] = stored[name].to(torch.float32)
        else:
            raise CodecError(f"{name}: dtype must be bfloat16 in view {view}, got {stored[name].dtype}")
    for name in stored:
        if name not in decoded and _owner(name, chosen) not in decoded:
            raise CodecError(f"{name}: a scale without its weight {_owner(name, chosen)}")
    return decoded


def codec(view: str) -> ViewCodec:
    """The codec of a view name; CodecError names those there are."""
    if view not in VIEWS:
        raise CodecError(f"view must be one of {', '.join(sorted(VIEWS))}, got {view!r}")
    return VIEWS[view]


def absolute_max(name: str, tensor: Tensor) -> float:
    """The largest magnitude of a tensor, in one pass; NonFiniteWeightsError for NaN or infinity, which would poison a
    whole block.
    """
    if tensor.dtype != torch.bfloat16:
        raise CodecError(f"{name}: dtype must be bfloat16, got {tensor.dtype}")
    largest = bits.largest_magnitude(bits.words(tensor))
    if largest >= bits.INFINITY:
        raise NonFiniteWeightsError(
            f"{name}: must be finite, holds {'infinity' if largest == bits.INFINITY else 'NaN'}"
        )
    return bits.value(largest)


def _check_input(chosen: ViewCodec, name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.bfloat16:
        raise CodecError(f"{name}: dtype must be bfloat16, got {tensor.dtype}")
    if not is_quantised(name):
        return
    if tensor.ndim != 2:
        raise CodecError(f"{name}: a linear weight must have 2 dimensions, got {tuple(tensor.shape)}")
    if tensor.shape[1] % chosen.k_multiple:
        raise CodecError(
            f"{name}: input dimension must be a multiple of {chosen.k_multiple} in view {chosen.view}, "
            f"got {tuple(tensor.shape)}"
        )


def _owner(name: str, chosen: ViewCodec) -> str:
    """The weight that a stored scale belongs to."""
    for suffix in chosen.scale_suffixes:
        if name.endswith(suffix):
            base = name.removesuffix(suffix)
            return base if base.endswith(_WEIGHT) else base + _WEIGHT
    return name


def _part(stored: Mapping[str, Tensor], name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """stored[name], checked."""
    if name not in stored:
        raise CodecError(f"{name}: missing beside its weight")
    tensor = stored[name]
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise CodecError(f"{name}: must be {dtype} {shape}, got {tensor.dtype} {tuple(tensor.shape)}")
    return tensor


def _bf16_quantise(tensors: Mapping[str, Tensor], amaxes: Sequence[float]) -> dict[str, dict[str, Tensor]]:
    return {name: {name: tensor} for name, tensor in tensors.items()}


def _bf16_dequantise(name: str, stored: Mapping[str, Tensor]) -> Tensor:
    return _part(stored, name, torch.bfloat16, tuple(stored[name].shape)).to(torch.float32)


def _fp8_quantise(tensors: Mapping[str, Tensor], amaxes: Sequence[float]) -> dict[str, dict[str, Tensor]]:
    results = fp8.quantise(list(tensors.values()))
    return {
        name: {name: codes, name + _SCALE_INV: scale_inv}
        for name, (codes, scale_inv) in zip(tensors, results, strict=True)
    }


def _fp8_dequantise(name: str, stored: Mapping[str, Tensor]) -> Tensor:
    codes = _part(stored, name, fp8.E4M3, tuple(stored[name].shape))
    n, k = codes.shape
    return fp8.dequantise(codes, _part(stored, name + _SCALE_INV, torch.float32, (fp8.blocks(n), fp8.blocks(k))))


def _nvfp4_quantise(tensors: Mapping[str, Tensor], amaxes: Sequence[float]) -> dict[str, dict[str, Tensor]]:
    scales_2 = nvfp4.tensor_scales(amaxes)
    stored: dict[str, dict[str, Tensor]] = {}
    for i, (name, (packed, scales)) in enumerate(
        zip(tensors, nvfp4.quantise(list(tensors.values()), scales_2), strict=True)
    ):
        prefix = name.removesuffix(_WEIGHT)
        stored[name] = {
            name: packed,
            f"{prefix}.weight_scale": scales,
            f"{prefix}.weight_scale_2": scales_2[i],
            f"{prefix}.input_scale": torch.tensor(UNCALIBRATED_INPUT_SCALE, dtype=torch.float32),
        }
    return stored


def _nvfp4_dequantise(name: str, stored: Mapping[str, Tensor]) -> Tensor:
    prefix = name.removesuffix(_WEIGHT)
    packed = _part(stored, name, torch.uint8, tuple(stored[name].shape))
    n, half_k = packed.shape
    scales = _part(stored, f"{prefix}.weight_scale", torch.float8_e4m3fn, (n, half_k * 2 // nvfp4.BLOCK))
    return nvfp4.dequantise(packed, scales, _part(stored, f"{prefix}.weight_scale_2", torch.float32, ()))


VIEWS: Mapping[str, ViewCodec] = {
    VIEW_BF16: ViewCodec(VIEW_BF16, _bf16_quantise, _bf16_dequantise),
    VIEW_FP8: ViewCodec(VIEW_FP8, _fp8_quantise, _fp8_dequantise, (_SCALE_INV,)),
    VIEW_NVFP4: ViewCodec(VIEW_NVFP4, _nvfp4_quantise, _nvfp4_dequantise, _NVFP4_SUFFIXES, nvfp4.BLOCK),
}
