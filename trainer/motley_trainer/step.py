"""One optimizer step on one batch."""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

from motley_api.records import EndedBy, GroupStep, Ratio, StepRecord
from torch import Tensor

from motley_trainer.batches import (
    Sequence,
    build_microbatch,
    build_sequences,
    plan_microbatches,
    share_of_rank,
)
from motley_trainer.buffer.batch import Batch
from motley_trainer.losses import Objective, Tokens, TokenStats, token_losses, token_losses_from_hidden
from motley_trainer.megatron import shims
from motley_trainer.megatron.engine import Engine
from motley_trainer.megatron.parallel import all_agree, sum_over_data
from motley_trainer.recipe import Recipe
from motley_trainer.tally import Column, Table, group_steps, named_metrics, run_ratios, splits_of

MICROBATCH_TOKENS = 16_384


@dataclass(frozen=True)
class Outcome:
    """What a step did. `blamed`: groups whose samples made the gradient non-finite; only when skipped."""

    loss: float
    grad_norm: float
    skipped: bool
    blamed: tuple[str, ...]
    groups: list[GroupStep]
    ratios: dict[str, Ratio]
    metrics: dict[str, float]


def train_step(
    engine: Engine, batch: Batch, recipe: Recipe, *, learning_rate: float, max_tokens: int = MICROBATCH_TOKENS
) -> Outcome:
    """Batch -> sequences -> microbatches -> gradients -> one update, or none when a gradient is not finite."""
    sequences = build_sequences(batch.trajectories, recipe, step=batch.step)
    table, finite = _gradients(engine, sequences, recipe, max_tokens=max_tokens)
    norm = engine.update(learning_rate) if finite else float("nan")
    blamed = () if finite else blame(engine, sequences, recipe, max_tokens=max_tokens)
    return Outcome(
        loss=table.row("all")[Column.LOSS],
        grad_norm=norm,
        skipped=not finite,
        blamed=blamed,
        groups=group_steps(table, sequences, batch.tallies),
        ratios=run_ratios(table, replay=recipe.objective.replay),
        metrics=named_metrics(table, sequences, recipe.objective),
    )


def _gradients(engine: Engine, sequences: Many[Sequence], recipe: Recipe, *, max_tokens: int) -> tuple[Table, bool]:
    """(sums, whether losses and gradients are finite). An overflow of FP16's loss scale is no fault of the batch: it is
    computed again at a lower scale."""
    while True:
        table = accumulate(engine, sequences, range(len(sequences)), recipe, max_tokens=max_tokens)
        # A loss that is not finite may leave finite gradients behind where a weight of 0 meets it: both are looked at.
        sound, losses_sound = engine.reduce_gradients(), all_agree(table.row("all")[Column.BAD] == 0)
        if sound or not losses_sound or not engine.lower_loss_scale():
            return table, sound and losses_sound


def accumulate(
    engine: Engine, sequences: Many[Sequence], chosen: Many[int], recipe: Recipe, *, max_tokens: int
) -> Table:
    """Gradients of the chosen sequences' losses, from zero; their sums over all ranks."""
    engine.zero_gradients()
    parallel = engine.parallel
    table = Table(splits_of(sequences))
    lengths = [sequences[index].tokens.numel() for index in chosen]
    for plan in plan_microbatches(lengths, max_tokens=max_tokens * parallel.data_size):
        indexes = [chosen[place] for place in plan]
        microbatch = build_microbatch(
            sequences,
            share_of_rank(indexes, rank=parallel.data_rank, size=parallel.data_size),
            rows=-(-len(indexes) // parallel.data_size),
            multiple=parallel.tensor_size,
            length=max(lengths[place] for place in plan),
            device=shims.device(),
        )
        trained = microbatch.trained
        if recipe.objective.reference_kl:
            with engine.as_reference():
                _, stats = _token_losses(
                    engine, microbatch.tokens, trained, replace(recipe.objective, reference_kl=0.0)
                )
            trained = replace(trained, reference_logp_N=stats.logp_N)
        losses_N, stats = _token_losses(engine, microbatch.tokens, trained, recipe.objective)
        weighted_N = losses_N * microbatch.coefficients_N
        engine.scaled(weighted_N.sum()).backward()
        table.add(weighted_N.detach(), stats, microbatch.sequence_N, recipe)
    table.sums = sum_over_data(table.sums.to(shims.device())).cpu()
    return table


def _token_losses(
    engine: Engine, tokens_BS: Tensor, trained: Tokens, objective: Objective
) -> tuple[Tensor, TokenStats]:
    """Under mask replay only the candidates' logits are ever made."""
    shard = engine.parallel.vocab_shard(engine.shape.vocabulary)
    if objective.replay:
        hidden_RH, weight_VH = engine.hidden(tokens_BS)
        return token_losses_from_hidden(hidden_RH, weight_VH, trained, objective, shard=shard)
    return token_losses(engine.logits(tokens_BS), trained, objective, shard=shard, overwrite_logits=True)


def blame(engine: Engine, sequences: Many[Sequence], recipe: Recipe, *, max_tokens: int) -> tuple[str, ...]:
    """Groups whose samples alone give a non-finite loss or gradient. Costs one more pass; only after a failure."""
    guilty = []
    for group in sorted({s.trajectory.group for s in sequences}):
        members = [index for index, s in enumerate(sequences) if s.trajectory.group == group]
        table = accumulate(engine, sequences, members, recipe, max_tokens=max_tokens)
        if not (engine.reduce_gradients() and all_agree(table.row("all")[Column.BAD] == 0)):
            guilty.append(group)
    engine.zero_gradients()
    return tuple(guilty)


def step_record(
    outcome: Outcome,
    batch: Batch,
    *,
    run: str,
    attempt: int,
    started_unix_s: float,
    train_s: float,
    publish_s: float,
) -> StepRecord:
    samples = batch.trajectories
    return StepRecord(
        run=run,
        step=batch.step,
        attempt=attempt,
        started_unix_s=started_unix_s,
        finished_unix_s=time.time(),
        wait_s=batch.waited_s,
        train_s=train_s,
        publish_s=publish_s,
        skipped=outcome.skipped,
        reward=Ratio(sum(t.reward or 0.0 for t in samples), float(len(samples))),
        lag=_total(outcome.groups),
        format_error_ends=Ratio(float(sum(t.ended_by is EndedBy.FORMAT_ERRORS for t in samples)), float(len(samples))),
        grad_norm=outcome.grad_norm if not outcome.skipped else 0.0,
        loss=outcome.loss,
        groups=outcome.groups,
        metrics=outcome.metrics,
        **outcome.ratios,
    )


def _total(groups: Many[GroupStep]) -> Ratio:
    return Ratio(sum(g.lag.num for g in groups), sum(g.lag.den for g in groups))
