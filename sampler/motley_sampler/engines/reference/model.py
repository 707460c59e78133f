"""The decoder's forward pass over slots of a KV cache.

Legend: B = sequences of the batch, t = tokens of each in this step (padded), N = B * t, S = slots, T = positions of a slot,
L = keys read, D = hidden, H = query heads, J = key-value heads, G = H / J, d = head dimension, E = experts, F = expert size,
R = rows whose logits are wanted, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from motley_sampler.engines.reference.config import ModelConfig
from motley_sampler.engines.reference.precision import bf16, e4m3, split
from motley_sampler.engines.reference.weights import Experts, Layer, Mlp, Weights

KEY_BUCKET = 32  # keys are read in multiples of this, so that buffers of few sizes are reused


class KvCache:
    """Keys and values of S slots of T positions, and one more position per slot where padding goes. Float32 [S, J, T + 1, d]."""

    def __init__(self, config: ModelConfig, slots: int, positions: int) -> None:
        shape = (slots, config.kv_heads, positions + 1, config.head_dim)
        self.slots, self.positions = slots, positions
        self.keys = [torch.zeros(shape) for _ in range(config.layers)]
        self.values = [torch.zeros(shape) for _ in range(config.layers)]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        for plane in (*self.keys, *self.values):
            plane[target, :, :length] = plane[source, :, :length]


@dataclass(frozen=True)
class Step:
    """What all layers of one step share."""

    slots: Tensor  # [B]
    cache_rows: Tensor  # [N * J], rows of a cache plane seen as [S * J * (T + 1), d]
    keys_read: int
    hidden: Tensor  # [B, t, L], True where a key must not be seen
    cos: Tensor  # [N, 1, d]
    sin: Tensor  # [N, 1, d]
    batch: int
    tokens: int  # t


class Rope:
    """Rotary tables of positions 0..T, rounded as the model's dtype keeps them."""

    def __init__(self, config: ModelConfig, positions: int) -> None:
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        angles = torch.arange(positions + 1, dtype=torch.float32)[:, None] * (config.rope_theta**-half)[None]
        self.cos = torch.cat([angles.cos(), angles.cos()], -1)
        # The rotation's minus sign lives here: rotate_half(x) * sin == roll(x, d / 2) * signed sin.
        self.sin = torch.cat([-angles.sin(), angles.sin()], -1)


