"""Sums over tokens, split by group, view and lag, that average correctly whatever is added up first."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from motley_api.records import EndedBy, GroupStep, Ratio
from torch import Tensor

from motley_trainer.batches import Sequence
from motley_trainer.buffer.batch import GroupTally
from motley_trainer.losses import Objective, TokenStats
from motley_trainer.losses.stats import k3
from motley_trainer.losses.weights import Unweighted
from motley_trainer.recipe import Recipe

LARGEST_LOG_RATIO = 300.0  # raw ratios are summed, and squared, in float64: e^600 still fits
LAG_BUCKETS = ((0, 1), (2, 3), (4, 5), (6, None))


class Column(enum.IntEnum):
    """What is summed for every split."""

    TOKENS = 0  # kept
    DROPPED = 1
    MASKED = 2  # kept, weight 0
    LOW = 3  # raw ratio below the range
    HIGH = 4
    KL = 5
    K3 = 6
    ABS_DIFF = 7  # |log p - log q|
    RATIO = 8
    WEIGHT = 9
    WEIGHT_SQUARED = 10
    ENTROPY = 11
    HEAD_P = 12
    HEAD_Q = 13
    TAIL_RATIO = 14
    CORRECTION = 15
    CLIPPED = 16  # weight differs from the raw ratio
    LOSS = 17  # with the token's coefficient
    BAD = 18  # tokens whose loss is not finite
    REFERENCE_KL = 19


@dataclass(frozen=True)
class Splits:
    """names: "all", "group/h100-fp8", "view/fp8", "lag/0-1", ...; rows_SK: which of them each sequence adds to."""

    names: list[str]
    rows_SK: Tensor  # noqa: N815


def splits_of(sequences: Many[Sequence]) -> Splits:
    keys = [
        ("all", f"group/{s.trajectory.group}", f"view/{s.trajectory.view}", f"lag/{lag_bucket(s.lag)}")
        for s in sequences
    ]
    names = ["all", *sorted({name for row in keys for name in row[1:]})]
    place = {name: index for index, name in enumerate(names)}
    return Splits(names, torch.tensor([[place[name] for name in row] for row in keys], dtype=torch.long))


def lag_bucket(lag: int) -> str:
    for low, high in LAG_BUCKETS:
        if high is None or lag <= high:
            return f"{low}+" if high is None else f"{low}-{high}"
    raise AssertionError("the last bucket has no end")


class Table:
    """float64[splits, columns], summed over microbatches, then over ranks."""

    def __init__(self, splits: Splits) -> None:
        self.splits = splits
        self.sums = torch.zeros(len(splits.names), len(Column), dtype=torch.float64)

    def add(self, losses_N: Tensor, stats: TokenStats, sequence_N: Tensor, recipe: Recipe) -> None:
        """losses_N: with their coefficients. All detached."""
        columns_N = columns(losses_N, stats, recipe).cpu()
        rows_NK = self.splits.rows_SK[sequence_N.cpu()]
        for split in range(rows_NK.shape[1]):
            self.sums.index_add_(0, rows_NK[:, split], columns_N)

    def row(self, name: str) -> dict[Column, float]:
        if name not in self.splits.names:
            return dict.fromkeys(Column, 0.0)
        return dict(zip(Column, self.sums[self.splits.names.index(name)].tolist(), strict=True))


def columns(losses_N: Tensor, stats: TokenStats, recipe: Recipe) -> Tensor:
    """float64[N, columns] of one microbatch."""
    kept_N = stats.kept_N.double()
    log_ratio_N = stats.log_ratio_N.double().clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    ratio_N = log_ratio_N.exp()
    unweighted = isinstance(recipe.objective.weight, Unweighted)
    weight_N = (ratio_N if unweighted else stats.weight_N.double()) * kept_N  # without weights: what they would be
    clipped_N = torch.zeros_like(kept_N) if unweighted else (weight_N - ratio_N).abs() > 1e-6 * ratio_N
    bad_N = ~losses_N.isfinite()
    values = {
        Column.TOKENS: kept_N,
        Column.DROPPED: 1 - kept_N,
        Column.MASKED: (stats.weight_N == 0) * kept_N,
        Column.LOW: (log_ratio_N < math.log(recipe.range_low)) * kept_N,
        Column.HIGH: (log_ratio_N > math.log(recipe.range_high)) * kept_N,
        Column.KL: stats.kl_N,
        Column.K3: k3(log_ratio_N) * kept_N,
        Column.ABS_DIFF: log_ratio_N.abs() * kept_N,
        Column.RATIO: ratio_N * kept_N,
        Column.WEIGHT: weight_N,
        Column.WEIGHT_SQUARED: weight_N.square(),
        Column.ENTROPY: stats.entropy_N,
        Column.HEAD_P: stats.head_p_N,
        Column.HEAD_Q: stats.head_q_N,
        Column.TAIL_RATIO: stats.tail_ratio_N * kept_N,
        Column.CORRECTION: stats.correction_N,
        Column.CLIPPED: clipped_N * kept_N,
        Column.LOSS: losses_N.masked_fill(bad_N, 0.0),
        Column.BAD: bad_N,
        Column.REFERENCE_KL: stats.reference_kl_N,
    }
    table = torch.stack([values[column].double() for column in Column], 1)
    # A token whose loss is not finite skips the step; it must not make the record of the step unreadable, too.
    table[bad_N] = 0.0
    table[bad_N, Column.DROPPED] = table[bad_N, Column.BAD] = 1.0
    return table


# ------------------------------------------------------------------------------------------------ what the ledger gets
def run_ratios(table: Table, *, replay: bool) -> dict[str, Ratio]:
    row = table.row("all")
    tokens = row[Column.TOKENS]
    return {
        "kl": Ratio(row[Column.KL], tokens),
        "out_of_range": Ratio(row[Column.LOW] + row[Column.HIGH], tokens),
        "entropy": Ratio(row[Column.ENTROPY], tokens),
        # Under replay the support is everything: there is no tail.
        "tail_ratio": Ratio() if replay else Ratio(row[Column.TAIL_RATIO], tokens),
    }


def group_steps(table: Table, sequences: Many[Sequence], tallies: Many[GroupTally]) -> list[GroupStep]:
    """One record for every group that delivered anything, by name."""
    views = {s.trajectory.group: s.trajectory.view for s in sequences} | {t.name: t.view for t in tallies}
    return [
        _group_step(
            name,
            views[name],
            table.row(f"group/{name}"),
            [s for s in sequences if s.trajectory.group == name],
            next((t for t in tallies if t.name == name), GroupTally(name=name, view=views[name])),
        )
        for name in sorted(views)
    ]


def _group_step(
    name: str, view: str, row: dict[Column, float], members: Many[Sequence], tally: GroupTally
) -> GroupStep:
    tokens = row[Column.TOKENS]
    turns = [turn for s in members for turn in s.trajectory.turns]
    return GroupStep(
        name=name,
        view=view,
        samples=len(members),
        discarded=tally.discarded,
        stale=tally.stale,
        infrastructure_failures=tally.infrastructure_failures,
        format_error_ends=sum(s.trajectory.ended_by is EndedBy.FORMAT_ERRORS for s in members),
        turns=len(turns),
        generated_tokens=sum(s.positions.numel() for s in members),
        trained_tokens=round(tokens),
        masked_tokens=round(row[Column.MASKED] + row[Column.DROPPED]),
        dropped_tokens=round(row[Column.DROPPED]),
        reward=Ratio(sum(s.trajectory.reward or 0.0 for s in members), float(len(members))),
        kl=Ratio(row[Column.KL], tokens),
        out_of_range=Ratio(row[Column.LOW] + row[Column.HIGH], tokens),
        entropy=Ratio(row[Column.ENTROPY], tokens),
        ess=Ratio(row[Column.WEIGHT] ** 2, tokens * row[Column.WEIGHT_SQUARED]),
        lag=Ratio(float(sum(s.lag for s in members)), float(len(members))),
        turn_latency_s=Ratio(sum(turn.latency_s for turn in turns), float(len(turns))),
        version=max((s.trajectory.start_version for s in members), default=-1),
    )


def named_metrics(table: Table, sequences: Many[Sequence], objective: Objective) -> dict[str, float]:
    """Under the names of Miles: "<name>" over all, and "<name>/group/<g>", "<name>/view/<v>", "<name>/lag/<bucket>".

    Each is a mean over the "trained_tokens" of its split, so that means of several splits are averaged by those.
    """
    found: dict[str, float] = {}
    for split in table.splits.names:
        suffix = "" if split == "all" else f"/{split}"
        row = table.row(split)
        if row[Column.TOKENS]:
            found.update({f"{name}{suffix}": value for name, value in _means(row, objective).items()})
    lags = [s.lag for s in sequences]
    if lags:
        found |= {"avg_staleness": sum(lags) / len(lags), "max_staleness": float(max(lags))}
    return found


def _means(row: dict[Column, float], objective: Objective) -> dict[str, float]:
    tokens = row[Column.TOKENS]
    means = {
        "trained_tokens": tokens,
        "train_rollout_logprob_abs_diff": row[Column.ABS_DIFF] / tokens,
        "train_rollout_kl": row[Column.K3] / tokens,
        "train_rollout_kl_exact": row[Column.KL] / tokens,  # over the candidates where they are recorded
        "entropy": row[Column.ENTROPY] / tokens,
        "ois": row[Column.RATIO] / tokens,
        "ess_ratio": row[Column.WEIGHT] ** 2 / max(tokens * row[Column.WEIGHT_SQUARED], 1e-300),
        "tis": row[Column.WEIGHT] / tokens,
        "tis_clipfrac": row[Column.CLIPPED] / tokens,
        "mis_mask_fraction_low": row[Column.LOW] / tokens,
        "mis_mask_fraction_high": row[Column.HIGH] / tokens,
        "sc_correction": row[Column.CORRECTION] / tokens,
    }
    if objective.reference_kl:
        means["kl_loss"] = row[Column.REFERENCE_KL] / tokens
    if not objective.replay:
        means |= {
            "sc_train_head_mass": row[Column.HEAD_P] / tokens,
            "sc_rollout_head_mass": row[Column.HEAD_Q] / tokens,
            "sc_tail_ratio": row[Column.TAIL_RATIO] / tokens,
        }
    return means
