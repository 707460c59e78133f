# ruff: noqa: N815  (shapes in suffixes)
"""Trajectories to tensors: sequences with advantages and supports, and microbatches of similar lengths.

Legend as in losses/: B = sequences of a microbatch, S = their padded length, N = trained tokens, C = candidates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import numpy as np
import torch
from motley_api.records import Candidates, Trajectory
from torch import Tensor

from motley_trainer.buffer.validate import generated_positions
from motley_trainer.losses import (
    Support,
    Tokens,
    build_head_support,
    build_support,
    group_advantages,
    token_coefficients,
)
from motley_trainer.losses.objective import finite_tokens
from motley_trainer.recipe import Recipe


@dataclass(frozen=True)
class Sequence:
    """One trajectory to train on. tokens: int64[T]. positions: int64[N], of its generated tokens. coefficients:
    float64[N], 0 for dropped tokens. lag: steps between its start version and the weights being trained."""

    trajectory: Trajectory
    tokens: Tensor
    positions: Tensor
    support: Support
    recorded: bool
    advantage: float
    coefficients: Tensor
    lag: int


@dataclass(frozen=True)
class Microbatch:
    """tokens: int64[B, S], padded with 0 at the end of rows. sequence_N: which sequence of the batch each token is of."""

    tokens: Tensor
    trained: Tokens
    coefficients_N: Tensor
    sequence_N: Tensor


def build_sequences(trajectories: Many[Trajectory], recipe: Recipe, *, step: int) -> list[Sequence]:
    """Errors: ValueError naming the trajectory whose arrays contradict each other."""
    works = {work: index for index, work in enumerate(dict.fromkeys(t.work for t in trajectories))}
    rewards = torch.tensor([float("nan") if t.reward is None else t.reward for t in trajectories], dtype=torch.float64)
    prompts = torch.tensor([works[t.work] for t in trajectories])
    advantages = group_advantages(rewards, prompts, normalise_std=recipe.normalise_std)
    parsed = [_parse(trajectory) for trajectory in trajectories]
    kept = [finite_tokens(support) for _, _, support in parsed]
    owner_N = torch.arange(len(parsed)).repeat_interleave(torch.tensor([mask.numel() for mask in kept]))
    coefficients_N = token_coefficients(owner_N, torch.cat(kept), sequences=len(parsed), reduction=recipe.reduction)
    parts = torch.split(coefficients_N, [mask.numel() for mask in kept])
    return [
        Sequence(
            trajectory=trajectory,
            tokens=tokens,
            positions=positions,
            support=support,
            recorded=trajectory.candidates is not None,
            advantage=float(advantages[index]),
            coefficients=parts[index],
            lag=step - 1 - trajectory.start_version,
        )
        for index, (trajectory, (tokens, positions, support)) in enumerate(zip(trajectories, parsed, strict=True))
    ]


def _parse(trajectory: Trajectory) -> tuple[Tensor, Tensor, Support]:
    tokens = _tensor(trajectory.token_ids, "<i4").long()
    positions = torch.from_numpy(generated_positions(trajectory, tokens.numel()))
    logq = _tensor(trajectory.logprobs, "<f4")
    try:
        support = _support(trajectory.candidates, tokens[positions], logq)
    except ValueError as error:
        raise ValueError(f"trajectory {trajectory.id}: {error}") from error
    if not bool(logq.isfinite().all()):
        # A token without a log-prob of its own is dropped, whatever its support says.
        own = support.logq_C.clone()
        own[support.chosen_N[~logq.isfinite()]] = float("nan")
        support = replace(support, logq_C=own)
    return tokens, positions, support


def _support(candidates: Candidates | None, sampled_N: Tensor, logq_N: Tensor) -> Support:
    if candidates is None:
        return build_support(sampled_N, logq_N, None, None, None)
    build = build_head_support if candidates.head else build_support
    counts_N = _tensor(candidates.counts, "<u2", np.int64)
    ids_C = _tensor(candidates.ids, "<u4", np.int64)
    return build(sampled_N, logq_N, counts_N, ids_C, _tensor(candidates.logprobs, "<f4"))


def _tensor(data: bytes, dtype: str, wide: type[np.int64] | None = None) -> Tensor:
    array = np.frombuffer(data, dtype)
    return torch.from_numpy(array.astype(wide) if wide else array.copy())


def plan_microbatches(lengths: Many[int], *, max_tokens: int) -> list[list[int]]:
    """Indexes of sequences per microbatch: similar lengths together, at most `max_tokens` padded tokens each (a longer
    sequence goes alone). Deterministic: ties by index."""
    order = sorted(range(len(lengths)), key=lambda index: (lengths[index], index))
    plans: list[list[int]] = []
    for index in order:  # ascending, so that the newest member is the longest
        if plans and (len(plans[-1]) + 1) * lengths[index] <= max_tokens:
            plans[-1].append(index)
        else:
            plans.append([index])
    return plans


def share_of_rank(plan: Many[int], *, rank: int, size: int) -> list[int]:
    """Which sequences of a microbatch a data-parallel rank computes."""
    return list(plan[rank::size])


def build_microbatch(
    sequences: Many[Sequence], indexes: Many[int], *, rows: int, multiple: int, length: int, device: torch.device
) -> Microbatch:
    """`rows` >= len(indexes): empty rows keep every rank's shapes alike. S is `length` rounded up to `multiple`."""
    padded = -(-length // multiple) * multiple
    tokens = torch.zeros(rows, padded, dtype=torch.long)
    parts: defaultdict[str, list[Tensor]] = defaultdict(list)
    heads = any(sequences[index].support.head_C is not None for index in indexes)
    trained = candidates = 0
    for row, index in enumerate(indexes):
        sequence = sequences[index]
        count = sequence.positions.numel()
        tokens[row, : sequence.tokens.numel()] = sequence.tokens
        parts["token_C"].append(sequence.support.token_C + trained)
        parts["chosen_N"].append(sequence.support.chosen_N + candidates)
        parts["ids_C"].append(sequence.support.ids_C)
        parts["logq_C"].append(sequence.support.logq_C)
        if heads:
            parts["head_C"].append(sequence.support.in_head(torch.ones(sequence.support.ids_C.numel())))
        parts["rows_N"].append(sequence.positions - 1 + row * padded)  # a token is predicted by the row before it
        parts["advantage_N"].append(torch.full((count,), sequence.advantage, dtype=torch.float64))
        parts["temperature_N"].append(torch.full((count,), sequence.trajectory.temperature, dtype=torch.float64))
        parts["coefficients_N"].append(sequence.coefficients)
        parts["sequence_N"].append(torch.full((count,), index))
        trained += count
        candidates += sequence.support.ids_C.numel()

    def joined(name: str, dtype: torch.dtype) -> Tensor:
        return (torch.cat(parts[name]) if parts[name] else torch.zeros(0)).to(device, dtype)

    return Microbatch(
        tokens=tokens.to(device),
        trained=Tokens(
            rows_N=joined("rows_N", torch.long),
            advantage_N=joined("advantage_N", torch.float32),
            temperature_N=joined("temperature_N", torch.float32),
            support=Support(
                joined("token_C", torch.long),
                joined("ids_C", torch.long),
                joined("logq_C", torch.float32),
                joined("chosen_N", torch.long),
                joined("head_C", torch.bool) if heads else None,
            ),
            recorded=all(sequences[index].recorded for index in indexes),
            sequence_N=joined("sequence_N", torch.long),
        ),
        coefficients_N=joined("coefficients_N", torch.float32),
        sequence_N=joined("sequence_N", torch.long),
    )
