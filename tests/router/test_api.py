"""The control API over real HTTP: sessions, heartbeats, the fleet, status, refusals."""

from __future__ import annotations

import asyncio
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
import pytest
from motley_api import keys
from motley_api.records import Fleet, GroupShare, RouterStatus
from motley_sampler.router.main import ConfigError, settings_from
from yarl import URL

StageOf = Callable[..., Awaitable[Any]]


async def test_a_session_is_placed_renewed_and_ended(stage: Any) -> None:
    engine = await stage.engine("e1")
    await stage.fleet(g=1000)
    status, lease = await stage.call("POST", "/v1/sessions", {"session": "work/7/0"})
    assert status == 201
    want = {"session": "work/7/0", "group": "g", "view": "bf16", "engine": "e1", "url": engine.url, "ttl_s": 30.0}
    assert lease == want
    assert await stage.call("PUT", "/v1/sessions/work/7/0", lease) == (200, want)
    quoted = URL(stage.url + "/v1/sessions/work%2F7%2F0", encoded=True)
    async with stage.client.put(quoted, data=msgspec.json.encode(lease)) as response:
        assert (response.status, await response.json()) == (200, want)
    assert await stage.call("DELETE", "/v1/sessions/work/7/0") == (204, "")
    assert await stage.call("DELETE", "/v1/sessions/work/7/0") == (204, "")
    _, raw = await stage.call("GET", "/v1/status")
    status_now = msgspec.convert(raw, RouterStatus)
    assert (status_now.sessions_active, status_now.sessions_total, status_now.fleet_generation) == (0, 1, 1)


async def test_new_sessions_hold_the_shares_and_a_full_fleet_answers_503_with_retry_after(stage: Any) -> None:
    await stage.engine("a1", "a")
    await stage.engine("b1", "b", max_sessions=2)
    await stage.fleet(a=667, b=333)
    groups = [(await stage.call("POST", "/v1/sessions", {"session": f"s{n}"}))[1]["group"] for n in range(6)]
    assert sorted(groups) == ["a"] * 4 + ["b"] * 2
    body = msgspec.json.encode({"session": "s6"})
    async with stage.client.post(stage.url + "/v1/sessions", data=body) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "1")
        answer = await response.json()
    assert answer["reason"] == "Full"
    assert answer["groups"] == {"a": "Full", "b": "Full"}


async def test_a_paused_fleet_places_nothing_and_keeps_what_is_there(stage: Any) -> None:
    await stage.engine("e1")
    await stage.fleet(g=1000)
    _, lease = await stage.call("POST", "/v1/sessions", {"session": "s"})
    await stage.fleet(2, paused=True, g=1000)
    status, answer = await stage.call("POST", "/v1/sessions", {"session": "t"})
    assert (status, answer["reason"]) == (503, "Paused")
    assert await stage.call("PUT", "/v1/sessions/s", lease) == (200, lease)


async def test_every_path_but_health_and_metrics_needs_the_token(stage: Any) -> None:
    async with aiohttp.ClientSession() as stranger:
        for method, path in [
            ("POST", "/v1/sessions"),
            ("PUT", "/v1/sessions/s"),
            ("DELETE", "/v1/sessions/s"),
            ("PUT", "/v1/engines/e"),
            ("DELETE", "/v1/engines/e"),
            ("PUT", "/v1/fleet"),
            ("GET", "/v1/fleet"),
            ("GET", "/v1/status"),
            ("POST", "/generate"),
            ("POST", "/v1/chat/completions"),
            ("GET", "/v1/models"),
            ("GET", "/nothing-here"),
        ]:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer ü"}):
                async with stranger.request(method, stage.url + path, headers=headers) as response:
                    assert response.status == 401, (method, path)
                    assert (await response.json())["reason"] == "Unauthorized"
        for path in ("/health", "/metrics"):
            async with stranger.get(stage.url + path) as response:
                assert response.status == 200


