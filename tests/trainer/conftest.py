import os
import socket

import pytest


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def one_process():
    """A gang of one in this process."""
    import torch

    saved = {name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")}
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), RANK="0", WORLD_SIZE="1")
    torch.set_num_threads(1)
    from motley_trainer.megatron import parallel

    yield parallel.initialise(tensor=1, expert=1)
    torch.distributed.destroy_process_group()
    for name, value in saved.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture
def engine_of(one_process, tmp_path):
    """Engines on the tiny model, with its random weights."""
    import torch
    from motley_trainer.megatron.engine import AdamSettings, Engine
    from motley_weights.checkpoints import read_checkpoint
    from motley_weights.names import ModelShape
    from trainer.kit import write_model

    def make(*, clip: float = 1.0, rate: float = 1e-3, dtype=torch.float32, **config):
        checkpoint = read_checkpoint(write_model(tmp_path / "model", **config))
        engine = Engine(
            ModelShape.from_hf_config(checkpoint.config),
            one_process,
            AdamSettings(rate, 0.9, 0.98, 1e-8, 0.0, clip),
            dtype=dtype,
            context_length=128,
        )
        engine.load_weights(checkpoint.tensors)
        engine.build_optimizer()
        return engine

    return make
