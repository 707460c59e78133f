"""Candidate sets as top-p leaves them, for the benchmarks: sizes mostly one to three, q a noisy p."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Share of tokens by the size of their set. Text is mostly certain: under top-p 0.97 the first candidate alone is enough for
# most tokens. An assumption, stated in docs/losses.md; the tail up to top-k 64 is what makes dense arrays wide.
SIZE_SHARES = {1: 0.72, 2: 0.12, 3: 0.06}
MIDDLE, MIDDLE_SHARE = (4, 8), 0.07
LARGE, LARGE_SHARE = (9, 64), 0.03


def sizes(rng: np.random.Generator, tokens: int) -> NDArray[np.int64]:
    """int64[tokens], 1 to 64."""
    small = rng.choice(list(SIZE_SHARES), tokens, p=np.array(list(SIZE_SHARES.values())) / sum(SIZE_SHARES.values()))
    drawn = rng.random(tokens)
    middle = rng.integers(MIDDLE[0], MIDDLE[1] + 1, tokens)
    large = rng.integers(LARGE[0], LARGE[1] + 1, tokens)
    return np.where(drawn < LARGE_SHARE, large, np.where(drawn < LARGE_SHARE + MIDDLE_SHARE, middle, small))


def ragged(
    rng: np.random.Generator, tokens: int, vocabulary: int
) -> tuple[NDArray[np.uint16], NDArray[np.uint32], NDArray[np.float32], NDArray[np.int64]]:
    """(counts [tokens], ids [C], log-probs [C], sampled ids [tokens]) as Candidates stores them: nothing for a set of one."""
    size = sizes(rng, tokens)
    counts, ids, logprobs, sampled = size.astype(np.uint16), [], [], np.empty(tokens, np.int64)
    counts[size == 1] = 0
    for token, count in enumerate(size.tolist()):
        mine = rng.choice(vocabulary, count, replace=False)
        q = np.sort(rng.dirichlet(np.full(count, 0.5)).astype(np.float64) + 1e-4)[::-1]
        q /= q.sum()
        sampled[token] = mine[rng.choice(count, p=q)]
        if count > 1:
            ids.append(mine)
            logprobs.append(np.log(q))
    return counts, np.concatenate(ids).astype(np.uint32), np.concatenate(logprobs).astype(np.float32), sampled