@pytest.mark.parametrize(
    ("method", "path", "body", "want_status", "want_reason"),
    [
        ("POST", "/v1/sessions", b"{", 400, "MalformedJSON"),
        ("POST", "/v1/sessions", b"\xff\xfe", 400, "MalformedJSON"),
        ("POST", "/v1/sessions", b"{}", 400, "InvalidBody"),
        ("POST", "/v1/sessions", b'{"session": 5}', 400, "InvalidBody"),
        ("POST", "/v1/sessions", b'{"session": ""}', 400, "InvalidSession"),
        ("POST", "/v1/sessions", b'{"session": "' + b"x" * 513 + b'"}', 400, "InvalidSession"),
        ("PUT", "/v1/sessions/s", b'{"session":"t","group":"g","view":"v","engine":"e","url":"u"}', 400, "InvalidBody"),
        ("PUT", "/v1/sessions/s", b'{"session":"s","group":"x","view":"v","engine":"e","url":"u"}', 404, "SessionLost"),
        ("PUT", "/v1/engines/e", b'{"id":"f","group":"g","view":"v","url":"u","version":1,"ready":true}', 400, "InvalidBody"),
        ("PUT", "/v1/fleet", b'{"generation": 1, "groups": [{"name": "a"}]}', 400, "InvalidBody"),
        ("POST", "/generate", b'{"input_ids": [1, 2', 400, "MalformedJSON"),
        ("POST", "/generate", b"[1, 2]", 400, "InvalidBody"),
        ("GET", "/nothing-here", None, 404, "NotFound"),
        ("GET", "/v1/sessions", None, 405, "MethodNotAllowed"),
    ],
)  # fmt: skip
async def test_bad_requests_get_a_clear_refusal(
    stage: Any, method: str, path: str, body: bytes | None, want_status: int, want_reason: str
) -> None:
    stage.clock.now_s += 100  # past warm-up: unknown engines are gone
    status, answer = await stage.call(method, path, body)
    assert (status, answer["reason"]) == (want_status, want_reason)
    assert answer["message"]


async def test_a_body_over_the_limit_is_413_and_the_router_goes_on(stage_of: StageOf) -> None:
    stage = await stage_of(max_body_bytes=1000)
    engine = await stage.engine("e1")
    await stage.fleet(g=1000)
    prompt = msgspec.json.encode({"input_ids": list(range(2000))})
    status, answer = await stage.call("POST", "/generate", prompt)
    assert (status, answer["reason"]) == (413, "BodyTooLarge")
    assert "at most 1000 bytes" in answer["message"]

    async def without_a_length() -> Any:
        for start in range(0, len(prompt), 500):
            yield prompt[start : start + 500]

    async with stage.client.post(stage.url + "/generate", data=without_a_length()) as response:
        assert response.status == 413
    assert engine.seen == []
    assert (await stage.call("POST", "/generate", {"input_ids": [1]}))[0] == 200


async def test_two_groups_of_one_name_or_a_share_out_of_range_are_refused(stage: Any) -> None:
    group = GroupShare(name="a", view="bf16", capacity_sessions=1, share_milli=500)
    status, answer = await stage.call("PUT", "/v1/fleet", Fleet(generation=1, groups=[group, group]))
    assert (status, answer["reason"]) == (400, "InvalidFleet")
    wide = msgspec.structs.replace(group, share_milli=1001)
    status, answer = await stage.call("PUT", "/v1/fleet", Fleet(generation=1, groups=[wide]))
    assert (status, answer["message"]) == (400, "share_milli of group 'a' must be between 0 and 1000, got 1001")
    assert (await stage.call("GET", "/v1/fleet"))[0] == 404


async def test_an_older_fleet_document_is_refused_and_the_newer_stays(stage: Any) -> None:
    await stage.fleet(5, g=1000)
    older = Fleet(generation=4, groups=[])
    status, answer = await stage.call("PUT", "/v1/fleet", older)
    assert (status, answer["reason"], answer["generation"]) == (409, "StaleGeneration", 5)
    status, answer = await stage.call("GET", "/v1/fleet")
    assert (status, answer["generation"]) == (200, 5)


def write_fleet(path: pathlib.Path, generation: int, **shares: int) -> None:
    groups = [GroupShare(name=n, view="bf16", capacity_sessions=4, share_milli=s) for n, s in shares.items()]
    path.write_bytes(msgspec.json.encode(Fleet(generation=generation, groups=groups)))


