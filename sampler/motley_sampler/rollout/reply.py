"""An engine's reply to /generate, checked and taken apart. SGLang's schema. Pure.

An engine's word is not trusted: lists of unequal length, versions that are no numbers, a sampled token outside its own
support are an engine's fault, and such a reply is asked for again. A log-prob that is null or not finite is kept as NaN: that
single token is for the trainer to drop and count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray


class ReplyError(ValueError):
    """A reply that cannot be used."""


class _Span(msgspec.Struct, frozen=True):
    version: str | int
    start: int = 0
    end: int = 0


class _Finish(msgspec.Struct, frozen=True):
    type: str
    message: str = ""


class _Meta(msgspec.Struct, frozen=True):
    finish_reason: _Finish | None = None
    cached_tokens: int = 0
    weight_version: str | int | None = None
    weight_versions: list[_Span] = []
    output_token_logprobs: list[tuple[float | None, int, Any]] | None = None
    output_top_logprobs: list[list[tuple[float | None, int, Any]] | None] | None = None
    output_token_sampling_mask: list[list[int]] | None = None
    output_token_sampling_logprobs: list[list[float | None]] | None = None


class _Body(msgspec.Struct, frozen=True):
    meta_info: _Meta
    output_ids: list[int] = []


@dataclass(frozen=True)
class Reply:
    """One turn's tokens. G = tokens, C = candidates over all of them; see records.Candidates for counts of 0."""

    token_ids: tuple[int, ...]  # [G]
    logprobs: NDArray[np.float32]  # [G]
    counts: NDArray[np.uint16] | None  # [G]; None: drawn from the whole vocabulary, and no candidates asked for
    candidate_ids: NDArray[np.uint32]  # [C]
    candidate_logprobs: NDArray[np.float32]  # [C]
    start_version: int
    end_version: int
    cached_tokens: int


_decoder = msgspec.json.Decoder(_Body)


def parse_generate(body: bytes, *, filtered: bool, max_tokens: int, top_logprobs: int = 0) -> Reply:
    """Takes an engine's answer apart; whitespace before it (keep-alive) is fine. Raises ReplyError.

    `filtered`: top-p or top-k was on, so each token's support is wanted. Otherwise `top_logprobs` candidates, if any.
    """
    try:
        parsed = _decoder.decode(body.strip())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ReplyError(f"not a reply to /generate: {error}: {body.strip()[:200]!r}") from error
    meta, ids = parsed.meta_info, parsed.output_ids
    if meta.finish_reason is not None and meta.finish_reason.type == "abort":
        raise ReplyError(f"aborted: {meta.finish_reason.message or 'no reason given'}")
    if meta.finish_reason is None:
        raise ReplyError("unfinished: no finish_reason")
    if not 0 < len(ids) <= max_tokens:
        raise ReplyError(f"output_ids: {len(ids)} tokens, want 1 to {max_tokens}")
    start, end = _versions(meta)
    nothing = (np.zeros(0, np.uint32), np.zeros(0, np.float32))
    if filtered:
        logprobs, counts, candidates = _supports(meta, ids)
    elif top_logprobs:
        logprobs, (counts, candidates) = _plain_logprobs(meta, ids), _heads(meta, len(ids), top_logprobs)
    else:
        logprobs, counts, candidates = _plain_logprobs(meta, ids), None, nothing
    return Reply(tuple(ids), logprobs, counts, *candidates, start, end, meta.cached_tokens)


def _versions(meta: _Meta) -> tuple[int, int]:
    """Weights versions of the first and the last token: an update in mid-reply leaves several spans."""
    spans = [_version(span.version) for span in sorted(meta.weight_versions, key=lambda span: span.start)]
    spans = spans or ([] if meta.weight_version is None else [_version(meta.weight_version)])
    if not spans:
        raise ReplyError("neither weight_versions nor weight_version: the tokens' weights are unknown")
    return min(spans), max(spans)


def _version(value: str | int) -> int:
    try:
        version = int(str(value).removeprefix("v"))
    except ValueError:
        version = -1
    if version < 0:
        raise ReplyError(f"weights version {value!r} is not a number >= 0")
    return version


def _value(logprob: float | None) -> float:
    return math.nan if logprob is None else logprob


def _plain_logprobs(meta: _Meta, ids: list[int]) -> NDArray[np.float32]:
    rows = meta.output_token_logprobs
    if rows is None or [token for _, token, _ in rows] != ids:
        raise ReplyError(f"output_token_logprobs: want one entry for each of {len(ids)} output_ids, with the same ids")
    return np.array([_value(logprob) for logprob, _, _ in rows], np.float32)


def _heads(
    meta: _Meta, tokens: int, top_logprobs: int
) -> tuple[NDArray[np.uint16], tuple[NDArray[np.uint32], NDArray[np.float32]]]:
    """A vocabulary smaller than `top_logprobs` is a head as a whole."""
    rows = [row or [] for row in meta.output_top_logprobs or []]
    if len(rows) != tokens or not all(0 < len(row) <= top_logprobs for row in rows):
        raise ReplyError(
            f"output_top_logprobs: want 1 to {top_logprobs} entries for each of {tokens} output_ids, got {len(rows)} lists"
            f" of {sorted({len(row) for row in rows})}"
        )
    ids = np.array([token for row in rows for _, token, _ in row], np.uint32)
    values = np.array([_value(logprob) for row in rows for logprob, _, _ in row], np.float32)
    return np.array([len(row) for row in rows], np.uint16), (ids, values)


def _supports(
    meta: _Meta, ids: list[int]
) -> tuple[NDArray[np.float32], NDArray[np.uint16], tuple[NDArray[np.uint32], NDArray[np.float32]]]:
    masks, supports = meta.output_token_sampling_mask, meta.output_token_sampling_logprobs
    if masks is None or supports is None or not len(masks) == len(supports) == len(ids):
        raise ReplyError(f"output_token_sampling_mask and _logprobs: want one list for each of {len(ids)} output_ids")
    logprobs, counts = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.uint16)
    kept_ids: list[int] = []
    kept_logprobs: list[float | None] = []
    for index, (token, mask, support) in enumerate(zip(ids, masks, supports, strict=True)):
        if len(mask) != len(support) or token not in mask:
            raise ReplyError(
                f"support of output token {index}: {len(mask)} ids, {len(support)} log-probs, sampled id {token}"
            )
        logprobs[index] = _value(support[mask.index(token)])
        if len(mask) > 1:
            counts[index] = len(mask)
            kept_ids += mask
            kept_logprobs += support
    values = np.array([_value(logprob) for logprob in kept_logprobs], np.float32)
    return logprobs, counts, (np.array(kept_ids, np.uint32), values)
