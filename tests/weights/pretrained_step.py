"""`python pretrained_step.py FOLDER`: one step of the trainer on a Hugging Face folder; prints what came of it, as JSON."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import torch
from motley_api.resources.rlrun import Algorithm
from trainer.kit import make_trajectory, make_work

LEARNING_RATE = 1e-6


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
    from motley_trainer.buffer.batch import Batch
    from motley_trainer.megatron import parallel
    from motley_trainer.megatron.engine import AdamSettings, Engine
    from motley_trainer.recipe import recipe_of
    from motley_trainer.step import train_step
    from motley_weights.checkpoints import read_checkpoint
    from motley_weights.names import ModelShape

    place = parallel.initialise(tensor=1, expert=1)
    checkpoint = read_checkpoint(folder)
    engine = Engine(
        ModelShape.from_hf_config(checkpoint.config),
        place,
        AdamSettings(LEARNING_RATE, 0.9, 0.98, 1e-8, 0.0, 1.0),
        dtype=torch.float32,
        context_length=128,
    )
    engine.load_weights(checkpoint.tensors)
    before = {name: tensor.clone() for name, tensor in engine.hf_tensors()}
    assert all(torch.equal(before[name], checkpoint.tensors[name]) for name in before)
    engine.build_optimizer()
    batch = Batch(
        step=1, waited_s=0.0, replayed=False, trajectories=[make_trajectory(make_work(1), s) for s in range(2)]
    )
    algorithm = Algorithm.model_validate({"importanceSampling": {"mode": "None"}})
    outcome = train_step(engine, batch, recipe_of(algorithm), learning_rate=LEARNING_RATE)
    after = dict(engine.hf_tensors())
    changed = sum(int((after[name] != before[name]).sum()) for name in before)
    print(
        json.dumps(
            {
                "finite": all(bool(tensor.isfinite().all()) for tensor in after.values()) and not outcome.skipped,
                "grad_norm": outcome.grad_norm,
                "changed_share": changed / sum(tensor.numel() for tensor in before.values()),
                "tensors": len(after),
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
