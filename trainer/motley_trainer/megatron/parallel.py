"""Process groups: what is parallel over what."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker

from motley_trainer.losses import VocabShard
from motley_trainer.megatron import shims


@dataclass(frozen=True)
class Parallel:
    """This rank's place. data_* are over everything that holds the same parameters and other sequences."""

    rank: int
    world: int
    data_rank: int
    data_size: int
    tensor_rank: int
    tensor_size: int

    def vocab_shard(self, vocabulary: int) -> VocabShard:
        """The part of an unpadded vocabulary that this rank's output layer holds."""
        size = padded_vocabulary(vocabulary, self.tensor_size) // self.tensor_size
        start = self.tensor_rank * size
        group = parallel_state.get_tensor_model_parallel_group() if self.tensor_size > 1 else None
        return VocabShard(start, max(0, min(size, vocabulary - start)), group)


def padded_vocabulary(vocabulary: int, tensor_size: int) -> int:
    return -(-vocabulary // tensor_size) * tensor_size


def initialise(*, tensor: int, expert: int, timeout_s: float = 600.0) -> Parallel:
    """Joins the process group of torchrun's environment and builds Megatron's groups.

    Errors: ValueError when tensor or expert parallelism does not divide the world.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world % tensor or (world // tensor) % expert:
        raise ValueError(
            f"trainer.tensorParallel {tensor} x trainer.expertParallel {expert} must divide {world} processes"
        )
    if not shims.CPU:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        dist.init_process_group("gloo" if shims.CPU else "nccl", timeout=datetime.timedelta(seconds=timeout_s))
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor,
        1,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=1 if expert > 1 else None,
        create_gloo_process_groups=False,
    )
    # Its fork() is a null context: without dropout nothing asks for per-rank random states, CUDA's or others.
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    return Parallel(
        rank=dist.get_rank(),
        world=world,
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=tensor,
    )


def sum_over_data(values: torch.Tensor) -> torch.Tensor:
    if parallel_state.get_data_parallel_world_size() > 1:
        dist.all_reduce(values, group=parallel_state.get_data_parallel_group())
    return values


def all_agree(flag: bool) -> bool:
    """Whether `flag` holds on every rank."""
    if dist.get_world_size() == 1:
        return flag
    value = torch.tensor([int(flag)], device=shims.device())
    dist.all_reduce(value, op=dist.ReduceOp.MIN)
    return bool(value.item())


def broadcast_bytes(data: bytes | None) -> bytes:
    """Rank 0's bytes, on every rank."""
    if dist.get_world_size() == 1:
        assert data is not None
        return data
    size = torch.tensor([len(data) if data is not None else 0], device=shims.device())
    dist.broadcast(size, 0)
    if data is not None:
        body = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8).to(shims.device())
    else:
        body = torch.empty(max(1, int(size)), dtype=torch.uint8, device=shims.device())
    dist.broadcast(body, 0)
    return body.cpu().numpy().tobytes()[: int(size)]
