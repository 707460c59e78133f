"""An SGLang server behind the agent: conformance, supports, updates under way, as for any engine.

Every test runs against a stand-in that answers in the recorded shape, and with `pytest -m sglang` against the real server on a
CPU, which takes minutes to start and an environment that has sglang.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from agent.rig import Rig, publish, settings
from aiohttp import web
from aiohttp.test_utils import TestClient
from engine import exchanges, tiny
from engine.test_sglang_arguments import SGLANG_PYTHON
from motley_api import keys
from motley_sampler.agent.agent import Agent
from motley_sampler.agent.build import build_agent
from motley_sampler.agent.http import make_app
from motley_sampler.engines.sglang.engine import SglangEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")

Json = dict[str, Any]
CONFIG = tiny.moe_config(max_position_embeddings=512)
CONTEXT, LIVE, LONG = 512, 16, 300
LOGPROB_WITHIN = 1e-4  # nats; both sides compute in float32
EDGE = 1e-4  # of probability: a candidate whose mass is this near to top_p may be kept or not
REAL = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.skipif(not SGLANG_PYTHON.exists(), reason="sglang is not installed (make venv-sglang)"),
]


@dataclass
class Stage:
    rig: Rig
    client: TestClient[web.Request, web.Application]
    real: bool
    version: int = 0

    @property
    def agent(self) -> Agent:
        return self.rig.agent

    @property
    def engine(self) -> SglangEngine:
        assert isinstance(self.agent.engine, SglangEngine)
        return self.agent.engine

    @property
    def folder(self) -> Path:
        assert self.agent.standing.folder is not None
        return self.agent.standing.folder

    def publish(self) -> int:
        self.version += 1
        publish(self.rig, self.version, config=CONFIG)
        return self.version

    async def next_version(self) -> int:
        self.publish()
        await self.agent.look()
        self.serves(self.version)
        return self.version

    def serves(self, version: int) -> None:
        state = self.agent.state()
        assert (state.ready, state.version) == (True, version), state.message

    async def ask(self, body: Json, want_status: int = 200) -> Json:
        answer = await self.client.post("/generate", json=body)
        found: Json = await answer.json()
        assert answer.status == want_status, found
        return found

    async def parts(self, body: Json) -> AsyncIterator[Json]:
        async with self.client.post("/generate", json={**body, "stream": True}, read_bufsize=1 << 22) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                data = line.strip().removeprefix(b"data:").strip()
                if data.startswith(b"{"):
                    yield json.loads(data)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _stand_in(root: Path) -> Path:
    """A python whose `-m sglang.launch_server` is the stand-in."""
    script = root / "python"
    paths = os.pathsep.join(path for path in sys.path if path)
    program = Path(tiny.__file__).with_name("fake_sglang.py")
    script.write_text(f'#!/bin/sh\nshift 2\nPYTHONPATH="{paths}" exec "{sys.executable}" "{program}" "$@"\n')
    script.chmod(0o755)
    return script


def sglang_rig(root: Path, *, real: bool) -> Rig:
    rig = Rig(root)
    rig.settings = settings(
        root,
        engine={"type": "SGLang", "args": ["--device=cpu"]},
        sessions=LIVE,
        context_length=CONTEXT,
        sglang_python=str(SGLANG_PYTHON if real else _stand_in(root)),
        engine_port=_free_port(),
        hang_s=300.0,  # the machine may be busy with other tests
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rig.agent = build_agent(rig.settings)
    return rig


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["stand-in", pytest.param("sglang", marks=REAL)])
async def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    real = request.param == "sglang"
    rig = sglang_rig(tmp_path_factory.mktemp(request.param), real=real)
    try:
        made = Stage(rig, await rig.client_for(make_app(rig.agent)), real)
        await made.next_version()
        yield made
        await made.client.close()
    finally:
        await rig.agent.engine.stop()


async def test_it_conforms_before_it_serves(stage: Stage) -> None:
    state = stage.agent.state()
    assert (state.ready, state.version, state.logprob_mode) == (True, stage.version, "AfterFilter"), state.message
    # The oracle is float32 over the same bytes, and so is this server.
    assert state.canary_max_abs_diff is not None
    assert state.canary_max_abs_diff < LOGPROB_WITHIN


def _teacher_forced(folder: Path, tokens: list[int], prompt: int) -> torch.Tensor:
    """transformers' logits [G, V] of each token after the first `prompt`, float32 computed, in float64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0, prompt - 1 : -1].double()
    return logits


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(0.7, 0.9, 20), (1.0, 0.95, 5), (1.5, 1.0, 50)])
async def test_logprobs_and_supports_equal_those_of_transformers(
    stage: Stage, temperature: float, top_p: float, top_k: int
) -> None:
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    prompts = [tiny.prompt(length, seed=length) for length in (3, 12, 30)]
    bodies = [tiny.body(prompt, 12, sampling=sampling, logprob_start_len=0) for prompt in prompts]
    replies = await asyncio.gather(*(stage.ask(body) for body in bodies))
    for prompt, reply in zip(prompts, replies, strict=True):
        meta, output = reply["meta_info"], reply["output_ids"]
        plain = _teacher_forced(stage.folder, prompt, 1).log_softmax(-1)
        want_prompt = [plain[index, token].item() for index, token in enumerate(prompt[1:])]
        assert [row[0] for row in meta["input_token_logprobs"][1:]] == pytest.approx(want_prompt, abs=LOGPROB_WITHIN)
        scaled = (_teacher_forced(stage.folder, prompt + output, len(prompt)) / temperature).log_softmax(-1)
        for place, token in enumerate(output):
            logprob, got_token, _ = meta["output_token_logprobs"][place]
            assert got_token == token
            assert logprob == pytest.approx(scaled[place, token].item(), abs=LOGPROB_WITHIN)
            got = meta["output_token_sampling_mask"][place]
            certain, allowed = _support(scaled[place], top_p, top_k)
            assert certain <= set(got) <= allowed
            assert token in got
            # q: renormalised over what was kept.
            want = scaled[place, got] - scaled[place, got].logsumexp(-1)
            assert meta["output_token_sampling_logprobs"][place] == pytest.approx(want.tolist(), abs=LOGPROB_WITHIN)


