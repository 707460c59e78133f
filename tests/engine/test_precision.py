"""A group's numbers are real arithmetic: the view's own values, rounded where its kernels round."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from engine import tiny
from motley_sampler.engines.reference import precision
from motley_sampler.engines.reference.model import full_logits
from motley_sampler.engines.reference.precision import (
    Arithmetic,
    KernelProfile,
    Linear,
    Quant,
    arithmetic_for,
    e2m1,
    quantise_fp8,
    quantise_nvfp4,
)
from motley_sampler.engines.reference.weights import load_weights, read_stored
from motley_weights.codecs import decode

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@pytest.mark.parametrize("view", ["bf16", "fp8", "nvfp4"])
def test_weights_are_what_the_codec_decodes(view: str, views: dict[str, Path]) -> None:
    decoded = decode(view, read_stored(views[view]))
    layer = load_weights(views[view], arithmetic_for("B200", "FP8", fp32_head=False)).layers[1]
    attention = "model.layers.1.self_attn."
    want_qkv = torch.cat([decoded[f"{attention}{part}_proj.weight"] for part in "qkv"])
    # The layer's weight is [pieces, K / pieces, O]; joined again it is the transpose.
    assert torch.equal(layer.qkv.weight.reshape(-1, want_qkv.shape[0]).T, want_qkv)
    assert torch.equal(layer.out.weight.reshape(-1, 32).T, decoded[f"{attention}o_proj.weight"])
    want_quant = {"bf16": Quant.NONE, "fp8": Quant.FP8, "nvfp4": Quant.NVFP4}[view]
    assert layer.qkv.quant is want_quant


def test_router_and_head_stay_bf16_in_every_view(views: dict[str, Path]) -> None:
    for folder in views.values():
        weights = load_weights(folder, Arithmetic())
        assert weights.head.quant is Quant.NONE
        assert all(layer.mlp.router.quant is Quant.NONE for layer in weights.layers)  # type: ignore[union-attr]


def test_e2m1_rounds_to_the_nearest_value_and_ties_to_the_even_code() -> None:
    values = torch.tensor(E2M1)
    assert torch.equal(e2m1(values), values)
    assert torch.equal(e2m1(-values), -values)
    # Codes count 0, .5, 1, ... as 0, 1, 2, ...: of two neighbours the one at the even place wins a tie.
    for place, (low, high) in enumerate(pairwise(E2M1)):
        want = low if place % 2 == 0 else high
        assert e2m1(torch.tensor([(low + high) / 2])).item() == want, (low, high)
    assert e2m1(torch.tensor([100.0])).item() == 6.0


def test_fp8_activations_have_a_scale_per_128_and_three_mantissa_bits() -> None:
    x = torch.randn(5, 200, generator=torch.Generator().manual_seed(0))
    x[:, 128:] *= 1e-3  # its own group, so its own scale: relative precision stays
    got = quantise_fp8(x)
    for columns in (slice(0, 128), slice(128, 200)):
        part, rounded = x[:, columns], got[:, columns]
        scale = part.abs().amax(-1, keepdim=True) / 448
        want = (part / scale).to(torch.float8_e4m3fn).float() * scale
        torch.testing.assert_close(rounded, want, rtol=1e-6, atol=0)
        # Half a step of E4M3 is 2^-4 of the value, or 2^-10 scales for its smallest ones.
        assert ((rounded - part).abs() <= part.abs() / 16 + scale * 2**-10 * 1.01).all()


def test_nvfp4_activations_are_e2m1_times_an_e4m3_scale_per_16() -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    got = quantise_nvfp4(x).view(3, 4, 16)
    scale = (x.view(3, 4, 16).abs().amax(-1, keepdim=True) / 6).to(torch.float8_e4m3fn).float()
    codes = (got / scale).abs()
    assert (torch.tensor(E2M1)[None, None, None] - codes[..., None]).abs().amin(-1).max() < 1e-6
    assert torch.equal(quantise_nvfp4(torch.zeros(1, 16)), torch.zeros(1, 16))
    with pytest.raises(ValueError, match="divisible by 16, got 24"):
        quantise_nvfp4(torch.zeros(1, 24))


def test_splitting_the_contraction_changes_the_last_bits_only() -> None:
    generator = torch.Generator().manual_seed(2)
    x, w = torch.randn(64, 256, generator=generator), torch.randn(96, 256, generator=generator) / 16
    whole = Linear(w, Quant.NONE, Arithmetic(profile=KernelProfile(split_k=1)))(x)
    pieces = Linear(w, Quant.NONE, Arithmetic(profile=KernelProfile(split_k=8, bf16_partials=True)))(x)
    assert torch.equal(whole, precision.bf16(whole))
    assert not torch.equal(whole, pieces)
    # Eight partial sums, each rounded to 8 bits, of values near 1.
    torch.testing.assert_close(whole, pieces, rtol=0, atol=0.05)


def test_two_gpu_types_in_one_precision_differ_slightly_and_precisions_more(views: dict[str, Path]) -> None:
    prompts = [tiny.prompt(40, seed=5)]

    def mean_difference(view: str, gpu: str, kv: str) -> float:
        with torch.inference_mode():
            exact = full_logits(load_weights(views["bf16"], tiny.EXACT), prompts)[0].log_softmax(-1)
            got = full_logits(load_weights(views[view], arithmetic_for(gpu, kv)), prompts)[0].log_softmax(-1)
        return float((got - exact).abs().mean())

    with torch.inference_mode():
        h100 = full_logits(load_weights(views["bf16"], arithmetic_for("H100", "BF16")), prompts)[0]
        a100 = full_logits(load_weights(views["bf16"], arithmetic_for("A100-80GB", "BF16")), prompts)[0]
    assert not torch.equal(h100, a100)
    bf16 = mean_difference("bf16", "H100", "BF16")
    bf16_fp8_kv = mean_difference("bf16", "H100", "FP8")
    fp8 = mean_difference("fp8", "H100", "FP8")
    nvfp4 = mean_difference("nvfp4", "B200", "FP8")
    assert 0 < bf16 < bf16_fp8_kv < fp8 < nvfp4
