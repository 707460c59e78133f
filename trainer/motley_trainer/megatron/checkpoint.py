"""Megatron's distributed checkpoint: one folder, every rank writes its shards, any parallel layout may read them."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue

from motley_trainer.megatron import shims
from motley_trainer.megatron.engine import Engine


def save(engine: Engine, folder: Path) -> None:
    """Into an existing, empty folder that all ranks see. Returns when every rank's shards are written."""
    if shims.CPU:
        # The writer's result queue lives in a manager process; spawning it imports this program again (13-24 s).
        get_write_results_queue("fork")
    with shims.cuda_means_cpu():
        dist_checkpointing.save(engine.sharded_state(loading=False), str(folder))
    dist.barrier()


def load(engine: Engine, folder: Path) -> None:
    with shims.cuda_means_cpu():
        engine.load_state(dist_checkpointing.load(engine.sharded_state(loading=True), str(folder)))
