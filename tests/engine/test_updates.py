"""New weights under running requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

from engine import tiny


async def test_sixteen_live_requests_survive_an_update_and_report_both_versions(
    views: dict[str, Path], tmp_path: Path
) -> None:
    config = tiny.moe_config()
    newer = tiny.write_view(tmp_path / "newer", "bf16", config, tiny.tensors(config, seed=9))
    engine = await tiny.started(views["bf16"], version=5)
    half_way = [asyncio.Event() for _ in range(16)]

    async def follow(index: int) -> dict[str, object]:
        request = {**tiny.body(tiny.prompt(6, seed=index), 110), "stream": True}
        last: dict[str, object] = {}
        async for chunk in engine.stream(request):
            half_way[index].set()
            last = chunk
        return last

    tasks = [asyncio.create_task(follow(index)) for index in range(16)]
    await asyncio.gather(*(event.wait() for event in half_way))
    await engine.update(newer, 6)
    replies = await asyncio.gather(*tasks)
    load = engine.load()
    await engine.stop()
    for reply in replies:
        meta = reply["meta_info"]
        assert isinstance(meta, dict)
        assert meta["finish_reason"] == {"type": "length", "length": 110}
        spans = meta["weight_versions"]
        assert [span["version"] for span in spans] == ["5", "6"]
        assert spans[0]["start"] == 0
        assert 0 < spans[0]["end"] == spans[1]["start"] < 110
        assert spans[1]["end"] == 110
        assert meta["weight_version"] == "6"
    assert load.turns == 16  # aborted requests are no turns


async def test_the_tokens_after_an_update_come_from_the_new_weights(views: dict[str, Path], tmp_path: Path) -> None:
    """Same weights under a new number: the reply is as if nothing had happened, so keys and values were kept."""
    engine = await tiny.started(views["bf16"], version=5)
    want = await engine.generate(tiny.body(tiny.prompt(6), 100, extra_key="undisturbed"))
    chunks = engine.stream({**tiny.body(tiny.prompt(6), 100), "stream": True})
    await anext(chunks)
    await engine.update(views["bf16"], 6)
    got = [chunk async for chunk in chunks][-1]
    await engine.stop()
    assert isinstance(want, dict)
    assert got["output_ids"] == want["output_ids"]
    assert [span["version"] for span in got["meta_info"]["weight_versions"]] == ["5", "6"]


async def test_a_paused_engine_keeps_its_requests_and_moves_on_after(views: dict[str, Path]) -> None:
    engine = await tiny.started(views["bf16"])
    await engine.pause()
    task = asyncio.create_task(engine.generate(tiny.body(tiny.prompt(6), 5)))
    await tiny.until(lambda: engine.load().queued == 1)
    await engine.pause()  # a turn of the loop: the request is there, and nothing came of it
    assert engine.load().queued == 1
    assert not task.done()
    await engine.resume()
    reply = await task
    await engine.stop()
    assert isinstance(reply, dict)
    assert len(reply["output_ids"]) == 5
