"""Engines, router and trainer that fail: turns are sent again with the same tokens, and nothing finished is lost."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from motley_api.records import EndedBy


def call(command: str) -> str:
    return f"<tool_call>{command}</tool_call>"


def solve(session: str, turn: int, body: dict[str, Any]) -> Any:
    return call(("cat start", "echo yes > done", "submit")[turn])


def late(code: int, message: str) -> web.Response:
    """A failure after keep-alive bytes, which had committed the status."""
    body = b"   " + json.dumps({"error": {"message": message, "code": code}}).encode()
    return web.Response(body=body, content_type="application/json")


def failing_at(turn_to_fail: int, times: int, response: Any) -> Any:
    left = [times]

    def script(session: str, turn: int, body: dict[str, Any]) -> Any:
        if turn == turn_to_fail and left[0]:
            left[0] -= 1
            return response()
        return solve(session, turn, body)

    return script


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motley_sampler.rollout.session.FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr("motley_sampler.rollout.session.LONGEST_BACKOFF_S", 0.05)


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (lambda: web.Response(status=503, headers={"Retry-After": "0.05"}), "Unavailable"),
        (lambda: web.Response(status=500, text="boom"), "Unavailable"),
        (lambda: late(503, "CanaryFailed"), "Unavailable"),
        (lambda: web.Response(text="<html>not json"), "BadReply"),
        (lambda: web.json_response({"output_ids": [], "meta_info": {"finish_reason": {"type": "stop"}}}), "BadReply"),
        (lambda: web.json_response({"meta_info": {"finish_reason": {"type": "abort", "message": "x"}}}), "BadReply"),
    ],
)
async def test_a_failed_turn_is_sent_again_with_the_same_tokens(
    world: Any, settings: Any, start: Any, response: Any, reason: str
) -> None:
    world.engine.script = failing_at(1, 2, response)
    async with start(settings) as running:
        world.deal()
        [episode] = await world.delivered("0/0")
    assert (episode.reward, len(episode.turns)) == (1.0, 3)
    sent = [request["input_ids"] for request in world.engine.requests]
    assert len(sent) == 5
    assert sent[1] == sent[2] == sent[3]
    assert len({request["rid"] for request in world.engine.requests}) == 5
    assert running.metric("retries_total", reason=reason) == 2
    assert world.renewals >= 2  # the router was asked for a better place


async def test_a_reply_that_a_middlebox_cut_off_is_asked_for_again_and_is_no_failure_of_the_policy(
    world: Any, settings: Any, start: Any
) -> None:
    world.engine.script = solve
    world.engine.cuts = 3
    async with start(settings) as running:
        world.deal()
        [episode] = await world.delivered("0/0")
    assert (episode.reward, episode.ended_by, len(episode.turns)) == (1.0, EndedBy.SUBMIT, 3)
    sent = [request["input_ids"] for request in world.engine.requests]
    assert sent[0] == sent[1] == sent[2] == sent[3]
    assert len(sent) == 6
    assert running.metric("retries_total", reason="Unreachable") == 3


async def test_an_engine_behind_its_version_is_waited_for(world: Any, settings: Any, start: Any) -> None:
    """More often than a failing engine would be: being behind is no failure."""
    world.engine.script = failing_at(0, 20, lambda: web.Response(status=409, headers={"Retry-After": "0.05"}))
    async with start(settings) as running:
        world.deal(min_version=9)
        [episode] = await world.delivered("0/0")
    assert episode.reward == 1.0
    assert running.metric("retries_total", reason="VersionBehind") == 20
    # Every tenth time another engine is asked for: this one may be stuck, and its peers not.
    assert [complaint for complaint in world.complaints if complaint] == 2 * [{"refused": "engine-0"}]


async def test_an_engine_that_never_catches_up_is_an_infrastructure_failure(
    world: Any, settings: Any, start: Any
) -> None:
    world.engine.script = lambda session, turn, body: web.Response(status=409, headers={"Retry-After": "0.05"})
    async with start(replace(settings, episode=replace(settings.episode, episode_timeout_s=1.0))):
        world.deal()
        [episode] = await world.delivered("0/0")
    assert (episode.ended_by, episode.reward) == (EndedBy.INFRASTRUCTURE, None)


async def test_an_engine_that_goes_on_failing_is_given_up(world: Any, settings: Any, start: Any) -> None:
    world.engine.script = lambda session, turn, body: web.Response(status=500, text="boom")
    async with start(settings) as running:
        world.deal()
        [episode] = await world.delivered("0/0")
    assert (episode.ended_by, episode.reward) == (EndedBy.INFRASTRUCTURE, None)
    assert "boom" in episode.detail
    assert running.metric("infrastructure_failures_total", kind="EngineFailed") == 1
    assert len(world.engine.requests) == 12


@pytest.mark.parametrize(
    "refusal", [lambda: web.Response(status=400, text="top_k must be ..."), lambda: late(400, "top_k must be ...")]
)
async def test_a_request_that_the_engine_refuses_is_not_repeated(
    world: Any, settings: Any, start: Any, refusal: Any
) -> None:
    world.engine.script = lambda session, turn, body: refusal()
    async with start(settings):
        world.deal()
        [episode] = await world.delivered("0/0")
    assert (episode.ended_by, "top_k must be" in episode.detail) == (EndedBy.INFRASTRUCTURE, True)
    assert len(world.engine.requests) == 1


async def test_a_dead_engine_moves_the_session_inside_its_group(world: Any, settings: Any, start: Any) -> None:
    alive = world.engine_url
    world.engine.script = solve
    world.engine_url, world.next_engine = "http://127.0.0.1:9", "engine-dead"  # nothing listens on the discard port
    async with start(settings) as running:
        world.deal()
        await world.until(lambda: running.metric("retries_total", reason="Unreachable") >= 1)
        world.engine_url, world.next_engine = alive, "engine-1"
        [episode] = await world.delivered("0/0")
    assert (episode.reward, episode.engine, episode.group) == (1.0, "engine-1", "h100-fp8")
    assert {"unreachable": "engine-dead"} in world.complaints
    assert not any("refused" in complaint for complaint in world.complaints)


async def test_the_second_refusal_in_a_row_asks_for_another_engine(world: Any, settings: Any, start: Any) -> None:
    """The first may pass, and a move costs the prefix; the third turn's first refusal starts the count anew."""
    refusals = {0: 2, 1: 1}

    def script(session: str, turn: int, body: dict[str, Any]) -> Any:
        if refusals.get(turn, 0):
            refusals[turn] -= 1
            return web.Response(status=503, headers={"Retry-After": "0.05"})
        return solve(session, turn, body)

    world.engine.script = script
    async with start(settings):
        world.deal()
        [episode] = await world.delivered("0/0")
    assert episode.reward == 1.0
    assert len(world.complaints) >= 3  # each refusal asked the router, and it may have been time to renew besides
    assert [complaint for complaint in world.complaints if complaint] == [{"refused": "engine-0"}]


