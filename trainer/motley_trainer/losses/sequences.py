"""What is decided over whole sequences: ratios, masks and traces. Pure; everything is detached.

Legend: N = tokens, each with the number of its sequence; a sequence's tokens may lie anywhere, in their order. A batch
that is cut between sequences therefore gives the same numbers as the whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from motley_trainer.losses.weights import Level, VTrace


@dataclass(frozen=True)
class RatioMask:
    """Sequences whose ratio, the product over their tokens, is outside [low, high] count nothing (Miles: tis_level
    sequence, tis_mode mask; verl: rollout_rs sequence)."""

    low: float = 0.5
    high: float = 2.0

    def keeps(self, log_ratio_N: Tensor, advantage_N: Tensor, sequence_N: Tensor) -> Tensor:
        return _inside(sequence_log_ratio(log_ratio_N, sequence_N, Level.SEQUENCE), self.low, self.high)


@dataclass(frozen=True)
class GeometricMask:
    """Sequences whose geometric mean ratio is outside [low, high] count nothing (Miles: tis_level geometric, tis_mode
    mask; verl: rollout_rs geometric)."""

    low: float = 0.99
    high: float = 1.01

    def keeps(self, log_ratio_N: Tensor, advantage_N: Tensor, sequence_N: Tensor) -> Tensor:
        return _inside(sequence_log_ratio(log_ratio_N, sequence_N, Level.GEOMETRIC), self.low, self.high)


@dataclass(frozen=True)
class DriftMask:
    """DeepSeek-V3.2's off-policy sequence mask (arXiv:2512.02556, section 3.1): a sequence with a negative advantage
    counts nothing where the mean of log q/p over its tokens is above `drift` (nats)."""

    drift: float = 0.1

    def keeps(self, log_ratio_N: Tensor, advantage_N: Tensor, sequence_N: Tensor) -> Tensor:
        drift_N = -sequence_log_ratio(log_ratio_N, sequence_N, Level.GEOMETRIC)
        return ~((advantage_N < 0) & (drift_N > self.drift))


type SequenceMask = RatioMask | GeometricMask | DriftMask


def sequence_log_ratio(log_ratio_N: Tensor, sequence_N: Tensor, level: Level) -> Tensor:
    """The log-ratio that each token's weight is computed of, [N]: its own, its sequence's sum, or its mean."""
    if level is Level.TOKEN:
        return log_ratio_N
    index_N, count_S = _sequences(sequence_N)
    sum_S = torch.zeros(count_S.numel(), dtype=torch.float64, device=log_ratio_N.device)
    sum_S = sum_S.index_add(0, index_N, log_ratio_N.detach().double())
    if level is Level.GEOMETRIC:
        sum_S = sum_S / count_S
    return sum_S[index_N].to(log_ratio_N.dtype)


def vtrace_weights(log_ratio_N: Tensor, sequence_N: Tensor, weight: VTrace) -> Tensor:
    """[N]: what V-trace multiplies the advantage of token t with where the reward R comes after the last token T and
    every value is the same baseline b. Then each temporal difference but the last is 0, and
    rho_t (r_t + v_{t+1} - b) = w_t (R - b), w_T = rho_T, w_t = rho_t (c_{t+1} ... c_{T-1}) rho_T before.
    rho = min(r, rho cap), c = min(r, trace cap): a sequence that ends off the policy's path counts little anywhere.
    """
    order_N = sequence_N.argsort(stable=True)
    log_ratio = log_ratio_N.detach().double()[order_N]
    rho, trace = log_ratio.clamp(max=math.log(weight.rho)), log_ratio.clamp(max=math.log(weight.trace))
    sequence = sequence_N[order_N]
    last = torch.ones_like(sequence, dtype=torch.bool)
    last[:-1] = sequence[1:] != sequence[:-1]
    # Sum of log c over the tokens after t and before T, as a difference of sums over everything before them.
    before = (trace.where(~last, torch.zeros_like(trace))).cumsum(0)
    end = last.nonzero()[:, 0]
    at_end = end[torch.searchsorted(end, torch.arange(sequence.numel(), device=end.device))]
    later = before[at_end] - before
    log_weight = torch.where(last, rho, rho + later + rho[at_end])
    out = torch.empty_like(log_weight)
    out[order_N] = log_weight.exp()
    return out.to(log_ratio_N.dtype)


def vtrace_targets(
    log_ratio_T: Tensor,
    reward_T: Tensor,
    value_T: Tensor,
    bootstrap: float,
    *,
    discount: float = 1.0,
    rho_cap: float = 1.0,
    trace_cap: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(value targets v_s [T], policy-gradient advantages [T]) of one sequence (IMPALA, equations 1 and section 4.2)."""
    shapes = (log_ratio_T.shape, reward_T.shape, value_T.shape)
    if len(set(shapes)) != 1:
        raise ValueError(f"V-trace needs equal shapes, got {log_ratio_T.shape=} {reward_T.shape=} {value_T.shape=}")
    rho_T = log_ratio_T.clamp(max=math.log(rho_cap)).exp()
    trace_T = log_ratio_T.clamp(max=math.log(trace_cap)).exp()
    next_T = torch.cat([value_T[1:], value_T.new_tensor([bootstrap])])
    delta_T = rho_T * (reward_T + discount * next_T - value_T)
    carried = value_T.new_zeros(())
    excess: list[Tensor] = []
    for t in range(value_T.numel() - 1, -1, -1):
        carried = delta_T[t] + discount * trace_T[t] * carried
        excess.append(carried)
    target_T = value_T + torch.stack(excess[::-1]) if excess else value_T
    after_T = torch.cat([target_T[1:], value_T.new_tensor([bootstrap])])
    return target_T, rho_T * (reward_T + discount * after_T - value_T)


def _sequences(sequence_N: Tensor) -> tuple[Tensor, Tensor]:
    """(number 0 .. S-1 of each token's sequence [N], how many tokens each has [S])."""
    _, index_N, count_S = torch.unique(sequence_N, return_inverse=True, return_counts=True)
    return index_N, count_S


def _inside(log_ratio_N: Tensor, low: float, high: float) -> Tensor:
    if not 0 < low < high:
        raise ValueError(f"bounds must satisfy 0 < low < high, got low={low} high={high}")
    return (log_ratio_N >= math.log(low)) & (log_ratio_N <= math.log(high))
