from __future__ import annotations

import json
from pathlib import Path

import pytest
from agent.rig import settings
from motley_api import keys
from motley_sampler.agent.build import build_agent
from motley_sampler.agent.settings import EngineArgs, SettingsError, from_env, parse_engine_args


def _env(tmp_path: Path) -> dict[str, str]:
    made = settings(tmp_path)
    group, run = tmp_path / "group.json", tmp_path / "run.json"
    group.write_text(made.spec.model_dump_json(by_alias=True))
    run.write_text(made.run_spec.model_dump_json(by_alias=True))
    return {
        keys.ENV_GROUP_CONFIG: str(group),
        keys.ENV_RUN_CONFIG: str(run),
        keys.ENV_POD_NAME: "run-h100-0",
        keys.ENV_POD_IP: "127.0.3.4",
        keys.ENV_GROUP: "run-h100",
        keys.ENV_RUN: "run",
        keys.ENV_STORE_URL: f"file://{tmp_path}/store",
        keys.ENV_ROUTER_URL: "http://127.0.0.1:8000/",
        keys.ENV_TOKEN: "t",
        keys.ENV_SCRATCH: str(tmp_path),
    }


def test_everything_comes_from_the_environment(tmp_path: Path) -> None:
    made = from_env(_env(tmp_path))
    assert (made.url, made.view, made.router_url) == ("http://127.0.3.4:8200", "bf16", "http://127.0.0.1:8000")
    assert (made.spec.sessions_per_engine, made.run_spec.model.context_length) == (4, 128)


@pytest.mark.parametrize("name", [keys.ENV_TOKEN, keys.ENV_POD_IP, keys.ENV_GROUP_CONFIG, keys.ENV_SCRATCH])
def test_a_missing_variable_is_named(tmp_path: Path, name: str) -> None:
    env = _env(tmp_path)
    del env[name]
    with pytest.raises(SettingsError, match=f"{name} must be set"):
        from_env(env)


def test_a_group_that_is_none_is_refused(tmp_path: Path) -> None:
    env = _env(tmp_path)
    Path(env[keys.ENV_GROUP_CONFIG]).write_text(json.dumps({"gpuType": "H100", "precision": "INT3"}))
    with pytest.raises(SettingsError, match="precision"):
        from_env(env)


def test_engine_arguments_are_sglangs_names_and_the_last_wins() -> None:
    got = parse_engine_args(["--max-running-requests", "8", "--max-running-requests=9", "--enable-fp32-lm-head"])
    assert got == EngineArgs(max_running_requests=9, fp32_lm_head=True)
    for bad, want in (
        (["--tp-size=2"], "--tp-size=2 must be one of --max-running-requests"),
        (["8"], "'8' must follow an option"),
        (["--context-length=0"], "--context-length must be a whole number above 0, got '0'"),
    ):
        with pytest.raises(SettingsError, match=want):
            parse_engine_args(bad)


def test_an_agent_is_built_from_settings(tmp_path: Path) -> None:
    agent = build_agent(settings(tmp_path))
    assert (agent.state().max_sessions, agent.state().ready, agent.alive()) == (4, False, True)
