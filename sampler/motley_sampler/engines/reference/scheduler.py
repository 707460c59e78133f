"""Continuous batching: which sequences run in a step, and what becomes of the drawn tokens. One thread, no clock, no I/O."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from motley_sampler.engines.protocol import GenerateRequest
from motley_sampler.engines.reference.model import KvCache, Rope, forward, plan_step
from motley_sampler.engines.reference.sampling import Draw, Filter, FilterBatch, draw
from motley_sampler.engines.reference.slots import Slot, SlotTable
from motley_sampler.engines.reference.weights import Weights


@dataclass(eq=False)
class Running:
    """One sequence, from its arrival to its finish."""

    request: GenerateRequest
    rng: random.Random
    tokens: list[int]  # prompt, then what was drawn
    on_progress: Callable[[Running], None]
    filter: Filter
    counted: bool = True  # in the load's totals; canaries are not
    slot: Slot | None = None
    computed: int = 0  # tokens whose keys and values are in the slot
    cached: int = 0
    spans: list[tuple[int, int, int]] = field(default_factory=list)  # (version, start, end) of the drawn tokens
    version: int = -1  # of the newest step it took part in
    finish: dict[str, Any] | None = None
    logprobs: list[float] = field(default_factory=list)
    support_logprobs: list[Any] = field(default_factory=list)
    support_ids: list[list[int]] = field(default_factory=list)
    top: list[list[tuple[float, int]]] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[len(self.request.input_ids) :]


@dataclass
class Totals:
    """Cumulative, canaries left out."""

    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0


class Scheduler:
    """Owns the weights in use, the KV cache, and the sequences. Every method is called from one thread."""

    def __init__(
        self,
        weights: Weights,
        version: int,
        *,
        slots: int,
        max_running: int,
        context_length: int,
        prefill_tokens: int = 512,
    ) -> None:
        """prefill_tokens: most prompt tokens of one step, padding included; a longer prompt is taken in pieces."""
        self.weights, self.version = weights, version
        self.context_length = context_length
        self.max_running = min(max_running, slots)
        self.prefill_tokens = prefill_tokens
        self.cache = KvCache(weights.config, slots, context_length)
        self.rope = Rope(weights.config, context_length)
        self.table = SlotTable(slots, context_length)
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []
        self.totals = Totals()
        self._progressed: list[Running] = []  # told at the end of the step, when the books are right again
        self._filters: tuple[list[Running], FilterBatch] | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def submit(self, sequence: Running) -> None:
        self.waiting.append(sequence)

    def swap(self, weights: Weights, version: int) -> None:
        """Later steps use `weights`. Running sequences keep the keys and values that they have; new ones find no old prefix."""
        self.weights, self.version = weights, version
        self.table.change_version()

    def abort(self, matches: Callable[[Running], bool], message: str) -> None:
        for sequence in [s for s in (*self.waiting, *self.running) if matches(s)]:
            self._finish(sequence, {"type": "abort", "message": message, "status_code": None, "err_type": None})
        self._settle()

    def step(self) -> None:
        """One prefill piece if any is due, then one token of every sequence that is past its prompt."""
        self._admit()
        prefilling = [s for s in self.running if s.pending > 1]
        if prefilling:
            self._run(*self._prefill_batch(prefilling))
        decoding = [s for s in self.running if s.finish is None and s.pending == 1]
        if decoding:
            self._run(decoding, 1)
        self._settle()

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_running:
            sequence = self.waiting[0]
            request = sequence.request
            limit = len(request.input_ids) - 1
            if request.logprob_start_len >= 0:
                limit = min(limit, request.logprob_start_len)
            placed = self.table.place(
                request.input_ids,
                version=self.version,
                cache_key=request.cache_key,
                session=request.session_id,
                reuse_at_most=limit,
            )
            if placed is None:
                return
            self.waiting.popleft()
            if placed.copy_from is not None:
                self.cache.copy_prefix(placed.copy_from.index, placed.slot.index, placed.cached)
            sequence.slot = placed.slot
            sequence.computed = sequence.cached = placed.cached
            self.running.append(sequence)

    def _prefill_batch(self, prefilling: list[Running]) -> tuple[list[Running], int]:
        """Sequences in order of arrival, and the tokens of each, so that the padded batch stays within prefill_tokens."""
        chosen, tokens = [prefilling[0]], min(prefilling[0].pending, self.prefill_tokens)
        for sequence in prefilling[1:]:
            wider = max(tokens, min(sequence.pending, self.prefill_tokens))
            if wider * (len(chosen) + 1) > self.prefill_tokens:
                break
            chosen.append(sequence)
            tokens = wider
        return chosen, tokens

    def _run(self, batch: list[Running], tokens: int) -> None:
        """Computes up to `tokens` pending tokens of each sequence, and draws for those that reach their end."""
        pieces = [s.tokens[s.computed : s.computed + tokens] for s in batch]
        starts = [s.computed for s in batch]
        slots = [_slot(s).index for s in batch]
        padded = torch.tensor([piece + [0] * (tokens - len(piece)) for piece in pieces]).flatten()
        step = plan_step(self.weights.config, self.cache, self.rope, slots, starts, tokens)
        rows, prompt_rows, drawing = self._rows(batch, pieces, tokens)
        logits = forward(self.weights, self.cache, step, padded, torch.tensor(rows, dtype=torch.int64))
        for sequence, piece in zip(batch, pieces, strict=True):
            sequence.computed += len(piece)
            sequence.version = self.version
            _slot(sequence).tokens.extend(piece)
        for sequence, targets, first in prompt_rows:
            self._record_prompt(sequence, targets, logits[first : first + len(targets)])
        if drawing:
            self._draw(drawing, logits[-len(drawing) :])
        for sequence in batch:
            if sequence.pending == 0 and sequence.finish is None:  # max_new_tokens 0: only the prompt's log-probs
                self._finish(sequence, {"type": "length", "length": 0})

    def _rows(
        self, batch: list[Running], pieces: list[list[int]], tokens: int
    ) -> tuple[list[int], list[tuple[Running, list[int], int]], list[Running]]:
        """Rows of the padded batch whose logits are needed: those that predict prompt tokens first, then those to draw from."""
        rows: list[int] = []
        prompt_rows: list[tuple[Running, list[int], int]] = []
        drawing: list[Running] = []
        last_rows: list[int] = []
        for index, (sequence, piece) in enumerate(zip(batch, pieces, strict=True)):
            end = sequence.computed + len(piece)
            start = sequence.request.logprob_start_len
            if start >= 0:
                first, last = max(sequence.computed, start), min(end, len(sequence.request.input_ids) - 1)
                if first < last:
                    targets = sequence.tokens[first + 1 : last + 1]
                    prompt_rows.append((sequence, targets, len(rows)))
                    rows.extend(index * tokens + position - sequence.computed for position in range(first, last))
            if end == len(sequence.tokens) and sequence.request.sampling.max_new_tokens > 0:
                drawing.append(sequence)
                last_rows.append(index * tokens + len(piece) - 1)
        return rows + last_rows, prompt_rows, drawing

    def _record_prompt(self, sequence: Running, targets: list[int], logits: torch.Tensor) -> None:
        picked = logits.log_softmax(-1).gather(1, torch.tensor(targets)[:, None])[:, 0]
        if not sequence.prompt_logprobs:
            sequence.prompt_logprobs.append(None)  # the first token has nothing before it; SGLang reports null
        sequence.prompt_logprobs.extend(picked.tolist())

    def _draw(self, drawing: list[Running], logits: torch.Tensor) -> None:
        if self._filters is None or self._filters[0] != drawing:
            vocab = self.weights.config.vocab_size
            self._filters = (drawing, FilterBatch.of([s.filter for s in drawing], vocab))
        uniforms = [s.rng.random() for s in drawing]
        wanted = [s.request.return_sampling_mask for s in drawing]
        top = max(s.request.top_logprobs_num for s in drawing)
        drawn = draw(logits, self._filters[1], uniforms, wanted, top)
        for index, sequence in enumerate(drawing):
            self._append(sequence, drawn, index)

    def _append(self, sequence: Running, drawn: Draw, index: int) -> None:
        if not drawn.finite[index]:
            message = f"the model's logits are not finite under weights version {self.version}"
            self._finish(
                sequence, {"type": "abort", "message": message, "status_code": 500, "err_type": "NonFiniteLogits"}
            )
            return
        request, token = sequence.request, drawn.tokens[index]
        position = len(sequence.tokens) - len(request.input_ids)
        sequence.tokens.append(token)
        if sequence.spans and sequence.spans[-1][0] == self.version:
            sequence.spans[-1] = (self.version, sequence.spans[-1][1], position + 1)
        else:
            sequence.spans.append((self.version, position, position + 1))
        if request.return_logprob:
            sequence.logprobs.append(drawn.logprobs[index])
            if request.top_logprobs_num:
                sequence.top.append(drawn.top[index][: request.top_logprobs_num])
        if request.return_sampling_mask:
            sequence.support_ids.append(drawn.candidate_ids[index])
            sequence.support_logprobs.append(
                drawn.candidate_logprobs[index] if request.support_logprobs else drawn.support_logprobs[index]
            )
        sampling = request.sampling
        # ignore_eos is about every token that ends a reply, as SGLang has it.
        ends = () if sampling.ignore_eos else (*self.weights.config.eos_ids, *(sampling.stop_token_ids or ()))
        if token in ends:
            self._finish(sequence, {"type": "stop", "matched": token})
        elif position + 1 >= sampling.max_new_tokens:
            self._finish(sequence, {"type": "length", "length": position + 1})
        elif request.stream:
            self._progressed.append(sequence)

    def _finish(self, sequence: Running, reason: dict[str, Any]) -> None:
        sequence.finish = reason
        if sequence.slot is not None:
            self.table.release(sequence.slot)
        if sequence.counted:
            self.totals.turns += reason["type"] != "abort"
            self.totals.prompt_tokens += len(sequence.request.input_ids)
            self.totals.cached_tokens += sequence.cached
            self.totals.generated_tokens += len(sequence.output_ids)
        self._progressed.append(sequence)

    def _settle(self) -> None:
        """Drops what finished, then tells those who wait."""
        if any(s.finish is not None for s in self.running):
            self.running = [s for s in self.running if s.finish is None]
        if any(s.finish is not None for s in self.waiting):
            self.waiting = deque(s for s in self.waiting if s.finish is None)
        progressed, self._progressed = self._progressed, []
        for sequence in progressed:
            sequence.on_progress(sequence)


def _slot(sequence: Running) -> Slot:
    if sequence.slot is None:
        raise AssertionError("a running sequence has a slot")
    return sequence.slot


def make_running(
    request: GenerateRequest, *, seed: int, on_progress: Callable[[Running], None], counted: bool = True
) -> Running:
    """seed: of the request's draws when it brings none."""
    sampling = request.sampling
    chosen = sampling.sampling_seed if sampling.sampling_seed is not None else seed
    return Running(
        request=request,
        rng=random.Random(chosen),
        tokens=list(request.input_ids),
        on_progress=on_progress,
        filter=Filter(sampling.temperature, sampling.top_p, sampling.top_k),
        counted=counted,
    )
