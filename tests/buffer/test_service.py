"""The buffer over HTTP: who may speak, what is answered, and that an acknowledgement survives kill -9."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap

import msgspec
import pytest
import zstandard
from aiohttp.test_utils import TestClient, TestServer
from motley_api.records import Fleet, StepRecord, TrainerStatus, TrajectoryAck, Work, encode, encode_json
from motley_trainer.buffer import service as service_module
from motley_trainer.buffer.batch import Resume
from motley_trainer.buffer.client import BufferClient, BufferUnavailableError
from motley_trainer.buffer.service import BufferService
from trainer.kit import UID, make_trajectory

TOKEN = {"Authorization": "Bearer secret"}


@pytest.fixture
async def served(bench):
    service = BufferService(bench.core, token="secret")
    server = TestServer(service.public_app())
    await server.start_server(**service_module.RUNNER_OPTIONS)
    async with TestClient(server) as client:
        yield client, service, bench
    service.close()


async def ask(client, sessions=8):
    answer = await client.post("/v1/work", json={"worker": "w/1", "sessions": sessions}, headers=TOKEN)
    return msgspec.json.decode(await answer.read(), type=list[Work]), answer


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("post", "/v1/work"),
        ("post", "/v1/trajectories"),
        ("put", "/v1/fleet"),
        ("get", "/v1/status"),
        ("get", "/v1/steps"),
    ],
)
async def test_every_endpoint_wants_the_token(served, method, path):
    client, _, _ = served
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        assert (await getattr(client, method)(path, headers=headers)).status == 401


async def test_health_and_metrics_are_open(served):
    client, _, _ = served
    assert (await client.get("/health")).status == 200
    body = await (await client.get("/metrics")).text()
    assert "motley_trainer_step 0.0" in body


async def test_rank_zero_s_door_is_not_on_the_network(served):
    client, _, _ = served
    assert (await client.get("/local/batch?step=1&wait=0&waited=0", headers=TOKEN)).status == 404


@pytest.mark.parametrize("compressed", [True, False])
async def test_trajectories_are_taken_plain_or_compressed(served, compressed):
    client, _, bench = served
    works, _ = await ask(client)
    body = encode([make_trajectory(works[0], sample) for sample in range(4)])
    headers = dict(TOKEN)
    if compressed:
        body = zstandard.ZstdCompressor().compress(body)
        headers["Content-Encoding"] = "zstd"
    answer = await client.post("/v1/trajectories", data=body, headers=headers)
    ack = msgspec.json.decode(await answer.read(), type=TrajectoryAck)
    assert len(ack.accepted) == 4
    assert bench.core.status().buffered == 4


async def test_an_empty_hand_says_when_to_ask_again(served):
    client, _, _ = served
    works, answer = await ask(client, sessions=0)
    assert works == []
    assert answer.headers["Retry-After"] == "1"


@pytest.mark.parametrize("body", [b"\x93\x01", b"\x28\xb5\x2f\xfdnot zstd", encode(["text"])])
async def test_a_body_that_is_no_trajectories_is_refused_and_named(served, body):
    client, _, _ = served
    answer = await client.post("/v1/trajectories", data=body, headers=TOKEN)
    assert answer.status == 400
    assert "body" in (await answer.json())["error"]


async def test_a_small_body_that_unpacks_to_too_much_is_refused(served, monkeypatch):
    monkeypatch.setattr(service_module, "MAX_BODY_BYTES", 1000)
    client, _, _ = served
    bomb = zstandard.ZstdCompressor().compress(b"\0" * 100_000)
    answer = await client.post("/v1/trajectories", data=bomb, headers=TOKEN)
    assert answer.status == 400


async def test_steps_and_status_are_readable(served):
    client, _, bench = served
    bench.train(1)
    bench.train(2)
    answer = await client.get("/v1/steps?after=1", headers=TOKEN)
    assert [record.step for record in msgspec.json.decode(await answer.read(), type=list[StepRecord])] == [2]
    status = msgspec.json.decode(await (await client.get("/v1/status", headers=TOKEN)).read(), type=TrainerStatus)
    assert (status.step, status.weights_version, status.durable_version, status.last.step) == (2, 2, 0, 2)
    assert (await client.get("/v1/steps?after=x", headers=TOKEN)).status == 400


async def test_a_paused_fleet_gets_no_work(served):
    client, _, _ = served
    fleet = encode_json(Fleet(generation=1, groups=[], paused=True))
    assert (await client.put("/v1/fleet", data=fleet, headers=TOKEN)).status == 204
    assert (await ask(client))[0] == []


async def test_a_full_disk_is_507_and_unhealthy_until_it_is_well_again(served):
    client, _, bench = served
    works, _ = await ask(client)
    body = encode([make_trajectory(work, sample) for work in works for sample in range(4)])
    db = bench.core.db._db
    db.execute(f"pragma max_page_count = {db.execute('pragma page_count').fetchone()[0]}")
    answer = await client.post("/v1/trajectories", data=body, headers=TOKEN)
    assert answer.status == 507
    assert "full" in (await answer.json())["error"]
    assert (await client.get("/health")).status == 503
    status = msgspec.json.decode(await (await client.get("/v1/status", headers=TOKEN)).read(), type=TrainerStatus)
    assert status.condition == "BufferBroken"
    db.execute("pragma max_page_count = 1000000")
    assert (await client.post("/v1/trajectories", data=body, headers=TOKEN)).status == 200
    assert (await client.get("/health")).status == 200


async def test_rank_zero_waits_at_its_own_door_until_the_batch_is_there(bench, tmp_path):
    from aiohttp import web

    service = BufferService(bench.core, token="secret")
    public = TestClient(TestServer(service.public_app()))
    runner = web.AppRunner(service.local_app())
    await public.start_server()
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "s")).start()
    rank = BufferClient(str(tmp_path / "s"))
    assert await asyncio.to_thread(rank.resume, 0, 0) == 2
    assert await asyncio.to_thread(rank.next_batch, 1, wait_s=0.0, waited_s=0.0) is None
    waiting = asyncio.create_task(asyncio.to_thread(rank.next_batch, 1, wait_s=30.0, waited_s=7.0))
    works, _ = await ask(public)
    body = encode([make_trajectory(work, sample) for work in works for sample in range(4)])
    await public.post("/v1/trajectories", data=body, headers=TOKEN)
    batch = await waiting
    assert len(batch.trajectories) == 8
    assert batch.waited_s >= 7.0
    await runner.cleanup()
    await public.close()
    service.close()
    with pytest.raises(BufferUnavailableError):
        rank.commit(bench.record(1))


def test_what_was_acknowledged_survives_kill_9(tmp_path):
    """A process that delivers and prints each acknowledged id is killed in full swing."""
    program = textwrap.dedent(
        f"""
        import pathlib, sys
        sys.path[:0] = {sys.path!r}
        from buffer.conftest import Bench
        from motley_trainer.buffer.batch import Resume
        bench = Bench(pathlib.Path({str(tmp_path)!r}), steps=10000, batch={{"prompts": 500, "samplesPerPrompt": 4}})
        bench.core.resume(Resume(step=0, durable=0))
        while True:
            for work in bench.ask(sessions=4):
                print(*bench.deliver([work]).accepted, flush=True)
        """
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        acknowledged = [name for _ in range(12) for name in process.stdout.readline().split()]
        os.kill(process.pid, signal.SIGKILL)
        acknowledged += process.stdout.read().split()
    from motley_trainer.buffer.db import BufferDb

    db = BufferDb(tmp_path / "buffer" / "buffer.sqlite3", run_uid=UID)
    kept = {row[0] for row in db._db.execute("select id from trajectories where body is not null")}
    assert len(acknowledged) >= 48
    assert set(acknowledged) <= kept
    assert db.resume(Resume(step=0, durable=0).step, 0)[0] == 2
