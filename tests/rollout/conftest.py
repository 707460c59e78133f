"""A small world on loopback for one worker: an engine that replays scripted replies in SGLang's schema, a router with its
lease rules, a trainer that deals work and keeps what it acknowledged. Sandboxes and grading are real."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import zstandard
from aiohttp import web
from motley_api.records import (
    EngineState,
    GroupSessions,
    Lease,
    LeaseRequest,
    RouterStatus,
    Trajectory,
    TrajectoryAck,
    Work,
    WorkRequest,
)
from motley_api.resources.rlrun import Isolation
from motley_sampler.rollout.language import Language, load_language
from motley_sampler.rollout.metrics import Metrics
from motley_sampler.rollout.settings import EpisodeLimits, Sampling, Settings
from motley_sampler.rollout.worker import Worker, open_worker
from motley_sampler.sandbox.host import MIB, Limits
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

ADDRESS, TOKEN = "127.0.0.1", "run-token"
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (  # Qwen's layout: a newline between a message's end and the next one's start
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


def call(command: str) -> str:
    return f"<tool_call>{command}</tool_call>"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tokenizer of single bytes."""
    folder = tmp_path_factory.mktemp("model")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *letters, "<tool_call>", "</tool_call>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<tool_call>", "</tool_call>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    return folder


@pytest.fixture(scope="session")
def language(model: Path) -> Language:
    return load_language(model)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """train/touch is solved by a file `done` with the word yes in it."""
    files = {
        "task.toml": "[verifier]\ntimeout_sec = 20.0\n",
        "instruction.md": "Write yes to done.\n",
        "environment/start": "here\n",
        "tests/test.sh": '[ "$(cat /app/done)" = yes ] && r=1 || r=0; echo $r > /logs/verifier/reward.txt\n',
    }
    for name, changed in (("touch", {}), ("broken", {"tests/test.sh": "exit 1\n"})):
        for path, text in {**files, **changed}.items():
            target = tmp_path / "tasks" / "train" / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
    return tmp_path / "tasks"


Script = Callable[[str, int, dict[str, Any]], "str | web.Response | Awaitable[str | web.Response]"]


@dataclass
class Engine:
    """Replies by `script(session, turn, body)`: a text, or a whole response. Remembers every request."""

    language: Language
    script: Script = lambda session, turn, body: call("submit")
    version: int = 3
    spans: list[dict[str, Any]] | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    change: Callable[[dict[str, Any]], None] = lambda reply: None
    cuts: int = 0  # so many replies are cut off half-way, as middleboxes do after a silence

    async def generate(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == f"Bearer {TOKEN}"
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        turn = body["input_ids"].count(1) // 2 - 1  # <|im_start|> twice a turn: what the policy is told, its own header
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            said = self.script(body["session_id"], turn, body)
            said = await said if isinstance(said, Awaitable) else said
        finally:
            self.running -= 1
        if isinstance(said, web.StreamResponse):
            return said
        reply = self.reply(said, body)
        self.change(reply)
        if self.cuts:
            self.cuts -= 1
            half = web.StreamResponse(headers={"Content-Type": "application/json"})
            await half.prepare(request)
            await half.write(json.dumps(reply).encode()[:40])
            assert request.transport is not None
            request.transport.abort()
            return half
        return web.Response(body=b"  \n " + json.dumps(reply).encode(), content_type="application/json")

    def reply(self, text: str, body: dict[str, Any]) -> dict[str, Any]:
        """Every byte was one of two candidates with .75 / .25, every control token the only one."""
        ids = [*self.language.tokenizer.encode(text, add_special_tokens=False).ids, 2]
        ids = ids[: body["sampling_params"]["max_new_tokens"]]
        masks = [[token] if token <= 2 else [token, token - 1] for token in ids]
        logprobs = [[0.0] if len(mask) == 1 else [math.log(0.75), math.log(0.25)] for mask in masks]
        meta: dict[str, Any] = {
            "finish_reason": {"type": "stop"} if ids[-1] == 2 else {"type": "length"},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 7,
            "weight_version": str(self.version),
            "weight_versions": self.spans or [{"version": str(self.version), "start": 0, "end": len(ids)}],
        }
        if body.get("return_sampling_mask"):
            assert body["sampling_logprobs_mode"] == "support"
            meta |= {"output_token_sampling_mask": masks, "output_token_sampling_logprobs": logprobs}
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[row[0], token, None] for row, token in zip(logprobs, ids, strict=True)]
        return {"text": "", "output_ids": ids, "meta_info": meta}


