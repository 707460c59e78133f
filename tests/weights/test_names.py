"""Names and shapes of Megatron's and Hugging Face's tensors, both ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from motley_weights import names
from motley_weights.errors import NamesError, UnsupportedModelError
from motley_weights.names import MegatronSpec, ModelShape

MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 3,
    "intermediate_size": 10,
    "moe_intermediate_size": 6,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "vocab_size": 7,
    "max_position_embeddings": 16,
}
DENSE = {**MOE, "architectures": ["Qwen3ForCausalLM"]}
LLAMA = {**MOE, "architectures": ["LlamaForCausalLM"]}


def tensors_of(shape: ModelShape) -> dict[str, torch.Tensor]:
    """Every element of the checkpoint distinct."""
    made, start = {}, 0
    for name, size in names.expected_shapes(shape).items():
        count = torch.Size(size).numel()
        made[name] = torch.arange(start, start + count, dtype=torch.float64).reshape(size)
        start += count
    return made


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    return got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


@settings(max_examples=60, deadline=None)
@given(
    architecture=st.sampled_from(names.SUPPORTED_ARCHITECTURES),
    kv_heads=st.integers(1, 3),
    per_group=st.integers(1, 4),
    head_dim=st.integers(1, 5),
    layers=st.integers(1, 3),
    tied=st.booleans(),
    bias=st.booleans(),
    dense_layer=st.integers(0, 3),
    step=st.integers(1, 2),
    padding=st.integers(0, 5),
    spec=st.sampled_from(MegatronSpec),
)
def test_there_and_back_is_exact(
    architecture: str,
    kv_heads: int,
    per_group: int,
    head_dim: int,
    layers: int,
    tied: bool,
    bias: bool,
    dense_layer: int,
    step: int,
    padding: int,
    spec: MegatronSpec,
):
    config = {
        **MOE,
        "architectures": [architecture],
        "num_attention_heads": kv_heads * per_group,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_hidden_layers": layers,
        "tie_word_embeddings": tied,
        "attention_bias": bias,
        "mlp_only_layers": [dense_layer],
        "decoder_sparse_step": step,
    }
    shape = ModelShape.from_hf_config(config)
    hf = tensors_of(shape)
    megatron = names.from_hf(shape, hf, spec=spec, padded_vocabulary=shape.vocabulary + padding)
    assert same(dict(names.to_hf(shape, megatron)), hf)


def test_qkv_rows_interleave_by_query_group():
    # 4 query heads, 2 groups, head dimension 1: rows are q0 q1 k0 v0 | q2 q3 k1 v1.
    shape = ModelShape.from_hf_config({**MOE, "head_dim": 1})
    q, k, v = torch.tensor([[0.0], [1], [2], [3]]), torch.tensor([[10.0], [11]]), torch.tensor([[20.0], [21]])
    want = torch.tensor([[0.0], [1], [10], [20], [2], [3], [11], [21]])
    assert torch.equal(names.merge_qkv(shape, q, k, v), want)
    for got, expected in zip(names.split_qkv(shape, want), (q, k, v), strict=True):
        assert torch.equal(got, expected)


def test_gate_rows_come_before_up_rows():
    shape = ModelShape.from_hf_config(DENSE)
    fc1 = torch.arange(20.0).unsqueeze(1).expand(20, 8)
    mapped = dict(names.to_hf(shape, {"decoder.layers.0.mlp.linear_fc1.weight": fc1}))
    assert mapped["model.layers.0.mlp.gate_proj.weight"][:, 0].tolist() == list(range(10))
    assert mapped["model.layers.0.mlp.up_proj.weight"][:, 0].tolist() == list(range(10, 20))


def test_local_spec_names_are_those_of_a_real_model():
    # As listed by GPTModel.state_dict() of megatron-core 0.19.2 under get_gpt_layer_local_spec, its "_extra_state" left
    # out.
    shape = ModelShape.from_hf_config({**MOE, "num_hidden_layers": 1, "num_experts": 1, "num_experts_per_tok": 1})
    want_names = [
        "embedding.word_embeddings.weight",
        "decoder.layers.0.input_layernorm.weight",
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.self_attention.linear_proj.weight",
        "decoder.layers.0.self_attention.q_layernorm.weight",
        "decoder.layers.0.self_attention.k_layernorm.weight",
        "decoder.layers.0.pre_mlp_layernorm.weight",
        "decoder.layers.0.mlp.router.weight",
        "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight",
        "decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    ]
    assert list(names.from_hf(shape, tensors_of(shape))) == want_names


def test_transformer_engine_names_hold_the_norms_inside_the_next_layer():
    shape = ModelShape.from_hf_config({**MOE, "mlp_only_layers": [0]})
    made = names.from_hf(shape, tensors_of(shape), spec=MegatronSpec.TRANSFORMER_ENGINE)
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in made
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in made  # a dense layer
    assert "decoder.layers.1.pre_mlp_layernorm.weight" in made  # a layer with experts keeps its own
    assert "decoder.layers.1.mlp.experts.linear_fc1.weight2" in made
    assert not any("input_layernorm" in name or "local_experts" in name for name in made)


def test_a_tied_model_has_no_head_on_either_side():
    shape = ModelShape.from_hf_config({**DENSE, "tie_word_embeddings": True})
    hf = tensors_of(shape)
    assert "lm_head.weight" not in hf
    carried = {**hf, "lm_head.weight": hf["model.embed_tokens.weight"]}  # some checkpoints have it all the same
    megatron = names.from_hf(shape, carried)
    assert "output_layer.weight" not in megatron
    copied = {**megatron, "output_layer.weight": hf["model.embed_tokens.weight"]}
    assert same(dict(names.to_hf(shape, copied)), hf)


def test_padding_of_the_vocabulary_is_zeros_and_is_cut_off_again():
    shape = ModelShape.from_hf_config(DENSE)
    megatron = names.from_hf(shape, tensors_of(shape), padded_vocabulary=12)
    assert megatron["output_layer.weight"].shape == (12, 8)
    assert megatron["output_layer.weight"][7:].abs().sum() == 0
    assert dict(names.to_hf(shape, megatron))["lm_head.weight"].shape == (7, 8)


def test_the_stream_keeps_its_order_and_needs_no_whole_model():
    shape = ModelShape.from_hf_config(MOE)
    megatron = names.from_hf(shape, tensors_of(shape))
    some = [(name, megatron[name]) for name in ("output_layer.weight", "decoder.layers.1.mlp.router.weight")]
    assert [name for name, _ in names.to_hf(shape, iter(some))] == ["lm_head.weight", "model.layers.1.mlp.gate.weight"]


def test_state_that_is_no_weight_is_left_out():
    shape = ModelShape.from_hf_config(MOE)
    assert list(names.to_hf(shape, {"decoder.layers.0.mlp.linear_fc1._extra_state": torch.empty(0)})) == []


# ---------------------------------------------------------------- shapes from a config


def test_transformers_5_and_older_configs_give_the_same_shape():
    old = {**MOE, "rope_theta": 1e6, "rope_scaling": None, "norm_topk_prob": True}
    new = {**MOE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "norm_topk_prob": True}
    new["num_local_experts"] = new.pop("num_experts")
    assert ModelShape.from_hf_config(old) == ModelShape.from_hf_config(new)
    assert ModelShape.from_hf_config(new).rope_theta == 1e6


def test_rope_scaling_is_kept_for_whoever_builds_the_model():
    config = {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}
    assert dict(ModelShape.from_hf_config(config).rope_scaling) == {"rope_type": "llama3", "factor": 8.0}


def test_an_unknown_architecture_names_what_is_supported():
    with pytest.raises(
        UnsupportedModelError, match="LlamaForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM, got Mamba"
    ):
        ModelShape.from_hf_config({**MOE, "architectures": ["MambaForCausalLM"]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size: must be a positive integer, got None"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers: must be a positive integer, got 'two'"),
        ({"num_experts": 0}, "num_experts: must be a positive integer, got 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: must divide num_attention_heads 4, got 3"),
    ],
)
def test_a_bad_config_names_the_field(change: dict[str, Any], message: str):
    with pytest.raises(NamesError, match=message):
        ModelShape.from_hf_config({**MOE, **change})


# ---------------------------------------------------------------- refusals


def test_a_missing_an_extra_and_a_misshapen_tensor_are_named():
    shape = ModelShape.from_hf_config(DENSE)
    hf = tensors_of(shape)
    with pytest.raises(NamesError, match=r"1 tensors of Qwen3ForCausalLM missing, the first: model\.norm\.weight"):
        names.from_hf(shape, {name: tensor for name, tensor in hf.items() if name != "model.norm.weight"})
    with pytest.raises(NamesError, match=r"does not have, the first: model\.layers\.9\.mlp\.up_proj\.weight"):
        names.from_hf(shape, {**hf, "model.layers.9.mlp.up_proj.weight": torch.ones(1)})
    with pytest.raises(NamesError, match=r"model\.norm\.weight: must have shape \(8,\), got \(9,\)"):
        names.from_hf(shape, {**hf, "model.norm.weight": torch.ones(9)})


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("decoder.layers.0.mlp.unknown.weight", (1,), "not a tensor of a Megatron GPTModel"),
        ("vision.patch_embed.weight", (1,), "not a tensor of a Megatron GPTModel"),
        ("decoder.layers.5.input_layernorm.weight", (8,), "has no tensor model.layers.5.input_layernorm.weight"),
        (
            "decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.weight",
            (8, 6),
            "has no tensor .*experts.3.down_proj",
        ),
        ("decoder.layers.0.mlp.linear_fc2.weight", (8, 10), "has no tensor model.layers.0.mlp.down_proj.weight"),
        ("decoder.layers.0.self_attention.linear_qkv.weight", (23, 8), "must have 24 rows, got \\(23, 8\\)"),
        ("decoder.layers.0.self_attention.linear_qkv.weight", (24, 9), "q_proj.weight must have shape \\(12, 8\\)"),
        ("decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight", (11, 8), "even number of rows"),
        ("embedding.word_embeddings.weight", (5, 8), r"must have shape \(7, 8\), got \(5, 8\)"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(name: str, size: tuple[int, ...], message: str):
    with pytest.raises(NamesError, match=message):
        list(names.to_hf(ModelShape.from_hf_config(MOE), {name: torch.zeros(size)}))