async def test_the_fleet_file_is_read_again_when_it_changes_and_a_broken_one_changes_nothing(
    stage_of: StageOf, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fleet.json"
    stage = await stage_of(fleet_path=path)
    stage.router.read_fleet()
    assert stage.router.table.fleet is None
    write_fleet(path, 1, g=1000)
    stage.router.sweep()
    assert stage.router.table.fleet.generation == 1
    path.write_text('{"generation": 2, "groups"')
    stage.router.sweep()
    assert stage.router.table.fleet.generation == 1
    assert "fleet-file-refused" in capsys.readouterr().err
    write_fleet(path, 3, g=500, h=500)
    stage.router.sweep()
    assert stage.router.table.fleet.generation == 3
    await stage.fleet(4, g=1000)
    write_fleet(path, 3, g=1)  # the mounted file lags behind what was put
    stage.router.sweep()
    assert stage.router.table.fleet.generation == 4


async def test_silent_engines_are_found_by_the_sweep_and_their_sessions_told_at_renewal(stage: Any) -> None:
    await stage.engine("e1")
    await stage.engine("e2")
    await stage.engine("h1", "h")
    await stage.fleet(g=1000, h=0)
    _, lease = await stage.call("POST", "/v1/sessions", {"session": "s"})
    assert lease["engine"] == "e1"
    stage.clock.now_s += 11
    await stage.beat("e2", "h1")
    stage.router.sweep()
    status, renewed = await stage.call("PUT", "/v1/sessions/s", lease)
    assert (status, renewed["engine"], renewed["group"]) == (200, "e2", "g")
    stage.clock.now_s += 11
    await stage.beat("h1")
    stage.router.sweep()
    status, answer = await stage.call("PUT", "/v1/sessions/s", renewed)
    assert (status, answer["reason"]) == (404, "SessionLost")
    _, raw = await stage.call("GET", "/v1/status")
    engines = {one["id"]: (one["ready"], one.get("reason", "")) for one in raw["engines"]}
    assert engines == {"e1": (False, "TimedOut"), "e2": (False, "TimedOut"), "h1": (True, "")}
    groups = {one["name"]: (one["active"], one["engines_ready"], one["engines"]) for one in raw["groups"]}
    assert groups == {"g": (0, 0, 0), "h": (0, 1, 1)}


async def test_a_goodbye_moves_sessions_at_once(stage: Any) -> None:
    await stage.engine("e1")
    await stage.engine("e2")
    await stage.fleet(g=1000)
    _, lease = await stage.call("POST", "/v1/sessions", {"session": "s"})
    assert (await stage.call("DELETE", "/v1/engines/e1"))[0] == 204
    status, renewed = await stage.call("PUT", "/v1/sessions/s", lease)
    assert (status, renewed["engine"]) == (200, "e2")


async def test_a_fleet_that_grows_from_8_to_12_engines_and_drains_to_6_loses_no_session_in_no_time(stage: Any) -> None:
    """By drain and goodbye, while the clock stands still: nothing is found out by a time-out."""
    await stage.fleet(g=600, h=400)
    names = [(f"{'gh'[number % 2]}{number:02d}", "gh"[number % 2]) for number in range(12)]
    for name, group in names[:8]:
        await stage.engine(name, group, max_sessions=12)
    leases = [(await stage.call("POST", "/v1/sessions", {"session": f"s{n}"}))[1] for n in range(40)]
    for name, group in names[8:]:
        await stage.engine(name, group, max_sessions=12)
    leases += [(await stage.call("POST", "/v1/sessions", {"session": f"t{n}"}))[1] for n in range(20)]
    leaving = [name for name, _ in names[:6]]
    await stage.beat(*leaving, max_sessions=12, ready=False, draining=True)
    for lease in leases:  # a drain moves nobody
        assert await stage.call("PUT", f"/v1/sessions/{lease['session']}", lease) == (200, lease)
    for name in leaving:
        assert (await stage.call("DELETE", f"/v1/engines/{name}"))[0] == 204
    moved = 0
    for lease in leases:
        status, now = await stage.call("PUT", f"/v1/sessions/{lease['session']}", lease)
        assert (status, now["group"], now["view"]) == (200, lease["group"], lease["view"])
        assert now["engine"] not in leaving
        assert (now["engine"] == lease["engine"]) == (lease["engine"] not in leaving)
        moved += now["engine"] != lease["engine"]
    assert 0 < moved == sum(lease["engine"] in leaving for lease in leases)
    _, status = await stage.call("GET", "/v1/status")
    assert {group["name"]: group["active"] for group in status["groups"]} == {"g": 36, "h": 24}  # 60 at 600 to 400


async def test_a_holder_that_cannot_connect_is_moved_inside_the_group_and_stays_when_there_is_nobody_else(
    stage: Any,
) -> None:
    await stage.engine("e1")
    await stage.engine("e2")
    await stage.engine("h1", "h")
    await stage.fleet(g=1000, h=0)
    _, lease = await stage.call("POST", "/v1/sessions", {"session": "s"})
    status, moved = await stage.call("PUT", "/v1/sessions/s?unreachable=e1", lease)
    assert (status, moved["engine"]) == (200, "e2")
    assert (await stage.call("POST", "/v1/sessions", {"session": "t"}))[1]["engine"] == "e2"  # e1 is suspect
    assert await stage.call("PUT", "/v1/sessions/s?unreachable=e1", moved) == (200, moved)  # old news
    await stage.call("DELETE", "/v1/engines/e1")
    assert await stage.call("PUT", "/v1/sessions/s?unreachable=e2", moved) == (200, moved)


async def test_a_request_with_an_expired_lease_is_refused_and_says_since_when(stage: Any) -> None:
    await stage.engine("e1")
    await stage.fleet(g=1000)
    _, lease = await stage.call("POST", "/v1/sessions", {"session": "s"})
    stage.clock.now_s += 31
    await stage.beat("e1")
    stage.router.sweep()
    stage.clock.now_s += 4
    status, answer = await stage.call("PUT", "/v1/sessions/s", lease)
    assert (status, answer["reason"]) == (404, "LeaseExpired")
    assert answer["message"] == "the lease of 's' ran out 4 s ago and its place was given away"
    assert (await stage.call("POST", "/v1/sessions", {"session": "s"}))[0] == 201


async def test_a_holder_that_is_refused_is_moved_and_the_engine_is_not_suspected(stage: Any) -> None:
    await stage.engine("e1")
    await stage.engine("e2")
    await stage.engine("h1", "h")
    await stage.fleet(g=1000, h=0)
    _, lease = await stage.call("POST", "/v1/sessions", {"session": "s"})
    status, moved = await stage.call("PUT", "/v1/sessions/s?refused=e1", lease)
    assert (status, moved["engine"]) == (200, "e2")
    assert (await stage.call("POST", "/v1/sessions", {"session": "t"}))[1]["engine"] == "e1"
    await stage.call("DELETE", "/v1/engines/e1")
    assert await stage.call("PUT", "/v1/sessions/s?refused=e2", moved) == (200, moved)  # never to another group


async def test_a_restarted_router_relearns_leases_from_their_holders(stage_of: StageOf) -> None:
    first = await stage_of()
    await first.engine("e1")
    await first.engine("e2")
    await first.fleet(g=1000)
    leases = [(await first.call("POST", "/v1/sessions", {"session": f"s{n}"}))[1] for n in range(4)]
    second = await stage_of()  # knows nothing: no fleet, no engines
    for lease in leases:
        assert await second.call("PUT", f"/v1/sessions/{lease['session']}", lease) == (200, lease)
    second.engines = dict(first.engines)
    await second.beat()
    await second.fleet(g=1000)
    second.router.sweep()
    _, raw = await second.call("GET", "/v1/status")
    assert {one["name"]: one["active"] for one in raw["groups"]} == {"g": 4}
    second.engines = {}


async def test_a_lease_in_another_group_than_the_session_is_a_conflict(stage: Any) -> None:
    await stage.engine("e1")
    await stage.fleet(g=1000)
    _, lease = await stage.call("POST", "/v1/sessions", {"session": "s"})
    status, answer = await stage.call("PUT", "/v1/sessions/s", lease | {"group": "h"})
    assert (status, answer["reason"]) == (409, "LeaseConflict")


async def test_a_holder_cannot_ask_for_a_lease_without_end(stage: Any) -> None:
    await stage.engine("e1")
    await stage.fleet(g=1000)
    _, lease = await stage.call("POST", "/v1/sessions", {"session": "s"})
    _, renewed = await stage.call("PUT", "/v1/sessions/s", lease | {"ttl_s": 1e12})
    assert renewed["ttl_s"] == 600.0


async def test_metrics_show_sessions_shares_moves_losses_and_refusals(stage: Any) -> None:
    await stage.engine("e1")
    await stage.engine("e2", draining=True)
    await stage.fleet(g=1000)
    _, lease = await stage.call("POST", "/v1/sessions", {"session": "s"})
    await stage.call("PUT", "/v1/sessions/s", lease)
    await stage.fleet(2, paused=True, g=1000)
    await stage.call("POST", "/v1/sessions", {"session": "t"})
    stage.clock.now_s += 5
    await stage.beat("e2", draining=True)
    _, text = await stage.call("GET", "/metrics")
    stage.clock.now_s += 6
    stage.router.sweep()
    _, later = await stage.call("GET", "/metrics")
    for line in (
        'motley_router_sessions_active{group="g"} 1.0',
        'motley_router_group_share_milli{group="g"} 1000.0',
        'motley_router_engines{state="Ready"} 1.0',
        'motley_router_engines{state="Draining"} 1.0',
        'motley_router_engine_heartbeat_age_seconds{engine="e1"} 5.0',
        'motley_router_sessions_total{group="g"} 1.0',
        "motley_router_lease_renewals_total 1.0",
        'motley_router_refusals_total{reason="Paused"} 1.0',
    ):
        assert line in text.splitlines()
    assert 'motley_router_lost_sessions_total{group="g"} 1.0' in later.splitlines()
    assert 'motley_router_engines{state="TimedOut"} 1.0' in later.splitlines()


async def test_health_fails_when_the_sweep_has_stopped(
    stage_of: StageOf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = await stage_of(sweep_s=0.01)
    assert (await stage.call("GET", "/health"))[0] == 200

    def breaks(**_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(stage.router.table, "sweep", breaks)
    async with asyncio.timeout(10):
        while "event=sweep-failed" not in capsys.readouterr().err:
            await asyncio.sleep(0.01)
    assert (await stage.call("GET", "/health"))[0] == 200  # it may only be late
    monkeypatch.setattr(stage.router, "_swept_s", asyncio.get_running_loop().time() - 11)
    status, answer = await stage.call("GET", "/health")
    assert (status, answer["reason"]) == (503, "SweepStopped")


# The process.


def test_an_environment_without_a_token_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="MOTLEY_TOKEN must be set"):
        settings_from({})
    with pytest.raises(ConfigError, match="MOTLEY_RUN_CONFIG=/nowhere"):
        settings_from({keys.ENV_TOKEN: "t", keys.ENV_RUN_CONFIG: "/nowhere"})


async def test_the_command_serves_on_its_pods_address_and_stops_on_sigterm(tmp_path: pathlib.Path) -> None:
    write_fleet(tmp_path / "fleet.json", 7, g=1000)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        keys.ENV_TOKEN: "t",
        keys.ENV_POD_IP: "127.77.250.1",
        keys.ENV_FLEET: str(tmp_path / "fleet.json"),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "motley_sampler.router.main", env=environment, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    url = f"http://127.77.250.1:{keys.ROUTER_PORT}"
    try:
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer t"}) as client, asyncio.timeout(30):
            while True:
                try:
                    async with client.get(url + "/v1/status") as response:
                        assert (await response.json())["fleet_generation"] == 7
                        break
                except aiohttp.ClientConnectorError:
                    await asyncio.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(process.communicate(), 30)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0
    assert b"event=start" in errors
    assert b"event=stop" in errors


def test_the_router_starts_without_torch_and_reads_tokenizers_only_when_somebody_chats() -> None:
    code = "import sys, motley_sampler.router.main; print(*sys.modules, sep='\\n')"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    modules = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    ).stdout.split()
    assert "aiohttp" in modules
    assert not {"torch", "transformers", "numpy", "tokenizers", "jinja2", "fsspec", "pydantic"} & set(modules)
