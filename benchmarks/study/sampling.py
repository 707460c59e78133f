"""The emulated fleet: reference engines without a server, each on its own version of its own view."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from motley_sampler.engines.protocol import GenerateRequest, SamplingParams
from motley_sampler.engines.reference.config import parse_config
from motley_sampler.engines.reference.precision import arithmetic_for
from motley_sampler.engines.reference.scheduler import Running, Scheduler, make_running
from motley_sampler.engines.reference.weights import Weights, build_weights
from motley_sampler.rollout.reply import Reply
from motley_weights.codecs import encode_group, fusion_groups, view_model_files
from torch import Tensor

from benchmarks.study.plan import REFRESH_STEPS, Engine, Settings
from benchmarks.study.versions import Ring

Views = Mapping[str, Mapping[str, Tensor]]  # by view, by stored name


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    session: str
    seed: int


class Fleet:
    def __init__(
        self, engines: Sequence[Engine], config: Mapping[str, Any], names: Iterable[str], settings: Settings
    ) -> None:
        """config: the checkpoint's config.json, names: of its tensors."""
        self.engines = tuple(engines)
        self._settings = settings
        self._view_names = sorted({engine.view for engine in engines})
        files = {view: view_model_files(view, config, names) for view in self._view_names}
        self._models = {view: parse_config(json.loads(found["config.json"])) for view, found in files.items()}
        self._ring: Ring[Views] = Ring(max(engine.delay for engine in engines))
        self._schedulers: dict[int, Scheduler] = {}

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Encodes every view of a version, as a publisher does."""
        groups = list(fusion_groups(tensors))
        views: dict[str, dict[str, Tensor]] = {}
        for view in self._view_names:
            stored: dict[str, Tensor] = {}
            for group in groups:
                stored.update(encode_group(view, group))
            views[view] = stored
        self._ring.publish(version, views)

    def refresh(self, index: int) -> None:
        """One engine moves on to the version that its delay allows."""
        engine = self.engines[index]
        version, views = self._ring.behind(engine.delay)
        weights = self._weights(engine, views[engine.view])
        held = self._schedulers.get(index)
        if held is not None:
            held.swap(weights, version)
            return
        sessions = engine.samples * REFRESH_STEPS
        self._schedulers[index] = Scheduler(
            weights,
            version,
            slots=sessions,
            max_running=sessions,
            context_length=self._settings.context_tokens,
            prefill_tokens=sessions * self._settings.context_tokens,  # a turn's prompts in one pass
        )

    def generate(self, index: int, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Reply | None]:
        """One reply to each prompt, all in one batch, with every token's support."""
        scheduler = self._schedulers[index]
        running = [self._submit(scheduler, prompt, sampling) for prompt in prompts]
        with torch.inference_mode():
            while scheduler.has_work:
                scheduler.step()
        return [_reply(sequence) for sequence in running]

    def _submit(self, scheduler: Scheduler, prompt: Prompt, sampling: SamplingParams) -> Running:
        request = GenerateRequest(
            input_ids=prompt.ids,
            sampling=sampling,
            return_sampling_mask=True,
            support_logprobs=True,
            session_id=prompt.session,
        )
        sequence = make_running(request, seed=prompt.seed, on_progress=lambda _: None)
        scheduler.submit(sequence)
        return sequence

    def _weights(self, engine: Engine, stored: Mapping[str, Tensor]) -> Weights:
        arithmetic = arithmetic_for(engine.gpu_type, engine.kv_cache_precision)
        with torch.inference_mode():
            return build_weights(self._models[engine.view], arithmetic, stored)


def _reply(sequence: Running) -> Reply | None:
    """What `parse_generate` makes of the same reply over HTTP; None when the engine gave up on it (logits not finite)."""
    if sequence.finish is None or sequence.finish["type"] == "abort":
        return None
    supports = list(zip(sequence.output_ids, sequence.support_ids, sequence.support_logprobs, strict=True))
    several = [(ids, logprobs) for _, ids, logprobs in supports if len(ids) > 1]
    return Reply(
        token_ids=tuple(sequence.output_ids),
        logprobs=np.array([logprobs[ids.index(token)] for token, ids, logprobs in supports], np.float32),
        counts=np.array([len(ids) if len(ids) > 1 else 0 for _, ids, _ in supports], np.uint16),
        candidate_ids=np.array([token for ids, _ in several for token in ids], np.uint32),
        candidate_logprobs=np.array([value for _, logprobs in several for value in logprobs], np.float32),
        start_version=sequence.version,
        end_version=sequence.version,
        cached_tokens=sequence.cached,
    )
