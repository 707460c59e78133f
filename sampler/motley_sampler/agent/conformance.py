"""Does the live engine compute what a clean load of the same view computes, and report it in the terms we train on?

Fixed prompts go through the live engine once per version. Everything that comes back (log-probs of the prompt, of drawn tokens,
of their candidates; version labels) is compared with a second, independent load of the folder. Pure but for `run`, which asks.

Legend: T = tokens of a prompt, G = generated tokens, V = vocabulary, C = candidates of one token.
"""

from __future__ import annotations

import asyncio
import enum
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from motley_api.keys import VIEW_BF16, VIEW_FP8, VIEW_NVFP4
from numpy.typing import NDArray

from motley_sampler.engines.protocol import Engine, EngineError, Json

Floats = NDArray[np.float64]

PROMPTS = 4
PROMPT_TOKENS = 24
NEW_TOKENS = 8
NORMALISED_WITHIN = 1e-3


@dataclass(frozen=True)
class Sampling:
    """What a canary is drawn with."""

    temperature: float
    top_p: float
    top_k: int


# Taken in turn by the prompts. The first: a temperature far from 1 and a top-k that bites, so that the three modes of log-probs
# differ by tenths on any model. The second: a top-p that bites also where the model is undecided.
SAMPLINGS = (Sampling(3.0, 0.8, 20), Sampling(1.0, 0.4, 1000))


class Mode(enum.StrEnum):
    """Which distribution a reported log-prob is of."""

    AFTER_FILTER = "AfterFilter"
    AFTER_TEMPERATURE = "AfterTemperature"
    BEFORE_TEMPERATURE = "BeforeTemperature"
    UNKNOWN = "Unknown"


@dataclass(frozen=True)
class Tolerance:
    """Largest differences of log-probs, in nats, that the engine's and the oracle's arithmetic explain."""

    max_abs: float
    mean_abs: float
    median_abs: float


# The same arithmetic in other batch shapes. Where a matrix library sums in another order, an FP32 sum ends on the other side of
# a rounding boundary now and then, and a routing tie falls the other way: that is far off for a few tokens and nothing for most,
# which is what the median tells from wrong scales or the weights of an earlier step. Measured on one machine: 1e-6 throughout.
SAME_ARITHMETIC: Mapping[str, Tolerance] = {
    VIEW_BF16: Tolerance(max_abs=0.3, mean_abs=0.02, median_abs=0.003),
    VIEW_FP8: Tolerance(max_abs=0.5, mean_abs=0.04, median_abs=0.005),
    VIEW_NVFP4: Tolerance(max_abs=0.8, mean_abs=0.06, median_abs=0.01),
}
# Real kernels against the reference arithmetic.
OTHER_KERNELS: Mapping[str, Tolerance] = {
    VIEW_BF16: Tolerance(max_abs=1.0, mean_abs=0.05, median_abs=0.03),
    VIEW_FP8: Tolerance(max_abs=1.5, mean_abs=0.1, median_abs=0.06),
    VIEW_NVFP4: Tolerance(max_abs=3.0, mean_abs=0.3, median_abs=0.2),
}


@dataclass(frozen=True)
class Verdict:
    """`reason` is empty when the engine conforms."""

    reason: str
    message: str
    max_abs_diff: float | None
    mode: Mode
    prompt_logprobs: Floats | None = (
        None  # the oracle's, all prompts one after another: what the next version is told from
    )

    @property
    def passed(self) -> bool:
        return not self.reason


# A clean load of the folder, asked for the logits [len, V] of whole sequences. Blocking; run in a thread.
Oracle = Callable[[Sequence[Sequence[int]]], list[Floats]]


def prompts(vocab_size: int, context_length: int) -> list[list[int]]:
    """Fixed for a vocabulary: random tokens reach every expert and leave the model undecided."""
    rng = random.Random(20261013)
    length = max(2, min(PROMPT_TOKENS, context_length - NEW_TOKENS))
    return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(PROMPTS)]


