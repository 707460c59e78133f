"""A Megatron GPTModel out of a Hugging Face config: Qwen3-MoE, Qwen3 and Llama shapes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from motley_weights.errors import UnsupportedModelError
from motley_weights.names import ModelShape
from torch import Tensor, nn

from motley_trainer.megatron.parallel import padded_vocabulary


class Attention(nn.Module):
    """core_attention put into the layer spec: torch's own kernel, no mask tensor, no CUDA random state.

    Query, key, value: [sequence, batch, heads, dim]; rows are padded at their end, so causal masking is all they need.
    """

    def __init__(self, config: TransformerConfig, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.size(1) != k.size(1)
        )
        return out.permute(2, 0, 1, 3).flatten(2)


class RMSNorm(nn.RMSNorm):
    """Norm put into the layer spec: Megatron's local one refuses sequence parallelism, which MoE with tensor parallelism
    demands. The attribute makes finalize_model_grads sum its gradient over the tensor group."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def transformer_config(
    shape: ModelShape, *, tensor: int, expert: int, dtype: torch.dtype, context_length: int
) -> TransformerConfig:
    """Errors: UnsupportedModelError for a RoPE scaling rule, which this builder has no rule for."""
    if shape.rope_scaling:
        raise UnsupportedModelError(
            f"config.json rope_scaling: must be null for training, got {dict(shape.rope_scaling)}"
        )
    sizes: dict[str, Any] = {}
    if shape.experts:
        sizes = {
            "num_moe_experts": shape.experts,
            "moe_router_topk": shape.experts_per_token,
            "moe_ffn_hidden_size": shape.expert_hidden,
            # softmax over the chosen equals softmax over all, then divided by the chosen ones' sum
            "moe_router_pre_softmax": not shape.normalise_expert_weights,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "allgather",
            "moe_grouped_gemm": False,
            "moe_layer_freq": [int(shape.has_experts(layer)) for layer in range(shape.layers)],
        }
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_hidden,
        qk_layernorm=shape.qk_norm,
        layernorm_epsilon=shape.rms_eps,
        add_bias_linear=False,
        add_qkv_bias=shape.attention_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=tensor,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=1 if expert > 1 else tensor,
        sequence_parallel=tensor > 1,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        use_cpu_initialization=True,
        perform_initialization=False,
        # Our loss carries the coefficient of every token, fixed for the whole batch: ranks' gradients are summed.
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        **sizes,
    )


def build_model(shape: ModelShape, config: TransformerConfig, *, context_length: int) -> GPTModel:
    if shape.attention_bias:
        raise UnsupportedModelError("config.json attention_bias: must be false for training")
    layers = [_layer_spec(shape, config, layer) for layer in range(shape.layers)]
    block = TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)
    return GPTModel(
        config,
        block,
        vocab_size=padded_vocabulary(shape.vocabulary, config.tensor_model_parallel_size),
        max_sequence_length=context_length,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        share_embeddings_and_output_weights=shape.tied,
        parallel_output=True,
    )


def _layer_spec(shape: ModelShape, config: TransformerConfig, layer: int) -> Any:
    spec = get_gpt_layer_local_spec(
        num_experts=shape.experts if shape.has_experts(layer) else None,
        moe_grouped_gemm=False,
        qk_layernorm=shape.qk_norm,
        normalization="RMSNorm",
    )
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = Attention
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec
