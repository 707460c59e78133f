"""Tiny random models as view folders, made by the same codecs that a trainer publishes with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from motley_sampler.engines.reference.engine import ReferenceEngine
from motley_sampler.engines.reference.precision import Arithmetic, Compute
from motley_weights.codecs import encode_group, fusion_groups, view_model_files
from safetensors.torch import save_file
from torch import Tensor

EXACT = Arithmetic(Compute.FP32)
VOCAB = 64

_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "eos_token_id": VOCAB - 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}


def moe_config(**changes: Any) -> dict[str, Any]:
    moe = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "intermediate_size": 48,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return {**_BASE, **moe, **changes}


def dense_config(model_type: str, **changes: Any) -> dict[str, Any]:
    names = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
    return {
        **_BASE,
        "model_type": model_type,
        "architectures": [names[model_type]],
        "intermediate_size": 48,
        "mlp_bias": False,
        **changes,
    }


def tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """BF16 under Hugging Face names, scaled so that logits spread over several nats."""
    generator = torch.Generator().manual_seed(seed)
    hidden, dim, made = config["hidden_size"], config["head_dim"], {}

    def norm(name: str, size: int) -> None:
        made[name] = (1 + 0.2 * torch.randn(size, generator=generator)).bfloat16()

    def linear(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        made[name] = (gain * torch.randn(rows, columns, generator=generator) * columns**-0.5).bfloat16()

    def mlp(prefix: str, inner: int) -> None:
        linear(prefix + "gate_proj.weight", inner, hidden)
        linear(prefix + "up_proj.weight", inner, hidden)
        linear(prefix + "down_proj.weight", hidden, inner)

    made["model.embed_tokens.weight"] = torch.randn(config["vocab_size"], hidden, generator=generator).bfloat16()
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        norm(prefix + "input_layernorm.weight", hidden)
        norm(prefix + "post_attention_layernorm.weight", hidden)
        if config["model_type"].startswith("qwen3"):
            norm(prefix + "self_attn.q_norm.weight", dim)
            norm(prefix + "self_attn.k_norm.weight", dim)
        for part, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"), ("v", "num_key_value_heads")):
            linear(f"{prefix}self_attn.{part}_proj.weight", config[heads] * dim, hidden)
        linear(prefix + "self_attn.o_proj.weight", hidden, config["num_attention_heads"] * dim)
        if config["model_type"] == "qwen3_moe" and layer not in config["mlp_only_layers"]:
            linear(prefix + "mlp.gate.weight", config["num_experts"], hidden, 2.0)
            for expert in range(config["num_experts"]):
                mlp(f"{prefix}mlp.experts.{expert}.", config["moe_intermediate_size"])
        else:
            mlp(prefix + "mlp.", config["intermediate_size"])
    norm("model.norm.weight", hidden)
    if not config["tie_word_embeddings"]:
        linear("lm_head.weight", config["vocab_size"], hidden, 2.0)
    return made


def write_view(folder: Path, view: str, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    """A folder as a pull leaves it (without its manifest)."""
    folder.mkdir(parents=True, exist_ok=True)
    stored: dict[str, Tensor] = {}
    for group in fusion_groups(weights.items()):
        stored.update(encode_group(view, group))
    save_file(stored, str(folder / "model.safetensors"))
    for name, content in view_model_files(view, config, weights).items():
        (folder / name).write_bytes(content)
    return folder


async def started(folder: Path, arithmetic: Arithmetic = EXACT, *, version: int = 5, **options: Any) -> ReferenceEngine:
    defaults: dict[str, Any] = {"slots": 20, "max_running": 16, "seed": lambda: 7}
    engine = ReferenceEngine(arithmetic, **{**defaults, **options})
    await engine.start(folder, version)
    return engine


def body(prompt: list[int], new: int = 12, **more: Any) -> dict[str, Any]:
    """A request that reports everything; `sampling` overrides single sampling parameters."""
    sampling = {"max_new_tokens": new, "top_k": 20, "top_p": 0.9, "ignore_eos": True, "sampling_seed": 1}
    sampling |= more.pop("sampling", {})
    asked = {"return_logprob": True, "return_sampling_mask": True, "sampling_logprobs_mode": "support"}
    return {"input_ids": prompt, "sampling_params": sampling, **asked, **more}


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB - 1, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Waits for a condition; the time limit only bounds a failure."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)
