"""Megatron's distributed checkpoint: one folder, every rank writes its shards, any parallel layout may read them."""

from __future__ import annotations

import queue
from pathlib import Path

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async

from motley_trainer.megatron import shims
from motley_trainer.megatron.engine import Engine


def save(engine: Engine, folder: Path) -> None:
    """Into an existing, empty folder that all ranks see. Returns when every rank's shards are written."""
    # Megatron passes results of its writer threads through a process of its own, for asynchronous saves: it takes seconds
    # to start, and outlives a trainer that is killed. A save that is waited for needs a plain queue.
    filesystem_async._results_queue = queue.Queue()
    with shims.cuda_means_cpu():
        dist_checkpointing.save(engine.sharded_state(loading=False), str(folder))
    dist.barrier()


def load(engine: Engine, folder: Path) -> None:
    with shims.cuda_means_cpu():
        engine.load_state(dist_checkpointing.load(engine.sharded_state(loading=True), str(folder)))