def sampling_of(index: int) -> Sampling:
    """Of the prompt with this index."""
    return SAMPLINGS[index % len(SAMPLINGS)]


def canary_body(prompt: Sequence[int], index: int, nonce: str) -> Json:
    """One /generate body that asks for everything. The nonce keeps the prefix cache out of it."""
    sampling = sampling_of(index)
    return {
        "input_ids": list(prompt),
        "sampling_params": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_new_tokens": NEW_TOKENS,
            "ignore_eos": True,
            "sampling_seed": index,
        },
        "return_logprob": True,
        "logprob_start_len": 0,
        "return_sampling_mask": True,
        "sampling_logprobs_mode": "support",
        "extra_key": f"canary-{nonce}-{index}",
        "rid": f"canary-{nonce}-{index}",
    }


async def run(
    engine: Engine,
    oracle: Oracle,
    *,
    version: int,
    nonce: str,
    tolerance: Tolerance,
    previous: Floats | None,
) -> Verdict:
    """Asks the live engine and judges the answers. previous: prompt log-probs of the version served before."""
    info = engine.model_info()
    asked = prompts(info["vocab_size"], info["context_length"])
    bodies = [canary_body(prompt, index, nonce) for index, prompt in enumerate(asked)]
    try:
        answers = await asyncio.gather(*(engine.generate(body, counted=False) for body in bodies))
    except EngineError as error:
        return Verdict("CanaryFailed", f"the engine did not answer the canary: {error}", None, Mode.UNKNOWN)
    replies = [answer for answer in answers if isinstance(answer, dict)]
    sequences = [prompt + list(reply["output_ids"]) for prompt, reply in zip(asked, replies, strict=True)]
    logits = await asyncio.to_thread(oracle, sequences)
    return judge(asked, replies, logits, version=version, tolerance=tolerance, previous=previous)


def judge(
    asked: Sequence[Sequence[int]],
    replies: Sequence[Json],
    logits: Sequence[Floats],
    *,
    version: int,
    tolerance: Tolerance,
    previous: Floats | None,
) -> Verdict:
    """logits: the oracle's [T + G, V] for each prompt with what the engine drew for it."""
    try:
        return _judge(asked, replies, logits, version, tolerance, previous)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        return Verdict(
            "CanaryFailed", f"the canary's reply is malformed: {type(error).__name__}: {error}", None, Mode.UNKNOWN
        )


def _judge(
    asked: Sequence[Sequence[int]],
    replies: Sequence[Json],
    logits: Sequence[Floats],
    version: int,
    tolerance: Tolerance,
    previous: Floats | None,
) -> Verdict:
    problem = next((found for reply in replies if (found := _label_problem(reply, version))), "")
    if problem:
        return Verdict("VersionMismatch", problem, None, Mode.UNKNOWN)
    live = np.concatenate([_prompt_logprobs(reply, prompt) for prompt, reply in zip(asked, replies, strict=True)])
    clean = np.concatenate([_teacher_forced(z, prompt) for prompt, z in zip(asked, logits, strict=True)])
    difference = np.abs(live - clean)
    largest = float(difference.max()) if np.isfinite(difference).all() else float("inf")

    stale = _stale(live, clean, previous, version)
    if stale:
        return Verdict("VersionMismatch", stale, largest, Mode.UNKNOWN)
    problem = _exceeds(difference, tolerance, "prompt log-probs")
    if problem:
        return Verdict("CanaryFailed", problem, largest, Mode.UNKNOWN)

    each = enumerate(zip(logits, asked, replies, strict=True))
    drawn = [token for index, (z, prompt, reply) in each for token in _drawn(z, prompt, reply, sampling_of(index))]
    problem = next((found for token in drawn if (found := _support_problem(token, tolerance))), "")
    if problem:
        return Verdict("SupportMismatch", problem, largest, Mode.UNKNOWN)
    # What samples are made of, then what SGLang calls log-probs: both must be what they are taken for.
    mode, error = nearest_mode(drawn, [token.support_logprob for token in drawn])
    if mode is not Mode.AFTER_FILTER:
        return Verdict(
            "ModeMismatch", f"output_token_sampling_logprobs must be {Mode.AFTER_FILTER}, are {mode}", largest, mode
        )
    off = float(np.mean(np.concatenate([token.candidate_errors() for token in drawn])))
    if off > tolerance.mean_abs:
        message = f"log-probs of candidates differ by {off:.4f} nats on average, allowed {tolerance.mean_abs}"
        return Verdict("SupportMismatch", message, largest, mode)
    if error > tolerance.mean_abs:
        message = f"log-probs of drawn tokens differ by {error:.4f} nats on average, allowed {tolerance.mean_abs}"
        return Verdict("CanaryFailed", message, largest, mode)
    plain, _ = nearest_mode(drawn, [token.logprob for token in drawn])
    if plain is not Mode.AFTER_TEMPERATURE:
        return Verdict(
            "ModeMismatch", f"output_token_logprobs must be {Mode.AFTER_TEMPERATURE}, are {plain}", largest, plain
        )
    return Verdict("", "", largest, mode, clean)