def _support(logp_V: torch.Tensor, top_p: float, top_k: int) -> tuple[set[int], set[int]]:
    """(what must be kept, what may be): a token is kept while the mass before it is <= top_p and its rank below top_k."""
    p, ids = logp_V.exp().sort(descending=True)
    before = p.cumsum(0) - p
    ranked = torch.arange(len(p)) < top_k
    certain, allowed = ids[ranked & (before <= top_p - EDGE)], ids[ranked & (before <= top_p + EDGE)]
    return set(certain.tolist()), set(allowed.tolist())


async def test_sixteen_live_requests_survive_a_publish_and_say_which_token_is_of_which_version(stage: Stage) -> None:
    old_folder, old = stage.folder, stage.version
    under_way = [asyncio.Event() for _ in range(LIVE)]

    async def follow(index: int) -> Json:
        more = {"return_logprob": index == 0, "return_sampling_mask": False, "sampling_logprobs_mode": None}
        last: Json = {}
        async for part in stage.parts(tiny.body(tiny.prompt(8, seed=index), LONG, **more)):
            under_way[index].set()
            last = part
        return last

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(follow(index)) for index in range(LIVE)]
        await asyncio.gather(*(event.wait() for event in under_way))
        new = await stage.next_version()
    replies = [task.result() for task in tasks]
    for reply in replies:
        meta = reply["meta_info"]
        assert meta["finish_reason"] == {"type": "length", "length": LONG}  # not one was aborted
        spans = meta["weight_versions"]
        assert [span["version"] for span in spans] == [str(old), str(new)]
        assert (spans[0]["start"], spans[1]["end"]) == (0, LONG)
        assert 0 < spans[0]["end"] == spans[1]["start"] < LONG
        assert (meta["start_version"], meta["end_version"]) == (old, new)  # staleness counts from the first
    # The label tells the truth: up to the change the old weights computed it, and not one token further.
    prompt, output = tiny.prompt(8, seed=0), replies[0]["output_ids"]
    change = replies[0]["meta_info"]["weight_versions"][0]["end"]
    got = torch.tensor([row[0] for row in replies[0]["meta_info"]["output_token_logprobs"]]).double()
    want = _teacher_forced(old_folder, prompt + output, len(prompt)).log_softmax(-1)
    difference = (got - want.gather(1, torch.tensor(output)[:, None])[:, 0]).abs()
    assert difference[:change].max() < LOGPROB_WITHIN
    assert difference[change : change + 8].max() > 0.01


