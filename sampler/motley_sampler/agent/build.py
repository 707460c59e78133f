"""Puts an agent together from its settings: the only place that knows which engine there is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from motley_api.resources.samplergroup import EngineType

from motley_sampler.agent.agent import Agent
from motley_sampler.agent.conformance import OTHER_KERNELS, SAME_ARITHMETIC, Oracle
from motley_sampler.agent.settings import SPARE_SLOTS, Settings, SettingsError, parse_engine_args
from motley_sampler.agent.views import ViewSource

SGLANG_HANG_S = 90.0


def build_agent(settings: Settings) -> Agent:
    """Raises SettingsError for engine arguments that mean nothing."""
    if settings.spec.engine.type is EngineType.REFERENCE:
        return _reference(settings)
    return _sglang(settings)


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


def _sglang(settings: Settings) -> Agent:
    """The oracle is the reference arithmetic in float32 over the view's own bytes; kernels differ from it by rounding."""
    from motley_sampler.agent.oracle import clean_load
    from motley_sampler.engines.reference.precision import Arithmetic, Compute
    from motley_sampler.engines.sglang.arguments import CannotRun, Launch, on_cpu, render
    from motley_sampler.engines.sglang.engine import SglangEngine

    spec = settings.spec
    more = tuple(spec.engine.args)

    def arguments(folder: Path, version: int) -> list[str]:
        return render(
            Launch(
                model_path=folder,
                host=settings.address,
                port=settings.engine_port,
                version=version,
                context_length=settings.run_spec.model.context_length,
                max_running=spec.sessions_per_engine + SPARE_SLOTS,
                gpu_type=spec.gpu_type,
                precision=spec.precision,
                kv_cache_precision=spec.kv_cache_precision,
                gpus=spec.gpus_per_engine,
                more=more,
            )
        )

    try:
        arguments(Path(), 0)
    except CannotRun as error:
        raise SettingsError(str(error)) from error
    url = f"http://{settings.address}:{settings.engine_port}"
    engine = SglangEngine(settings.sglang_python, arguments, url, cpu=on_cpu(more))
    exact = Arithmetic(Compute.FP32)
    # Its scheduler is asked for a sign of life less often than a thread of our own shows one.
    settings = dataclasses.replace(settings, hang_s=max(settings.hang_s, SGLANG_HANG_S))
    return Agent(
        settings, engine, _source(settings), lambda folder: clean_load(folder, exact), OTHER_KERNELS[settings.view]
    )


def _source(settings: Settings) -> ViewSource:
    return ViewSource(settings.store_url, settings.run, settings.view, settings.scratch)
