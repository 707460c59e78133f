"""What a trajectory must be before it may be acknowledged. Pure."""

from __future__ import annotations

import math

import numpy as np
from motley_api.records import Trajectory

SUM_TOLERANCE = 1e-3  # of a support's probabilities around 1: float32 log-probs of up to 4096 candidates
LOGPROB_TOLERANCE = 1e-3  # between a token's own log-prob and its candidate's


class RefusedError(ValueError):
    """The trajectory can never be accepted; the message names the field and what is allowed."""


def check(
    trajectory: Trajectory, *, run: str, published: int, quarantined: frozenset[str], candidates_needed: bool = True
) -> None:
    """Errors: RefusedError. A log-prob that is not finite is no reason: that token is dropped by the loss and counted."""
    if trajectory.run != run:
        raise RefusedError(f"run: is {trajectory.run!r}, this trainer's is {run!r}")
    if trajectory.id != f"{trajectory.work}/{trajectory.sample}":
        raise RefusedError(
            f"id: is {trajectory.id!r}, want '<work>/<sample>' = '{trajectory.work}/{trajectory.sample}'"
        )
    if trajectory.group in quarantined:
        raise RefusedError(f"group: {trajectory.group} is quarantined")
    _check_versions(trajectory, published)
    if trajectory.reward is not None and not math.isfinite(trajectory.reward):
        raise RefusedError(f"reward: is {trajectory.reward}, want a finite number or null")
    if not (math.isfinite(trajectory.temperature) and trajectory.temperature > 0):
        raise RefusedError(f"temperature: is {trajectory.temperature}, want > 0")
    tokens = _array(trajectory.token_ids, "<i4", "tokenIds")
    if tokens.size and tokens.min() < 0:
        raise RefusedError("tokenIds: holds a negative id")
    sampled = tokens[generated_positions(trajectory, tokens.size)]
    logprobs = _array(trajectory.logprobs, "<f4", "logprobs")
    if logprobs.size != sampled.size:
        raise RefusedError(f"logprobs: {logprobs.size} of them for {sampled.size} generated tokens")
    if trajectory.candidates is None:
        if candidates_needed and sampled.size:
            raise RefusedError("candidates: missing; mask replay and score centering need them")
        if trajectory.top_p < 1 or trajectory.top_k > 0:
            raise RefusedError(
                "candidates: missing, though topP or topK filtered: the distribution drawn from is unknown"
            )
        return
    if trajectory.candidates.head and (trajectory.top_p < 1 or trajectory.top_k > 0):
        raise RefusedError("candidates.head: is true, though topP or topK filtered; want the whole set drawn from")
    _check_candidates(trajectory, sampled, logprobs)


def generated_positions(trajectory: Trajectory, tokens: int) -> np.ndarray:
    """int64[G], positions of the generated tokens. Errors: RefusedError when turns overlap, run backwards or leave the text."""
    positions, last = [], 0
    for number, turn in enumerate(trajectory.turns):
        if not last <= turn.start <= turn.end <= tokens:
            raise RefusedError(
                f"turns[{number}]: [{turn.start}, {turn.end}) overlaps the one before or leaves {tokens} tokens"
            )
        if turn.start == 0 and turn.end > 0:
            raise RefusedError(f"turns[{number}]: starts at token 0, which nothing predicts")
        positions.append(np.arange(turn.start, turn.end))
        last = turn.end
    return np.concatenate(positions) if positions else np.zeros(0, np.int64)


def _check_versions(trajectory: Trajectory, published: int) -> None:
    for number, turn in enumerate(trajectory.turns):
        if not 0 <= turn.start_version <= turn.end_version:
            versions = f"{turn.start_version} to {turn.end_version}"
            raise RefusedError(f"turns[{number}]: versions {versions}, want 0 <= startVersion <= endVersion")
    if trajectory.end_version > published:
        raise RefusedError(
            f"version: {trajectory.end_version} is not published in this attempt; the newest is {published}"
        )


