"""One training process of the gang, as torchrun starts it: resume, then batch -> step -> publish -> ledger -> checkpoint."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from motley_api.resources.rlrun import TrainerDtype
from motley_weights.checkpoints import model_dir_files, read_checkpoint
from motley_weights.names import ModelShape
from motley_weights.publishing import DeltaPolicy
from motley_weights.store import WeightStore
from torch import Tensor

from motley_trainer import logs
from motley_trainer.buffer.batch import Batch, Notice
from motley_trainer.buffer.client import BufferClient
from motley_trainer.checkpoints import CheckpointFolder
from motley_trainer.publish import Publisher, bf16
from motley_trainer.recipe import learning_rate, recipe_of
from motley_trainer.settings import ENV_LEFT, ENV_SOCKET, Settings, from_environment
from motley_trainer.source import local_model

if TYPE_CHECKING:
    from motley_trainer.megatron.engine import Engine
    from motley_trainer.step import Outcome

log = logging.getLogger(__name__)

POLL_S = 5.0  # rank 0 waits for a batch this long at a time; between two waits the ranks agree to go on
DTYPES = {TrainerDtype.BF16: torch.bfloat16, TrainerDtype.FP16: torch.float16, TrainerDtype.FP32: torch.float32}
EVALUATION_LIMIT_S = 60.0  # of the last evaluation, after the last step

type Point = Callable[[str, int], None]
"""Called with a name and a step between any two effects: what fault-injection tests hook into."""


class Start(msgspec.Struct, frozen=True):
    """What rank 0 tells the others of the start."""

    step: int
    attempt: int


@dataclass
class Gang:
    """What the loop needs. `client` and `publisher` are rank 0's only."""

    settings: Settings
    engine: Engine
    checkpoints: CheckpointFolder
    client: BufferClient | None
    publisher: Publisher | None
    attempt: int
    durable: int
    stop: StopFlag
    at: Point
    notice: Notice


class StopFlag:
    """Set by SIGTERM: finish the step, save, leave."""

    def __init__(self) -> None:
        self.set = False

    def listen(self) -> None:
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        self.set = True


def run(settings: Settings, *, at: Point = lambda name, step: None) -> bool:
    """Trains to the last step. Returns False when it left early because it was asked to.

    The order matters: version 0, or the rewound pointers, are there before Megatron is even imported, so that samplers
    load while the optimizer is being built.
    """
    stop = StopFlag()
    stop.listen()
    first = int(os.environ.get("RANK", "0")) == 0
    model = local_model(settings.spec.model.source, settings.scratch)
    checkpoint = read_checkpoint(model)
    folder = CheckpointFolder(settings.durable_folder("checkpoints"), run_uid=settings.run_uid)
    client = BufferClient(os.environ[ENV_SOCKET]) if first else None
    publisher = Publisher(_store(settings), model_dir_files(model)) if first else None
    start = _start(folder, client, publisher, checkpoint.tensors, at) if first else None

    from motley_trainer.megatron import parallel

    spec = settings.spec.trainer
    place = parallel.initialise(tensor=spec.tensor_parallel, expert=spec.expert_parallel)
    told = parallel.broadcast_bytes(msgspec.msgpack.encode(start) if start else None)
    start = msgspec.msgpack.decode(told, type=Start)
    engine = _engine(settings, ModelShape.from_hf_config(checkpoint.config), place, checkpoint.tensors, folder, start)
    gang = Gang(settings, engine, folder, client, publisher, start.attempt, start.step, stop, at, Notice())
    if start.attempt < 0:
        gang.attempt = _catch_up(gang, start.step)
    at("started", start.step)
    return _loop(gang, start.step)


def _store(settings: Settings) -> WeightStore:
    """Versions between two anchors are deltas against the one before, whose files stay on this pod's own disk."""
    return WeightStore(settings.store_url, settings.run, deltas=DeltaPolicy(settings.scratch / "delta-cache"))


