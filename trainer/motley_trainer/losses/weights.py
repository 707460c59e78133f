"""Importance weights f(r) of the ratio r = p_y / q_y, each with what score centering needs of it.

All take log-ratios, so that no ratio overflows: log-probs of -2 and -91 give a finite weight.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import torch
from torch import Tensor


class Level(enum.StrEnum):
    """Over what the ratio is taken before f is applied to it; every token of a sequence then has the same weight."""

    TOKEN = "Token"
    SEQUENCE = "Sequence"  # the product over the sequence's tokens: unbiased, of enormous variance
    GEOMETRIC = "Geometric"  # the product's T-th root: the same scale whatever the length


@dataclass(frozen=True)
class Unweighted:
    """f(r) = 1: no correction."""

    def of(self, log_ratio: Tensor) -> Tensor:
        return torch.ones_like(log_ratio)

    def times_q(self, logp: Tensor, logq: Tensor) -> Tensor:
        """q * f(p / q), elementwise."""
        return logq.exp()

    def tail(self, log_rho: Tensor) -> Tensor:
        """alpha = rho * f(1 / rho): the coefficient of p outside the recorded head."""
        return log_rho.exp()


@dataclass(frozen=True)
class Tis:
    """Truncated importance sampling: f(r) = min(r, cap) (Ionides 2008; fengyao.notion.site/off-policy-rl)."""

    cap: float = 2.0

    def __post_init__(self) -> None:
        if not self.cap > 0:
            raise ValueError(f"cap must be > 0, got {self.cap}")

    def of(self, log_ratio: Tensor) -> Tensor:
        return log_ratio.clamp(max=math.log(self.cap)).exp()

    def times_q(self, logp: Tensor, logq: Tensor) -> Tensor:
        return torch.minimum(logp, logq + math.log(self.cap)).exp()

    def tail(self, log_rho: Tensor) -> Tensor:
        return (log_rho + math.log(self.cap)).clamp(max=0.0).exp()


@dataclass(frozen=True)
class Mis:
    """Masked importance sampling (IcePop, arXiv:2510.18855): f(r) = r where low <= r <= high, else 0."""

    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high:
            raise ValueError(f"bounds must satisfy 0 < low < high, got low={self.low} high={self.high}")

    def _inside(self, log_ratio: Tensor) -> Tensor:
        return (log_ratio >= math.log(self.low)) & (log_ratio <= math.log(self.high))

    def of(self, log_ratio: Tensor) -> Tensor:
        # The inner where keeps exp() from overflowing outside the range.
        inside = self._inside(log_ratio)
        return log_ratio.where(inside, torch.zeros_like(log_ratio)).exp() * inside

    def times_q(self, logp: Tensor, logq: Tensor) -> Tensor:
        return logp.exp() * self._inside(logp - logq)

    def tail(self, log_rho: Tensor) -> Tensor:
        return self._inside(-log_rho).to(log_rho.dtype)


@dataclass(frozen=True)
class VTrace:
    """V-trace's weights (IMPALA, arXiv:1802.01561) where the only reward is the last one and the baseline is the
    prompt's mean, as in GRPO; see sequences.vtrace_weights. rho: cap of a token's own ratio. trace: of later ones'."""

    rho: float = 1.0
    trace: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.trace <= self.rho:
            raise ValueError(f"caps must satisfy 0 < trace <= rho, got trace={self.trace} rho={self.rho}")


type TokenWeight = Unweighted | Tis | Mis
