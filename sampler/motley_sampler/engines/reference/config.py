"""The decoder's shape, read from a Hugging Face config.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from motley_api.keys import VIEW_BF16, VIEW_FP8, VIEW_NVFP4
from motley_weights.errors import UnsupportedModelError

MODEL_TYPES = ("qwen3_moe", "qwen3", "llama")


@dataclass(frozen=True)
class ModelConfig:
    model_type: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int  # of dense layers
    expert_size: int  # of one expert
    experts: int  # 0: dense everywhere
    experts_per_token: int
    norm_topk: bool
    dense_layers: frozenset[int]
    rms_eps: float
    rope_theta: float
    tied_head: bool
    qk_norm: bool
    max_positions: int
    eos_ids: tuple[int, ...]
    view: str  # that the weights are stored as

    def moe(self, layer: int) -> bool:
        return self.experts > 0 and layer not in self.dense_layers


def read_config(folder: Path) -> ModelConfig:
    """config.json of a model folder. Raises UnsupportedModelError, naming the field, or OSError."""
    path = folder / "config.json"
    try:
        return parse_config(msgspec.json.decode(path.read_bytes()))
    except msgspec.DecodeError as error:
        raise UnsupportedModelError(f"{path.name} must be JSON: {error}") from error


def parse_config(raw: dict[str, Any]) -> ModelConfig:
    model_type = raw.get("model_type")
    if model_type not in MODEL_TYPES:
        raise UnsupportedModelError(f"model_type must be one of {', '.join(MODEL_TYPES)}, got {model_type!r}")
    for name, wanted in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("use_sliding_window", False),
    ):
        if raw.get(name, wanted) != wanted:
            raise UnsupportedModelError(f"{name} must be {wanted!r}, got {raw[name]!r}")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type != "default":
        raise UnsupportedModelError(f"rope type must be default, got {rope_type!r}")
    try:
        return _build(model_type, raw, rope)
    except KeyError as error:
        raise UnsupportedModelError(f"config.json lacks {error.args[0]}") from error


def _build(model_type: str, raw: dict[str, Any], rope: dict[str, Any]) -> ModelConfig:
    layers, heads, hidden = raw["num_hidden_layers"], raw["num_attention_heads"], raw["hidden_size"]
    moe = model_type == "qwen3_moe"
    experts = (raw.get("num_experts") or raw.get("num_local_experts") or 0) if moe else 0
    stride = raw.get("decoder_sparse_step") or 1
    dense = {layer for layer in range(layers) if (layer + 1) % stride} | set(raw.get("mlp_only_layers") or [])
    eos = raw.get("eos_token_id")
    return ModelConfig(
        model_type=model_type,
        vocab_size=raw["vocab_size"],
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or hidden // heads,
        intermediate_size=raw.get("intermediate_size") or 0,
        expert_size=raw["moe_intermediate_size"] if experts else 0,
        experts=experts,
        experts_per_token=raw["num_experts_per_tok"] if experts else 0,
        norm_topk=bool(raw.get("norm_topk_prob", False)),
        dense_layers=frozenset(dense),
        rms_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
        tied_head=bool(raw.get("tie_word_embeddings", False)),
        qk_norm=model_type.startswith("qwen3"),
        max_positions=raw["max_position_embeddings"],
        eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        view=_view(raw.get("quantization_config")),
    )


def _view(quantisation: dict[str, Any] | None) -> str:
    """View name of a checkpoint's quantization_config, as `motley_weights.codecs` writes it."""
    if not quantisation:
        return VIEW_BF16
    method = quantisation.get("quant_method")
    views = {"fp8": VIEW_FP8, "modelopt": VIEW_NVFP4}
    if method not in views:
        raise UnsupportedModelError(
            f"quantization_config.quant_method must be one of {', '.join(views)}, got {method!r}"
        )
    return views[method]