@dataclass
class World:
    engine: Engine
    url: str = ""
    # The router.
    leases: dict[str, Lease] = field(default_factory=dict)
    engine_url: str = ""
    next_engine: str = "engine-0"
    refuse_leases: int = 0
    lost: set[str] = field(default_factory=set)
    ended: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)  # sessions that the engine was told to forget
    complaints: list[dict[str, str]] = field(default_factory=list)  # queries of renewals
    renewals: int = 0
    ttl_s: float = 30.0
    # The trainer.
    works: list[Work] = field(default_factory=list)
    asked: list[WorkRequest] = field(default_factory=list)
    kept: dict[str, Trajectory] = field(default_factory=dict)
    deliveries: int = 0
    fail_deliveries: int = 0
    lose_acks: int = 0
    refuse: set[str] = field(default_factory=set)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def deal(self, task: str = "touch", samples: int = 1, *, min_version: int = 0, within_s: float = 60.0) -> str:
        identity = str(next(self._numbers))
        deadline = time.time() + within_s
        self.works.append(
            Work(
                id=identity,
                task=task,
                samples=list(range(samples)),
                seed=1,
                min_version=min_version,
                deadline_unix_s=deadline,
            )
        )
        return identity

    async def until(self, condition: Callable[[], bool], what: str = "") -> None:
        for _ in range(3000):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"never came true: {what or condition}")

    async def delivered(self, *identities: str) -> list[Trajectory]:
        await self.until(lambda: all(identity in self.kept for identity in identities), f"delivery of {identities}")
        return [self.kept[identity] for identity in identities]

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28)
        app.add_routes(
            [
                web.post("/generate", self.engine.generate),
                web.post("/v1/sessions", self._lease),
                web.put("/v1/sessions/{session}", self._renew),
                web.delete("/v1/sessions/{session}", self._end),
                web.delete("/motley/sessions/{session}", self._close),
                web.get("/v1/status", self._status),
                web.post("/v1/work", self._work),
                web.post("/v1/trajectories", self._trajectories),
            ]
        )
        return app

    async def _lease(self, request: web.Request) -> web.Response:
        if self.refuse_leases:
            self.refuse_leases -= 1
            return web.json_response({"reason": "Full"}, status=503, headers={"Retry-After": "0.05"})
        asked = msgspec.json.decode(await request.read(), type=LeaseRequest)
        lease = Lease(
            session=asked.session,
            group="h100-fp8",
            view="fp8",
            engine=self.next_engine,
            url=self.engine_url,
            ttl_s=self.ttl_s,
        )
        self.leases[asked.session] = lease
        return web.Response(body=msgspec.json.encode(lease), status=201)

    async def _renew(self, request: web.Request) -> web.Response:
        lease = msgspec.json.decode(await request.read(), type=Lease)
        assert request.match_info["session"] == lease.session
        self.renewals += 1
        self.complaints.append(dict(request.query))
        if lease.session in self.lost:
            return web.json_response({"reason": "SessionLost"}, status=404)
        moved = msgspec.structs.replace(lease, engine=self.next_engine, url=self.engine_url)
        return web.Response(body=msgspec.json.encode(moved))

    async def _end(self, request: web.Request) -> web.Response:
        self.ended.append(request.match_info["session"])
        return web.Response(status=204)

    async def _close(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {TOKEN}"
        self.closed.append(request.match_info["session"])
        return web.Response(status=204)

    async def _status(self, _: web.Request) -> web.Response:
        engines: list[EngineState] = []
        groups = [
            GroupSessions(name=n, active=0, capacity_sessions=c, share_milli=s, engines_ready=1, engines=1)
            for n, c, s in (("a", 8, 500), ("b", 6, 500), ("late", 100, 0))
        ]
        status = RouterStatus(fleet_generation=1, sessions_active=0, sessions_total=0, groups=groups, engines=engines)
        return web.Response(body=msgspec.json.encode(status))

    async def _work(self, request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read(), type=WorkRequest)
        self.asked.append(asked)
        dealt, room = [], asked.sessions
        while self.works and room > 0:
            dealt.append(self.works.pop(0))
            room -= len(dealt[-1].samples)
        headers = {} if dealt else {"Retry-After": "0.05"}
        return web.Response(body=msgspec.json.encode(dealt), headers=headers)

    async def _trajectories(self, request: web.Request) -> web.Response:
        self.deliveries += 1
        if self.fail_deliveries:
            self.fail_deliveries -= 1
            return web.Response(status=503)
        body = zstandard.ZstdDecompressor().decompress(await request.read())
        accepted, duplicates, refused = [], [], {}
        for trajectory in msgspec.msgpack.decode(body, type=list[Trajectory]):
            if trajectory.id in self.refuse:
                refused[trajectory.id] = "refused by the test"
            elif trajectory.id in self.kept:
                duplicates.append(trajectory.id)
            else:
                self.kept[trajectory.id] = trajectory
                accepted.append(trajectory.id)
        if self.lose_acks:
            self.lose_acks -= 1
            assert request.transport is not None
            request.transport.abort()
        return web.Response(
            body=msgspec.json.encode(TrajectoryAck(accepted=accepted, duplicates=duplicates, refused=refused)),
            content_type="application/json",
        )


@pytest_asyncio.fixture
async def world(language: Language) -> AsyncIterator[World]:
    made = World(Engine(language))
    runner = web.AppRunner(made.app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, ADDRESS, 0)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    made.url = made.engine_url = f"http://{ADDRESS}:{port}"
    yield made
    await runner.cleanup()


@pytest.fixture
def settings(world: World, model: Path, tasks: Path, tmp_path: Path) -> Settings:
    return Settings(
        run="demo",
        worker="rollout-0",
        address=ADDRESS,
        token=TOKEN,
        router_url=world.url,
        trainer_url=world.url,
        scratch=tmp_path / "scratch",
        model_source=str(model),
        tasks_source=str(tasks),
        isolation=Isolation.AUTO,
        sampling=Sampling(1.0, 0.97, 64),
        episode=EpisodeLimits(
            turns=6, tokens_per_turn=120, context_tokens=4000, command_timeout_s=10.0, episode_timeout_s=60.0
        ),
        sandbox=Limits(memory_bytes=512 * MIB, output_bytes=200),
        sessions=8,
        workers=1,
    )


@dataclass
class Running:
    worker: Worker
    metrics: Metrics

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"motley_rollout_{name}", labels) or 0.0


@pytest.fixture
def start(world: World) -> Callable[[Settings], contextlib.AbstractAsyncContextManager[Running]]:
    """A worker at work; leaving the block ends it as a crash would."""

    @contextlib.asynccontextmanager
    async def run(settings: Settings) -> AsyncIterator[Running]:
        metrics = Metrics()
        async with open_worker(settings, metrics) as worker:
            working = asyncio.create_task(worker.run())
            yield Running(worker, metrics)
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    return run


def supports(trajectory: Trajectory) -> list[tuple[list[int], list[float]]]:
    """The ragged candidates, one support per generated token, as a reader decodes them."""
    assert trajectory.candidates is not None
    counts = np.frombuffer(trajectory.candidates.counts, "<u2")
    ids = np.frombuffer(trajectory.candidates.ids, "<u4")
    logprobs = np.frombuffer(trajectory.candidates.logprobs, "<f4")
    ends = np.cumsum(counts, dtype=np.int64)
    return [
        (ids[end - count : end].tolist(), logprobs[end - count : end].tolist())
        for count, end in zip(counts.tolist(), ends.tolist(), strict=True)
    ]


@pytest.fixture
def read_supports() -> Callable[[Trajectory], list[tuple[list[int], list[float]]]]:
    return supports