async def test_an_ended_episode_frees_its_place_at_the_router_and_its_prefix_at_the_engine(
    world: Any, settings: Any, start: Any
) -> None:
    async with start(settings):
        world.deal(samples=2)
        await world.delivered("0/0", "0/1")
    assert sorted(world.ended) == sorted(world.closed) == ["0/0", "0/1"]


async def test_a_turn_on_a_hanging_engine_follows_its_session_to_another(world: Any, settings: Any, start: Any) -> None:
    hung = asyncio.Event()

    async def script(session: str, turn: int, body: dict[str, Any]) -> Any:
        if not hung.is_set():
            hung.set()
            await asyncio.sleep(60)
        return solve(session, turn, body)

    world.engine.script = script
    world.ttl_s = 0.3  # renewed every 0.1 s
    async with start(settings):
        world.deal()
        await world.until(hung.is_set)
        world.next_engine = "engine-1"
        [episode] = await world.delivered("0/0")
    assert (episode.reward, episode.engine) == (1.0, "engine-1")
    assert world.engine.requests[0]["input_ids"] == world.engine.requests[1]["input_ids"]


async def test_a_session_whose_group_is_gone_is_never_graded(world: Any, settings: Any, start: Any) -> None:
    world.ttl_s = 0.3
    world.lost.add("0/0")
    world.engine.script = lambda session, turn, body: call("sleep 0.5; echo yes > done")
    async with start(settings) as running:
        world.deal()
        [episode] = await world.delivered("0/0")
    assert (episode.ended_by, episode.reward) == (EndedBy.INFRASTRUCTURE, None)
    assert running.metric("infrastructure_failures_total", kind="SessionLost") == 1


async def test_leases_are_waited_for(world: Any, settings: Any, start: Any) -> None:
    world.refuse_leases = 5
    async with start(settings):
        world.deal()
        [episode] = await world.delivered("0/0")
    assert episode.ended_by is EndedBy.SUBMIT


async def test_leases_are_renewed_while_a_command_runs(world: Any, settings: Any, start: Any) -> None:
    world.ttl_s = 0.3
    world.engine.script = lambda session, turn, body: call("sleep 1") if turn == 0 else call("submit")
    async with start(settings):
        world.deal()
        await world.delivered("0/0")
    assert world.renewals >= 3


async def test_a_trainer_that_is_down_gets_everything_later(world: Any, settings: Any, start: Any) -> None:
    world.fail_deliveries = 3
    async with start(settings) as running:
        world.deal(samples=4)
        await world.delivered("0/0", "0/1", "0/2", "0/3")
        await world.until(lambda: len(running.worker.delivery.spool) == 0)
    assert running.metric("delivery_failures_total") == 3
    assert running.metric("deliveries_total", outcome="accepted") == 4


