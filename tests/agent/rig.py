"""An agent with a real engine and a real store, in this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from engine import tiny
from motley_api import keys
from motley_api.records import EngineState
from motley_api.resources.rlrun import RLRunSpec
from motley_api.resources.samplergroup import SamplerGroupSpec
from motley_sampler.agent.agent import Agent
from motley_sampler.agent.conformance import SAME_ARITHMETIC
from motley_sampler.agent.http import make_app
from motley_sampler.agent.oracle import clean_load
from motley_sampler.agent.settings import Settings
from motley_sampler.agent.views import ViewSource
from motley_sampler.engines.reference.engine import ReferenceEngine
from motley_sampler.engines.reference.precision import arithmetic_for
from motley_weights.store import WeightStore

TOKEN = "s3cret"
AUTH = {"Authorization": f"Bearer {TOKEN}"}
CONFIG = tiny.moe_config()


class Clock:
    """Moves when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def settings(root: Path, **changes: Any) -> Settings:
    group = {
        "gpuType": changes.pop("gpu_type", "H100"),
        "precision": changes.pop("precision", "BF16"),
        "sessionsPerEngine": changes.pop("sessions", 4),
        "drainSeconds": changes.pop("drain_seconds", 60),
        "engine": changes.pop("engine", {"type": "Reference"}),
        "runRef": {"name": "run"},
    }
    run = {
        "model": {"source": "file:///model", "contextLength": changes.pop("context_length", 128)},
        "steps": 3,
        "tasks": {"source": "file:///tasks"},
        "store": {"url": f"file://{root}/store"},
    }
    made = Settings(
        engine_id="run-h100-0",
        group="run-h100",
        run="run",
        spec=SamplerGroupSpec.model_validate(group),
        run_spec=RLRunSpec.model_validate(run),
        store_url=f"file://{root}/store",
        router_url="http://127.0.0.1:9",
        token=TOKEN,
        address="127.0.0.1",
        scratch=root / "scratch",
        poll_s=0.01,
        retry_s=0.01,
        heartbeat_s=0.01,
        body_bytes=100_000,
    )
    return dataclasses.replace(made, **changes)


class Rig:
    """Everything that a test may want to touch."""

    def __init__(
        self,
        root: Path,
        *,
        engine_type: Callable[..., ReferenceEngine] = ReferenceEngine,
        clock: Callable[[], float] | None = None,
        **changes: Any,
    ) -> None:
        self.settings = settings(root, **changes)
        self.store = WeightStore(self.settings.store_url, "run")
        spec = self.settings.spec
        arithmetic = arithmetic_for(spec.gpu_type.value, spec.kv_cache_precision.value)
        self.engine = engine_type(arithmetic, slots=20, max_running=16, **({"clock": clock} if clock else {}))
        self.source = ViewSource(self.settings.store_url, "run", self.settings.view, self.settings.scratch)
        self.agent = Agent(
            self.settings,
            self.engine,
            self.source,
            lambda folder: clean_load(folder, arithmetic),
            SAME_ARITHMETIC[self.settings.view],
            **({"clock": clock} if clock else {}),
        )

    async def client(self) -> TestClient[web.Request, web.Application]:
        return await self.client_for(make_app(self.agent))

    async def client_for(self, app: web.Application) -> TestClient[web.Request, web.Application]:
        client = TestClient(TestServer(app, handler_cancellation=True), headers=AUTH)
        await client.start_server()
        return client

    @property
    def state(self) -> EngineState:
        return self.agent.state()


def publish(rig: Rig, version: int, *, seed: int | None = None, config: dict[str, Any] = CONFIG) -> None:
    """One version of the rig's view; other seeds give other weights, by default the version's number."""
    files = {"config.json": msgspec.json.encode(config)}
    weights = tiny.tensors(config, seed=version if seed is None else seed)
    report = rig.store.publish(version, weights.items(), model_dir_files=files, views=[rig.settings.view])
    report.raise_for_failures()


def generate_headers(min_version: int) -> dict[str, str]:
    return {keys.MIN_VERSION_HEADER: str(min_version)}
