"""Tensor names: Megatron-core's GPTModel <-> Hugging Face's Qwen3, Qwen3-MoE and Llama. Pure and exact.

Legend: D = hidden, N = query heads, G = key/value heads (Megatron's query groups), H = head dimension, F = MLP width, V
= vocabulary.

Megatron's side is the whole model (tensor, pipeline and expert shards already merged), in either of two spellings:
- local spec: input_layernorm, pre_mlp_layernorm, mlp.experts.local_experts.<e>.linear_fc1.weight
- TransformerEngine spec: norms inside the next layer (linear_qkv.layer_norm_weight, linear_fc1.layer_norm_weight),
experts as
  mlp.experts.linear_fc1.weight<e>
`to_hf` reads both, `from_hf` writes the one it is told to.

Megatron's linear_qkv interleaves by query group: rows are, for each group, its N/G query heads, then its key head, then
its value head. linear_fc1 is gate rows, then up rows.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from motley_weights.errors import NamesError, UnsupportedModelError

# Architecture -> (per-head norms of query and key, may have experts)
_ARCHITECTURES = {
    "LlamaForCausalLM": (False, False),
    "Qwen3ForCausalLM": (True, False),
    "Qwen3MoeForCausalLM": (True, True),
}
SUPPORTED_ARCHITECTURES = tuple(sorted(_ARCHITECTURES))


class MegatronSpec(enum.Enum):
    """Which layer spec names the tensors."""

    LOCAL = "local"
    TRANSFORMER_ENGINE = "te"


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """What of a Hugging Face config the mapping, and a builder of the Megatron model, need."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_hidden: int  # of a dense MLP layer
    vocabulary: int
    tied: bool  # the head is the embedding
    qk_norm: bool
    attention_bias: bool
    rms_eps: float
    rope_theta: float
    rope_scaling: tuple[tuple[str, Any], ...]  # sorted items of the scaling rule; empty for plain RoPE
    max_positions: int
    experts: int = 0  # 0: every layer is dense
    experts_per_token: int = 0
    expert_hidden: int = 0
    normalise_expert_weights: bool = False  # the chosen experts' probabilities are made to sum to 1
    dense_layers: frozenset[int] = frozenset()  # layers without experts in a model that has them

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """From a config.json's content. UnsupportedModelError for another architecture; NamesError for a missing or bad
        field.
        """
        names = config.get("architectures") or ["(none given)"]
        architecture = names[0]
        if architecture not in _ARCHITECTURES:
            raise UnsupportedModelError(
                f"config.json architectures: must be one of {', '.join(SUPPORTED_ARCHITECTURES)}, got {architecture}"
            )
        qk_norm, may_have_experts = _ARCHITECTURES[architecture]
        hidden = _positive(config, "hidden_size")
        heads = _positive(config, "num_attention_heads")
        layers = _positive(config, "num_hidden_layers")
        kv_heads = config.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise NamesError(
                f"config.json num_key_value_heads: must divide num_attention_heads {heads}, got {kv_heads}"
            )
        rope_theta, rope_scaling = _rope(config)
        experts = _positive(config, "num_experts", "num_local_experts") if may_have_experts else 0
        return cls(
            architecture=architecture,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=config.get("head_dim") or hidden // heads,
            ffn_hidden=_positive(config, "intermediate_size"),
            vocabulary=_positive(config, "vocab_size"),
            tied=bool(config.get("tie_word_embeddings", False)),
            qk_norm=qk_norm,
            attention_bias=bool(config.get("attention_bias", False)),
            rms_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_positions=_positive(config, "max_position_embeddings"),
            experts=experts,
            experts_per_token=_positive(config, "num_experts_per_tok") if experts else 0,
            expert_hidden=_positive(config, "moe_intermediate_size") if experts else 0,
            normalise_expert_weights=bool(config.get("norm_topk_prob", False)),
            dense_layers=_dense_layers(config, layers) if experts else frozenset(),
        )

    def has_experts(self, layer: int) -> bool:
        return self.experts > 0 and layer not in self.dense_layers

    @property
    def qkv_rows(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


def to_hf(
    shape: ModelShape, megatron: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face (name, tensor) pairs of merged Megatron tensors, streamed in the given order.

    Splits are views where rows lie together, else copies. Vocabulary padding is cut off; the output layer of a tied
    model and Megatron's non-tensor "_extra_state" are left out. NamesError names any tensor that has no place or a
    wrong shape.
    """
    pairs = megatron.items() if isinstance(megatron, Mapping) else megatron
    for name, tensor in pairs:
        if name.endswith("._extra_state") or name.startswith("rotary_pos_emb."):
            continue
        yield from _one_to_hf(shape, name.removeprefix("module."), tensor)


def from_hf(
    shape: ModelShape,
    hf_tensors: Mapping[str, Tensor],
    *,
    spec: MegatronSpec = MegatronSpec.LOCAL,
    padded_vocabulary: int | None = None,
) -> dict[str, Tensor]:
    """Merged Megatron tensors of a whole Hugging Face checkpoint; the inverse of `to_hf`.

    padded_vocabulary: rows of embedding and output layer when Megatron pads them (zeros are appended). NamesError when
    a tensor is missing, left over, or has another shape than the config says.
    """
    rows = shape.vocabulary if padded_vocabulary is None else padded_vocabulary
    if rows < shape.vocabulary:
        raise NamesError(f"padded_vocabulary: must be >= vocabulary {shape.vocabulary}, got {rows}")
    wanted = expected_shapes(shape)
    _check_complete(shape, hf_tensors, wanted)

    def take(name: str) -> Tensor:
        tensor = hf_tensors[name]  # may load from disk: once each
        if tuple(tensor.shape) != wanted[name]:
            raise NamesError(f"{name}: must have shape {wanted[name]}, got {tuple(tensor.shape)}")
        return tensor

    megatron = {"embedding.word_embeddings.weight": _pad_rows(take("model.embed_tokens.weight"), rows)}
    for layer in range(shape.layers):
        megatron.update(_layer_from_hf(shape, layer, take, spec))
    megatron["decoder.final_layernorm.weight"] = take("model.norm.weight")
    if not shape.tied:
        megatron["output_layer.weight"] = _pad_rows(take("lm_head.weight"), rows)
    return megatron


def expected_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of the Hugging Face checkpoint and its shape, in the order that a checkpoint usually has."""
    names: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, shape.hidden)}
    for layer in range(shape.layers):
        names.update(_layer_shapes(shape, layer))
    names["model.norm.weight"] = (shape.hidden,)
    if not shape.tied:
        names["lm_head.weight"] = (shape.vocabulary, shape.hidden)
    return names