def _start(
    folder: CheckpointFolder,
    client: BufferClient | None,
    publisher: Publisher | None,
    source: Mapping[str, Tensor],
    at: Point,
) -> Start:
    """Rank 0: where to start from, and the weights of that step in every view. Attempt -1: some view lacks them, and they
    must come out of the checkpoint first."""
    assert client is not None
    assert publisher is not None
    step = folder.newest() or 0
    if publisher.lacking(step):
        if step > 0:
            return Start(step, -1)
        failed = publisher.publish(0, bf16((name, source[name]) for name in source))
        if "bf16" in failed:
            raise RuntimeError(f"version 0 could not be published: {failed['bf16']}")
    at("first-published", step)
    if not publisher.lacking(step):
        publisher.rewind(step)
    at("rewound", step)
    return Start(step, client.resume(step, step))


def _catch_up(gang: Gang, step: int) -> int:
    """Publishes the checkpoint's weights in the views that lack them, then rewinds the others. A collective."""
    attempt = b""
    tensors = gang.engine.hf_tensors()
    if gang.publisher is not None and gang.client is not None:
        gang.publisher.publish(step, tensors)
        gang.publisher.rewind(step)
        attempt = msgspec.msgpack.encode(gang.client.resume(step, step))
    else:
        _exhaust(tensors)
    from motley_trainer.megatron import parallel

    return msgspec.msgpack.decode(parallel.broadcast_bytes(attempt or None), type=int)


def _engine(
    settings: Settings,
    shape: ModelShape,
    place: Any,
    source: Mapping[str, Tensor],
    folder: CheckpointFolder,
    start: Start,
) -> Engine:
    from motley_trainer.megatron import checkpoint
    from motley_trainer.megatron.engine import AdamSettings, Engine

    spec, optimizer = settings.spec, settings.spec.algorithm.optimizer
    engine = Engine(
        shape,
        place,
        AdamSettings(
            learning_rate=float(optimizer.learning_rate),
            beta1=float(optimizer.beta1),
            beta2=float(optimizer.beta2),
            epsilon=float(optimizer.epsilon),
            weight_decay=float(optimizer.weight_decay),
            gradient_clip=float(optimizer.gradient_clip),
        ),
        dtype=DTYPES[spec.trainer.dtype],
        context_length=spec.model.context_length,
        expert=spec.trainer.expert_parallel,
    )
    engine.load_weights(source)
    if float(spec.algorithm.reference_kl):
        engine.keep_reference()
    engine.build_optimizer()
    if start.step > 0:
        checkpoint.load(engine, folder.path(start.step))
    return engine


# ------------------------------------------------------------------------------------------------ the loop
def _loop(gang: Gang, step: int) -> bool:
    while step < gang.settings.spec.steps:
        batch = _next_batch(gang, step + 1)
        if batch is None:
            if gang.durable < step:
                _save(gang, step)
            return False
        gang.at("batch", batch.step)
        step = _one_step(gang, batch)
    if gang.durable < step:
        _save(gang, step)
    if gang.client is not None:
        gang.client.wait_for_evaluation(limit_s=EVALUATION_LIMIT_S)
        gang.client.notice(msgspec.structs.replace(gang.notice, finished=True))
    gang.at("finished", step)
    return True


def _next_batch(gang: Gang, step: int) -> Batch | None:
    """The same batch on every rank; None when any rank was asked to stop."""
    from motley_trainer.megatron import parallel

    waited_s = 0.0
    while True:
        if not parallel.all_agree(not gang.stop.set):
            return None
        data: bytes | None = None
        if gang.client is not None:
            started_s = time.monotonic()
            batch = gang.client.next_batch(step, wait_s=POLL_S, waited_s=waited_s)
            waited_s += time.monotonic() - started_s
            data = b"" if batch is None else msgspec.msgpack.encode(batch)
        data = parallel.broadcast_bytes(data)
        if data:
            return msgspec.msgpack.decode(data, type=Batch)


