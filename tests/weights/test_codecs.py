"""The codecs against hand-worked numbers, golden files made elsewhere, and slow independent readers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from motley_api.keys import STANDARD_VIEWS
from motley_weights import codecs
from motley_weights.codecs import fp8, nvfp4
from motley_weights.errors import CodecError, NonFiniteWeightsError

from weights import slow_reference

GOLDEN = Path(__file__).parent / "golden"
DOWN = "model.layers.0.mlp.down_proj.weight"
Q, K, V = (f"model.layers.3.self_attn.{letter}_proj.weight" for letter in "qkv")


def bf16(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).to(torch.bfloat16)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same_bytes(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert got[name].shape == tensor.shape, name
        assert torch.equal(as_bytes(got[name]), as_bytes(tensor)), name


# ---------------------------------------------------------------- hand-worked


def test_bf16_stores_the_tensor_itself():
    tensor = bf16([[1.0, -2.0]])
    assert codecs.encode("bf16", DOWN, tensor) == {DOWN: tensor}


def test_fp8_codes_of_a_block_worked_by_hand():
    # amax 896 -> scale_inv = 896 / 448 = 2. Halves: 448, -1, 0.5, 0, 17, 18.
    # E4M3 codes: 448 = 2^8 x 1.75 -> exponent 15, mantissa 6 -> 0x7e; -1 -> 0x80 + exponent 7 -> 0xb8; 0.5 -> exponent
    # 6 -> 0x30. 17 and 18: steps of 2 from 16 (0x58, mantissa 0); 17 ties between 16 and 18 -> even mantissa, 16; 18 ->
    # 0x59.
    stored = codecs.encode("fp8", DOWN, bf16([[896.0, -2.0, 1.0, 0.0, 34.0, 36.0]]))
    want_codes = torch.tensor([[0x7E, 0xB8, 0x30, 0x00, 0x58, 0x59]], dtype=torch.uint8)
    assert torch.equal(stored[DOWN].view(torch.uint8), want_codes)
    assert torch.equal(stored[DOWN + "_scale_inv"], torch.tensor([[2.0]]))
    assert stored[DOWN].dtype == torch.float8_e4m3fn


def test_fp8_blocks_at_the_edge_are_partial_and_have_their_own_scale():
    # [130, 129]: 2 x 2 blocks of 128, three of them partial. One value in each: scales are value / 448.
    weight = torch.zeros(130, 129)
    weight[0, 0], weight[1, 128], weight[129, 5], weight[129, 128] = 448.0, 224.0, -112.0, 56.0
    stored = codecs.encode("fp8", DOWN, weight.to(torch.bfloat16))
    want_scale_inv = torch.tensor([[1.0, 0.5], [0.25, 0.125]])
    assert torch.equal(stored[DOWN + "_scale_inv"], want_scale_inv)
    assert torch.equal(codecs.decode("fp8", stored)[DOWN], weight)


def test_nvfp4_codes_of_a_block_worked_by_hand():
    # amax 6 x 448 = 2688 -> tensor scale 1. Block 0 has amax 2688 -> block scale 448; 2688 / 448 = 6 -> code 7.
    # Block 1 has amax 6 -> block scale 6 / 6 / 1 = 1, so its values are the codes' values:
    # 0 .5 1 1.5 2 3 4 6 -> 0..7, negative ones 8 more; -0.5 -> 9, -6 -> 15. Even element in the low half of a byte.
    first = [2688.0] + [0.0] * 15
    second = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0, 0.0]
    stored = codecs.encode("nvfp4", DOWN, bf16([first + second]))
    prefix = DOWN.removesuffix(".weight")
    want_packed = [0x07] + [0x00] * 7 + [0x10, 0x32, 0x54, 0x76, 0xA9, 0xCB, 0xED, 0x0F]
    assert stored[DOWN].tolist() == [want_packed]
    assert stored[f"{prefix}.weight_scale"].to(torch.float32).tolist() == [[448.0, 1.0]]
    assert stored[f"{prefix}.weight_scale_2"].item() == 1.0
    assert stored[f"{prefix}.weight_scale_2"].shape == ()
    assert stored[f"{prefix}.input_scale"].item() == 1.0
    assert codecs.decode("nvfp4", stored)[DOWN].tolist() == [first + second]


@pytest.mark.parametrize(
    ("value", "want_code"),
    [
        (0.25, 0),  # between 0 and 0.5: even code 0
        (0.75, 2),  # between 0.5 (1) and 1 (2)
        (1.25, 2),
        (1.75, 4),
        (2.5, 4),
        (3.5, 6),
        (5.0, 6),
        (7.0, 7),  # beyond the largest
        (-0.25, 8),  # minus zero keeps its sign
        (-5.0, 14),
        (-0.0, 0),
    ],
)
def test_e2m1_ties_go_to_the_even_code(value: float, want_code: int):
    assert nvfp4.to_e2m1(torch.tensor([value])).item() == want_code
    # One unit in the last place to either side is no tie.
    for towards in (-math.inf, math.inf):
        beside = torch.nextafter(torch.tensor(value), torch.tensor(towards))
        want = slow_reference.nearest(slow_reference.Fraction(beside.item()), slow_reference.E2M1_MAGNITUDES)
        assert nvfp4.to_e2m1(beside.reshape(1)).item() & 7 == want


def test_e2m1_matches_a_search_for_the_nearest_value_over_all_exponents():
    # Every float32 whose low 13 bits are zero and whose exponent lies around E2M1's range, both signs.
    patterns = torch.arange(0x3C00_0000 >> 13, 0x4200_0000 >> 13, dtype=torch.int32) << 13
    values = torch.cat([patterns.view(torch.float32), -patterns.view(torch.float32)])
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    below = torch.searchsorted(midpoints, values.abs())
    tie_up = torch.isin(values.abs(), midpoints[[1, 3, 5]])
    want = (below + tie_up).to(torch.uint8) + 8 * (values < 0).to(torch.uint8)
    assert torch.equal(nvfp4.to_e2m1(values).to(torch.uint8), want)


@pytest.mark.parametrize("view", ["fp8", "nvfp4"])
def test_a_tensor_of_zeros_decodes_to_zeros_with_finite_scales(view: str):
    stored = codecs.encode(view, DOWN, torch.zeros(4, 32, dtype=torch.bfloat16))
    assert all(torch.isfinite(tensor.to(torch.float32)).all() for tensor in stored.values())
    assert torch.equal(codecs.decode(view, stored)[DOWN], torch.zeros(4, 32))


def test_zero_blocks_have_scale_one_as_modelopt_writes():
    weight = torch.zeros(1, 32, dtype=torch.bfloat16)
    weight[0, 0] = 1.0
    stored = codecs.encode("nvfp4", DOWN, weight)
    assert stored[DOWN.replace(".weight", ".weight_scale")].to(torch.float32).tolist() == [[448.0, 1.0]]


# ---------------------------------------------------------------- golden files


@pytest.mark.parametrize("view", ["fp8", "nvfp4"])
def test_golden_bytes(view: str):
    given_tensors = safetensors.torch.load_file(GOLDEN / "input.safetensors")
    want = safetensors.torch.load_file(GOLDEN / f"{view}.safetensors")
    assert_same_bytes(codecs.encode_group(view, given_tensors), want)


def test_grouping_a_stream_gives_the_golden_bytes_too():
    given_tensors = safetensors.torch.load_file(GOLDEN / "input.safetensors")
    got: dict[str, torch.Tensor] = {}
    for group in codecs.fusion_groups(sorted(given_tensors.items())):
        got.update(codecs.encode_group("nvfp4", group))
    assert_same_bytes(got, safetensors.torch.load_file(GOLDEN / "nvfp4.safetensors"))


def test_independent_readers_decode_the_golden_files_to_the_same_values():
    stored = safetensors.torch.load_file(GOLDEN / "fp8.safetensors")
    decoded = codecs.decode("fp8", stored)
    for name in (name for name in decoded if codecs.is_quantised(name)):
        want = slow_reference.fp8_value(stored[name].view(torch.uint8), stored[f"{name}_scale_inv"])
        assert torch.equal(decoded[name], want), name
    stored = safetensors.torch.load_file(GOLDEN / "nvfp4.safetensors")
    decoded = codecs.decode("nvfp4", stored)
    for name in (name for name in decoded if codecs.is_quantised(name)):
        prefix = name.removesuffix(".weight")
        scale_2 = stored[f"{prefix}.weight_scale_2"].item()
        want = slow_reference.nvfp4_value(stored[name], stored[f"{prefix}.weight_scale"], scale_2)
        assert torch.equal(decoded[name], want), name


def test_compressed_tensors_reads_the_nvfp4_golden_file_to_the_same_values():
    """vLLM's package, which knows the layout under other names and divides by a global scale where ModelOpt multiplies. It
    computes in bfloat16: 8 bits of mantissa, rounded three times.
    """
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers", reason="needs the extra test")
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    stored = safetensors.torch.load_file(GOLDEN / "nvfp4.safetensors")
    decoded = codecs.decode("nvfp4", stored)
    quantised = [name for name in decoded if codecs.is_quantised(name)]
    assert quantised
    for name in quantised:
        prefix = name.removesuffix(".weight")
        n, half_k = stored[name].shape
        values = helpers.unpack_fp4_from_uint8(stored[name], n, 2 * half_k, dtype=torch.float32)
        want = torch.tensor([*nvfp4.E2M1_VALUES, *(-value for value in nvfp4.E2M1_VALUES)])
        assert torch.equal(values, want[nvfp4.unpack(stored[name]).to(torch.int32)])
        renamed = {
            "weight_packed": stored[name],
            "weight_scale": stored[f"{prefix}.weight_scale"],
            "weight_global_scale": 1 / stored[f"{prefix}.weight_scale_2"].reshape(1),
        }
        got = NVFP4PackedCompressor.decompress(renamed, scheme)["weight"]
        torch.testing.assert_close(got.to(torch.float32), decoded[name], rtol=3 * 2**-8, atol=0)


# ---------------------------------------------------------------- properties

shapes = st.tuples(st.integers(1, 140), st.integers(1, 12).map(lambda blocks: 16 * blocks))


@settings(max_examples=40, deadline=None)
@given(shape=shapes, seed=st.integers(0, 2**31), log2_magnitude=st.integers(-120, 100))
def test_round_trips_stay_within_half_a_step_of_the_format(shape: tuple[int, int], seed: int, log2_magnitude: int):
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    weight = (noise * 2.0**log2_magnitude).to(torch.bfloat16)
    value = weight.to(torch.float32)

    got = codecs.decode("fp8", codecs.encode("fp8", DOWN, weight))[DOWN]
    # 3 mantissa bits: 2^-4 of the value; below the smallest normal, half a step of 2^-9 of the block's scale (amax /
    # 448).
    bound = torch.maximum(value.abs() * 2**-4, value.abs().max() / 448 * 2**-10)
    assert ((got - value).abs() <= bound * 1.0001).all()

    got = codecs.decode("nvfp4", codecs.encode("nvfp4", DOWN, weight))[DOWN]
    # Widest gap of E2M1 is 2 (4 to 6), half of it 1, on a scale of amax / 6 rounded to E4M3 (2^-4, so 6 may become 6.4
    # and be cut).
    tiles = value.view(shape[0], -1, 16)
    amax = tiles.abs().amax(2, keepdim=True)
    # A block far below the tensor's largest value has a scale below E4M3's smallest: it rounds on that grid instead.
    floor = value.abs().max() / (6 * 448) * 2**-9
    bound = torch.maximum(amax / 6 * 1.07, floor * 0.5)
    assert ((got.view_as(tiles) - tiles).abs() <= bound).all()


@settings(max_examples=20, deadline=None)
@given(shape=shapes, seed=st.integers(0, 2**31))
def test_encoding_what_a_view_decodes_to_changes_nothing_in_fp8(shape: tuple[int, int], seed: int):
    # Powers of two as values: BF16, E4M3 and the scale hold them exactly.
    exponents = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed))
    weight = (448.0 * 2.0 ** exponents.float()).to(torch.bfloat16)
    decoded = codecs.decode("fp8", codecs.encode("fp8", DOWN, weight))[DOWN]
    assert torch.equal(decoded, weight.to(torch.float32))


def test_the_result_does_not_depend_on_the_bands_that_tensors_are_worked_on_in(monkeypatch: pytest.MonkeyPatch):
    weight = torch.randn(300, 304, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    whole = {view: codecs.encode(view, DOWN, weight) for view in STANDARD_VIEWS}
    monkeypatch.setattr(fp8, "_BAND_ELEMENTS", 1)
    monkeypatch.setattr(nvfp4, "_BAND_ELEMENTS", 16 * 37)
    for view in STANDARD_VIEWS:
        assert_same_bytes(codecs.encode(view, DOWN, weight), whole[view])


@pytest.mark.parametrize("view", ["fp8", "nvfp4"])
def test_small_tensors_together_give_what_each_gives_alone(view: str, monkeypatch: pytest.MonkeyPatch):
    """Of equal and of different shapes, with whole and partial blocks, zeros among them, and one that counts as large."""
    for module in (fp8, nvfp4):
        monkeypatch.setattr(module, "_SMALL_ELEMENTS", 256 * 32)
    shapes = [(64, 64), (130, 48), (256, 32), (64, 64), (1, 16), (256, 32), (64, 64), (300, 160), (130, 48), (64, 64)]
    random = torch.Generator().manual_seed(2)
    tensors = {
        f"model.layers.0.mlp.experts.{i}.down_proj.weight": (
            torch.randn(shape, generator=random) * 10.0 ** (i - 5) * (i != 3)
        ).to(torch.bfloat16)
        for i, shape in enumerate(shapes)
    }
    alone: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        alone |= codecs.encode(view, name, tensor)
    together = codecs.encode_group(view, tensors)
    assert list(together) == list(alone)
    assert_same_bytes(together, alone)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 20),
    seed=st.integers(0, 2**31),
    top=st.integers(1, 0x7F7F),
    spread=st.sampled_from([3, 400, 0x7F7F]),
)
@example(
    rows=8, seed=0, top=0x7F7F, spread=0x7F7F
)  # small ones beside the largest: their quotients vanish, and their signs
def test_nvfp4_codes_are_the_rounded_quotients_for_any_bits(rows: int, seed: int, top: int, spread: int):
    """The encoder compares bit patterns; here is the formula that it stands for, over all of bfloat16: subnormals, both
    zeros, magnitudes near the largest, and quotients that vanish."""
    random = torch.Generator().manual_seed(seed)
    magnitude = (top - torch.randint(0, spread + 1, (rows, 48), generator=random)).clamp(min=0)
    magnitude[0, 0] = top
    sign = torch.randint(0, 2, (rows, 48), generator=random) << 15
    weight = (magnitude | sign).to(torch.int32).to(torch.int16).view(torch.bfloat16)
    stored = codecs.encode("nvfp4", DOWN, weight)
    prefix = DOWN.removesuffix(".weight")
    scale_2 = stored[f"{prefix}.weight_scale_2"]
    value = weight.to(torch.float32).view(rows, 3, 16)
    scale = value.abs().amax(2) / (6.0 * scale_2)
    scale = torch.where(scale == 0, 1.0, scale).clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn)
    assert torch.equal(stored[f"{prefix}.weight_scale"].view(torch.uint8), scale.view(torch.uint8))
    want = nvfp4.to_e2m1(value / (scale.to(torch.float32) * scale_2).unsqueeze(2)).view(rows, 48)
    assert torch.equal(nvfp4.unpack(stored[DOWN]).to(torch.int32), want)


# ---------------------------------------------------------------- which modules, which scales


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("model.layers.0.self_attn.q_proj.weight", True),
        ("model.layers.11.self_attn.o_proj.weight", True),
        ("model.layers.0.mlp.gate_proj.weight", True),
        ("model.layers.0.mlp.experts.127.down_proj.weight", True),
        ("model.layers.0.mlp.gate.weight", False),
        ("model.layers.0.self_attn.q_proj.bias", False),
        ("model.layers.0.self_attn.q_norm.weight", False),
        ("model.layers.0.input_layernorm.weight", False),
        ("model.embed_tokens.weight", False),
        ("lm_head.weight", False),
        ("model.norm.weight", False),
    ],
)
def test_linear_layers_are_quantised_and_the_rest_stays_bf16(name: str, want: bool):
    assert codecs.is_quantised(name) == want
    tensor = torch.ones(16, 16, dtype=torch.bfloat16)
    for view in ("fp8", "nvfp4"):
        assert (codecs.encode(view, name, tensor)[name].dtype == torch.bfloat16) != want


def test_what_an_engine_folds_together_shares_the_largest_tensor_scale():
    weights = {Q: bf16([[1.0] * 16]), K: bf16([[2688.0] * 16]), V: bf16([[2.0] * 16])}
    stored = codecs.encode_group("nvfp4", weights)
    scales = [stored[name.replace(".weight", ".weight_scale_2")].item() for name in weights]
    assert scales == [1.0, 1.0, 1.0]  # 2688 / 2688, for all three
    torch.testing.assert_close(codecs.decode("nvfp4", stored)[Q], torch.ones(1, 16), rtol=0.07, atol=0)


def test_fusion_groups_are_complete_before_they_are_encoded():
    tensor = torch.ones(1, 16, dtype=torch.bfloat16)
    stream = [(Q, tensor), ("model.norm.weight", tensor), (V, tensor), (DOWN, tensor), (K, tensor)]
    assert [sorted(group) for group in codecs.fusion_groups(stream)] == [
        ["model.norm.weight"],
        [DOWN],
        sorted((Q, K, V)),
    ]


def test_an_incomplete_fusion_group_comes_last_and_is_not_lost():
    tensor = torch.ones(1, 16, dtype=torch.bfloat16)
    gate = "model.layers.0.mlp.gate_proj.weight"
    assert [sorted(group) for group in codecs.fusion_groups([(gate, tensor), (DOWN, tensor)])] == [[DOWN], [gate]]


def test_configuration_files_say_what_the_loaders_look_for():
    names = ["model.layers.1.mlp.gate.weight", "model.layers.0.mlp.gate.weight", Q, "lm_head.weight"]
    config = {"hidden_size": 16, "torch_dtype": "float32", "quantization_config": {"quant_method": "gptq"}}
    want_skipped = ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]

    bf16_config = json.loads(codecs.view_model_files("bf16", config, names)["config.json"])
    assert bf16_config == {"hidden_size": 16, "dtype": "bfloat16", "torch_dtype": "bfloat16"}

    fp8_config = json.loads(codecs.view_model_files("fp8", config, names)["config.json"])["quantization_config"]
    assert fp8_config["quant_method"] == "fp8"
    assert fp8_config["activation_scheme"] == "dynamic"
    assert fp8_config["weight_block_size"] == [128, 128]
    assert fp8_config["modules_to_not_convert"] == [*want_skipped, "model.embed_tokens"]

    files = codecs.view_model_files("nvfp4", config, names)
    flat = json.loads(files["config.json"])["quantization_config"]
    nested = json.loads(files["hf_quant_config.json"])["quantization"]
    assert (flat["quant_method"], flat["quant_algo"], flat["ignore"]) == ("modelopt", "NVFP4", want_skipped)
    assert flat["config_groups"]["group_0"]["weights"]["group_size"] == 16
    assert (nested["quant_algo"], nested["group_size"], nested["exclude_modules"]) == ("NVFP4", 16, want_skipped)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("view", STANDARD_VIEWS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_weights_are_refused_by_name(view: str, bad: float):
    weight = torch.ones(2, 16, dtype=torch.bfloat16)
    weight[1, 3] = bad
    with pytest.raises(NonFiniteWeightsError, match=r"model\.layers\.0\.mlp\.down_proj\.weight: must be finite"):
        codecs.encode(view, DOWN, weight)


def test_float32_is_refused_because_views_come_from_the_same_bf16_tensor():
    with pytest.raises(CodecError, match=r"dtype must be bfloat16, got torch\.float32"):
        codecs.encode("fp8", DOWN, torch.ones(2, 16))


def test_nvfp4_refuses_an_input_dimension_that_engines_cannot_load():
    with pytest.raises(CodecError, match=r"multiple of 16 in view nvfp4, got \(2, 24\)"):
        codecs.encode("nvfp4", DOWN, torch.ones(2, 24, dtype=torch.bfloat16))


def test_an_unknown_view_names_those_there_are():
    with pytest.raises(CodecError, match="must be one of bf16, fp8, nvfp4, got 'int4'"):
        codecs.encode("int4", DOWN, torch.ones(2, 16, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("view", "damage", "message"),
    [
        ("bf16", lambda s: s.update({DOWN: s[DOWN].float()}), "must be torch.bfloat16"),
        ("bf16", lambda s: s.update({"model.norm.weight": torch.ones(4, dtype=torch.int32)}), "dtype must be bfloat16"),
        ("fp8", lambda s: s.pop(DOWN + "_scale_inv"), "_scale_inv: missing"),
        ("fp8", lambda s: s.pop(DOWN), "a scale without its weight"),
        ("fp8", lambda s: s.update({DOWN: s[DOWN].view(torch.uint8)}), "must be torch.float8_e4m3fn"),
        ("fp8", lambda s: s.update({DOWN + "_scale_inv": torch.ones(2, 2)}), r"must be torch.float32 \(1, 1\)"),
        ("nvfp4", lambda s: s.pop(DOWN.replace(".weight", ".weight_scale_2")), "weight_scale_2: missing"),
        ("nvfp4", lambda s: s.pop(DOWN), "a scale without its weight"),
        ("nvfp4", lambda s: s.update({DOWN.replace(".weight", ".weight_scale"): torch.ones(1, 1)}), "float8_e4m3fn"),
    ],
)
def test_decode_refuses_what_is_not_the_view(view: str, damage: object, message: str):
    stored = codecs.encode(view, DOWN, torch.ones(4, 32, dtype=torch.bfloat16))
    damage(stored)  # type: ignore[operator]
    with pytest.raises(CodecError, match=message):
        codecs.decode(view, stored)