def _array(data: bytes, dtype: str, name: str) -> np.ndarray:
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise RefusedError(f"{name}: {len(data)} bytes, want a multiple of {size}")
    return np.frombuffer(data, dtype)


def _check_candidates(trajectory: Trajectory, sampled: np.ndarray, logprobs: np.ndarray) -> None:
    candidates = trajectory.candidates
    assert candidates is not None
    counts = _array(candidates.counts, "<u2", "candidates.counts").astype(np.int64)
    ids = _array(candidates.ids, "<u4", "candidates.ids").astype(np.int64)
    logq = _array(candidates.logprobs, "<f4", "candidates.logprobs").astype(np.float64)
    if counts.size != sampled.size:
        raise RefusedError(f"candidates.counts: {counts.size} of them for {sampled.size} generated tokens")
    if not counts.sum() == ids.size == logq.size:
        raise RefusedError(
            f"candidates: counts sum to {counts.sum()}, ids {ids.size}, logprobs {logq.size}; must agree"
        )
    token = np.repeat(np.arange(counts.size), counts)
    if np.unique(token * (1 << 33) + ids).size != ids.size:
        raise RefusedError("candidates.ids: an id occurs twice in one support")
    hit = ids == sampled[token]
    hits = np.bincount(token, weights=hit, minlength=counts.size)
    if candidates.head and (counts == 0).any():
        raise RefusedError(f"candidates.counts: the head of generated token {int(np.argmin(counts))} is empty")
    if not candidates.head and ((counts > 0) & (hits != 1)).any():
        bad = int(np.argmax((counts > 0) & (hits != 1)))
        raise RefusedError(f"candidates.ids: sampled id {sampled[bad]} of generated token {bad} is not in its support")
    if np.isposinf(logq).any() or (logq > LOGPROB_TOLERANCE).any():
        raise RefusedError("candidates.logprobs: holds one above 0")
    mass = np.bincount(token, weights=np.exp(logq), minlength=counts.size)
    excess = mass - 1 if candidates.head else np.abs(mass - 1)
    off = (counts > 0) & (excess > SUM_TOLERANCE)  # NaN compares false: such a token is dropped by the loss
    if off.any():
        bad, want = int(np.argmax(off)), "at most 1" if candidates.head else "1"
        raise RefusedError(
            f"candidates.logprobs: support of generated token {bad} sums to {mass[bad]:.6f}, want {want}"
        )
    if candidates.head:
        _check_heads(token, logq, hit, logprobs)
        return
    own = np.zeros(counts.size)
    own[token[hit]] = logq[hit]
    apart = np.abs(own - logprobs) > LOGPROB_TOLERANCE
    if apart.any():
        bad = int(np.argmax(apart))
        raise RefusedError(
            f"logprobs: {logprobs[bad]:.4f} of generated token {bad}, but its support says {own[bad]:.4f};"
            " were they taken before the filter?"
        )


def _check_heads(token: np.ndarray, logq: np.ndarray, hit: np.ndarray, logprobs: np.ndarray) -> None:
    """A sampled token of the head has its log-prob there; any other is no likelier than the least of the head."""
    least = np.full(logprobs.size, np.inf)
    np.minimum.at(least, token, logq)
    inside = np.zeros(logprobs.size, bool)
    inside[token[hit]] = True
    own = np.where(inside, 0.0, np.minimum(logprobs, least))
    own[token[hit]] = logq[hit]
    apart = np.abs(own - logprobs) > LOGPROB_TOLERANCE
    if apart.any():
        bad = int(np.argmax(apart))
        raise RefusedError(
            f"logprobs: {logprobs[bad]:.4f} of generated token {bad}, but its head says {own[bad]:.4f}"
            f"{'' if inside[bad] else ' at most'}; were they taken of another distribution?"
        )
