from __future__ import annotations

import msgspec
from aiohttp import web
from aiohttp.test_utils import TestServer
from motley_api import records
from motley_operator.measure import KEPT_LAST_STEPS, RunMemory, Telemetry


def step(number: int, attempt: int = 1) -> records.StepRecord:
    zero = records.Ratio()
    return records.StepRecord(
        run="r",
        step=number,
        attempt=attempt,
        started_unix_s=0.0,
        finished_unix_s=float(number),
        wait_s=0.0,
        train_s=0.0,
        publish_s=0.0,
        reward=zero,
        kl=zero,
        out_of_range=zero,
        entropy=zero,
        grad_norm=0.0,
        loss=0.0,
        lag=zero,
        groups=[],
    )


def trainer(step: int, attempt: int = 1) -> records.TrainerStatus:
    return records.TrainerStatus(
        run="r",
        attempt=attempt,
        steps_total=99,
        step=step,
        weights_version=step,
        durable_version=0,
        buffered=0,
        outstanding=0,
    )


def hear(memory: RunMemory, status: records.TrainerStatus, steps: list[records.StepRecord]) -> None:
    memory.trainer = status
    memory.heard(steps)
    memory.remember(steps, early=5, counted=(0, 0))


def test_nothing_is_asked_for_while_no_step_is_new() -> None:
    memory = RunMemory(trainer=trainer(3))
    assert memory.ask_after() == 0
    hear(memory, trainer(3), [step(1), step(2), step(3)])
    assert memory.ask_after() is None
    memory.trainer = trainer(4)
    assert memory.ask_after() == 3


def test_a_new_attempt_is_asked_for_everything_once() -> None:
    memory = RunMemory()
    hear(memory, trainer(5), [step(number) for number in range(1, 6)])
    memory.trainer = trainer(3, attempt=2)
    assert memory.ask_after() == 0
    hear(memory, trainer(3, attempt=2), [step(1), step(2), step(3)])
    assert memory.ask_after() is None
    memory.trainer = trainer(4, attempt=2)
    assert memory.ask_after() == 3  # the repeated step 4 comes as attempt 2


def test_first_last_and_uncounted_steps_are_kept_and_the_rest_forgotten() -> None:
    memory = RunMemory()
    steps = [step(number) for number in range(1, 501)]
    memory.remember(steps, early=5, counted=(1, 400))
    kept = sorted(number for _, number in memory.steps)
    assert kept == [1, 2, 3, 4, 5, *range(401, 501)]
    memory.remember([], early=5, counted=(1, 500))
    assert sorted(number for _, number in memory.steps) == [1, 2, 3, 4, 5, *range(501 - KEPT_LAST_STEPS, 501)]


def test_the_first_steps_of_a_group_that_joined_late_are_kept_for_its_early_level() -> None:
    memory = RunMemory()
    late = records.GroupStep(name="late", view="fp8")
    steps = [msgspec.structs.replace(step(number), groups=[late] if number >= 100 else []) for number in range(1, 501)]
    for end in range(50, 501, 50):
        memory.remember(steps[end - 50 : end], early=5, counted=(1, end))
    kept = [1, 2, 3, 4, 5, *range(100, 105), *range(501 - KEPT_LAST_STEPS, 501)]
    assert sorted(number for _, number in memory.steps) == kept


async def test_a_minute_of_a_routers_answers_becomes_a_load_of_each_group() -> None:
    """Over HTTP, as routers answer; one that restarts in between begins anew."""
    now_s, silent = [1000.0], [False]

    async def status(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer t"
        if silent[0]:
            raise web.HTTPServiceUnavailable
        second = int(now_s[0]) - 1000
        engine = records.EngineState(
            id="e",
            group="g",
            view="fp8",
            url="http://e",
            version=1,
            ready=True,
            running=6,
            kv_used_percent=92,
            turns=100 + second,
            generated_tokens=7700 + 77 * second,
            busy_s=50.0 + second,
            turn_latency_counts=[0, 0, 0, 0, 0, 0, 0, 0, second, *[0] * 8],
        )
        group = records.GroupSessions(
            name="g", active=12, capacity_sessions=12, share_milli=1000, engines_ready=1, engines=1
        )
        answer = records.RouterStatus(
            fleet_generation=1, sessions_active=12, sessions_total=40, groups=[group], engines=[engine]
        )
        return web.Response(body=records.encode_json(answer), content_type="application/json")

    app = web.Application()
    app.add_routes([web.get("/v1/status", status)])
    server = TestServer(app, host="127.0.0.1")
    await server.start_server()
    url = str(server.make_url("")).rstrip("/")
    telemetry, memory = Telemetry(lambda: now_s[0]), RunMemory(token="t")

    async def look(second: float) -> None:
        now_s[0] = 1000.0 + second
        await telemetry.look(memory, url, f"{url}/nobody", early=5, counted=(0, 0))

    try:
        for second in range(0, 61, 3):
            await look(second)
        (load,) = memory.loads["g"]
        assert (load.sessions, load.turns, load.tokens, load.kv_used_percent) == (12.0, 60, 60 * 77, 92.0)
        assert load.p90_s == 14.5  # all of them between 10 and 15 s: 10 + 0.9 x 5
        silent[0] = True
        await look(90)
        assert memory.router is None
        silent[0] = False
        for second in (93, 121, 140):
            await look(second)
        assert len(memory.loads["g"]) == 1  # 47 s since it answers again
        await look(153)
        assert len(memory.loads["g"]) == 2
    finally:
        await telemetry.close()
        await server.close()