@dataclass(frozen=True)
class Drawn:
    """One generated token: what the engine said of it, and the oracle's logits [V] where it was drawn."""

    token: int
    logprob: float
    ids: NDArray[np.int64]  # [C]
    support_logprobs: Floats  # [C]
    logits: Floats
    sampling: Sampling

    @property
    def support_logprob(self) -> float:
        found = np.flatnonzero(self.ids == self.token)
        return float(self.support_logprobs[found[0]]) if found.size else float("-inf")

    def log_prob(self, mode: Mode) -> float:
        """By the oracle, of this token, under one reading of what is reported."""
        if mode is Mode.BEFORE_TEMPERATURE:
            return float(log_softmax(self.logits)[self.token])
        scaled = log_softmax(self.logits / self.sampling.temperature)
        if mode is Mode.AFTER_TEMPERATURE:
            return float(scaled[self.token])
        return float(scaled[self.token] - np.log(np.exp(scaled[self.ids]).sum()))

    def candidate_errors(self) -> Floats:
        """[C] of the reported log-probs, against the oracle's renormalised over the same candidates."""
        scaled = log_softmax(self.logits / self.sampling.temperature)[self.ids]
        return np.asarray(np.abs(self.support_logprobs - (scaled - np.log(np.exp(scaled).sum()))))


def nearest_mode(drawn: Sequence[Drawn], reported: Sequence[float]) -> tuple[Mode, float]:
    """The mode that explains the reported log-probs best, and the mean absolute error that is left, in nats."""
    values = np.asarray(reported, dtype=np.float64)
    if not drawn or not np.isfinite(values).all():
        return Mode.UNKNOWN, float("inf")
    modes = (Mode.AFTER_FILTER, Mode.AFTER_TEMPERATURE, Mode.BEFORE_TEMPERATURE)
    errors = {mode: float(np.mean(np.abs([t.log_prob(mode) for t in drawn] - values))) for mode in modes}
    best = min(modes, key=lambda mode: errors[mode])
    return best, errors[best]


def _label_problem(reply: Json, version: int) -> str:
    """Every generated token is of `version`, and said to be."""
    meta, count = reply["meta_info"], len(reply["output_ids"])
    spans = [(span["version"], span["start"], span["end"]) for span in meta["weight_versions"]]
    if spans != [(str(version), 0, count)] or meta["weight_version"] != str(version):
        return f"weight_versions must be {version} from 0 to {count}, got {spans} under {meta['weight_version']}"
    return ""