async def test_a_prefix_is_kept_within_a_version_and_never_crosses_it(stage: Stage) -> None:
    prompt = tiny.prompt(40, seed=77)
    first = await stage.ask(tiny.body(prompt, 6, session_id="s"))
    turn = [*prompt, *first["output_ids"], 3, 1, 4]
    second = await stage.ask(tiny.body(turn, 6, session_id="s"))
    assert second["meta_info"]["cached_tokens"] == 40 + 6 - 1  # all that was computed
    new = await stage.next_version()
    third = await stage.ask(tiny.body(turn, 6, session_id="s"))
    assert (third["meta_info"]["start_version"], third["meta_info"]["cached_tokens"]) == (new, 0)


async def test_a_paused_server_keeps_its_requests_and_goes_on(stage: Stage) -> None:
    running = stage.parts(tiny.body(tiny.prompt(8), 100))
    await anext(running)
    assert (await stage.client.post("/pause_generation")).status == 200
    waiting = asyncio.create_task(stage.ask(tiny.body(tiny.prompt(5), 4)))
    done, _ = await asyncio.wait([waiting], timeout=1.0)
    assert not done
    assert (await stage.client.post("/continue_generation")).status == 200
    assert (await waiting)["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
    last = [part async for part in running][-1]
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 100}
    assert [span["version"] for span in last["meta_info"]["weight_versions"]] == [str(stage.version)]


async def test_a_stream_grows_into_the_whole_reply(stage: Stage) -> None:
    parts = [part async for part in stage.parts(tiny.body(tiny.prompt(8), 20))]
    assert len(parts) > 1
    assert {(part["meta_info"]["start_version"], part["meta_info"]["end_version"]) for part in parts} == {
        (stage.version, stage.version)
    }
    for before, after in itertools.pairwise(parts):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
    last = parts[-1]
    meta = last["meta_info"]
    lengths = {len(last["output_ids"]), *(len(meta[name]) for name in exchanges.PER_TOKEN), meta["completion_tokens"]}
    assert lengths == {20}


async def test_a_stream_whose_lines_grow_long_arrives_whole(stage: Stage) -> None:
    """150 tokens with all 60 candidates: the last part is longer than a stream reader's line may be."""
    body = tiny.body(tiny.prompt(8), 150, sampling={"top_k": 60, "top_p": 1.0, "temperature": 3.0})
    last = [part async for part in stage.parts(body)][-1]
    assert {len(ids) for ids in last["meta_info"]["output_token_sampling_mask"]} == {60}
    assert len(last["output_ids"]) == 150
    assert len(json.dumps(last)) > 2**17


async def test_what_cannot_be_answered_is_refused_and_nothing_else_suffers(stage: Stage) -> None:
    no_limit = await stage.ask(tiny.body([1], 1, sampling={"top_k": -1}), 400)
    assert "top_k" in no_limit["error"]["message"]
    too_long = await stage.ask(tiny.body([1] * CONTEXT, 1), 400)
    assert too_long["error"]["message"]
    no_string = await stage.ask(tiny.body([1], 1, extra_key=7), 400)
    assert no_string["error"]["message"] == "extra_key must be a string, got int"
    too_new = await stage.client.post(
        "/generate", json=tiny.body([1], 1), headers={"X-Motley-Min-Version": str(stage.version + 1)}
    )
    assert (too_new.status, (await too_new.json())["version"]) == (409, stage.version)
    assert len((await stage.ask(tiny.body([1], 3)))["output_ids"]) == 3


