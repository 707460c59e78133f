"""What the agent is told by its environment, read once."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from motley_api import keys
from motley_api.resources.rlrun import RLRunSpec
from motley_api.resources.samplergroup import EngineType, SamplerGroupSpec

SPARE_SLOTS = 4  # KV slots beyond the declared sessions: room for canaries, and for a session that comes early


@dataclass(frozen=True)
class EngineArgs:
    """Of the reference engine, from SamplerGroup.spec.engine.args; the last of an option wins."""

    max_running_requests: int | None = None
    prefill_tokens: int = 512
    context_length: int | None = None
    fp32_lm_head: bool = False


@dataclass(frozen=True)
class Settings:
    engine_id: str
    group: str
    run: str
    spec: SamplerGroupSpec
    run_spec: RLRunSpec
    store_url: str
    router_url: str
    token: str
    address: str
    scratch: Path
    sglang_python: str = sys.executable  # that has sglang; its pins may ask for an environment of its own
    port: int = keys.SAMPLER_PORT
    engine_port: int = keys.ENGINE_PORT
    poll_s: float = 1.0  # between looks at the view's pointer
    heartbeat_s: float = 1.0
    hang_s: float = 30.0  # without progress of the engine's loop: no heartbeats, and liveness fails
    session_idle_s: float = 30.0  # a session unheard of for this long does not hold up a drain; the router's lease
    retry_s: float = 2.0  # before a failed version is loaded again
    max_failures: int = 3  # conformance failures of one version before the process gives up and is replaced
    max_ends: int = 3  # of the process, within the window, before the engine is retired instead of started again
    ends_window_s: float = 3600.0
    keep_versions: int = 2  # pulled folders kept besides the one served
    body_bytes: int = 16 << 20

    @property
    def view(self) -> str:
        return keys.VIEW_OF_PRECISION[self.spec.precision.value]

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.port}"


class SettingsError(ValueError):
    """The environment lacks something, or holds something that cannot be."""


def from_env(env: Mapping[str, str]) -> Settings:
    """Raises SettingsError naming the variable."""

    def need(name: str) -> str:
        if not env.get(name):
            raise SettingsError(f"{name} must be set")
        return env[name]

    group_path, run_path = Path(need(keys.ENV_GROUP_CONFIG)), Path(need(keys.ENV_RUN_CONFIG))
    try:
        spec = SamplerGroupSpec.model_validate_json(group_path.read_bytes())
        run_spec = RLRunSpec.model_validate_json(run_path.read_bytes())
    except (OSError, ValueError) as error:
        raise SettingsError(f"{keys.ENV_GROUP_CONFIG} or {keys.ENV_RUN_CONFIG}: {error}") from error
    return Settings(
        engine_id=need(keys.ENV_POD_NAME),
        group=need(keys.ENV_GROUP),
        run=need(keys.ENV_RUN),
        spec=spec,
        run_spec=run_spec,
        store_url=need(keys.ENV_STORE_URL),
        router_url=need(keys.ENV_ROUTER_URL).rstrip("/"),
        token=need(keys.ENV_TOKEN),
        address=need(keys.ENV_POD_IP),
        scratch=Path(need(keys.ENV_SCRATCH)),
        sglang_python=env.get(keys.ENV_SGLANG_PYTHON) or sys.executable,
    )


def parse_engine_args(args: list[str]) -> EngineArgs:
    """`--name=value` or `--name value` of the reference engine. Raises SettingsError naming the argument."""
    values: dict[str, str] = {}
    pending: str | None = None
    for arg in args:
        if arg.startswith("--"):
            name, equals, value = arg.removeprefix("--").partition("=")
            if name not in _KNOWN:
                raise SettingsError(f"engine.args: {arg} must be one of {', '.join('--' + known for known in _KNOWN)}")
            values[name] = value if equals else "true"
            pending = None if equals else name
        elif pending is not None:
            values[pending], pending = arg, None
        else:
            raise SettingsError(f"engine.args: {arg!r} must follow an option")
    return EngineArgs(
        max_running_requests=_positive(values, "max-running-requests"),
        prefill_tokens=_positive(values, "chunked-prefill-size") or EngineArgs.prefill_tokens,
        context_length=_positive(values, "context-length"),
        fp32_lm_head=values.get("enable-fp32-lm-head", "false") == "true",
    )


# Named as SGLang names them, so that a group can change its engine and keep its arguments.
_KNOWN = ("max-running-requests", "chunked-prefill-size", "context-length", "enable-fp32-lm-head")


def _positive(values: Mapping[str, str], name: str) -> int | None:
    if name not in values:
        return None
    if not values[name].isdecimal() or int(values[name]) < 1:
        raise SettingsError(f"engine.args: --{name} must be a whole number above 0, got {values[name]!r}")
    return int(values[name])


__all__ = ["SPARE_SLOTS", "EngineArgs", "EngineType", "Settings", "SettingsError", "from_env", "parse_engine_args"]
