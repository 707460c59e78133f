"""Who else is in the batch, and what was cached, change nothing of a reply."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import tiny
from motley_sampler.engines.reference.slots import SlotTable, common_prefix


def _same(a: Any, b: Any) -> None:
    assert a["output_ids"] == b["output_ids"]
    for field in ("output_token_logprobs", "output_token_sampling_logprobs"):
        assert len(a["meta_info"][field]) == len(b["meta_info"][field])
    for left, right in zip(
        a["meta_info"]["output_token_logprobs"], b["meta_info"]["output_token_logprobs"], strict=True
    ):
        assert left[0] == pytest.approx(right[0], abs=1e-5)
    assert a["meta_info"]["output_token_sampling_mask"] == b["meta_info"]["output_token_sampling_mask"]


async def test_a_batch_equals_its_sequences_one_by_one(views: dict[str, Path]) -> None:
    prompts = [tiny.prompt(length, seed=length) for length in (3, 17, 40, 9, 1)]
    engine = await tiny.started(views["bf16"], prefill_tokens=16)  # in pieces, and padded
    together = await asyncio.gather(
        *(engine.generate(tiny.body(p, sampling={"sampling_seed": i})) for i, p in enumerate(prompts))
    )
    await engine.stop()
    for index, prompt in enumerate(prompts):
        alone = await tiny.started(views["bf16"])
        _same(await alone.generate(tiny.body(prompt, sampling={"sampling_seed": index})), together[index])
        await alone.stop()


async def test_a_list_of_prompts_gives_a_list_of_replies(views: dict[str, Path]) -> None:
    engine = await tiny.started(views["bf16"])
    prompts = [tiny.prompt(4, seed=1), tiny.prompt(6, seed=2)]
    many = await engine.generate({**tiny.body([]), "input_ids": prompts})
    singles = [await engine.generate(tiny.body(prompt, extra_key="other")) for prompt in prompts]
    await engine.stop()
    assert isinstance(many, list)
    for got, want in zip(many, singles, strict=True):
        _same(got, want)


async def test_the_next_turn_of_a_session_reuses_its_prefix_and_nothing_changes(views: dict[str, Path]) -> None:
    engine = await tiny.started(views["bf16"])
    first = await engine.generate(tiny.body(tiny.prompt(20), session_id="s"))
    assert isinstance(first, dict)
    turn = [*tiny.prompt(20), *first["output_ids"], 3, 1, 4, 1, 5]
    cached = await engine.generate(tiny.body(turn, session_id="s"))
    fresh = await engine.generate(tiny.body(turn, session_id="t", extra_key="elsewhere"))
    await engine.stop()
    assert isinstance(cached, dict)
    assert isinstance(fresh, dict)
    # All that was computed: the prompt and all drawn tokens but the last.
    assert cached["meta_info"]["cached_tokens"] == 20 + 12 - 1
    assert fresh["meta_info"]["cached_tokens"] == 0
    _same(cached, fresh)


async def test_sessions_that_share_a_prompt_share_its_prefix(views: dict[str, Path]) -> None:
    engine = await tiny.started(views["bf16"])
    await engine.generate(tiny.body(tiny.prompt(30), session_id="a"))
    second = await engine.generate(tiny.body(tiny.prompt(30), session_id="b", sampling={"sampling_seed": 9}))
    # The copy left the first session's own prefix alone.
    again = await engine.generate(tiny.body(tiny.prompt(30), session_id="a"))
    await engine.stop()
    assert isinstance(second, dict)
    assert isinstance(again, dict)
    assert second["meta_info"]["cached_tokens"] == 29
    assert again["meta_info"]["cached_tokens"] == 29


async def test_a_prefix_never_crosses_weights_versions_or_cache_keys(views: dict[str, Path], tmp_path: Path) -> None:
    config = tiny.moe_config()
    newer = tiny.write_view(tmp_path / "newer", "bf16", config, tiny.tensors(config, seed=9))
    engine = await tiny.started(views["bf16"], version=5)
    await engine.generate(tiny.body(tiny.prompt(30), session_id="a"))
    other_key = await engine.generate(tiny.body(tiny.prompt(30), session_id="a", cache_salt="tenant"))
    await engine.update(newer, 6)
    after = await engine.generate(tiny.body(tiny.prompt(30), session_id="a"))
    await engine.stop()
    alone = await tiny.started(newer, version=6)
    want = await alone.generate(tiny.body(tiny.prompt(30)))
    await alone.stop()
    assert isinstance(other_key, dict)
    assert isinstance(after, dict)
    assert other_key["meta_info"]["cached_tokens"] == 0
    assert after["meta_info"]["cached_tokens"] == 0
    _same(after, want)


async def test_more_requests_than_slots_wait_their_turn(views: dict[str, Path]) -> None:
    engine = await tiny.started(views["bf16"], slots=2, max_running=2)
    replies = await asyncio.gather(*(engine.generate(tiny.body(tiny.prompt(5, seed=i))) for i in range(7)))
    load = engine.load()
    await engine.stop()
    assert [len(reply["output_ids"]) for reply in replies if isinstance(reply, dict)] == [12] * 7
    assert (load.turns, load.generated_tokens, load.running, load.queued) == (7, 84, 0, 0)


def test_prompt_logprobs_do_not_depend_on_the_cache() -> None:
    table = SlotTable(2, 64)
    prompt = list(range(20))
    first = table.place(prompt, version=1, cache_key="", session="a", reuse_at_most=19)
    assert first is not None
    first.slot.tokens.extend(prompt)
    table.release(first.slot)
    # Log-probs from position 4 on need the logits of position 4: at most four positions may come from the cache.
    second = table.place(prompt, version=1, cache_key="", session="a", reuse_at_most=4)
    assert second is not None
    assert second.cached == 4


def test_least_recently_used_idle_slot_makes_room() -> None:
    table = SlotTable(2, 64)
    for session, prompt in (("a", [1, 2, 3]), ("b", [4, 5, 6])):
        placed = table.place(prompt, version=1, cache_key="", session=session, reuse_at_most=2)
        assert placed is not None
        placed.slot.tokens.extend(prompt)
        table.release(placed.slot)
    third = table.place([7, 8, 9], version=1, cache_key="", session="c", reuse_at_most=2)
    assert third is not None
    assert [slot.session for slot in table.slots] == ["c", "b"]


def test_the_slot_of_a_session_that_ended_is_taken_first_and_still_serves_its_prompts_other_samples() -> None:
    table = SlotTable(3, positions=100)

    def turn(tokens: list[int], session: str) -> tuple[int, int]:
        found = table.place(tokens, version=1, cache_key="", session=session, reuse_at_most=len(tokens) - 1)
        assert found is not None
        found.slot.tokens = list(tokens)
        table.release(found.slot)
        return found.slot.index, found.cached

    prompt = [1, 2, 3, 4]
    assert turn([9, 9, 9], "waits-long-for-a-tool") == (0, 0)
    assert turn([*prompt, 5], "ends") == (1, 0)
    assert turn([8, 8, 8], "other") == (2, 0)
    table.forget_session("ends")
    assert turn([*prompt, 6], "sibling") == (1, 4)  # in place: nobody needs the 5
    table.forget_session("other")
    assert turn([7, 7, 7], "new") == (2, 0)  # not slot 0, which was idle for longer
    assert turn([9, 9, 9, 9], "waits-long-for-a-tool") == (0, 3)


def test_common_prefix_is_the_longest() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        a = torch.randint(0, 2, (int(torch.randint(0, 9, (1,), generator=generator)),), generator=generator).tolist()
        b = torch.randint(0, 2, (int(torch.randint(0, 9, (1,), generator=generator)),), generator=generator).tolist()
        want = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert common_prefix(a, b) == want
