"""The worker as a process of its own: environment in, health and metrics out, SIGTERM at the end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from motley_api import keys
from motley_sampler.rollout.settings import ConfigError, settings_from


def run_json(model: Path, tasks: Path) -> dict[str, Any]:
    example = Path(__file__).parents[2] / "examples" / "demo" / "run.yaml"
    import yaml

    [spec] = [doc["spec"] for doc in yaml.safe_load_all(example.read_text()) if doc["kind"] == "RLRun"]
    spec["model"] |= {"source": str(model), "contextLength": 4000}
    spec["tasks"] |= {"source": str(tasks)}
    spec["tasks"]["limits"] |= {"maxTokensPerTurn": 100}
    return dict(spec)


def environment(spec: Path, url: str, scratch: Path) -> dict[str, str]:
    return {
        keys.ENV_RUN: "demo",
        keys.ENV_RUN_CONFIG: str(spec),
        keys.ENV_POD_NAME: "rollout-0",
        keys.ENV_POD_IP: "127.9.8.7",
        keys.ENV_TOKEN: "run-token",
        keys.ENV_ROUTER_URL: url,
        keys.ENV_TRAINER_URL: url,
        keys.ENV_SCRATCH: str(scratch),
    }


async def test_a_worker_process_serves_works_and_stops(world: Any, model: Path, tasks: Path, tmp_path: Path) -> None:
    spec = tmp_path / "run.json"
    spec.write_text(json.dumps(run_json(model, tasks)))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "motley_sampler.rollout.main"),
        env={**os.environ, **environment(spec, world.url, tmp_path / "scratch"), "PYTHONPATH": ":".join(sys.path)},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        world.deal()
        [episode] = await world.delivered("0/0")
        assert (episode.reward, episode.top_k) == (0.0, 64)
        async with aiohttp.ClientSession() as client:
            base = f"http://127.9.8.7:{keys.ROLLOUT_PORT}"
            assert (await client.get(f"{base}/health")).status == 200
            metrics = await (await client.get(f"{base}/metrics")).text()
        assert 'motley_rollout_episodes_total{ended_by="submit"} 1.0' in metrics
        assert 'motley_rollout_sandbox_isolation_info{isolation="' in metrics
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = await process.communicate()
    assert process.returncode == 0
    assert b"event=stopped spooled=0 delivered=True" in errors


def test_settings_come_from_the_runs_spec(model: Path, tasks: Path, tmp_path: Path) -> None:
    spec = tmp_path / "run.json"
    content = run_json(model, tasks)
    content["rollout"] = {"sessions": 50, "workers": 4}
    spec.write_text(json.dumps(content))
    settings = settings_from(environment(spec, "http://127.0.0.1:1/", tmp_path))
    assert settings.sessions == 13  # 50 / 4, rounded up
    assert (settings.sampling.top_p, settings.sampling.top_k, settings.sampling.filtered) == (0.97, 64, True)
    assert (settings.episode.turns, settings.episode.context_tokens) == (8, 4000)
    assert (settings.sandbox.output_bytes, settings.sandbox.memory_bytes) == (256, 512 << 20)
    assert settings.router_url == "http://127.0.0.1:1"


@pytest.mark.parametrize("name", [keys.ENV_RUN, keys.ENV_TOKEN, keys.ENV_RUN_CONFIG, keys.ENV_SCRATCH])
def test_a_missing_variable_is_named(model: Path, tasks: Path, tmp_path: Path, name: str) -> None:
    spec = tmp_path / "run.json"
    spec.write_text(json.dumps(run_json(model, tasks)))
    variables = environment(spec, "http://127.0.0.1:1", tmp_path)
    del variables[name]
    with pytest.raises(ConfigError, match=name):
        settings_from(variables)


def test_a_worker_imports_no_torch() -> None:
    import subprocess

    code = "import sys, motley_sampler.rollout.main; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    variables = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    found = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
