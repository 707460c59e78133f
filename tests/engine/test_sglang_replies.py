"""What the adapter adds to SGLang's replies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from motley_sampler.engines.sglang.engine import Labels, SglangEngine, _lines


def _reply(tokens: int, **meta: Any) -> dict[str, Any]:
    return {"output_ids": [1] * tokens, "meta_info": meta}


def _spans(reply: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(span["version"], span["start"], span["end"]) for span in reply["meta_info"]["weight_versions"]]


def test_parts_of_a_stream_are_labelled_with_the_newest_version_that_they_may_be_of() -> None:
    labels = Labels(5)
    got = []
    for version, tokens in ((5, 1), (5, 3), (6, 3), (6, 7)):
        part = _reply(tokens)
        labels.put_on(part, version)
        got.append(_spans(part))
    assert got == [
        [("5", 0, 1)],
        [("5", 0, 3)],
        [("5", 0, 3), ("6", 3, 3)],  # the update began: whatever comes may be of 6
        [("5", 0, 3), ("6", 3, 7)],
    ]


def test_sglangs_own_spans_are_left_alone() -> None:
    exact = [{"version": "5", "start": 0, "end": 9}]
    reply = _reply(9, weight_versions=exact)
    Labels(5).put_on(reply, 6)
    assert reply["meta_info"]["weight_versions"] == exact


def test_a_request_that_was_updated_before_its_first_token_is_of_the_new_version() -> None:
    labels, reply = Labels(5), _reply(4)
    labels.put_on(reply, 6)
    assert _spans(reply) == [("6", 0, 4)]


def test_what_was_aborted_in_the_queue_has_no_counts_and_counts_nothing() -> None:
    engine = SglangEngine("python", lambda folder, version: [], "http://127.0.0.1:9")
    reply = _reply(0, id="r", finish_reason={"type": "abort", "message": "Abort in waiting queue"})
    Labels(5).put_on(reply, 5)
    engine._count(reply["meta_info"])
    assert _spans(reply) == [("5", 0, 0)]
    assert (engine.load().prompt_tokens, engine.load().generated_tokens) == (0, 0)


@pytest.mark.parametrize("pieces", [[b"ab\ncd\n"], [b"a", b"b\nc", b"d\n"], [b"ab", b"\n", b"cd"], [b"ab\ncd"]])
async def test_lines_are_found_however_they_are_cut(pieces: list[bytes]) -> None:
    async def content() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    assert [line async for line in _lines(content()) if line] == [b"ab", b"cd"]
