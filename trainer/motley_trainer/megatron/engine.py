"""Model, gradients and optimizer behind a few plain calls; everything of Megatron that a training step needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from motley_weights.names import ModelShape, from_hf, to_hf
from torch import Tensor

from motley_trainer.megatron import shards, shims
from motley_trainer.megatron.model import build_model, transformer_config
from motley_trainer.megatron.parallel import Parallel, all_agree, padded_vocabulary

INITIAL_LOSS_SCALE = 2.0**16  # of FP16; doubled after a thousand steps without an overflow, halved at each


@dataclass(frozen=True)
class AdamSettings:
    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    gradient_clip: float  # 0: off


class Engine:
    """One rank's part of the policy and its optimizer."""

    def __init__(
        self,
        shape: ModelShape,
        parallel: Parallel,
        adam: AdamSettings,
        *,
        dtype: torch.dtype,
        context_length: int,
        expert: int = 1,
    ) -> None:
        self.shape = shape
        self.parallel = parallel
        self.dtype = dtype
        config = transformer_config(
            shape, tensor=parallel.tensor_size, expert=expert, dtype=dtype, context_length=context_length
        )
        self._bare = build_model(shape, config, context_length=context_length).to(shims.device())
        model = Float16Module(config, self._bare) if dtype is not torch.float32 else self._bare
        self._distributed = not shims.CPU and parallel.data_size > 1
        self._ddp = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(use_distributed_optimizer=self._distributed, overlap_grad_reduce=False),
            model,
        )
        self._adam = adam
        self._optimizer: Any = None
        self._reference: list[Tensor] = []

    # ------------------------------------------------------------------------------------------- weights
    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """From a whole Hugging Face checkpoint. Before the optimizer is built, which copies the parameters."""
        padded = padded_vocabulary(self.shape.vocabulary, self.parallel.tensor_size)
        whole = from_hf(self.shape, tensors, padded_vocabulary=padded)
        with torch.no_grad():
            for name, parameter in self._bare.named_parameters():
                part = shards.cut(name, whole[self._global_name(name)], *self._placement(name, parameter)[:3])
                parameter.copy_(part.to(parameter.dtype))

    def keep_reference(self) -> None:
        """Keeps a copy of the weights as they are now, in the model's dtype and on its device."""
        self._reference = [parameter.detach().clone() for parameter in self._bare.parameters()]

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Within, the model computes with the weights kept by keep_reference, without gradients."""
        own = [parameter.data for parameter in self._bare.parameters()]
        try:
            for parameter, kept in zip(self._bare.parameters(), self._reference, strict=True):
                parameter.data = kept
            with torch.no_grad():
                yield
        finally:
            for parameter, data in zip(self._bare.parameters(), own, strict=True):
                parameter.data = data

    def build_optimizer(self) -> None:
        """Slow the first time (it compiles nothing, but imports much): done after version 0 is published."""
        adam = self._adam
        config = OptimizerConfig(
            optimizer="adam",
            lr=adam.learning_rate,
            weight_decay=adam.weight_decay,
            adam_beta1=adam.beta1,
            adam_beta2=adam.beta2,
            adam_eps=adam.epsilon,
            clip_grad=adam.gradient_clip,
            params_dtype=self.dtype,
            bf16=self.dtype is torch.bfloat16,
            fp16=self.dtype is torch.float16,
            initial_loss_scale=INITIAL_LOSS_SCALE,
            min_loss_scale=1.0,
            hysteresis=1,
            use_distributed_optimizer=self._distributed,
        )
        with shims.cuda_means_cpu():
            self._optimizer = get_megatron_optimizer(config, [self._ddp], use_gloo_process_groups=False)

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, BF16 tensor) of the whole model under Hugging Face names. A collective: every rank must exhaust it."""
        yield from to_hf(self.shape, self._whole_tensors())

    def _whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._bare.named_parameters():
            local = parameter.detach().to(torch.bfloat16)
            dim, _, size, group = self._placement(name, parameter)
            whole = local if size == 1 else shards.merge(name, _gathered(local, group), dim)
            if ".local_experts." in name and parallel_state.get_expert_model_parallel_world_size() > 1:
                parts = _gathered(whole, parallel_state.get_expert_model_parallel_group())
                for rank, part in enumerate(parts):
                    yield self._global_name(name, rank), part
            else:
                yield name, whole

    def _placement(self, name: str, parameter: Tensor) -> tuple[int, int, int, Any]:
        """(dimension that is cut, this rank's part, number of parts, the group that holds them)."""
        if not getattr(parameter, "tensor_model_parallel", False):
            return 0, 0, 1, None
        if ".local_experts." in name:
            group = parallel_state.get_expert_tensor_parallel_group()
        else:
            group = parallel_state.get_tensor_model_parallel_group()
        return int(parameter.partition_dim), dist.get_rank(group), dist.get_world_size(group), group  # type: ignore[attr-defined]

    def _global_name(self, name: str, expert_rank: int | None = None) -> str:
        """Expert indexes in parameter names are local to the expert-parallel rank."""
        size = parallel_state.get_expert_model_parallel_world_size()
        if ".local_experts." not in name or size == 1:
            return name
        rank = parallel_state.get_expert_model_parallel_rank() if expert_rank is None else expert_rank
        head, tail = name.split(".local_experts.")
        index, rest = tail.split(".", 1)
        return f"{head}.local_experts.{int(index) + rank * (self.shape.experts // size)}.{rest}"

    # ------------------------------------------------------------------------------------------- a step
    def zero_gradients(self) -> None:
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()

    def hidden(self, tokens_BS: Tensor) -> tuple[Tensor, Tensor]:
        """(states [B * S, H] that go into the output layer, its weight [local vocabulary, H]), in the model's dtype. Rows in
        reading order; padding of the vocabulary is cut off. Every rank of the tensor group holds all states, and must put
        the whole of their gradient in."""
        batch, length = tokens_BS.shape
        positions_BS = torch.arange(length, device=tokens_BS.device)[None].expand(batch, -1)
        options = {} if self.dtype is torch.float32 else {"fp32_output": False}
        states_BSH: Tensor = self._ddp(tokens_BS, positions_BS, None, output_processor=_before_output_layer, **options)
        weight_VH = (
            self._bare.shared_embedding_or_output_weight() if self.shape.tied else self._bare.output_layer.weight
        )
        rows = self.parallel.vocab_shard(self.shape.vocabulary).size
        return states_BSH.flatten(0, 1), weight_VH if rows == weight_VH.shape[0] else weight_VH[:rows]

    def logits(self, tokens_BS: Tensor) -> Tensor:
        """[B * S, local vocabulary], in the model's dtype. Not Megatron's own, which come with a transposed copy, another
        in float32, and a gradient for each."""
        hidden_RH, weight_VH = self.hidden(tokens_BS)
        return F.linear(copy_to_tensor_model_parallel_region(hidden_RH), weight_VH)

    def scaled(self, loss: Tensor) -> Tensor:
        """What to call backward() on: under FP16 the loss times a scale that keeps small gradients above zero."""
        return loss * self._optimizer.get_loss_scale() if self.dtype is torch.float16 else loss

    def _scalers(self) -> list[Any]:
        """One for dense parameters, one for experts; they move together."""
        return [part.grad_scaler for part in getattr(self._optimizer, "chained_optimizers", [self._optimizer])]

    def lower_loss_scale(self) -> bool:
        """After FP16 gradients overflowed. Whether the scale could be lowered: no other dtype has one."""
        if self.dtype is not torch.float16:
            return False
        before = float(self._optimizer.get_loss_scale())
        with shims.cuda_means_cpu():
            for scaler in self._scalers():
                scaler.update(True)
        return float(self._optimizer.get_loss_scale()) < before

    def reduce_gradients(self) -> bool:
        """Sums gradients over the ranks. Whether they are all finite, on every rank."""
        finalize_model_grads([self._ddp])
        gradients = [p.main_grad for p in self._bare.parameters() if p.requires_grad]
        norms = torch.stack(torch._foreach_norm(gradients))
        return all_agree(bool(norms.isfinite().all()))

    def update(self, learning_rate: float) -> float:
        """One optimizer step. Returns the gradient norm before clipping."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        with shims.cuda_means_cpu():
            _, norm, _ = self._optimizer.step()
            if norm is None or self._adam.gradient_clip == 0:
                norm = self._optimizer.get_grad_norm()
        return float(norm)

    # ------------------------------------------------------------------------------------------- checkpoints
    def sharded_state(self, *, loading: bool) -> dict[str, Any]:
        state: dict[str, Any] = {"model": self._bare.sharded_state_dict()}
        metadata = {"distrib_optim_sharding_type": "fully_reshardable"} if self._distributed else None
        state["optimizer"] = self._optimizer.sharded_state_dict(state["model"], is_loading=loading, metadata=metadata)
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        self._bare.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])


def _before_output_layer(*, hidden_states: Tensor, config: TransformerConfig, **_: Any) -> Tensor:
    """GPTModel's output_processor: [S or this rank's part of it, B, H] to [B, S, H]."""
    if config.sequence_parallel:
        hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
    return hidden_states.transpose(0, 1)


def _gathered(tensor: Tensor, group: Any) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts
