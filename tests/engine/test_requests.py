"""What the engine accepts, refuses, and reports."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import tiny
from motley_sampler.engines.protocol import BadRequest, EngineError, parse_generate, parse_json
from motley_sampler.engines.reference.engine import ReferenceEngine
from safetensors.torch import save_file


def _parse(**changes: Any) -> Any:
    return parse_generate({**tiny.body([1, 2, 3]), **changes}, vocab_size=64, context_length=100)


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({"input_ids": []}, "input_ids must hold at least one token"),
        ({"input_ids": "text"}, r"Expected `array`, got `str` - at `\$.input_ids`"),
        ({"input_ids": [1, [2]]}, "one list of token ids, or a list of such lists"),
        ({"input_ids": [1, 64]}, "token ids must be from 0 to 63, got 64"),
        ({"input_ids": [-1]}, "token ids must be from 0 to 63, got -1"),
        ({"input_ids": [1] * 90}, "90 tokens and sampling_params.max_new_tokens 12 exceed the context length of 100"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature must be a number from 0"),
        ({"sampling_params": {"temperature": "hot"}}, r"\$.sampling_params.temperature"),
        ({"sampling_params": {"top_p": 0}}, "sampling_params.top_p must be above 0 and at most 1, got 0"),
        ({"sampling_params": {"min_p": 0.1}}, "sampling_params.min_p must be 0: not supported"),
        ({"sampling_params": {"stop": ["x"]}}, "sampling_params.stop must be absent"),
        ({"sampling_params": {"tempreature": 1}}, "unknown field `tempreature`"),
        (
            {"sampling_params": {"top_k": -1, "max_new_tokens": 1}},
            "top_k must be from 1 to 4096 with return_sampling_mask, got -1",
        ),
        ({"return_sampling_mask": False}, "sampling_logprobs_mode needs return_sampling_mask"),
        ({"sampling_logprobs_mode": "all"}, "Invalid enum value 'all'"),
        ({"logprob_start_len": 3}, "logprob_start_len must be -1, or from 0 to 2"),
        ({"rid": ["a", "b"]}, "rid must be one value"),
    ],
)
def test_a_bad_field_is_refused_by_name_with_what_is_allowed(changes: dict[str, Any], want: str) -> None:
    with pytest.raises(BadRequest, match=want):
        _parse(**changes)


def test_fields_that_do_not_change_the_tokens_are_let_through() -> None:
    (request,), batch = _parse(routing_key="r", priority=3, session_id="s")
    assert (request.session_id, request.input_ids, batch) == ("s", [1, 2, 3], False)


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b'"x"', b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(BadRequest, match="body must be"):
        parse_json(data)


async def test_the_reply_counts_and_labels(views: dict[str, Path]) -> None:
    engine = await tiny.started(views["bf16"], version=5)
    reply = await engine.generate(tiny.body(tiny.prompt(6), 3, rid="r1"))
    await engine.stop()
    assert isinstance(reply, dict)
    meta = reply["meta_info"]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("r1", 6, 3)
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert meta["weight_version"] == "5"
    assert meta["weight_versions"] == [{"version": "5", "start": 0, "end": 3}]
    assert [row[1] for row in meta["output_token_logprobs"]] == reply["output_ids"]
    assert [len(a) for a in meta["output_token_sampling_mask"]] == [
        len(b) for b in meta["output_token_sampling_logprobs"]
    ]


async def test_generation_stops_at_eos_and_at_stop_tokens(views: dict[str, Path]) -> None:
    engine = await tiny.started(views["bf16"])
    free = await engine.generate(tiny.body(tiny.prompt(6), 30))
    assert isinstance(free, dict)
    wanted = free["output_ids"][4]
    end = free["output_ids"].index(wanted)
    stop = {"stop_token_ids": [wanted]}
    stopped = await engine.generate(tiny.body(tiny.prompt(6), 30, sampling={**stop, "ignore_eos": False}))
    ignored = await engine.generate(tiny.body(tiny.prompt(6), 30, sampling=stop))
    await engine.stop()
    assert isinstance(stopped, dict)
    assert isinstance(ignored, dict)
    assert ignored["output_ids"] == free["output_ids"]  # as SGLang has it: ignore_eos is about all of them
    assert stopped["output_ids"] == free["output_ids"][: end + 1]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": wanted}


async def test_selected_mode_reports_the_drawn_tokens_entry_of_the_support(views: dict[str, Path]) -> None:
    engine = await tiny.started(views["bf16"])
    support = await engine.generate(tiny.body(tiny.prompt(6)))
    selected = await engine.generate({**tiny.body(tiny.prompt(6)), "sampling_logprobs_mode": "selected"})
    await engine.stop()
    assert isinstance(support, dict)
    assert isinstance(selected, dict)
    meta = support["meta_info"]
    want = [
        row[ids.index(token)]
        for token, ids, row in zip(
            support["output_ids"],
            meta["output_token_sampling_mask"],
            meta["output_token_sampling_logprobs"],
            strict=True,
        )
    ]
    assert selected["meta_info"]["output_token_sampling_logprobs"] == pytest.approx(want, abs=1e-5)


async def test_greedy_has_a_support_of_one_token_with_logprob_zero(views: dict[str, Path]) -> None:
    engine = await tiny.started(views["bf16"])
    reply = await engine.generate(tiny.body(tiny.prompt(6), 4, sampling={"temperature": 0, "top_k": -1}))
    await engine.stop()
    assert isinstance(reply, dict)
    assert reply["meta_info"]["output_token_sampling_mask"] == [[token] for token in reply["output_ids"]]
    assert reply["meta_info"]["output_token_sampling_logprobs"] == [[0.0]] * 4


async def test_a_seed_makes_a_reply_repeatable_and_another_seed_another(views: dict[str, Path]) -> None:
    engine = await tiny.started(views["bf16"])
    one, same, other = [
        await engine.generate(tiny.body(tiny.prompt(6), 20, sampling={"sampling_seed": seed, "temperature": 2.0}))
        for seed in (1, 1, 2)
    ]
    await engine.stop()
    assert isinstance(one, dict)
    assert isinstance(same, dict)
    assert isinstance(other, dict)
    assert one["output_ids"] == same["output_ids"] != other["output_ids"]


async def test_streamed_chunks_grow_into_the_whole_reply(views: dict[str, Path]) -> None:
    engine = await tiny.started(views["bf16"])
    whole = await engine.generate(tiny.body(tiny.prompt(6), 20))
    chunks = [chunk async for chunk in engine.stream({**tiny.body(tiny.prompt(6), 20), "stream": True})]
    await engine.stop()
    assert isinstance(whole, dict)
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    assert chunks[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    for chunk in chunks:
        length = len(chunk["output_ids"])
        assert chunk["output_ids"] == whole["output_ids"][:length]
        assert len(chunk["meta_info"]["output_token_logprobs"]) == length
        assert len(chunk["meta_info"]["output_token_sampling_logprobs"]) == length


async def test_a_stream_that_asks_for_no_numbers_has_none(views: dict[str, Path]) -> None:
    engine = await tiny.started(views["bf16"])
    body = {"input_ids": tiny.prompt(6), "sampling_params": {"max_new_tokens": 20, "ignore_eos": True}, "stream": True}
    chunks = [chunk async for chunk in engine.stream(body)]
    await engine.stop()
    assert len(chunks[-1]["output_ids"]) == 20
    for before, after in pairwise(chunks):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]


async def test_a_caller_that_goes_away_frees_its_slot(views: dict[str, Path]) -> None:
    engine = await tiny.started(views["bf16"], slots=1, max_running=1)
    await engine.pause()
    left = asyncio.create_task(engine.generate(tiny.body(tiny.prompt(6), 100)))
    await tiny.until(lambda: engine.load().queued == 1)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    await engine.resume()
    next_reply = await asyncio.wait_for(engine.generate(tiny.body(tiny.prompt(6), 2)), 20)
    load = engine.load()
    await engine.stop()
    assert isinstance(next_reply, dict)
    assert (load.running, load.queued) == (0, 0)
    assert load.turns == 1


async def test_aborting_by_id_ends_one_request_with_what_it_has(views: dict[str, Path]) -> None:
    engine = await tiny.started(views["bf16"])
    await engine.pause()
    tasks = [asyncio.create_task(engine.generate(tiny.body(tiny.prompt(6), 5, rid=rid))) for rid in ("a", "b")]
    await tiny.until(lambda: engine.load().queued == 2)
    await engine.abort("a")
    await engine.resume()
    aborted, done = await asyncio.gather(*tasks)
    await engine.stop()
    assert isinstance(aborted, dict)
    assert isinstance(done, dict)
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(done["output_ids"]) == 5


async def test_weights_that_give_nan_fail_the_request_not_the_engine(tmp_path: Path) -> None:
    config = tiny.moe_config()
    weights = tiny.tensors(config)
    good = tiny.write_view(tmp_path / "good", "bf16", config, weights)
    bad = tiny.write_view(tmp_path / "bad", "bf16", config, weights)
    # No publisher writes this: the codecs refuse it.
    save_file({**weights, "model.norm.weight": torch.full((32,), float("nan")).bfloat16()}, bad / "model.safetensors")
    engine = await tiny.started(bad)
    with pytest.raises(EngineError, match="logits are not finite under weights version 5"):
        await engine.generate(tiny.body(tiny.prompt(6)))
    await engine.update(good, 6)
    reply = await engine.generate(tiny.body(tiny.prompt(6)))
    await engine.stop()
    assert isinstance(reply, dict)
    assert len(reply["output_ids"]) == 12


async def test_another_model_is_no_update(views: dict[str, Path], tmp_path: Path) -> None:
    config = tiny.moe_config(num_hidden_layers=3)
    other = tiny.write_view(tmp_path / "other", "bf16", config, tiny.tensors(config))
    engine = await tiny.started(views["bf16"])
    with pytest.raises(BadRequest, match="another model"):
        await engine.update(other, 6)
    (tmp_path / "empty").mkdir()
    with pytest.raises(EngineError, match="cannot load empty"):
        await engine.update(tmp_path / "empty", 6)
    assert engine.model_info()["weight_version"] == "5"
    reply = await engine.generate(tiny.body(tiny.prompt(6)))
    await engine.stop()
    assert isinstance(reply, dict)


async def test_a_loop_that_breaks_says_so_to_everyone(views: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await tiny.started(views["bf16"])

    def broken(*_: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr("motley_sampler.engines.reference.scheduler.forward", broken)
    reply = await engine.generate(tiny.body(tiny.prompt(6)))
    assert isinstance(reply, dict)
    assert "device lost" in reply["meta_info"]["finish_reason"]["message"]
    assert "device lost" in (engine.failed() or "")
    with pytest.raises(EngineError, match="the engine failed"):
        await engine.generate(tiny.body(tiny.prompt(6)))
    await engine.stop()


def test_an_engine_that_has_not_started_is_unavailable() -> None:
    engine = ReferenceEngine(tiny.EXACT, slots=1, max_running=1)
    with pytest.raises(EngineError, match="not loaded"):
        engine.model_info()