def plan_step(
    config: ModelConfig, cache: KvCache, rope: Rope, slots: Sequence[int], starts: Sequence[int], tokens: int
) -> Step:
    """Indices of a step in which sequence b writes positions starts[b] .. starts[b] + tokens - 1 of slot slots[b].

    Positions beyond the slot (padding only) fall on the slot's spare position.
    """
    slots_B = torch.tensor(slots)
    positions_Bt = torch.tensor(starts)[:, None] + torch.arange(tokens)
    positions_Bt.clamp_(max=cache.positions)
    heads = torch.arange(config.kv_heads)
    rows = (slots_B[:, None, None] * config.kv_heads + heads) * (cache.positions + 1) + positions_Bt[:, :, None]
    longest = min(max(starts) + tokens, cache.positions)
    keys_read = min(-(-longest // KEY_BUCKET) * KEY_BUCKET, cache.positions)
    flat = positions_Bt.flatten()
    return Step(
        slots=slots_B,
        cache_rows=rows.flatten(),
        keys_read=keys_read,
        hidden=torch.arange(keys_read) > positions_Bt[:, :, None],
        cos=rope.cos[flat][:, None],
        sin=rope.sin[flat][:, None],
        batch=len(slots),
        tokens=tokens,
    )


def forward(weights: Weights, cache: KvCache, step: Step, tokens_N: Tensor, rows_R: Tensor | None) -> Tensor:
    """Writes the step's keys and values, and returns logits [R, V] float32 of rows rows_R (None: all N)."""
    config, rounds = weights.config, not weights.arithmetic.exact
    x_ND = weights.embedding[tokens_N]
    for index, layer in enumerate(weights.layers):
        attended = _attention(weights, layer, cache.keys[index], cache.values[index], step, x_ND)
        x_ND = _round(x_ND + layer.out(attended), rounds)
        inner = _rms_norm(x_ND, layer.post_norm, config.rms_eps, rounds)
        mixed = (
            _experts(config, layer.mlp, inner, rounds)
            if isinstance(layer.mlp, Experts)
            else _mlp(layer.mlp, inner, rounds)
        )
        x_ND = _round(x_ND + mixed, rounds)
    if rows_R is not None:
        x_ND = x_ND[rows_R]
    x_RD = _rms_norm(x_ND, weights.norm, config.rms_eps, rounds)
    return weights.head.accumulate(x_RD) if weights.arithmetic.profile.fp32_head else weights.head(x_RD)


def full_logits(weights: Weights, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Logits [len, V] of each whole sequence in one pass over a cache of its own: no scheduler, no prefix reuse."""
    longest = max(len(sequence) for sequence in sequences)
    cache = KvCache(weights.config, len(sequences), longest)
    step = plan_step(
        weights.config, cache, Rope(weights.config, longest), range(len(sequences)), [0] * len(sequences), longest
    )
    padded = torch.tensor([[*sequence, *[0] * (longest - len(sequence))] for sequence in sequences])
    logits = split(forward(weights, cache, step, padded.flatten(), None), 0, (len(sequences), longest))
    return [logits[index, : len(sequence)] for index, sequence in enumerate(sequences)]


def _round(x: Tensor, rounds: bool) -> Tensor:
    return bf16(x) if rounds else x


def _rms_norm(x: Tensor, weight: Tensor, eps: float, rounds: bool) -> Tensor:
    # From the norm: the mean of squares needs no second array of x's size.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return _round((x * scale).mul_(weight), rounds)


def _attention(weights: Weights, layer: Layer, keys: Tensor, values: Tensor, step: Step, x_ND: Tensor) -> Tensor:
    """[N, D] -> [N, H * d]."""
    config, arithmetic = weights.config, weights.arithmetic
    rounds, dim, heads, kv_heads = not arithmetic.exact, config.head_dim, config.heads, config.kv_heads
    qkv = split(layer.qkv(_rms_norm(x_ND, layer.input_norm, config.rms_eps, rounds)), -1, (-1, dim))
    qk, v_NJd = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
    if layer.qk_norm is not None:
        qk = _rms_norm(qk, layer.qk_norm, config.rms_eps, rounds)
    qk = _round(qk * step.cos + qk.roll(dim // 2, -1) * step.sin, rounds)
    q_NHd, k_NJd = qk[:, :heads], qk[:, heads:]
    if arithmetic.fp8_kv and rounds:
        k_NJd, v_NJd = e4m3(k_NJd), e4m3(v_NJd)
    keys.view(-1, dim).index_copy_(0, step.cache_rows, k_NJd.reshape(-1, dim))
    values.view(-1, dim).index_copy_(0, step.cache_rows, v_NJd.reshape(-1, dim))
    k_BJLd = keys[:, :, : step.keys_read].index_select(0, step.slots)
    v_BJLd = values[:, :, : step.keys_read].index_select(0, step.slots)
    group, batch, tokens = heads // kv_heads, step.batch, step.tokens
    q = (q_NHd * dim**-0.5).view(batch, tokens, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    scores = q.reshape(batch, kv_heads, group * tokens, dim) @ k_BJLd.transpose(-1, -2)
    grouped = scores.view(batch, kv_heads, group, tokens, -1).masked_fill_(step.hidden[:, None, None], float("-inf"))
    probabilities = grouped.softmax(-1).view_as(scores)
    if rounds and arithmetic.profile.bf16_probabilities:
        probabilities = bf16(probabilities)
    mixed = (probabilities @ v_BJLd).view(batch, kv_heads, group, tokens, dim)
    return _round(mixed.permute(0, 3, 1, 2, 4).reshape(batch * tokens, heads * dim), rounds)


def _mlp(mlp: Mlp, x: Tensor, rounds: bool) -> Tensor:
    gate, up = mlp.gate_up(x).chunk(2, -1)
    return mlp.down(_round(functional.silu(gate) * up, rounds))


def _experts(config: ModelConfig, experts: Experts, x_ND: Tensor, rounds: bool) -> Tensor:
    """Softmax over all experts, the best k, renormalised if the model says so; each expert's part rounded, then summed."""
    probabilities_NE = experts.router(x_ND).softmax(-1)
    best, chosen = probabilities_NE.topk(config.experts_per_token, -1)
    if config.norm_topk:
        best = best / best.sum(-1, keepdim=True)
    if experts.dense is None:
        return _sparse_experts(experts.each, x_ND, best, chosen, rounds)
    share_NE = torch.zeros_like(probabilities_NE).scatter_(1, chosen, best)
    gate_up = split(experts.dense.gate_up(x_ND), -1, (config.experts, 2, config.expert_size))
    inner_NEF = _round(functional.silu(gate_up[:, :, 0]) * gate_up[:, :, 1], rounds)
    down = experts.dense.down
    y_END = down.accumulate(down.quantise(inner_NEF.transpose(0, 1)))
    return _round(_round(y_END * share_NE.T[:, :, None], rounds).sum(0), rounds)


def _sparse_experts(each: tuple[Mlp, ...], x_ND: Tensor, best_Nk: Tensor, chosen_Nk: Tensor, rounds: bool) -> Tensor:
    total = torch.zeros_like(x_ND)
    for expert in sorted(set(chosen_Nk.flatten().tolist())):
        rows, rank = (chosen_Nk == expert).nonzero(as_tuple=True)
        mlp = each[expert]
        gate, up = mlp.gate_up(x_ND[rows]).chunk(2, -1)
        inner = _round(functional.silu(gate) * up, rounds)
        part = mlp.down.accumulate(mlp.down.quantise(inner)) * best_Nk[rows, rank][:, None]
        total.index_add_(0, rows, _round(part, rounds))
    return _round(total, rounds)
