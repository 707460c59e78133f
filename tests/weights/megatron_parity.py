"""Prints, as JSON per architecture, the largest difference between Megatron's and transformers' logits on the same
weights.

A script of its own, because Megatron on a CPU needs stand-ins for CUDA calls that no other test should see.
"""

from __future__ import annotations

import json
import sys
import tempfile
import types
import warnings
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from motley_weights import codecs, names
from motley_weights.checkpoints import read_checkpoint
from motley_weights.store import WeightStore

TOLERANCE_TOKENS = 24
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # not hidden / heads
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
}


def prepare_megatron() -> None:
    """What megatron-core 0.19 asks of CUDA without a guard, answered by the CPU."""
    if "triton" not in sys.modules:
        stash = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")
        stash.GLOBAL_BLOCK_SIZE, stash.paged_stash_copy_kernel, stash.paged_stash_pop_kernel = 1024, None, None  # type: ignore[attr-defined]
        sys.modules[stash.__name__] = stash
    for name in ("current_device", "synchronize", "current_stream", "stream"):
        setattr(torch.cuda, name, getattr(torch.cpu, name))
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)


def build_megatron(shape: names.ModelShape) -> torch.nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig

    experts: dict[str, Any] = {}
    if shape.experts:
        experts = {
            "num_moe_experts": shape.experts,
            "moe_router_topk": shape.experts_per_token,
            "moe_ffn_hidden_size": shape.expert_hidden,
            "moe_layer_freq": [int(shape.has_experts(layer)) for layer in range(shape.layers)],
            "moe_router_pre_softmax": not shape.normalise_expert_weights,
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
            "moe_grouped_gemm": False,
        }
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn_hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        qk_layernorm=shape.qk_norm,
        layernorm_epsilon=shape.rms_eps,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **experts,
    )
    return GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        vocab_size=shape.vocabulary,
        max_sequence_length=shape.max_positions,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        share_embeddings_and_output_weights=shape.tied,
    )


def scatter(model: torch.nn.Module) -> None:
    """Weights far from their initial values, norms included, all exact in BF16."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.08 + (1.0 if "layernorm" in name else 0.0)
            parameter.copy_(noise.to(torch.bfloat16))


def megatron_logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    length = tokens.shape[1]
    causal = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), diagonal=1)
    with torch.no_grad():
        logits: torch.Tensor = model(tokens, torch.arange(length).expand_as(tokens), causal)
    return logits


def compare(config: dict[str, Any]) -> dict[str, float]:
    from transformers import AutoModelForCausalLM

    shape = names.ModelShape.from_hf_config(config)
    tokens = torch.randint(0, shape.vocabulary, (2, TOLERANCE_TOKENS), generator=torch.Generator().manual_seed(5))
    first = build_megatron(shape)
    scatter(first)
    want = megatron_logits(first, tokens)

    with tempfile.TemporaryDirectory() as folder:
        store = WeightStore(folder, "parity")
        weights = ((name, t.to(torch.bfloat16)) for name, t in names.to_hf(shape, first.state_dict()))
        files = {"config.json": json.dumps(config).encode()}
        store.publish(1, weights, model_dir_files=files, views=["bf16"]).raise_for_failures()
        pulled = store.pull("bf16", 1, Path(folder) / "pulled")

        reference = AutoModelForCausalLM.from_pretrained(pulled, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            transformers_logits = reference(tokens).logits

        second = build_megatron(shape)
        loaded = names.from_hf(shape, {name: t.float() for name, t in read_checkpoint(pulled).tensors.items()})
        problems = second.load_state_dict(loaded, strict=False)
        back = megatron_logits(second, tokens)
    return {
        "transformers": (want - transformers_logits).abs().max().item(),
        "back": (want - back).abs().max().item(),
        "spread": want.std().item(),
        "unloaded": len([key for key in problems.missing_keys if "_extra_state" not in key])
        + len(problems.unexpected_keys),
    }


def compare_folder(folder: Path) -> dict[str, float]:
    """A real checkpoint: loaded by us into Megatron, and by transformers itself."""
    from transformers import AutoModelForCausalLM

    checkpoint = read_checkpoint(folder)
    shape = names.ModelShape.from_hf_config(checkpoint.config)
    tokens = torch.randint(0, shape.vocabulary, (1, TOLERANCE_TOKENS), generator=torch.Generator().manual_seed(5))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        want = reference(tokens).logits
    del reference
    model = build_megatron(shape)
    problems = model.load_state_dict(
        names.from_hf(shape, {name: t.float() for name, t in checkpoint.tensors.items()}), strict=False
    )
    got = megatron_logits(model, tokens)
    return {
        "transformers": (want - got).abs().max().item(),
        "spread": want.std().item(),
        "unloaded": len([key for key in problems.missing_keys if "_extra_state" not in key])
        + len(problems.unexpected_keys),
    }


def fp8_difference() -> float:
    """Between this project's and transformers' values of the golden FP8 file."""
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    stored = safetensors.torch.load_file(Path(__file__).parent / "golden" / "fp8.safetensors")
    decoded = codecs.decode("fp8", stored)
    differences = [
        (_dequantize_fp8_weight(stored[name], stored[f"{name}_scale_inv"], [128, 128], torch.float32) - decoded[name])
        .abs()
        .max()
        for name in decoded
        if codecs.is_quantised(name)
    ]
    return max(difference.item() for difference in differences)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    prepare_megatron()
    if len(sys.argv) > 1:
        print(json.dumps(compare_folder(Path(sys.argv[1]))))
        sys.exit()
    results = {name: compare({**SIZES, **config}) for name, config in MODELS.items()}
    print(json.dumps({**results, "fp8": {"transformers": fp8_difference()}}))
