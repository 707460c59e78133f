"""Puts an agent together from its settings: the only place that knows which engine there is."""

from __future__ import annotations

from pathlib import Path

from motley_api.resources.samplergroup import EngineType

from motley_sampler.agent.agent import Agent
from motley_sampler.agent.conformance import SAME_ARITHMETIC, Oracle
from motley_sampler.agent.settings import SPARE_SLOTS, Settings, SettingsError, parse_engine_args
from motley_sampler.agent.views import ViewSource


def build_agent(settings: Settings) -> Agent:
    """Raises SettingsError for engine arguments that mean nothing."""
    if settings.spec.engine.type is EngineType.REFERENCE:
        return _reference(settings)
    raise SettingsError(f"engine.type {settings.spec.engine.type.value} is not available in this image")


def _reference(settings: Settings) -> Agent:
    # torch comes in here, and only for this engine.
    from motley_sampler.agent.oracle import clean_load
    from motley_sampler.engines.reference.engine import ReferenceEngine
    from motley_sampler.engines.reference.precision import arithmetic_for

    spec, args = settings.spec, parse_engine_args(settings.spec.engine.args)
    arithmetic = arithmetic_for(spec.gpu_type.value, spec.kv_cache_precision.value, fp32_head=args.fp32_lm_head)
    max_running = args.max_running_requests or spec.sessions_per_engine
    engine = ReferenceEngine(
        arithmetic,
        slots=max(max_running, spec.sessions_per_engine) + SPARE_SLOTS,
        max_running=max_running + SPARE_SLOTS,
        context_length=args.context_length or settings.run_spec.model.context_length,
        prefill_tokens=args.prefill_tokens,
    )

    def oracle(folder: Path) -> Oracle:
        return clean_load(folder, arithmetic)

    return Agent(settings, engine, _source(settings), oracle, SAME_ARITHMETIC[settings.view])


def _source(settings: Settings) -> ViewSource:
    return ViewSource(settings.store_url, settings.run, settings.view, settings.scratch)