def _stale(live: Floats, clean: Floats, previous: Floats | None, version: int) -> str:
    """Nearer to the weights before than to those announced: the update did not take."""
    if previous is None or previous.shape != live.shape:
        return ""
    to_new, to_old = float(np.mean(np.abs(live - clean))), float(np.mean(np.abs(live - previous)))
    if to_old < 0.5 * to_new:
        return (
            f"serves the weights of the version before {version}: mean difference {to_old:.2e} nats to those, "
            f"{to_new:.2e} to a clean load of {version}"
        )
    return ""


def _exceeds(difference: Floats, tolerance: Tolerance, what: str) -> str:
    if not np.isfinite(difference).all():
        return f"{what} are not finite"
    largest, mean, median = float(difference.max()), float(difference.mean()), float(np.median(difference))
    if largest > tolerance.max_abs or mean > tolerance.mean_abs or median > tolerance.median_abs:
        return (
            f"{what} differ from a clean load by up to {largest:.4f} nats (allowed {tolerance.max_abs}), "
            f"{mean:.4f} on average (allowed {tolerance.mean_abs}), {median:.4f} in the median (allowed {tolerance.median_abs})"
        )
    return ""


def _support_problem(token: Drawn, tolerance: Tolerance) -> str:
    """Complete, minimal, normalised, and holding the drawn token."""
    top_p, top_k = token.sampling.top_p, token.sampling.top_k
    if token.token not in token.ids or len(set(token.ids.tolist())) != len(token.ids) or len(token.ids) > top_k:
        return (
            f"the support of token {token.token} must hold it once, among at most {top_k} ids, got {token.ids.tolist()}"
        )
    total = float(np.exp(token.support_logprobs).sum())
    if not abs(total - 1) <= NORMALISED_WITHIN:
        return f"a support must sum to 1, sums to {total:.6f}"
    p = np.exp(log_softmax(token.logits / token.sampling.temperature))[token.ids]
    # A token near the edge of top_p may fall on either side of it by the arithmetic's noise, which moves the mass in proportion.
    slack = max(2 * tolerance.mean_abs, 0.01)
    if len(token.ids) < top_k and p.sum() < top_p - slack:
        return f"a support must hold a mass of {top_p}, holds {p.sum():.4f} of the clean load's"
    if p.sum() - p.min() > top_p + slack:
        return f"a support must be the smallest with a mass of {top_p}, holds {p.sum() - p.min():.4f} without its last token"
    return ""


def _prompt_logprobs(reply: Json, prompt: Sequence[int]) -> Floats:
    """[T - 1]: the first token has nothing before it."""
    rows = reply["meta_info"]["input_token_logprobs"]
    if [row[1] for row in rows] != list(prompt):
        raise ValueError("input_token_logprobs are of other tokens than the prompt's")
    return np.array([_number(row[0]) for row in rows[1:]], dtype=np.float64)


def _teacher_forced(logits: Floats, prompt: Sequence[int]) -> Floats:
    rows = log_softmax(logits[: len(prompt) - 1])
    return np.asarray(rows[np.arange(len(prompt) - 1), list(prompt[1:])])


def _drawn(logits: Floats, prompt: Sequence[int], reply: Json, sampling: Sampling) -> list[Drawn]:
    meta, output = reply["meta_info"], reply["output_ids"]
    columns: tuple[list[Any], ...] = (
        meta["output_token_logprobs"],
        meta["output_token_sampling_mask"],
        meta["output_token_sampling_logprobs"],
    )
    if not output or any(len(column) != len(output) for column in columns):
        raise ValueError(
            f"{len(output)} tokens with {[len(column) for column in columns]} log-probs, supports and their log-probs"
        )
    return [
        Drawn(
            token=token,
            logprob=_number(row[0]),
            ids=np.array(ids, dtype=np.int64),
            support_logprobs=np.array([_number(value) for value in values], dtype=np.float64),
            logits=logits[len(prompt) - 1 + position],
            sampling=sampling,
        )
        for position, (token, row, ids, values) in enumerate(zip(output, *columns, strict=True))
    ]


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def log_softmax(logits: Floats) -> Floats:
    """Over the last axis, in float64."""
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))
