"""The proxy for /generate: bytes pass through, sessions stick, long replies stay alive, dead engines are survived."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from motley_api import keys

StageOf = Callable[..., Awaitable[Any]]
BODY = b'{ "input_ids": [1, 2],  "sampling_params": {"temperature": 1e0}, "return_sampling_mask": true, "x-unknown": [1.50] }'


async def two_engines(stage: Any) -> tuple[Any, Any]:
    engines = await stage.engine("e1"), await stage.engine("e2")
    await stage.fleet(g=1000)
    return engines


async def test_body_and_reply_pass_through_byte_for_byte_with_unknown_fields(stage: Any) -> None:
    engine = await stage.engine("e1")
    await stage.fleet(g=1000)
    reply = b'{"text": "",   "output_ids": [3], "meta_info": {"odd": 1.50}}'

    async def odd(request: web.Request, body: dict[str, Any]) -> web.Response:
        own = {"x-motley-version": "7", "Server": "hidden", "Retry-after": "3"}
        return web.Response(body=reply, content_type="application/json", headers=own)

    engine.script = odd
    headers = {keys.ROUTING_KEY_HEADER: "k", keys.MIN_VERSION_HEADER: "1", "X-Private": "stays here"}
    async with stage.client.post(stage.url + "/generate", data=BODY, headers=headers) as response:
        assert (response.status, await response.read()) == (200, reply)
        told = {name: response.headers.get(name) for name in ("X-Motley-Version", "Retry-After", "Content-Type")}
        assert told == {"X-Motley-Version": "7", "Retry-After": "3", "Content-Type": "application/json"}
        place = [response.headers[f"X-Motley-{name}"] for name in ("Group", "View", "Engine")]
        assert place == ["g", "bf16", "e1"]
        assert response.headers["Server"] != "hidden"
    raw, seen = engine.seen[0]
    assert raw == BODY
    assert seen[keys.ROUTING_KEY_HEADER] == "k"
    assert seen[keys.MIN_VERSION_HEADER] == "1"
    assert "X-Private" not in seen


@pytest.mark.parametrize("naming", ["header", "session_id", "routing_key", "user"])
async def test_thirty_turns_of_one_session_reach_one_engine_however_the_agent_names_it(stage: Any, naming: str) -> None:
    one, other = await two_engines(stage)
    for turn in range(30):
        headers = {keys.ROUTING_KEY_HEADER: "agent-1"} if naming == "header" else {}
        body: dict[str, Any] = {"input_ids": [turn]} | ({naming: "agent-1"} if naming != "header" else {})
        status, _ = await stage.call("POST", "/generate", body, **headers)
        assert status == 200
    assert (len(one.seen), len(other.seen)) == (30, 0)


async def test_requests_without_a_key_are_sessions_of_their_own_that_end_with_the_reply(stage: Any) -> None:
    await two_engines(stage)
    for _ in range(20):  # more than the fleet holds at once
        assert (await stage.call("POST", "/generate", {"input_ids": [1]}))[0] == 200
    _, status = await stage.call("GET", "/v1/status")
    assert (status["sessions_active"], status["sessions_total"]) == (0, 20)


async def test_a_routing_key_and_a_lease_of_the_same_name_are_one_session(stage: Any) -> None:
    await two_engines(stage)
    await stage.call("POST", "/v1/sessions", {"session": "other"})  # e1
    _, lease = await stage.call("POST", "/v1/sessions", {"session": "s"})
    assert lease["engine"] == "e2"
    await stage.call("POST", "/generate", {"input_ids": [1]}, **{keys.ROUTING_KEY_HEADER: "s"})
    assert len(stage.engines["e2"].seen) == 1
    assert stage.router.table.sessions_active == 2


async def test_an_event_stream_passes_through_as_it_comes(stage: Any) -> None:
    engine = await stage.engine("e1")
    await stage.fleet(g=1000)
    go_on = asyncio.Event()

    async def slowly(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"first": 1}\n\n')
        await go_on.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    engine.script = slowly
    async with stage.client.post(stage.url + "/generate", json={"input_ids": [1], "stream": True}) as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        assert await response.content.readuntil(b"\n\n") == b'data: {"first": 1}\n\n'  # before the engine is done
        go_on.set()
        assert await response.content.read() == b"data: [DONE]\n\n"


async def test_a_long_reply_is_kept_alive_by_whitespace_and_stays_valid_json(stage_of: StageOf) -> None:
    stage = await stage_of(keep_alive_s=0.02)
    engine = await stage.engine("e1")
    await stage.fleet(g=1000)
    go_on = asyncio.Event()

    async def slow(request: web.Request, body: dict[str, Any]) -> web.Response:
        await go_on.wait()
        return web.json_response(engine.reply(body))

    engine.script = slow
    async with stage.client.post(stage.url + "/generate", data=BODY) as response:
        assert (response.status, response.content_type) == (200, "application/json")
        early = await response.content.readexactly(3)
        go_on.set()
        rest = await response.content.read()
    assert early == b"   "
    assert msgspec.json.decode(early + rest) == engine.reply({"input_ids": [1, 2]})


async def test_a_long_stream_is_kept_alive_by_comments_between_events_only(stage_of: StageOf) -> None:
    stage = await stage_of(keep_alive_s=0.02)
    engine = await stage.engine("e1")
    await stage.fleet(g=1000)
    gates = [asyncio.Event() for _ in range(2)]

    async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: half")
        await gates[0].wait()
        await response.write(b" whole\n\n")
        await gates[1].wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    engine.script = slow
    async with stage.client.post(stage.url + "/generate", json={"input_ids": [1], "stream": True}) as response:
        assert await response.content.readexactly(10) == b"data: half"
        await asyncio.sleep(0.08)  # four keep-alive periods: a comment here would break the event
        gates[0].set()
        assert await response.content.readuntil(b"\n\n") == b" whole\n\n"
        assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        gates[1].set()
        rest = await response.content.read()
    assert rest.replace(b": keep-alive\n\n", b"") == b"data: [DONE]\n\n"


async def test_an_unreachable_engine_costs_a_retry_inside_the_group_and_is_suspected_until_heard_of(stage: Any) -> None:
    one, other = await two_engines(stage)
    await stage.engine("h1", "h")
    await one.stop()
    status, reply = await stage.call("POST", "/generate", {"input_ids": [5], "user": "s"})
    assert (status, reply["output_ids"]) == (200, [6, 7, 8])
    assert len(other.seen) == 1
    for n in range(3):
        assert (await stage.call("POST", "/v1/sessions", {"session": f"s{n}"}))[1]["engine"] == "e2"
    await one.start()  # back, at a new address
    await stage.beat("e1")
    assert (await stage.call("POST", "/v1/sessions", {"session": "s3"}))[1]["engine"] == "e1"
    await stage.call("POST", "/generate", {"input_ids": [5], "user": "s"})
    assert len(other.seen) == 2  # the moved session stays where it is


async def test_an_engine_that_breaks_off_before_its_reply_is_survived(stage: Any) -> None:
    one, other = await two_engines(stage)

    async def dies(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    one.script = dies
    status, reply = await stage.call("POST", "/generate", {"input_ids": [5], "user": "s"})
    assert (status, reply["output_ids"]) == (200, [6, 7, 8])
    assert (len(one.seen), len(other.seen)) == (
        2,
        1,
    )  # once more on the same engine: its connection may have been stale


async def test_an_engine_that_breaks_off_in_half_a_json_reply_is_survived(stage: Any) -> None:
    one, _ = await two_engines(stage)

    async def half(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "100"})
        await response.prepare(request)
        await response.write(b'{"output_ids": [9')
        assert request.transport is not None
        request.transport.close()
        return response

    one.script = half
    status, reply = await stage.call("POST", "/generate", {"input_ids": [5], "user": "s"})
    assert (status, reply["output_ids"]) == (200, [6, 7, 8])


async def test_an_engine_that_breaks_off_in_mid_stream_ends_the_stream_with_an_error_and_never_repeats_it(
    stage: Any,
) -> None:
    one, other = await two_engines(stage)
    break_off = asyncio.Event()

    async def half(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"first": 1}\n\ndata: {"sec')
        await break_off.wait()
        assert request.transport is not None
        request.transport.close()
        return response

    one.script = half
    async with stage.client.post(stage.url + "/generate", json={"input_ids": [1], "stream": True}) as response:
        assert await response.content.readuntil(b"\n\n") == b'data: {"first": 1}\n\n'
        break_off.set()
        events = (await response.read()).split(b"\n\n")
    assert events[0] == b'data: {"sec'
    error = msgspec.json.decode(events[1].removeprefix(b"data: "))["error"]
    assert (error["type"], error["code"]) == ("EngineFailed", 502)
    assert b"[DONE]" not in b"".join(events)
    assert (len(one.seen), len(other.seen)) == (1, 0)


async def test_a_hung_engine_is_left_when_its_heartbeats_stop_and_the_request_goes_again(stage_of: StageOf) -> None:
    stage = await stage_of(keep_alive_s=0.02)
    one, other = await two_engines(stage)

    async def hangs(request: web.Request, body: dict[str, Any]) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    one.script = hangs
    task = asyncio.create_task(stage.call("POST", "/generate", {"input_ids": [5], "user": "s"}))
    await one.arrived.wait()
    stage.clock.now_s += 11
    await stage.beat("e2")
    stage.router.sweep()
    status, reply = await asyncio.wait_for(task, 10)
    assert (status, reply["output_ids"]) == (200, [6, 7, 8])
    assert len(other.seen) == 1


async def test_a_session_that_lost_its_engine_never_starts_again_in_another_group(stage: Any) -> None:
    await stage.engine("e1", "g")
    await stage.engine("h1", "h")
    await stage.fleet(g=999, h=1)
    await stage.call("POST", "/generate", {"input_ids": [5], "user": "s"})
    stage.clock.now_s += 11
    await stage.beat("h1")
    stage.router.sweep()
    for _ in range(2):
        status, answer = await stage.call("POST", "/generate", {"input_ids": [5], "user": "s"})
        assert (status, answer["reason"]) == (410, "SessionLost")
    assert stage.engines["h1"].seen == []
    assert (await stage.call("POST", "/generate", {"input_ids": [5], "user": "t"}))[0] == 200


async def test_a_lone_engine_that_cannot_be_reached_is_503_and_keeps_its_session(stage: Any) -> None:
    one = await stage.engine("e1")
    await stage.fleet(g=1000)
    await stage.call("POST", "/generate", {"input_ids": [5], "user": "s"})
    await one.stop()
    async with stage.client.post(stage.url + "/generate", json={"input_ids": [5], "user": "s"}) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "2")
        assert (await response.json())["reason"] == "EngineFailed"
    await one.start()
    await stage.beat("e1")
    assert (await stage.call("POST", "/generate", {"input_ids": [5], "user": "s"}))[0] == 200


@pytest.mark.parametrize("status", [400, 409, 503])
async def test_an_engines_own_refusal_reaches_the_agent_as_it_is(stage: Any, status: int) -> None:
    engine = await stage.engine("e1")
    await stage.fleet(g=1000)

    async def refuses(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response({"error": {"message": "no"}}, status=status, headers={"Retry-After": "7"})

    engine.script = refuses
    async with stage.client.post(stage.url + "/generate", data=BODY) as response:
        assert (response.status, response.headers["Retry-After"]) == (status, "7")
        assert await response.json() == {"error": {"message": "no"}}
    assert len(engine.seen) == 1


@pytest.mark.parametrize("state", [{"ready": False, "reason": "CanaryFailed"}, {"ready": False, "draining": True}])
async def test_a_refusal_by_an_engine_that_says_it_does_not_serve_costs_a_retry_inside_the_group(
    stage: Any, state: dict[str, Any]
) -> None:
    """A draining engine keeps the sessions that it knows; one that it does not know it refuses for good."""
    one, other = await two_engines(stage)
    await stage.engine("h1", "h")
    await stage.fleet(2, g=1000, h=0)
    assert (await stage.call("POST", "/v1/sessions", {"session": "s"}))[1]["engine"] == "e1"
    await stage.beat("e1", **state)

    async def refuses(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response({"error": {"message": "not here"}}, status=503, headers={"Retry-After": "1"})

    one.script = refuses
    status, reply = await stage.call("POST", "/generate", {"input_ids": [5], "user": "s"})
    assert (status, reply["output_ids"]) == (200, [6, 7, 8])
    assert (len(one.seen), len(other.seen), len(stage.engines["h1"].seen)) == (1, 1, 0)


async def test_a_lone_engine_that_does_not_serve_keeps_its_session_and_its_refusal_reaches_the_agent(
    stage: Any,
) -> None:
    one = await stage.engine("e1")
    await stage.engine("h1", "h")
    await stage.fleet(g=1000, h=0)
    await stage.call("POST", "/v1/sessions", {"session": "s"})
    await stage.beat("e1", ready=False, reason="Loading")

    async def refuses(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response({"error": {"message": "not yet"}}, status=503, headers={"Retry-After": "1"})

    one.script = refuses
    async with stage.client.post(stage.url + "/generate", json={"input_ids": [5], "user": "s"}) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "1")
    assert stage.router.table.pin("s").engine == "e1"
    assert stage.engines["h1"].seen == []


async def test_a_refusal_after_keep_alive_bytes_is_told_in_the_body(stage_of: StageOf) -> None:
    stage = await stage_of(keep_alive_s=0.02)
    engine = await stage.engine("e1")
    await stage.fleet(g=1000)
    go_on = asyncio.Event()

    async def refuses_late(request: web.Request, body: dict[str, Any]) -> web.Response:
        await go_on.wait()
        return web.json_response({"error": "too late"}, status=503)

    engine.script = refuses_late
    async with stage.client.post(stage.url + "/generate", data=BODY) as response:
        await response.content.readexactly(1)
        go_on.set()
        error = msgspec.json.decode(await response.content.read())["error"]
    assert (response.status, error["code"], error["type"]) == (200, 503, "EngineRefused")
    assert "too late" in error["message"]


async def test_a_failure_that_an_engine_tells_late_has_its_status_while_the_proxy_has_sent_nothing(stage: Any) -> None:
    engine = await stage.engine("e1")
    await stage.fleet(g=1000)

    async def fails_late(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.Response(body=b'  {"error": {"message": "support too large", "code": 400}}')

    engine.script = fails_late
    status, answer = await stage.call("POST", "/generate", {"input_ids": [1]})
    assert (status, answer["error"]["type"]) == (400, "EngineRefused")
    assert "support too large" in answer["message"]


async def test_an_agent_that_hangs_up_frees_its_engine(stage: Any) -> None:
    engine = await stage.engine("e1")
    await stage.fleet(g=1000)
    hung_up = asyncio.Event()

    async def waits(request: web.Request, body: dict[str, Any]) -> web.Response:
        while request.transport is not None and not request.transport.is_closing():
            await asyncio.sleep(0.01)
        hung_up.set()
        return web.Response()

    engine.script = waits
    with pytest.raises(asyncio.TimeoutError):
        async with stage.client.post(stage.url + "/generate", data=BODY, timeout=aiohttp.ClientTimeout(total=0.1)):
            pass
    await asyncio.wait_for(hung_up.wait(), 10)
    await asyncio.wait_for(_until(lambda: stage.router.table.sessions_active == 0), 10)


async def test_an_agent_that_hangs_up_in_mid_stream_casts_no_suspicion_on_its_engine(stage: Any) -> None:
    engine = await stage.engine("e1")
    await stage.fleet(g=1000)
    hung_up = asyncio.Event()

    async def endless(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            while True:
                await response.write(b"data: {}\n\n")
                await asyncio.sleep(0.001)
        finally:
            hung_up.set()

    engine.script = endless
    async with stage.client.post(stage.url + "/generate", json={"input_ids": [1], "stream": True}) as response:
        await response.content.readuntil(b"\n\n")
        response.close()
    await asyncio.wait_for(hung_up.wait(), 10)
    await asyncio.wait_for(_until(lambda: stage.router.table.sessions_active == 0), 10)
    assert not stage.router.table.engines["e1"].suspect
    assert len(engine.seen) == 1
    _, metrics = await stage.call("GET", "/metrics")
    assert 'motley_router_proxied_requests_total{outcome="AgentGone",path="/generate"} 1.0' in metrics.splitlines()


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def test_a_session_in_use_is_kept_however_long_its_reply_takes(stage_of: StageOf) -> None:
    stage = await stage_of(proxy_ttl_s=5.0)
    engine = await stage.engine("e1")
    await stage.fleet(g=1000)
    go_on = asyncio.Event()

    async def slow(request: web.Request, body: dict[str, Any]) -> web.Response:
        await go_on.wait()
        return web.json_response(engine.reply(body))

    engine.script = slow
    task = asyncio.create_task(stage.call("POST", "/generate", {"input_ids": [5], "user": "s"}))
    await engine.arrived.wait()
    for _ in range(5):
        stage.clock.now_s += 4
        await stage.beat("e1")
        deadline_s = stage.clock.now_s + 5
        await asyncio.wait_for(_until(lambda: stage.router.table._clocks["s"].expires_s >= deadline_s), 10)  # noqa: B023
        stage.router.sweep()
    go_on.set()
    assert (await task)[0] == 200
    stage.clock.now_s += 6
    await stage.beat("e1")
    stage.router.sweep()
    assert stage.router.table.sessions_active == 0


async def test_a_min_version_that_no_engine_serves_is_refused_before_any_engine_sees_it(stage: Any) -> None:
    engine = await stage.engine("e1", version=3)
    await stage.fleet(g=1000)
    status, answer = await stage.call("POST", "/generate", {"input_ids": [5]}, **{keys.MIN_VERSION_HEADER: "4"})
    assert (status, answer["reason"]) == (503, "VersionBehind")
    status, answer = await stage.call("POST", "/generate", {"input_ids": [5]}, **{keys.MIN_VERSION_HEADER: "new"})
    assert (status, answer["reason"]) == (400, "InvalidHeader")
    assert engine.seen == []


async def test_the_fleets_size_changes_unseen_behind_one_address(stage: Any) -> None:
    """Grow from one engine to three and shrink to one while twelve agents keep talking: no request fails."""
    await stage.engine("e1", max_sessions=16)
    await stage.fleet(g=1000)
    failures: list[Any] = []
    turns = 0
    stop = asyncio.Event()

    async def agent(name: str) -> None:
        nonlocal turns
        while not stop.is_set():
            status, answer = await stage.call("POST", "/generate", {"input_ids": [1], "user": name})
            turns += 1
            if status != 200:
                failures.append((name, status, answer))

    async def turns_pass(count: int) -> None:
        goal = turns + count
        await asyncio.wait_for(_until(lambda: turns >= goal), 30)

    agents = [asyncio.create_task(agent(f"a{n}")) for n in range(6)]
    await turns_pass(30)
    await stage.engine("e2", max_sessions=16)
    await stage.engine("e3", max_sessions=16)
    agents += [asyncio.create_task(agent(f"b{n}")) for n in range(6)]
    await turns_pass(60)
    assert stage.engines["e2"].seen
    assert stage.engines["e3"].seen
    await stage.beat("e1", "e2", draining=True, ready=False)
    await turns_pass(60)
    await stage.engines["e1"].stop()
    await stage.engines["e2"].stop()
    await turns_pass(60)
    stop.set()
    await asyncio.gather(*agents)
    assert failures == []
    assert {stage.router.table.pin(f"a{n}").engine for n in range(6)} == {"e3"}
