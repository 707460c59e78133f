"""What every engine speaks: SGLang's JSON schema for /generate, and the few control calls that the agent needs.

The schema is SGLang 0.5.23's (`sglang.srt.managers.io_struct.GenerateReqInput` and the meta_info of its replies); fields that
do not change which tokens come out (routing_key, priority, ...) are accepted and ignored, sampling parameters that would
change the distribution and that an engine does not support are refused.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

SAMPLING_MASK_MAX_TOKENS = 4096  # SGLang's --sampling-mask-max-tokens

Json = dict[str, Any]


class EngineError(Exception):
    """Something that an engine refuses or fails, with the HTTP status that says so."""

    status = 500


class BadRequest(EngineError):  # noqa: N818 - named as HTTP names it
    """The request can never be answered as it is."""

    status = 400


class Unavailable(EngineError):  # noqa: N818
    """Not now: loading, paused for good, shutting down. The caller may come back or go elsewhere."""

    status = 503


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """SGLang's sampling_params. `temperature` 0 means greedy; `top_k` -1 means all tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 128
    stop_token_ids: list[int] | None = None
    sampling_seed: int | None = None
    ignore_eos: bool = False
    # Accepted at the value that leaves the distribution alone; anything else is refused by name.
    min_p: float = 0.0
    n: int = 1
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop: str | list[str] | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False

    def refuse_unsupported(self) -> None:
        """Raises BadRequest naming the field and what is allowed."""
        checks = [
            (0.0 <= self.temperature <= 1e4, "temperature", self.temperature, "a number from 0 to 10000"),
            (0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0 and at most 1"),
            (self.top_k == -1 or self.top_k >= 1, "top_k", self.top_k, "-1 (off) or at least 1"),
            (self.max_new_tokens >= 0, "max_new_tokens", self.max_new_tokens, "at least 0"),
            (self.min_p == 0.0, "min_p", self.min_p, "0: not supported"),
            (self.n == 1, "n", self.n, "1: send one request per sample"),
            (self.frequency_penalty == 0.0, "frequency_penalty", self.frequency_penalty, "0: not supported"),
            (self.presence_penalty == 0.0, "presence_penalty", self.presence_penalty, "0: not supported"),
            (self.repetition_penalty == 1.0, "repetition_penalty", self.repetition_penalty, "1: not supported"),
            (self.min_new_tokens == 0, "min_new_tokens", self.min_new_tokens, "0: not supported"),
            (not self.stop, "stop", self.stop, "absent: this engine has no tokenizer, use stop_token_ids"),
        ]
        for ok, name, value, allowed in checks:
            if not ok:
                raise BadRequest(f"sampling_params.{name} must be {allowed}, got {value!r}")


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /generate as it arrives. Unknown fields are ignored, as SGLang does."""

    input_ids: list[int | list[int]]
    sampling_params: SamplingParams | list[SamplingParams] = SamplingParams()
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    return_sampling_mask: bool = False
    sampling_logprobs_mode: Literal["selected", "support"] | None = None
    session_id: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    rid: str | list[str] | None = None
    stream: bool = False


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to continue, validated."""

    input_ids: list[int]
    sampling: SamplingParams
    return_logprob: bool = False
    logprob_start_len: int = -1  # -1: no log-probs of the prompt
    top_logprobs_num: int = 0
    return_sampling_mask: bool = False
    support_logprobs: bool = False
    session_id: str = ""
    cache_key: str = ""  # KV prefixes are shared only between requests of one key
    rid: str = ""
    stream: bool = False


def parse_json(data: bytes) -> Json:
    """A JSON object, or BadRequest that says where it breaks."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"body must be JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest(f"body must be a JSON object, got {type(body).__name__}")
    return body


def parse_generate(body: Json, *, vocab_size: int, context_length: int) -> tuple[list[GenerateRequest], bool]:
    """Body of /generate -> one request per sequence, and whether it was a batch (list of lists). Raises BadRequest."""
    try:
        raw = msgspec.convert(body, GenerateBody)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error)) from error
    prompts, batch = _prompts(raw.input_ids)
    samplings = _per_sequence(raw.sampling_params, len(prompts), "sampling_params", batch)
    rids = _per_sequence(raw.rid or "", len(prompts), "rid", batch)
    requests = []
    for index, (prompt, sampling, rid) in enumerate(zip(prompts, samplings, rids, strict=True)):
        where = f"input_ids[{index}]" if batch else "input_ids"
        sampling.refuse_unsupported()
        _check_prompt(prompt, where, sampling.max_new_tokens, vocab_size, context_length)
        _check_mask(raw, sampling)
        requests.append(
            GenerateRequest(
                input_ids=prompt,
                sampling=sampling,
                return_logprob=raw.return_logprob,
                logprob_start_len=_start_len(raw.logprob_start_len, len(prompt), where) if raw.return_logprob else -1,
                top_logprobs_num=_in_range("top_logprobs_num", raw.top_logprobs_num, 0, vocab_size),
                return_sampling_mask=raw.return_sampling_mask,
                support_logprobs=raw.sampling_logprobs_mode == "support",
                session_id=raw.session_id or "",
                cache_key="\x00".join((raw.cache_salt or "", raw.extra_key or "")),
                rid=f"{rid}-{index}" if batch and isinstance(raw.rid, str) else rid,
                stream=raw.stream,
            )
        )
    return requests, batch


def _prompts(input_ids: list[int | list[int]]) -> tuple[list[list[int]], bool]:
    single = [item for item in input_ids if isinstance(item, int)]
    if len(single) == len(input_ids):
        return [single], False
    many = [item for item in input_ids if isinstance(item, list)]
    if len(many) != len(input_ids):
        raise BadRequest("input_ids must be one list of token ids, or a list of such lists, not a mix")
    return many, True


def _per_sequence[T](value: T | list[T], count: int, name: str, batch: bool) -> list[T]:
    if not isinstance(value, list):
        return [value] * count
    if not batch or len(value) != count:
        raise BadRequest(f"{name} must be one value, or one per sequence ({count}), got {len(value)}")
    return value


def _check_prompt(prompt: list[int], where: str, max_new_tokens: int, vocab_size: int, context_length: int) -> None:
    if not prompt:
        raise BadRequest(f"{where} must hold at least one token")
    if len(prompt) + max_new_tokens > context_length:
        raise BadRequest(
            f"{where}: {len(prompt)} tokens and sampling_params.max_new_tokens {max_new_tokens} exceed the context "
            f"length of {context_length}"
        )
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= vocab_size:
        raise BadRequest(f"{where}: token ids must be from 0 to {vocab_size - 1}, got {low if low < 0 else high}")


def _check_mask(raw: GenerateBody, sampling: SamplingParams) -> None:
    """SGLang's rules: a mode needs a mask, and a mask a finite top_k, so that a support is bounded."""
    if raw.sampling_logprobs_mode is not None and not raw.return_sampling_mask:
        raise BadRequest("sampling_logprobs_mode needs return_sampling_mask: true")
    if not raw.return_sampling_mask or sampling.temperature == 0:
        return
    if not 1 <= sampling.top_k <= SAMPLING_MASK_MAX_TOKENS:
        raise BadRequest(
            f"sampling_params.top_k must be from 1 to {SAMPLING_MASK_MAX_TOKENS} with return_sampling_mask, "
            f"got {sampling.top_k}"
        )


def _start_len(start: int, prompt: int, where: str) -> int:
    if start == -1:
        return -1
    if not 0 <= start < prompt:
        raise BadRequest(f"logprob_start_len must be -1, or from 0 to {prompt - 1} for {where}, got {start}")
    return start


def _in_range(name: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise BadRequest(f"{name} must be from {low} to {high}, got {value}")
    return value


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How busy an engine is, and what it did since it started."""

    running: int = 0
    queued: int = 0
    kv_used_percent: int = 0
    preemptions: int = 0
    turns: int = 0  # finished /generate sequences, canaries left out
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    busy_s: float = 0.0


class Engine(Protocol):
    """What the agent needs of an engine. Bodies and replies are SGLang's JSON."""

    async def start(self, folder: Path, version: int) -> None:
        """First load, from a view folder. Raises EngineError or OSError when the folder cannot be served."""

    async def update(self, folder: Path, version: int) -> None:
        """Serves `folder` from the next decode step on; requests in flight survive, and report the change as spans."""

    async def generate(self, body: Json, *, counted: bool = True) -> Json | list[Json]:
        """One reply per sequence. Cancelling the call frees what it held. counted: in the load's totals; canaries are not."""

    def stream(self, body: Json) -> AsyncIterator[Json]:
        """Cumulative replies of one sequence, the last one with its finish_reason."""

    async def abort(self, rid: str, *, everything: bool = False) -> None: ...

    async def pause(self) -> None:
        """Stops between two steps, keeping every request (SGLang's mode in_place)."""

    async def resume(self) -> None: ...

    async def flush_cache(self) -> None: ...

    async def close_session(self, session: str) -> None:
        """The session's prefix is not needed any more."""

    def load(self) -> EngineLoad: ...

    def model_info(self) -> Json: ...

    def stalled_s(self) -> float:
        """Seconds since the engine last made progress. An idle engine makes progress by turning over."""

    def failed(self) -> str | None:
        """Why the engine can serve no more, if so: it must be replaced."""

    async def stop(self) -> None: ...