def _one_step(gang: Gang, batch: Batch) -> int:
    from motley_trainer.step import step_record, train_step

    optimizer = gang.settings.spec.algorithm.optimizer
    started_unix_s, started_s = time.time(), time.monotonic()
    rate = learning_rate(float(optimizer.learning_rate), optimizer.warmup_steps, batch.step)
    outcome = train_step(gang.engine, batch, recipe_of(gang.settings.spec.algorithm), learning_rate=rate)
    trained_s = time.monotonic()
    gang.at("trained", batch.step)
    failed = _publish(gang, batch.step)
    published_s = time.monotonic()
    gang.at("published", batch.step)
    if gang.client is not None:
        record = step_record(
            outcome,
            batch,
            run=gang.settings.run,
            attempt=gang.attempt,
            started_unix_s=started_unix_s,
            train_s=trained_s - started_s,
            publish_s=published_s - trained_s,
        )
        gang.client.commit(record)
        _say(gang, batch.step, outcome, failed)
    gang.at("committed", batch.step)
    if batch.step % gang.settings.spec.checkpoint.every_steps == 0:
        _save(gang, batch.step)
    if gang.publisher is not None:
        gang.publisher.prune(gang.checkpoints.resumable())
    return batch.step


def _publish(gang: Gang, version: int) -> dict[str, str]:
    tensors = gang.engine.hf_tensors()
    if gang.publisher is None:
        _exhaust(tensors)
        return {}
    return gang.publisher.publish(version, tensors)


def _exhaust(tensors: Iterator[tuple[str, Tensor]]) -> None:
    for _ in tensors:
        pass


def _say(gang: Gang, step: int, outcome: Outcome, failed: Mapping[str, str]) -> None:
    """Log line, and the status' condition where it changed."""
    assert gang.client is not None
    assert gang.publisher is not None
    rewards = sum(g.reward.num for g in outcome.groups) / max(1.0, sum(g.reward.den for g in outcome.groups))
    kl = outcome.ratios["kl"]
    log.info(
        "event=step step=%d reward=%.4f kl=%.6f grad_norm=%.4f skipped=%s",
        step,
        rewards,
        kl.num / max(1.0, kl.den),
        outcome.grad_norm,
        str(outcome.skipped).lower(),
    )
    notice = Notice()
    if failed:
        reasons = "; ".join(f"{view}: {reason}" for view, reason in sorted(failed.items()))
        notice = Notice(
            condition="StoreUnavailable",
            message=f"version {step} was not published in {reasons}",
            weights_version=gang.publisher.newest_common(),
        )
    if outcome.skipped:
        groups = ", ".join(outcome.blamed) or "no single group (only their sum is not finite)"
        notice = Notice(
            condition="NonFiniteGradient",
            message=f"step {step} was skipped and the weights stayed: NaN or infinity came from {groups}",
            weights_version=notice.weights_version,
        )
    if notice != gang.notice:
        gang.client.notice(notice)
        gang.notice = notice


def _save(gang: Gang, step: int) -> None:
    """A checkpoint of `step`, complete and durable on return."""
    from motley_trainer.megatron import checkpoint, parallel

    if gang.client is not None:
        gang.checkpoints.begin(step)
    parallel.all_agree(True)  # the folder is there for every rank
    checkpoint.save(gang.engine, gang.checkpoints.path(step))
    gang.at("saved", step)
    if gang.client is not None and gang.publisher is not None:
        oldest = gang.checkpoints.complete(step, keep=gang.settings.spec.checkpoint.keep)
        gang.at("tracked", step)
        gang.client.durable(step, oldest)
    parallel.all_agree(True)
    gang.durable = step
    gang.at("durable", step)


def main() -> None:
    logs.configure("rank")
    settings = from_environment()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if not run(settings) and (left := os.environ.get(ENV_LEFT)):
        Path(left).touch()  # on every pod of the gang: none of them may look done to the Job
    sys.stdout.flush()


if __name__ == "__main__":
    main()
