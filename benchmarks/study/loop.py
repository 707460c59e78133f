"""One arm with one seed: sample, train, publish, and a ledger record of every step, as the product's trainer writes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from motley_api.records import StepRecord
from motley_sampler.engines.protocol import SamplingParams
from motley_sampler.rollout.language import load_language
from motley_trainer.buffer.batch import Batch
from motley_trainer.megatron import shims
from motley_trainer.recipe import learning_rate, recipe_of
from motley_weights.checkpoints import read_checkpoint
from motley_weights.names import ModelShape

from benchmarks.study.episodes import Rollouts
from benchmarks.study.plan import FLEETS, Arm, Settings
from benchmarks.study.sampling import Fleet

shims.apply()

from motley_trainer.megatron import parallel  # noqa: E402
from motley_trainer.megatron.engine import AdamSettings, Engine  # noqa: E402
from motley_trainer.step import step_record, train_step  # noqa: E402


def run(
    arm: Arm,
    seed: int,
    settings: Settings,
    model: Path,
    *,
    on_step: Callable[[StepRecord], None],
    clock: Callable[[], float] = time.time,
) -> None:
    """Stops early only when nothing finite is left to train on."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    checkpoint = read_checkpoint(model)
    recipe, algorithm = recipe_of(arm.algorithm), arm.algorithm
    engine = _trainer(arm, settings, ModelShape.from_hf_config(checkpoint.config))
    engine.load_weights(checkpoint.tensors)
    engine.build_optimizer()
    language = load_language(model)
    fleet = Fleet(FLEETS[arm.fleet], checkpoint.config, list(checkpoint.tensors), settings)
    fleet.publish(0, engine.hf_tensors())
    sampling = SamplingParams(
        temperature=float(algorithm.sampling.temperature),
        top_p=float(algorithm.sampling.top_p),
        top_k=algorithm.sampling.top_k,
        max_new_tokens=settings.tokens_per_turn,
        stop_token_ids=list(language.stop_ids),
    )
    name = f"{arm.name}-s{seed}"
    rollouts = Rollouts(fleet, language, settings, sampling, run=name, seed=seed)
    for step in range(1, settings.steps + 1):
        started = clock()
        trajectories = rollouts.at(step)
        sampled = clock()
        batch = Batch(
            step=step,
            waited_s=sampled - started,
            replayed=False,
            trajectories=[t for t in trajectories if t.reward is not None],
        )
        if not batch.trajectories:
            return
        rate = learning_rate(float(settings.learning_rate), settings.warmup_steps, step)
        outcome = train_step(engine, batch, recipe, learning_rate=rate)
        trained = clock()
        fleet.publish(step, engine.hf_tensors())
        on_step(
            step_record(
                outcome,
                batch,
                run=name,
                attempt=0,
                started_unix_s=started,
                train_s=trained - sampled,
                publish_s=clock() - trained,
            )
        )


def _trainer(arm: Arm, settings: Settings, shape: ModelShape) -> Engine:
    if not dist.is_initialized():
        # One process: a store in memory stands in for torchrun's rendezvous.
        dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    optimizer = arm.algorithm.optimizer
    return Engine(
        shape,
        parallel.initialise(tensor=1, expert=1),
        AdamSettings(
            learning_rate=float(settings.learning_rate),
            beta1=float(optimizer.beta1),
            beta2=float(optimizer.beta2),
            epsilon=float(optimizer.epsilon),
            weight_decay=float(optimizer.weight_decay),
            gradient_clip=float(optimizer.gradient_clip),
        ),
        dtype=torch.float32,
        context_length=settings.context_tokens,
    )
