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


# ------------------------------------------------------------------------------------------------ over whole sequences
def sequence_ratios(log_ratios: list[float], sequences: list[int], level: str) -> list[float]:
    """The ratio that each token's weight is taken of: its own, its sequence's product, or the product's root."""
    out = []
    for n, sequence in enumerate(sequences):
        mine = [log_ratios[m] for m, other in enumerate(sequences) if other == sequence]
        logs = {"Token": log_ratios[n], "Sequence": sum(mine), "Geometric": sum(mine) / len(mine)}
        out.append(math.exp(logs[level]))
    return out


def policy_gradient(p: np.ndarray, y: int, advantage: float, weight: float) -> tuple[float, np.ndarray]:
    return -advantage * weight * math.log(p[y]), -advantage * weight * score(p, y)


def clipped(p: np.ndarray, y: int, advantage: float, ratio: float, low: float, high: float) -> tuple[float, np.ndarray]:
    """-min(r A, clip(r) A); its gradient is that of r A, r score, where the unclipped branch is the smaller one."""
    bounded = min(max(ratio, 1 - low), 1 + high)
    if ratio * advantage <= bounded * advantage:
        return -ratio * advantage, -advantage * ratio * score(p, y)
    return -bounded * advantage, np.zeros_like(p)


def vtrace(
    log_ratios: list[float],
    rewards: list[float],
    values: list[float],
    bootstrap: float,
    gamma: float,
    rho: float,
    c: float,
) -> tuple[list[float], list[float]]:
    """Equation 1 of IMPALA as the double sum that it is written as, and the advantages of section 4.2."""
    length = len(rewards)
    rhos = [min(math.exp(x), rho) for x in log_ratios]
    traces = [min(math.exp(x), c) for x in log_ratios]
    after = [*values[1:], bootstrap]
    targets = []
    for s in range(length):
        total = values[s]
        for t in range(s, length):
            delta = rhos[t] * (rewards[t] + gamma * after[t] - values[t])
            total += gamma ** (t - s) * math.prod(traces[s:t]) * delta
        targets.append(total)
    later = [*targets[1:], bootstrap]
    return targets, [rhos[t] * (rewards[t] + gamma * later[t] - values[t]) for t in range(length)]


def entropy(p: np.ndarray) -> tuple[float, np.ndarray]:
    """(H, dH/dz): dH/dz_i = -p_i (log p_i + H); 0 where p is."""
    logp = np.log(p, out=np.zeros_like(p), where=p > 0)
    h = -float((p * logp).sum())
    return h, -p * (logp + h)


def k3(z: np.ndarray, z_ref: np.ndarray, support: list[int], y: int, *, replay: bool) -> tuple[float, np.ndarray]:
    """(r - 1 - log r, its gradient in z) with r = p_ref / p of the sampled token: d / d log p = 1 - r."""
    p, p_ref = (trainer_probs(x, support, replay=replay) for x in (z, z_ref))
    r = p_ref[y] / p[y]
    return r - 1 - math.log(r), (1 - r) * score(p, y)
