"""What one worker runs with: from its environment and the run's configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from motley_api import keys
from motley_api.resources.rlrun import Isolation, RLRunSpec
from pydantic import ValidationError

from motley_sampler.sandbox.host import MIB, Limits


class ConfigError(Exception):
    """An environment that the worker cannot run in; names the variable or field."""


@dataclass(frozen=True)
class Sampling:
    temperature: float
    top_p: float
    top_k: int  # -1: off
    top_logprobs: int = 0  # of an unfiltered sampler: how many candidates to record

    @property
    def filtered(self) -> bool:
        """Whether tokens are drawn from less than the whole vocabulary: supports are recorded then."""
        return self.top_p < 1 or self.top_k > 0


@dataclass(frozen=True)
class EpisodeLimits:
    turns: int
    tokens_per_turn: int
    context_tokens: int
    command_timeout_s: float
    episode_timeout_s: float
    format_errors_in_row: int = 3


@dataclass(frozen=True)
class Settings:
    run: str
    worker: str  # this pod's name
    address: str
    token: str
    router_url: str
    trainer_url: str
    scratch: Path
    model_source: str
    tasks_source: str
    isolation: Isolation
    sampling: Sampling
    episode: EpisodeLimits
    sandbox: Limits
    sessions: int | None  # of this worker; None: its part of the fleet's capacity
    workers: int


def settings_from(environment: Mapping[str, str]) -> Settings:
    """Raises ConfigError naming what is missing or unusable."""

    def needed(name: str) -> str:
        value = environment.get(name, "")
        if not value:
            raise ConfigError(f"{name} must be set")
        return value

    spec = _run_spec(Path(needed(keys.ENV_RUN_CONFIG)))
    limits, rollout, sampling = spec.tasks.limits, spec.rollout, spec.algorithm.sampling
    memory_bytes = limits.memory_mebibytes * MIB
    return Settings(
        run=needed(keys.ENV_RUN),
        worker=needed(keys.ENV_POD_NAME),
        address=needed(keys.ENV_POD_IP),
        token=needed(keys.ENV_TOKEN),
        router_url=needed(keys.ENV_ROUTER_URL).rstrip("/"),
        trainer_url=needed(keys.ENV_TRAINER_URL).rstrip("/"),
        scratch=Path(needed(keys.ENV_SCRATCH)),
        model_source=spec.model.source,
        tasks_source=spec.tasks.source,
        isolation=spec.tasks.sandbox.isolation,
        sampling=Sampling(
            float(sampling.temperature), float(sampling.top_p), sampling.top_k, sampling.top_logprobs_num
        ),
        episode=EpisodeLimits(
            turns=limits.max_turns,
            tokens_per_turn=limits.max_tokens_per_turn,
            context_tokens=spec.model.context_length,
            command_timeout_s=limits.command_timeout_seconds,
            episode_timeout_s=limits.episode_timeout_seconds,
        ),
        sandbox=Limits(memory_bytes=memory_bytes, output_bytes=limits.output_bytes),
        sessions=None if rollout.sessions is None else -(-rollout.sessions // rollout.workers),
        workers=rollout.workers,
    )


def _run_spec(path: Path) -> RLRunSpec:
    try:
        return RLRunSpec.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError) as error:
        raise ConfigError(f"{keys.ENV_RUN_CONFIG}={path} must be a readable RLRun.spec: {error}") from error
