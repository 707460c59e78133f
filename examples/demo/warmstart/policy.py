"""The network of the demo's policy, in plain torch: Qwen3-MoE as published, in the names that its checkpoints use.

Only the warm start uses it; a test holds it against transformers. Legend: B = episodes, T = tokens, D = hidden, E = experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Params = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    vocab: int = 384
    hidden: int = 64
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    experts: int = 8
    experts_per_token: int = 2
    expert_hidden: int = 64
    rope_theta: float = 1e4
    norm_eps: float = 1e-6
    context: int = 512


def hf_config(shape: Shape, *, eos: int, pad: int) -> dict[str, object]:
    """config.json of a Qwen3MoeForCausalLM."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.expert_hidden * shape.experts_per_token,
        "moe_intermediate_size": shape.expert_hidden,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": shape.context,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": shape.layers,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "torch_dtype": "bfloat16",
    }


def init(shape: Shape, seed: int) -> Params:
    """Seeded random weights. Experts are stacked, [E, out, in]; `to_checkpoint` takes them apart."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int, std: float) -> Tensor:
        return torch.randn(*size, generator=generator) * std

    width, inner, experts = shape.hidden, shape.expert_hidden, shape.experts
    params = {
        "model.embed_tokens.weight": normal(shape.vocab, width, std=0.5),
        "model.norm.weight": torch.ones(width),
        "lm_head.weight": normal(shape.vocab, width, std=width**-0.5 / 2),
    }
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        params |= {
            at + "input_layernorm.weight": torch.ones(width),
            at + "post_attention_layernorm.weight": torch.ones(width),
            at + "self_attn.q_norm.weight": torch.ones(shape.head_dim),
            at + "self_attn.k_norm.weight": torch.ones(shape.head_dim),
            at + "self_attn.q_proj.weight": normal(queries, width, std=width**-0.5),
            at + "self_attn.k_proj.weight": normal(keys, width, std=width**-0.5),
            at + "self_attn.v_proj.weight": normal(keys, width, std=width**-0.5),
            at + "self_attn.o_proj.weight": normal(width, queries, std=queries**-0.5 / 2),
            at + "mlp.gate.weight": normal(experts, width, std=width**-0.5),
            at + "mlp.experts.gate_proj": normal(experts, inner, width, std=width**-0.5),
            at + "mlp.experts.up_proj": normal(experts, inner, width, std=width**-0.5),
            at + "mlp.experts.down_proj": normal(experts, width, inner, std=inner**-0.5 / 2),
        }
    return params


def to_checkpoint(params: Params) -> Params:
    """The published layout: one matrix per expert and projection, BF16."""
    out: Params = {}
    for name, value in params.items():
        if ".mlp.experts." in name:
            at, projection = name.rsplit(".", 1)
            for expert, matrix in enumerate(value):
                out[f"{at}.{expert}.{projection}.weight"] = matrix.detach().to(torch.bfloat16).contiguous()
        else:
            out[name] = value.detach().to(torch.bfloat16).contiguous()
    return out


def from_checkpoint(tensors: Params, shape: Shape) -> Params:
    """The inverse of `to_checkpoint`, in FP32."""
    params = {name: value.float() for name, value in tensors.items() if ".mlp.experts." not in name}
    for layer in range(shape.layers):
        at = f"model.layers.{layer}.mlp.experts."
        for projection in ("gate_proj", "up_proj", "down_proj"):
            matrices = [tensors[f"{at}{expert}.{projection}.weight"] for expert in range(shape.experts)]
            params[at + projection] = torch.stack(matrices).float()
    return params


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _rotate(x: Tensor, start: int, theta: float) -> Tensor:
    """Rotary embedding of x [B, heads, T, head_dim] at positions start .. start + T - 1 (halves, as in Qwen)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = torch.arange(start, start + x.shape[2], dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@dataclass
class Cache:
    """Keys and values of all positions so far, each [B, kv_heads, context, head_dim] per layer."""

    keys: list[Tensor]
    values: list[Tensor]
    length: int = 0

    @classmethod
    def empty(cls, shape: Shape, episodes: int, context: int) -> Cache:
        size = (episodes, shape.kv_heads, context, shape.head_dim)
        return cls([torch.zeros(size) for _ in range(shape.layers)], [torch.zeros(size) for _ in range(shape.layers)])


def _attention(params: Params, at: str, x: Tensor, shape: Shape, cache: Cache | None, layer: int) -> Tensor:
    batch, length, _ = x.shape
    start = cache.length if cache else 0

    def heads(name: str, count: int) -> Tensor:
        return (
            (x @ params[f"{at}self_attn.{name}_proj.weight"].T)
            .view(batch, length, count, shape.head_dim)
            .transpose(1, 2)
        )

    q = _rms(heads("q", shape.heads), params[at + "self_attn.q_norm.weight"], shape.norm_eps)
    k = _rms(heads("k", shape.kv_heads), params[at + "self_attn.k_norm.weight"], shape.norm_eps)
    v = heads("v", shape.kv_heads)
    q, k = _rotate(q, start, shape.rope_theta), _rotate(k, start, shape.rope_theta)
    if cache:
        cache.keys[layer][:, :, start : start + length] = k
        cache.values[layer][:, :, start : start + length] = v
        k, v = cache.keys[layer][:, :, : start + length], cache.values[layer][:, :, : start + length]
    mixed = functional.scaled_dot_product_attention(
        q, k, v, is_causal=length > 1, scale=shape.head_dim**-0.5, enable_gqa=True
    )
    return mixed.transpose(1, 2).reshape(batch, length, -1) @ params[at + "self_attn.o_proj.weight"].T


def _experts(params: Params, at: str, x: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Mixture for x [N, D] -> (output [N, D], load-balancing loss: 1 when even)."""
    probabilities = (x @ params[at + "mlp.gate.weight"].T).softmax(-1)
    weight, chosen = probabilities.topk(shape.experts_per_token, -1)
    weight = weight / weight.sum(-1, keepdim=True)
    gate, up, down = (params[f"{at}mlp.experts.{name}_proj"] for name in ("gate", "up", "down"))
    out = torch.zeros_like(x)
    for expert in range(shape.experts):
        rows, rank = (chosen == expert).nonzero(as_tuple=True)
        part = x[rows]
        hidden = functional.silu(part @ gate[expert].T) * (part @ up[expert].T)
        out = out.index_add(0, rows, hidden @ down[expert].T * weight[rows, rank, None])
    share = functional.one_hot(chosen, shape.experts).float().mean((0, 1))
    return out, shape.experts * (share * probabilities.mean(0)).sum()


def forward(params: Params, ids: Tensor, shape: Shape, cache: Cache | None = None) -> tuple[Tensor, Tensor]:
    """ids [B, T] -> (logits [B, T, vocab], mean load-balancing loss). With a cache: T new tokens after those it holds.

    A filled cache takes one token at a time.
    """
    if cache and cache.length and ids.shape[1] != 1:
        raise ValueError(f"a filled cache takes one token at a time, got {ids.shape[1]}")
    x = params["model.embed_tokens.weight"][ids]
    balance = torch.zeros(())
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        x = x + _attention(
            params, at, _rms(x, params[at + "input_layernorm.weight"], shape.norm_eps), shape, cache, layer
        )
        normed = _rms(x, params[at + "post_attention_layernorm.weight"], shape.norm_eps)
        mixed, loss = _experts(params, at, normed.reshape(-1, shape.hidden), shape)
        x = x + mixed.view_as(x)
        balance = balance + loss / shape.layers
    if cache:
        cache.length += ids.shape[1]
    return _rms(x, params["model.norm.weight"], shape.norm_eps) @ params["lm_head.weight"].T, balance
