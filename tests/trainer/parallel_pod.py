"""`python parallel_pod.py ROOT`: the same two steps under several layouts, each in forked processes over gloo. Writes
ROOT/<layout>.json, the resulting weights, and a checkpoint."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import torch
from motley_api.resources.rlrun import Algorithm
from trainer.kit import make_trajectory, make_work

# name: (processes, tensor parallel, expert parallel, checkpoint to start from)
LAYOUTS = {
    "one": (1, 1, 1, None),
    "data-2": (2, 1, 1, None),
    "tensor-2": (2, 2, 1, None),
    "expert-2": (2, 1, 2, None),
    "one-from-tensor-2": (1, 1, 1, "tensor-2"),
    "tensor-2-from-one": (2, 2, 1, "one"),
}


def batch(step: int):
    from motley_trainer.buffer.batch import Batch

    groups = ("h100-fp8", "b200-nvfp4")
    return Batch(
        step=step,
        waited_s=0.0,
        replayed=False,
        trajectories=[
            make_trajectory(make_work(10 * step + p), s, group=groups[s % 2]) for p in range(3) for s in range(3)
        ],
    )


def work(root: Path, name: str, rank: int, port: int) -> None:
    processes, tensor, expert, source = LAYOUTS[name]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(processes))
    from motley_trainer.megatron import checkpoint, parallel
    from motley_trainer.megatron.engine import AdamSettings, Engine
    from motley_trainer.recipe import recipe_of
    from motley_trainer.step import train_step
    from motley_weights.checkpoints import read_checkpoint
    from motley_weights.names import ModelShape
    from safetensors.torch import save_file

    model = read_checkpoint(root / "model")
    place = parallel.initialise(tensor=tensor, expert=expert)
    engine = Engine(
        ModelShape.from_hf_config(model.config),
        place,
        AdamSettings(1e-2, 0.9, 0.98, 1e-3, 0.0, 1.0),  # a large epsilon: Adam's first step must not blow rounding up
        dtype=torch.float32,
        context_length=128,
        expert=expert,
    )
    engine.load_weights(model.tensors)
    engine.build_optimizer()
    if source is not None:
        checkpoint.load(engine, root / f"checkpoint-{source}")
    results = []
    for recipe in (recipe_of(Algorithm()), recipe_of(Algorithm.model_validate({"maskReplay": "Disabled"}))):
        step = len(results) + 1
        outcome = train_step(engine, batch(step), recipe, learning_rate=1e-2, max_tokens=100)
        kl = outcome.ratios["kl"]
        results.append([outcome.loss, outcome.grad_norm, kl.num, kl.den, outcome.groups[0].ess.num])
        if step == 1 and source is None:
            if rank == 0:
                (root / f"checkpoint-{name}").mkdir()
            parallel.all_agree(True)
            checkpoint.save(engine, root / f"checkpoint-{name}")
            parallel.broadcast_bytes(b"hello" if rank == 0 else None)
    weights = dict(engine.hf_tensors())
    told = parallel.broadcast_bytes(b"\0\1told" if rank == 0 else None)
    if rank == 0:
        save_file(weights, root / f"{name}.safetensors")
        (root / f"{name}.json").write_text(json.dumps({"steps": results, "told": told.hex()}))


def main(root: Path) -> None:
    torch.set_num_threads(1)

    for name, (processes, *_) in LAYOUTS.items():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        children = []
        for rank in range(processes):
            child = os.fork()
            if child == 0:
                try:
                    work(root, name, rank, port)
                except BaseException:
                    import traceback

                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(name, codes, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