async def test_aborting_by_id_ends_one_request_with_what_it_has(stage: Stage) -> None:
    parts = {rid: stage.parts(tiny.body(tiny.prompt(6), LONG, rid=rid)) for rid in ("goes", "stays")}
    for stream in parts.values():
        await anext(stream)
    assert (await stage.client.post("/abort_request", json={"rid": "goes"})).status == 200
    gone = [part async for part in parts["goes"]][-1]
    stayed = [part async for part in parts["stays"]][-1]
    assert gone["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(gone["output_ids"]) < LONG
    assert stayed["meta_info"]["finish_reason"] == {"type": "length", "length": LONG}


async def test_health_loads_and_metrics_tell_what_the_server_does(stage: Stage) -> None:
    before, seen, finished = stage.agent.state(), asyncio.Event(), 0

    async def keep_busy(index: int) -> None:
        nonlocal finished
        while not seen.is_set():  # for as long as it takes until loads were read while something ran
            await stage.ask(tiny.body(tiny.prompt(8, seed=index), 100))
            finished += 1

    busy = [asyncio.create_task(keep_busy(index)) for index in range(3)]
    try:
        await tiny.until(lambda: stage.agent.state().running > 0, timeout_s=120)
        [rank] = (await (await stage.client.get("/v1/loads")).json())["loads"]
        assert (await stage.client.get("/health")).status == 200
        assert 1 <= rank["num_running_reqs"] + rank["num_waiting_reqs"] <= 3
        assert 0 <= rank["token_usage"] < 1
    finally:
        seen.set()
        await asyncio.gather(*busy)
    await tiny.until(lambda: stage.agent.state().running == 0, timeout_s=120)
    after = stage.agent.state()
    assert after.turns - before.turns == finished
    assert after.generated_tokens - before.generated_tokens == finished * 100
    assert after.prompt_tokens - before.prompt_tokens == finished * 8
    # Counted between two looks at the loads: the stand-in may be done before the second.
    assert after.busy_s > before.busy_s or (not stage.real and after.busy_s == before.busy_s)
    metrics = await (await stage.client.get("/metrics")).text()
    labels = '{engine="run-h100-0",group="run-h100",view="bf16"}'
    assert f"motley_engine_running_requests{labels} 0" in metrics
    assert f"motley_engine_turns_total{labels} {after.turns}" in metrics
    info = await (await stage.client.get("/server_info")).json()
    assert (info["context_length"], info["weight_version"], info["engine"]) == (CONTEXT, str(stage.version), "SGLang")


async def test_the_weights_of_before_under_a_new_label_are_found_out_and_mended(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call answers 200, and the server computes with what it had."""
    old_folder, update = stage.folder, stage.engine.update

    async def of_old_weights(folder: Path, version: int) -> None:
        await update(old_folder, version)

    monkeypatch.setattr(stage.engine, "update", of_old_weights)
    new = stage.publish()
    await stage.agent.look()
    assert (stage.agent.state().ready, stage.agent.state().reason) == (False, "VersionMismatch")
    assert (await stage.client.post("/generate", json=tiny.body([1], 1))).status == 503
    monkeypatch.undo()
    await stage.agent.look()
    stage.serves(new)


async def test_an_update_that_fails_is_never_advertised_and_the_server_comes_back(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = stage.engine.update

    async def of_nothing(folder: Path, version: int) -> None:
        await update(_empty(stage), version)

    monkeypatch.setattr(stage.engine, "update", of_nothing)
    old, new = stage.version, stage.publish()
    await stage.agent.look()
    state = stage.agent.state()
    assert (state.ready, state.version, state.reason) == (False, old, "LoadFailed")
    monkeypatch.undo()
    await stage.agent.look()
    stage.serves(new)


def _empty(stage: Stage) -> Path:
    """The served folder without its weights."""
    folder = stage.rig.settings.scratch / "empty"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(stage.folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


async def test_answers_have_the_recorded_shape(stage: Stage) -> None:
    """The stand-in is only as good as this: what the adapter says is answered by both with the same keys and types."""
    url = f"http://{stage.rig.settings.address}:{stage.rig.settings.engine_port}"
    heard = await exchanges.all_of(url, stage.folder, _empty(stage))
    if stage.real and os.environ.get("MOTLEY_RECORD_SGLANG"):
        exchanges.record(heard)
    on_file = exchanges.recorded()
    if stage.real:
        assert heard["server_info"]["answer"]["version"] == on_file["version"]
    for name, want in on_file["exchanges"].items():
        got = heard[name]
        assert (name, got["status"]) == (name, want["status"])
        assert (name, exchanges.schema(got["answer"])) == (name, exchanges.schema(want["answer"]))
    assert heard.keys() == on_file["exchanges"].keys()
    await stage.next_version()  # other tests find the engine as the agent left it


async def test_a_server_that_dies_is_noticed_and_its_process_replaced(tmp_path: Path) -> None:
    rig = sglang_rig(tmp_path, real=False)
    publish(rig, 1, config=CONFIG)
    running = asyncio.create_task(rig.agent.run())
    await tiny.until(lambda: rig.agent.state().ready, timeout_s=120)
    client = await rig.client_for(make_app(rig.agent))
    assert isinstance(rig.agent.engine, SglangEngine)
    server = rig.agent.engine._process
    assert server is not None
    os.killpg(server.pid, signal.SIGKILL)
    assert await asyncio.wait_for(running, 60) == keys.EXIT_GAVE_UP
    assert rig.agent.engine.failed() == "sglang ended with code -9"
    assert (await client.get("/motley/alive")).status == 503
    assert (await client.post("/generate", json=tiny.body([1], 1))).status == 503
    await client.close()
