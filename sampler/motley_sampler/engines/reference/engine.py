"""The reference engine: a scheduler on a thread of its own, behind `protocol.Engine`."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import torch
from motley_weights.errors import WeightsError

from motley_sampler.engines.protocol import (
    BadRequest,
    EngineError,
    EngineLoad,
    GenerateRequest,
    Json,
    Unavailable,
    parse_generate,
)
from motley_sampler.engines.reference.precision import Arithmetic
from motley_sampler.engines.reference.scheduler import Running, Scheduler, make_running
from motley_sampler.engines.reference.weights import Weights, load_weights

IDLE_TURN_S = 1.0  # an idle engine turns over this often, which is its sign of life


class ReferenceEngine:
    """Serves one view of one model on one core."""

    def __init__(
        self,
        arithmetic: Arithmetic,
        *,
        slots: int,
        max_running: int,
        context_length: int | None = None,
        prefill_tokens: int = 512,
        seed: Callable[[], int] = lambda: secrets.randbits(63),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """context_length: in tokens, None for the model's own. seed: of requests that bring none."""
        self._arithmetic = arithmetic
        self._slots, self._max_running, self._prefill_tokens = slots, max_running, prefill_tokens
        self._context_length = context_length
        self._seed, self._clock = seed, clock
        self._scheduler: Scheduler | None = None
        self._folder = Path()
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._paused = False
        self._stopping = False
        self._failure: str | None = None
        self._busy_s = 0.0
        self._progress_at = clock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    # --- life -----------------------------------------------------------------------------------------------------

    async def start(self, folder: Path, version: int) -> None:
        torch.set_num_threads(1)  # one core per engine: more would fight the engines beside it
        weights = await asyncio.to_thread(self._load, folder)
        config = weights.config
        self._scheduler = Scheduler(
            weights,
            version,
            slots=self._slots,
            max_running=self._max_running,
            context_length=min(self._context_length or config.max_positions, config.max_positions),
            prefill_tokens=self._prefill_tokens,
        )
        self._folder = folder
        self._loop = asyncio.get_running_loop()
        self._progress_at = self._clock()
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    async def update(self, folder: Path, version: int) -> None:
        """Loads beside the weights in use, and swaps between two steps: nothing waits, nothing is aborted."""
        scheduler = self._require()
        weights = await asyncio.to_thread(self._load, folder)
        if weights.config != scheduler.weights.config:
            raise BadRequest("the folder holds another model than the one served: config.json differs")
        await self._command(lambda: scheduler.swap(weights, version))
        self._folder = folder

    async def stop(self) -> None:
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 10.0)

    def _load(self, folder: Path) -> Weights:
        try:
            return load_weights(folder, self._arithmetic)
        except (WeightsError, OSError) as error:
            raise EngineError(f"cannot load {folder.name}: {error}") from error

    # --- requests -------------------------------------------------------------------------------------------------

    async def generate(self, body: Json, *, counted: bool = True) -> Json | list[Json]:
        requests, batch = self._parse(body)
        replies = await asyncio.gather(*(self._one(request, counted=counted) for request in requests))
        for reply in replies:
            _raise_abort(reply["meta_info"]["finish_reason"])
        return list(replies) if batch else replies[0]

    async def stream(self, body: Json) -> AsyncIterator[Json]:
        requests, batch = self._parse(body)
        if batch:
            raise BadRequest("stream must be false for a list of prompts")
        changed = asyncio.Event()
        started = self._clock()
        sequence = self._submit(requests[0], lambda _: changed.set(), counted=True)
        try:
            while True:
                await changed.wait()
                changed.clear()
                finished = sequence.finish is not None
                if finished:
                    _raise_abort(sequence.finish or {})
                yield self._reply(sequence, self._clock() - started, finished=finished)
                if finished:
                    return
        finally:
            self._cancel(sequence)

    def _parse(self, body: Json) -> tuple[list[GenerateRequest], bool]:
        scheduler = self._require()
        config = scheduler.weights.config
        return parse_generate(body, vocab_size=config.vocab_size, context_length=scheduler.context_length)

    async def _one(self, request: GenerateRequest, *, counted: bool) -> Json:
        started = self._clock()
        done = asyncio.Event()
        sequence = self._submit(request, lambda s: done.set() if s.finish is not None else None, counted=counted)
        try:
            await done.wait()
        finally:
            self._cancel(sequence)
        return self._reply(sequence, self._clock() - started, finished=True)

    def _submit(self, request: GenerateRequest, notify: Callable[[Running], None], *, counted: bool) -> Running:
        scheduler, loop = self._require(), self._loop
        if loop is None:
            raise Unavailable("the engine has not started")

        def on_progress(sequence: Running) -> None:
            # From the engine's thread. A loop that is closing has nobody left to tell.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(notify, sequence)

        sequence = make_running(request, seed=self._seed(), on_progress=on_progress, counted=counted)
        self._post(lambda: scheduler.submit(sequence))
        return sequence

    def _cancel(self, sequence: Running) -> None:
        """Frees what a caller that went away held; nothing to do for a finished sequence."""
        if sequence.finish is None and self._scheduler is not None:
            scheduler = self._scheduler
            self._post(lambda: scheduler.abort(lambda s: s is sequence, "the client went away"))

    def _reply(self, sequence: Running, latency_s: float, *, finished: bool) -> Json:
        """SGLang's reply. The engine's thread may append while we read: one length is taken first and holds for all lists."""
        request = sequence.request
        output_ids = sequence.output_ids
        count = len(output_ids)
        if not finished:
            if request.return_logprob:
                count = min(count, len(sequence.logprobs))
            if request.return_sampling_mask:
                count = min(count, len(sequence.support_logprobs))
            output_ids = output_ids[:count]
        spans = [span for span in list(sequence.spans) if span[1] < count]
        spans = spans or [(max(sequence.version, 0), 0, 0)]
        meta: Json = {
            "id": request.rid,
            "finish_reason": sequence.finish if finished else None,
            "prompt_tokens": len(request.input_ids),
            "completion_tokens": count,
            "cached_tokens": sequence.cached,
            "weight_version": str(spans[-1][0]),
            "weight_versions": [{"version": str(v), "start": start, "end": min(end, count)} for v, start, end in spans],
            "num_retractions": 0,
            "e2e_latency": latency_s,
        }
        if request.return_logprob:
            meta["output_token_logprobs"] = _pairs(sequence.logprobs[:count], output_ids)
            if request.logprob_start_len >= 0:
                prompt = request.input_ids[request.logprob_start_len :]
                # A prompt of which only the last token was asked for has no predicted token.
                values = sequence.prompt_logprobs or [None]
                meta["input_token_logprobs"] = _pairs(values, prompt[: len(values)])
            else:
                meta["input_token_logprobs"] = []
            if request.top_logprobs_num:
                top = sequence.top[:count]
                meta["output_top_logprobs"] = [[[value, token, None] for value, token in row] for row in top]
        if request.return_sampling_mask:
            meta["output_token_sampling_mask"] = sequence.support_ids[:count]
            meta["output_token_sampling_logprobs"] = sequence.support_logprobs[:count]
            meta["output_token_sampling_mask_length"] = count
        return {"text": "", "output_ids": output_ids, "meta_info": meta}

    # --- control --------------------------------------------------------------------------------------------------

    async def abort(self, rid: str, *, everything: bool = False) -> None:
        scheduler = self._require()
        await self._command(lambda: scheduler.abort(lambda s: everything or s.request.rid == rid, "aborted on request"))

    async def pause(self) -> None:
        await self._command(lambda: setattr(self, "_paused", True))

    async def resume(self) -> None:
        await self._command(lambda: setattr(self, "_paused", False))

    async def flush_cache(self) -> None:
        await self._command(self._require().table.flush)

    async def close_session(self, session: str) -> None:
        """Its prefix is not needed any more."""
        table = self._require().table
        await self._command(lambda: table.forget_session(session))

    def load(self) -> EngineLoad:
        scheduler = self._scheduler
        if scheduler is None:
            return EngineLoad()
        totals = scheduler.totals
        return EngineLoad(
            running=len(scheduler.running),
            queued=len(scheduler.waiting),
            kv_used_percent=scheduler.table.used_percent(),
            turns=totals.turns,
            prompt_tokens=totals.prompt_tokens,
            cached_tokens=totals.cached_tokens,
            generated_tokens=totals.generated_tokens,
            busy_s=self._busy_s,
        )

    def model_info(self) -> Json:
        scheduler = self._require()
        config = scheduler.weights.config
        return {
            "model_path": str(self._folder),
            "model_type": config.model_type,
            "is_generation": True,
            "weight_version": str(scheduler.version),
            "vocab_size": config.vocab_size,
            "context_length": scheduler.context_length,
            "max_running_requests": scheduler.max_running,
            "max_total_num_tokens": len(scheduler.table.slots) * scheduler.context_length,
        }

    def stalled_s(self) -> float:
        return max(0.0, self._clock() - self._progress_at)

    def failed(self) -> str | None:
        return self._failure

    # --- the engine's thread --------------------------------------------------------------------------------------

    def _require(self) -> Scheduler:
        if self._failure is not None:
            raise Unavailable(f"the engine failed: {self._failure}")
        if self._scheduler is None:
            raise Unavailable("the engine has not loaded weights yet")
        return self._scheduler

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake.set()

    async def _command(self, command: Callable[[], Any]) -> None:
        """Runs `command` on the engine's thread, between two steps, and waits for it."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def run() -> None:
            try:
                command()
            except Exception as error:  # travels to the caller
                loop.call_soon_threadsafe(_set_exception, done, error)
            else:
                loop.call_soon_threadsafe(_set_done, done)

        self._post(run)
        await done

    def _serve(self) -> None:
        scheduler = self._scheduler
        if scheduler is None:
            return
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._turn(scheduler)
        except Exception as error:  # whatever broke the loop, its callers must hear of it
            self._failure = f"{type(error).__name__}: {error}"
            scheduler.abort(lambda _: True, self._failure)
        while self._commands:
            self._commands.popleft()()
        scheduler.abort(lambda _: True, self._failure or "the engine stops")

    def _turn(self, scheduler: Scheduler) -> None:
        while self._commands:
            self._commands.popleft()()
        if scheduler.has_work and not self._paused:
            started = self._clock()
            scheduler.step()
            self._progress_at = self._clock()
            self._busy_s += self._progress_at - started
            return
        self._wake.wait(IDLE_TURN_S)
        self._wake.clear()
        self._progress_at = self._clock()


def _raise_abort(reason: Json) -> None:
    """An abort with a status is an error of ours; without one it was asked for, and is a reply."""
    if reason.get("type") == "abort" and reason.get("status_code"):
        raise EngineError(reason["message"])


def _pairs(values: list[Any], ids: list[int]) -> list[list[Any]]:
    return [[value, token, None] for value, token in zip(values, ids, strict=True)]


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _set_exception(future: asyncio.Future[None], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
