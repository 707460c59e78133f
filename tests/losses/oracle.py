"""A dense, float64, loop-by-loop re-derivation of every loss; gradients are written out by hand, not by autograd."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

Weight = Callable[[float], float]


def unweighted(r: float) -> float:
    return 1.0


def tis(cap: float) -> Weight:
    return lambda r: min(r, cap)


def mis(low: float, high: float) -> Weight:
    return lambda r: r if low <= r <= high else 0.0


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max())
    return e / e.sum()


def trainer_probs(z: np.ndarray, support: list[int], *, replay: bool) -> np.ndarray:
    """p over the vocabulary; under replay renormalised over the support and 0 outside."""
    if not replay:
        return softmax(z)
    p = np.zeros_like(z)
    p[support] = softmax(z[support])
    return p


def score(p: np.ndarray, v: int) -> np.ndarray:
    """d log p_v / d z = onehot(v) - p (p is 0 outside a replayed support, as is the gradient there)."""
    s = -p.copy()
    s[v] += 1.0
    return s


def centred(
    z: np.ndarray, support: list[int], q: list[float], y: int, advantage: float, f: Weight, *, replay: bool
) -> tuple[float, np.ndarray]:
    """(loss, gradient in the logits) of the score-centred surrogate of one token."""
    p = trainer_probs(z, support, replay=replay)
    q_of = dict(zip(support, q, strict=True))
    rho = max(1 - sum(q), 1e-6) / max(1 - sum(p[v] for v in support), 1e-6)
    alpha = 0.0 if replay else rho * f(1 / rho)
    w = f(p[y] / q_of[y])
    loss, grad = -advantage * w * math.log(p[y]), -advantage * w * score(p, y)
    for v in support:
        c = q_of[v] * f(p[v] / q_of[v]) - alpha * p[v]
        loss += advantage * c * math.log(p[v])
        grad += advantage * c * score(p, v)
    return loss, grad


def weighted(
    z: np.ndarray, support: list[int], q: list[float], y: int, advantage: float, f: Weight, *, replay: bool
) -> tuple[float, np.ndarray]:
    p = trainer_probs(z, support, replay=replay)
    w = f(p[y] / q[support.index(y)])
    return -advantage * w * math.log(p[y]), -advantage * w * score(p, y)
