"""A view folder -> the decoder's float32 parameters, computed from the view's own bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from motley_api.keys import VIEW_BF16, VIEW_FP8, VIEW_NVFP4
from motley_weights.codecs import decode, is_quantised
from motley_weights.errors import CheckpointError
from torch import Tensor

from motley_sampler.engines.reference.config import ModelConfig, read_config
from motley_sampler.engines.reference.precision import Arithmetic, Linear, Quant

QUANT_OF_VIEW = {VIEW_BF16: Quant.NONE, VIEW_FP8: Quant.FP8, VIEW_NVFP4: Quant.NVFP4}
DENSE_EXPERTS_MAX = 16  # up to here all experts are computed for every token: one product beats a loop over experts


@dataclass(frozen=True)
class Mlp:
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class Experts:
    """gate_up: one matrix of all experts side by side [K, E * 2F] when `dense`, else one Mlp per expert."""

    router: Linear
    dense: Mlp | None
    each: tuple[Mlp, ...]


@dataclass(frozen=True)
class Layer:
    input_norm: Tensor  # [D]
    qkv: Linear
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]
    out: Linear
    post_norm: Tensor  # [D]
    mlp: Mlp | Experts


@dataclass(frozen=True)
class Weights:
    config: ModelConfig
    arithmetic: Arithmetic
    embedding: Tensor  # [V, D]
    layers: tuple[Layer, ...]
    norm: Tensor  # [D]
    head: Linear


def read_stored(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's safetensors files, as stored. Raises CheckpointError when there is none or one is unreadable."""
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder.name}: no *.safetensors file")
    stored: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(str(file), framework="pt") as handle:
                # Cloned: a view of the mapping would keep the file open, and change with it.
                stored |= {name: handle.get_tensor(name).clone() for name in handle.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise CheckpointError(f"{file.name}: {error}") from error
    return stored


def load_weights(folder: Path, arithmetic: Arithmetic) -> Weights:
    """Reads, dequantises and lays out one version of a view. Raises CheckpointError, CodecError or UnsupportedModelError."""
    config = read_config(folder)
    with torch.inference_mode():
        return build_weights(config, arithmetic, read_stored(folder))


def build_weights(config: ModelConfig, arithmetic: Arithmetic, stored: Mapping[str, Tensor]) -> Weights:
    source = _Source(config, arithmetic, stored)
    embedding = source.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    head = embedding if config.tied_head else source.take("lm_head.weight", config.vocab_size, config.hidden_size)
    return Weights(
        config=config,
        arithmetic=arithmetic,
        embedding=embedding,
        layers=tuple(_layer(source, config, index) for index in range(config.layers)),
        norm=source.take("model.norm.weight", config.hidden_size),
        head=Linear(head, Quant.NONE, arithmetic),
    )


class _Source:
    """Decoded tensors by name, with shapes checked against the configuration."""

    def __init__(self, config: ModelConfig, arithmetic: Arithmetic, stored: Mapping[str, Tensor]) -> None:
        self._decoded = decode(config.view, stored)
        self._stored = stored
        self._arithmetic = arithmetic
        self._quant = QUANT_OF_VIEW[config.view]

    def take(self, name: str, *shape: int) -> Tensor:
        if name not in self._decoded:
            raise CheckpointError(f"{name}: missing")
        tensor = self._decoded.pop(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{name}: shape must be {shape} by config.json, got {tuple(tensor.shape)}")
        return tensor

    def linear(
        self, names_and_rows: list[tuple[str, int]], width: int, *, stack: Callable[[list[Tensor]], Tensor] = torch.cat
    ) -> Linear:
        """Matrices [rows, width] under one another (or stacked), as one layer."""
        names = [name for name, _ in names_and_rows]
        parts = [self.take(name, rows, width) for name, rows in names_and_rows]
        quant = self._quant if is_quantised(names[0]) else Quant.NONE
        scales = [self._stored.get(name.removesuffix("weight") + "input_scale") for name in names]
        scale = max((float(found) for found in scales if found is not None), default=1.0)
        return Linear(stack(parts), quant, self._arithmetic, input_scale=scale)


def _layer(source: _Source, config: ModelConfig, index: int) -> Layer:
    prefix, hidden, dim = f"model.layers.{index}.", config.hidden_size, config.head_dim
    attention = prefix + "self_attn."
    query_rows, kv_rows = config.heads * dim, config.kv_heads * dim
    qk_norm = None
    if config.qk_norm:
        query_norm = source.take(attention + "q_norm.weight", dim).expand(config.heads, dim)
        key_norm = source.take(attention + "k_norm.weight", dim).expand(config.kv_heads, dim)
        qk_norm = torch.cat([query_norm, key_norm])
    rows = [(f"{attention}{part}_proj.weight", kv_rows if part != "q" else query_rows) for part in "qkv"]
    return Layer(
        input_norm=source.take(prefix + "input_layernorm.weight", hidden),
        qkv=source.linear(rows, hidden),
        qk_norm=qk_norm,
        out=source.linear([(attention + "o_proj.weight", hidden)], query_rows),
        post_norm=source.take(prefix + "post_attention_layernorm.weight", hidden),
        mlp=_experts(source, config, prefix + "mlp.") if config.moe(index) else _mlp(source, config, prefix + "mlp."),
    )


def _mlp(source: _Source, config: ModelConfig, prefix: str, size: int | None = None) -> Mlp:
    inner = size or config.intermediate_size
    return Mlp(
        gate_up=source.linear(
            [(prefix + "gate_proj.weight", inner), (prefix + "up_proj.weight", inner)], config.hidden_size
        ),
        down=source.linear([(prefix + "down_proj.weight", config.hidden_size)], inner),
    )


def _experts(source: _Source, config: ModelConfig, prefix: str) -> Experts:
    router = source.linear([(prefix + "gate.weight", config.experts)], config.hidden_size)
    parts = [f"{prefix}experts.{expert}." for expert in range(config.experts)]
    if config.experts > DENSE_EXPERTS_MAX:
        return Experts(router, None, tuple(_mlp(source, config, part, config.expert_size) for part in parts))
    gate_up = [(f"{part}{half}_proj.weight", config.expert_size) for part in parts for half in ("gate", "up")]
    down = [(part + "down_proj.weight", config.hidden_size) for part in parts]
    dense = Mlp(source.linear(gate_up, config.hidden_size), source.linear(down, config.expert_size, stack=torch.stack))
    return Experts(router, dense, ())
