"""The gates in front of an engine, as a client meets them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import msgspec
import pytest
from agent.rig import TOKEN, Rig, generate_headers, publish
from aiohttp import web
from aiohttp.test_utils import TestClient
from engine import tiny
from motley_api.records import EngineState
from motley_sampler.agent.http import make_app
from motley_sampler.keepalive import late_failure

Client = TestClient[web.Request, web.Application]


async def _serving(make_rig: Callable[..., Rig], **options: Any) -> tuple[Rig, Client]:
    rig = make_rig(**options)
    publish(rig, 5)
    await rig.agent.look()
    assert rig.state.ready, rig.state.message
    return rig, await rig.client()


async def test_a_request_for_newer_weights_is_409_with_the_served_version(make_rig: Callable[..., Rig]) -> None:
    rig, client = await _serving(make_rig)
    refused = await client.post("/generate", json=tiny.body(tiny.prompt(5)), headers=generate_headers(6))
    assert (refused.status, (await refused.json())["version"]) == (409, 5)
    assert refused.headers["Retry-After"] == "1"  # it follows the pointer, and will have it
    served = await client.post("/generate", json=tiny.body(tiny.prompt(5)), headers=generate_headers(5))
    assert served.status == 200
    assert served.headers["X-Motley-Version"] == "5"
    meta = (await served.json())["meta_info"]
    assert (meta["start_version"], meta["end_version"], meta["group"], meta["view"]) == (5, 5, "run-h100", "bf16")
    odd = await client.post("/generate", json=tiny.body(tiny.prompt(5)), headers={"X-Motley-Min-Version": "v5"})
    assert odd.status == 400
    publish(rig, 6)
    await rig.agent.look()
    now = await client.post("/generate", json=tiny.body(tiny.prompt(5)), headers=generate_headers(6))
    assert now.status == 200
    await client.close()


async def test_before_the_first_version_it_is_503_with_retry_after(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    client = await rig.client()
    for path in ("/generate", "/flush_cache"):
        answer = await client.post(path, json=tiny.body(tiny.prompt(5)))
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
    assert (await client.get("/health")).status == 503
    assert (await client.get("/motley/alive")).status == 200  # loading is not a reason to be restarted
    assert (await client.get("/metrics")).status == 200
    await client.close()


@pytest.mark.parametrize(
    ("data", "want"),
    [
        (b"{", "body must be JSON"),
        (b"[]", "body must be a JSON object"),
        (b'{"input_ids": [1, 2' + b" " * 10 + b"]", "body must be JSON"),
        (json.dumps({"input_ids": [1] * 60_000}).encode(), "body must have at most 100000 bytes"),
        (json.dumps(tiny.body([1] * 127, 2)).encode(), "exceed the context length of 128"),
        (json.dumps({**tiny.body([1]), "session_id": 7}).encode(), "session_id must be a string, got int"),
    ],
)
async def test_bad_bodies_are_400_and_the_engine_goes_on(make_rig: Callable[..., Rig], data: bytes, want: str) -> None:
    _, client = await _serving(make_rig)
    answer = await client.post("/generate", data=data)
    assert answer.status == 400
    assert want in (await answer.json())["error"]["message"]
    good = await client.post("/generate", json=tiny.body(tiny.prompt(5)))
    assert good.status == 200
    await client.close()


async def test_a_prompt_of_100_mb_is_refused_by_its_announced_length_and_by_what_arrives(
    make_rig: Callable[..., Rig],
) -> None:
    rig, client = await _serving(make_rig)
    reader, writer = await asyncio.open_connection(client.host, client.port)
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 100000000\r\n\r\n"
    writer.write(head.encode())
    assert (await reader.readline()).split()[1] == b"400"  # not one byte of it was sent
    writer.close()
    sent = 0

    async def without_end() -> AsyncIterator[bytes]:
        nonlocal sent
        yield b'{"input_ids": ['
        while sent < 100_000_000:
            sent += 10_000
            yield b"1," * 5_000

    try:
        answer = await client.post("/generate", data=without_end())
        assert answer.status == 400
        assert "body must have at most 100000 bytes" in await answer.text()
    except aiohttp.ClientConnectionError:
        pass  # the server closed while we still wrote
    assert sent < 10_000_000
    assert (await client.post("/generate", json=tiny.body(tiny.prompt(5)))).status == 200
    assert rig.state.ready
    await client.close()


async def test_only_the_runs_token_opens_anything_but_probes(make_rig: Callable[..., Rig]) -> None:
    _, client = await _serving(make_rig)
    for given in ("", "Bearer wrong", "s3cret"):
        for method, path in (("POST", "/generate"), ("GET", "/motley/status"), ("POST", "/motley/drain")):
            answer = await client.request(method, path, headers={"Authorization": given})
            assert answer.status == 401, path
        for path in ("/health", "/metrics", "/motley/alive"):
            assert (await client.get(path, headers={"Authorization": given})).status == 200
    await client.close()


async def test_every_turn_is_counted_by_how_long_it_took(make_rig: Callable[..., Rig]) -> None:
    rig, client = await _serving(make_rig)
    for _ in range(3):
        assert (
            await client.post("/generate", json=tiny.body(tiny.prompt(5)), headers=generate_headers(5))
        ).status == 200
    refused = await client.post("/generate", json=tiny.body(tiny.prompt(5)), headers=generate_headers(6))
    assert refused.status == 409  # no turn
    state = rig.state
    assert (sum(state.turn_latency_counts), state.turns) == (3, 3)  # canaries are neither
    text = await (await client.get("/metrics")).text()
    labels = 'engine="run-h100-0",group="run-h100",view="bf16"'
    assert f"motley_engine_turn_latency_seconds_count{{{labels}}} 3" in text
    rig.agent.standing.turn_took(10.0)
    rig.agent.standing.turn_took(10.1)
    rig.agent.standing.turn_took(1000.0)
    # Upper bounds are inclusive, as Prometheus has them: 10 s is in the eighth bucket (<= 10), 10.1 s in the ninth.
    assert rig.state.turn_latency_counts[7:9] == [1, 1]
    assert rig.state.turn_latency_counts[-1] == 1
    await client.close()


async def test_status_and_metrics_tell_the_same(make_rig: Callable[..., Rig]) -> None:
    rig, client = await _serving(make_rig)
    await client.post("/generate", json=tiny.body(tiny.prompt(5), 7))
    state = msgspec.json.decode(await (await client.get("/motley/status")).read(), type=EngineState)
    assert (state.id, state.version, state.turns, state.generated_tokens) == ("run-h100-0", 5, 1, 7)
    assert state.max_sessions == 4
    text = await (await client.get("/metrics")).text()
    labels = '{engine="run-h100-0",group="run-h100",view="bf16"}'
    assert f"motley_engine_generated_tokens_total{labels} 7" in text.splitlines()
    assert f"motley_engine_weights_version{labels} 5" in text.splitlines()
    loads = (await (await client.get("/v1/loads")).json())["loads"][0]
    assert (loads["num_running_reqs"], loads["max_total_num_tokens"]) == (0, 20 * 128)
    info = await (await client.get("/model_info")).json()
    assert (info["weight_version"], info["vocab_size"]) == ("5", tiny.VOCAB)
    server = await (await client.get("/server_info")).json()
    assert (server["gpu_type"], server["precision"]) == ("H100", "BF16")
    assert (await client.get("/health_generate")).status == 200
    assert rig.state.turns == 1  # the health check is not work
    await client.close()


async def test_a_stream_is_server_sent_events_that_end_with_done(make_rig: Callable[..., Rig]) -> None:
    _, client = await _serving(make_rig)
    whole = await (await client.post("/generate", json=tiny.body(tiny.prompt(5)))).json()
    answer = await client.post("/generate", json={**tiny.body(tiny.prompt(5)), "stream": True})
    assert answer.headers["Content-Type"] == "text/event-stream"
    events = [line.removeprefix("data: ") for line in (await answer.text()).split("\n\n") if line]
    assert events[-1] == "[DONE]"
    last = json.loads(events[-2])
    assert last["output_ids"] == whole["output_ids"]
    assert last["meta_info"]["end_version"] == 5
    refused = await client.post("/generate", json={**tiny.body([]), "stream": True})
    assert refused.status == 400
    await client.close()


async def _slowly(make_rig: Callable[..., Rig]) -> tuple[Rig, Client]:
    """An agent that shows a sign of life every 20 ms, before an engine that is paused."""
    rig, client = await _serving(make_rig)
    await client.close()
    client = await rig.client_for(make_app(rig.agent, keep_alive_s=0.02))
    await client.post("/pause_generation")
    return rig, client


async def test_a_long_reply_is_kept_alive_by_spaces_and_stays_valid_json(make_rig: Callable[..., Rig]) -> None:
    _, client = await _slowly(make_rig)
    answer = await client.post("/generate", json=tiny.body(tiny.prompt(5), 4))
    early = await answer.content.readexactly(3)
    await client.post("/continue_generation")
    body = early + await answer.content.read()
    assert (answer.status, answer.content_type, early) == (200, "application/json", b"   ")
    assert len(json.loads(body)["output_ids"]) == 4
    assert json.loads(body)["meta_info"]["end_version"] == 5
    await client.close()


async def test_a_stream_is_kept_alive_by_comments_also_before_its_first_token(make_rig: Callable[..., Rig]) -> None:
    _, client = await _slowly(make_rig)
    answer = await client.post("/generate", json={**tiny.body(tiny.prompt(5), 4), "stream": True})
    assert await answer.content.readuntil(b"\n\n") == b": keep-alive\n\n"
    await client.post("/continue_generation")
    events = [line for line in (await answer.text()).split("\n\n") if line and not line.startswith(":")]
    assert events[-1] == "data: [DONE]"
    assert len(json.loads(events[-2].removeprefix("data: "))["output_ids"]) == 4
    await client.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_after_a_sign_of_life_is_told_in_the_body(make_rig: Callable[..., Rig], stream: bool) -> None:
    rig, client = await _slowly(make_rig)
    answer = await client.post("/generate", json={**tiny.body(tiny.prompt(5), 4), "stream": stream})
    await answer.content.readexactly(1)
    rig.agent.standing.proven.clear()
    rig.agent.standing.reason, rig.agent.standing.message = "CanaryFailed", "differs"
    await client.post("/continue_generation")
    text = await answer.text()
    told = text.split("data: ")[1] if stream else text
    assert answer.status == 200
    want = {"message": "CanaryFailed: tokens drawn from an unproven version are void", "code": 503}
    assert json.loads(told)["error"] == want
    if not stream:
        assert late_failure(text.encode()) == (503, want["message"])
    await client.close()


async def test_a_client_that_hangs_up_frees_its_slot(make_rig: Callable[..., Rig]) -> None:
    rig, client = await _serving(make_rig)
    await client.post("/pause_generation")
    request = asyncio.create_task(client.post("/generate", json=tiny.body(tiny.prompt(5), 100)))
    await tiny.until(lambda: rig.engine.load().queued == 1)
    request.cancel()
    await tiny.until(lambda: rig.agent.in_flight == 0)
    await client.post("/continue_generation")
    await tiny.until(lambda: (rig.engine.load().running, rig.engine.load().queued) == (0, 0))
    assert rig.engine.load().turns == 0
    await client.close()


async def test_an_update_by_hand_is_proven_and_may_not_go_back(make_rig: Callable[..., Rig]) -> None:
    rig, client = await _serving(make_rig)
    config = tiny.moe_config()
    folder = tiny.write_view(rig.settings.scratch / "by-hand", "bf16", config, tiny.tensors(config, seed=77))
    outside = tiny.write_view(rig.settings.scratch.parent / "outside", "bf16", config, tiny.tensors(config))

    async def update(path: str, version: object) -> tuple[int, Any]:
        body = {"model_path": path, "weight_version": version, "flush_cache": False}
        answer = await client.post("/update_weights_from_disk", json=body)
        return answer.status, await answer.json()

    assert (await update(str(outside), "6"))[0] == 400
    assert (await update(str(folder), 6))[0] == 400
    status, content = await update(str(folder), "4")
    assert (status, content["error"]["message"]) == (400, "weight_version must be at least the served 5, got 4")
    status, content = await update(str(folder), "6")
    assert (status, content["success"], rig.state.version) == (200, True, 6)
    (folder / "model.safetensors").write_bytes(b"short")
    status, content = await update(str(folder), "7")
    assert (status, rig.state.version, rig.state.ready) == (400, 6, True)  # the engine never saw it
    assert content["error"]["message"].startswith("model_path: model.safetensors: not a safetensors header")
    other = tiny.write_view(
        rig.settings.scratch / "other", "bf16", wider := tiny.moe_config(vocab_size=tiny.VOCAB * 2), tiny.tensors(wider)
    )
    status, content = await update(str(other), "7")
    assert (status, rig.state.version, rig.state.ready) == (400, 6, True)
    assert "belongs to another model than the one served" in content["error"]["message"]
    assert (await client.post("/generate", json=tiny.body(tiny.prompt(5)))).status == 200
    await client.close()


async def test_abort_and_flush_answer(make_rig: Callable[..., Rig]) -> None:
    _, client = await _serving(make_rig)
    assert (await client.post("/abort_request", json={"rid": "none"})).status == 200
    assert (await client.post("/flush_cache")).status == 200
    assert (await client.delete("/motley/sessions/none")).status == 204
    await client.close()