async def test_a_lost_acknowledgement_leads_to_a_duplicate_never_to_a_loss(
    world: Any, settings: Any, start: Any
) -> None:
    world.lose_acks = 1
    async with start(settings) as running:
        world.deal()
        await world.until(lambda: running.metric("deliveries_total", outcome="duplicate") == 1)
        assert len(running.worker.delivery.spool) == 0
    assert list(world.kept) == ["0/0"]


async def test_a_refused_trajectory_is_not_sent_again(world: Any, settings: Any, start: Any) -> None:
    world.refuse.add("0/0")
    async with start(settings) as running:
        world.deal()
        await world.until(lambda: running.metric("deliveries_total", outcome="refused") == 1)
        world.deal()
        await world.delivered("1/0")
        assert len(running.worker.delivery.spool) == 0
    assert world.deliveries == 2


async def test_a_restarted_worker_delivers_what_its_predecessor_left(world: Any, settings: Any, start: Any) -> None:
    world.fail_deliveries = 10**6
    async with start(settings) as running:
        world.deal()
        await world.until(lambda: len(running.worker.delivery.spool) == 1)
    first_name = world.asked[0].worker
    assert world.kept == {}
    world.fail_deliveries = 0
    (settings.scratch / "spool" / "torn.msgpack.zst").write_bytes(b"\x28\xb5\x2f\xfd torn")
    async with start(settings) as running:
        [episode] = await world.delivered("0/0")
        await world.until(lambda: len(running.worker.delivery.spool) == 0)
    assert episode.ended_by is EndedBy.SUBMIT
    names = {asked.worker for asked in world.asked}
    assert len(names) == 2  # another incarnation of the same pod, so that the trainer deals lost work anew
    assert {name.split("/")[0] for name in names} == {first_name.split("/")[0]} == {"rollout-0"}


async def test_a_full_spool_stops_new_work(world: Any, settings: Any, start: Any) -> None:
    world.fail_deliveries = 10**6
    async with start(replace(settings, sessions=2)) as running:
        for _ in range(20):
            world.deal()
        await world.until(lambda: len(running.worker.delivery.spool) >= 8)  # four for each session
        await world.until(lambda: not running.worker._running)
        assert len(world.works) >= 20 - 8 - 2
        world.fail_deliveries = 0
        await world.until(lambda: len(world.kept) == 20)


async def test_expired_and_unknown_work_is_dropped(world: Any, settings: Any, start: Any) -> None:
    async with start(settings) as running:
        world.deal(within_s=-1)
        world.deal("no-such-task")
        world.deal()
        await world.delivered("2/0")
    assert list(world.kept) == ["2/0"]
    assert running.metric("abandoned_episodes_total", reason="Expired") == 1
    assert running.metric("abandoned_episodes_total", reason="UnknownTask") == 1


async def test_stopping_finishes_what_runs_and_delivers_it(world: Any, settings: Any, start: Any) -> None:
    entered = asyncio.Event()

    async def script(session: str, turn: int, body: dict[str, Any]) -> Any:
        entered.set()
        await asyncio.sleep(0.2)
        return solve(session, turn, body)

    world.engine.script = script
    async with start(settings) as running:
        world.deal()
        await world.until(entered.is_set)
        world.deal()  # comes too late
        await running.worker.stop(20.0)
    assert list(world.kept) == ["0/0"]
    assert world.kept["0/0"].reward == 1.0


async def test_stopping_abandons_what_takes_longer_than_the_grace(world: Any, settings: Any, start: Any) -> None:
    world.engine.script = lambda session, turn, body: call("sleep 300")
    async with start(replace(settings, episode=replace(settings.episode, command_timeout_s=600))) as running:
        world.deal()
        await world.until(lambda: len(world.engine.requests) == 1)
        started_s = time.monotonic()
        await running.worker.stop(1.0)
        await world.until(lambda: world.ended == ["0/0"])
        assert time.monotonic() - started_s < 60
        assert running.metric("abandoned_episodes_total", reason="Stopping") == 1
    assert world.kept == {}


async def test_sessions_default_to_the_workers_part_of_the_fleet(world: Any, settings: Any, start: Any) -> None:
    """Groups without a share take no sessions: 8 + 6 of them for two workers."""
    async with start(replace(settings, sessions=None, workers=2)):
        await world.until(lambda: bool(world.asked))
    assert world.asked[0].sessions == 7


async def test_a_busy_worker_still_shows_that_it_lives(
    world: Any, settings: Any, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motley_sampler.rollout.worker.BUSY_ASK_S", 0.1)
    world.engine.script = lambda session, turn, body: call("sleep 2") if turn == 0 else call("submit")
    async with start(replace(settings, sessions=1)):
        world.deal()
        await world.until(lambda: sum(asked.sessions == 0 for asked in world.asked) >= 3)