def split_qkv(shape: ModelShape, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """linear_qkv [(N + 2G) x H, ...] -> q [N x H, ...], k [G x H, ...], v [G x H, ...]; weight or bias."""
    per_group = shape.heads // shape.kv_heads
    grouped = qkv.reshape(shape.kv_heads, per_group + 2, shape.head_dim, *qkv.shape[1:])
    q, k, v = grouped[:, :per_group], grouped[:, per_group], grouped[:, per_group + 1]
    return q.flatten(0, 2).contiguous(), k.flatten(0, 1).contiguous(), v.flatten(0, 1).contiguous()


def merge_qkv(shape: ModelShape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The inverse of `split_qkv`."""
    parts = [part.reshape(shape.kv_heads, -1, shape.head_dim, *part.shape[1:]) for part in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 2)


# ---------------------------------------------------------------- Megatron -> Hugging Face

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)")
_RENAMED = {  # inside a layer: same tensor, other name
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
}


def _one_to_hf(shape: ModelShape, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if name == "embedding.word_embeddings.weight":
        yield _checked(shape, name, "model.embed_tokens.weight", tensor[: shape.vocabulary])
    elif name == "output_layer.weight":
        if not shape.tied:
            yield _checked(shape, name, "lm_head.weight", tensor[: shape.vocabulary])
    elif name == "decoder.final_layernorm.weight":
        yield _checked(shape, name, "model.norm.weight", tensor)
    elif match := _LAYER.fullmatch(name):
        prefix = f"model.layers.{match[1]}."
        for hf_name, part in _layer_to_hf(shape, name, match[2], tensor):
            yield _checked(shape, name, prefix + hf_name, part)
    else:
        raise NamesError(f"{name}: not a tensor of a Megatron GPTModel that maps to {shape.architecture}")


def _layer_to_hf(shape: ModelShape, name: str, inner: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if inner in _RENAMED:
        yield _RENAMED[inner], tensor
    elif inner in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
        if tensor.shape[0] != shape.qkv_rows:
            raise NamesError(f"{name}: must have {shape.qkv_rows} rows, got {tuple(tensor.shape)}")
        kind = inner.rsplit(".", 1)[1]
        for letter, part in zip("qkv", split_qkv(shape, tensor), strict=True):
            yield f"self_attn.{letter}_proj.{kind}", part
    elif inner == "mlp.linear_fc1.weight":
        yield from _gate_up("mlp", name, tensor)
    elif match := _LOCAL_EXPERT.fullmatch(inner):
        yield from _expert(int(match[1]), match[2], name, tensor)
    elif match := _GROUPED_EXPERT.fullmatch(inner):
        yield from _expert(int(match[2]), match[1], name, tensor)
    else:
        raise NamesError(f"{name}: not a tensor of a Megatron GPTModel that maps to {shape.architecture}")


def _expert(expert: int, linear: str, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    prefix = f"mlp.experts.{expert}"
    if linear == "linear_fc1":
        yield from _gate_up(prefix, name, tensor)
    else:
        yield f"{prefix}.down_proj.weight", tensor


def _gate_up(prefix: str, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if tensor.shape[0] % 2:
        raise NamesError(f"{name}: must have an even number of rows (gate, then up), got {tuple(tensor.shape)}")
    gate, up = tensor.chunk(2, dim=0)
    yield f"{prefix}.gate_proj.weight", gate
    yield f"{prefix}.up_proj.weight", up


def _checked(shape: ModelShape, megatron_name: str, hf_name: str, tensor: Tensor) -> tuple[str, Tensor]:
    want = _expected_shape(shape, hf_name)
    if want is None:
        raise NamesError(f"{megatron_name}: {shape.architecture} with this config has no tensor {hf_name}")
    if tuple(tensor.shape) != want:
        raise NamesError(f"{megatron_name}: {hf_name} must have shape {want}, got {tuple(tensor.shape)}")
    return hf_name, tensor


# ---------------------------------------------------------------- Hugging Face -> Megatron


def _layer_from_hf(
    shape: ModelShape, layer: int, take: Callable[[str], Tensor], spec: MegatronSpec
) -> Iterator[tuple[str, Tensor]]:
    prefix, hf = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    fused = spec is MegatronSpec.TRANSFORMER_ENGINE
    input_norm = "self_attention.linear_qkv.layer_norm_weight" if fused else "input_layernorm.weight"
    yield prefix + input_norm, take(hf + "input_layernorm.weight")
    for kind in ("weight", "bias") if shape.attention_bias else ("weight",):
        q, k, v = (take(f"{hf}self_attn.{letter}_proj.{kind}") for letter in "qkv")
        yield f"{prefix}self_attention.linear_qkv.{kind}", merge_qkv(shape, q, k, v)
        yield f"{prefix}self_attention.linear_proj.{kind}", take(f"{hf}self_attn.o_proj.{kind}")
    if shape.qk_norm:
        for letter in "qk":
            yield f"{prefix}self_attention.{letter}_layernorm.weight", take(f"{hf}self_attn.{letter}_norm.weight")
    if shape.has_experts(layer):
        yield prefix + "pre_mlp_layernorm.weight", take(hf + "post_attention_layernorm.weight")
        yield prefix + "mlp.router.weight", take(hf + "mlp.gate.weight")
        for expert in range(shape.experts):
            source = f"{hf}mlp.experts.{expert}."
            for linear, tensor in _mlp_from_hf(source, take):
                inner = (
                    f"experts.{linear}.weight{expert}" if fused else f"experts.local_experts.{expert}.{linear}.weight"
                )
                yield f"{prefix}mlp.{inner}", tensor
        return
    mlp_norm = "mlp.linear_fc1.layer_norm_weight" if fused else "pre_mlp_layernorm.weight"
    yield prefix + mlp_norm, take(hf + "post_attention_layernorm.weight")
    for linear, tensor in _mlp_from_hf(hf + "mlp.", take):
        yield f"{prefix}mlp.{linear}.weight", tensor


def _mlp_from_hf(source: str, take: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield "linear_fc1", torch.cat((take(source + "gate_proj.weight"), take(source + "up_proj.weight")))
    yield "linear_fc2", take(source + "down_proj.weight")


def _pad_rows(tensor: Tensor, rows: int) -> Tensor:
    missing = rows - tensor.shape[0]
    return tensor if missing == 0 else torch.nn.functional.pad(tensor, (0, 0, 0, missing))


def _check_complete(shape: ModelShape, tensors: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]]) -> None:
    missing = [name for name in wanted if name not in tensors]
    if missing:
        raise NamesError(f"{len(missing)} tensors of {shape.architecture} missing, the first: {missing[0]}")
    # Some tied checkpoints carry the head as well; it is the embedding.
    extra = sorted(set(tensors) - set(wanted) - ({"lm_head.weight"} if shape.tied else set()))
    extra = [name for name in extra if not name.endswith("rotary_emb.inv_freq")]
    if extra:
        raise NamesError(f"{len(extra)} tensors that {shape.architecture} does not have, the first: {extra[0]}")


# ---------------------------------------------------------------- what a checkpoint holds


def _layer_shapes(shape: ModelShape, layer: int) -> dict[str, tuple[int, ...]]:
    prefix = f"model.layers.{layer}."
    inner = _attention_shapes(shape)
    if shape.has_experts(layer):
        inner["mlp.gate.weight"] = (shape.experts, shape.hidden)
        for expert in range(shape.experts):
            inner.update(_mlp_shapes(f"mlp.experts.{expert}.", shape.hidden, shape.expert_hidden))
    else:
        inner.update(_mlp_shapes("mlp.", shape.hidden, shape.ffn_hidden))
    return {prefix + name: size for name, size in inner.items()}


def _attention_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    q, kv, hidden = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.hidden
    sizes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    for name, (rows, columns) in {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}.items():
        sizes[f"self_attn.{name}_proj.weight"] = (rows, columns)
        if shape.attention_bias:
            sizes[f"self_attn.{name}_proj.bias"] = (rows,)
    if shape.qk_norm:
        sizes["self_attn.q_norm.weight"] = sizes["self_attn.k_norm.weight"] = (shape.head_dim,)
    sizes["post_attention_layernorm.weight"] = (hidden,)
    return sizes


def _mlp_shapes(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (width, hidden),
        f"{prefix}up_proj.weight": (width, hidden),
        f"{prefix}down_proj.weight": (hidden, width),
    }


_HF_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_HF_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.((?:gate|up|down)_proj\.weight)")


def _expected_shape(shape: ModelShape, hf_name: str) -> tuple[int, ...] | None:
    """The shape of one tensor; None when the model has none of that name."""
    match = _HF_LAYER.fullmatch(hf_name)
    if match is None:
        return {
            "model.embed_tokens.weight": (shape.vocabulary, shape.hidden),
            "lm_head.weight": (shape.vocabulary, shape.hidden),
            "model.norm.weight": (shape.hidden,),
        }.get(hf_name)
    layer, inner = int(match[1]), match[2]
    if layer >= shape.layers:
        return None
    if expert := _HF_EXPERT.fullmatch(inner):
        if not shape.has_experts(layer) or int(expert[1]) >= shape.experts:
            return None
        return _mlp_shapes("", shape.hidden, shape.expert_hidden)[expert[2]]
    if shape.has_experts(layer):
        return {**_attention_shapes(shape), "mlp.gate.weight": (shape.experts, shape.hidden)}.get(inner)
    return {**_attention_shapes(shape), **_mlp_shapes("mlp.", shape.hidden, shape.ffn_hidden)}.get(inner)


def _positive(config: Mapping[str, Any], field: str, newer_name: str = "") -> int:
    """A size under its name, or under the one that newer versions of transformers write."""
    value = config.get(field, config.get(newer_name))
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise NamesError(f"config.json {field}: must be a positive integer, got {value!r}")
    return value


def _rope(config: Mapping[str, Any]) -> tuple[float, tuple[tuple[str, Any], ...]]:
    """(theta, scaling) from transformers 5's rope_parameters or the older rope_theta and rope_scaling."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = parameters.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    return float(theta), () if kind == "default" else tuple(sorted(parameters.items()))


def _dense_layers(config: Mapping[str, Any], layers: int) -> frozenset[int]:
    """Layers with a dense MLP, by Qwen3-MoE's mlp_only_layers and decoder_sparse_step."""
    only = frozenset(config.get("mlp_only_layers") or ())
    step = config.get("decoder_sparse_step") or 1
    return frozenset(layer for layer in range(layers) if layer in only or (layer + 1) % step)
