"""Tool calls and engine replies, taken apart."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from motley_sampler.rollout.reply import ReplyError, parse_generate
from motley_sampler.rollout.toolcall import (
    MALFORMED,
    NO_TOOL_CALL,
    Command,
    FormatError,
    Submit,
    parse_reply,
    tool_message,
)
from motley_sampler.sandbox.host import CommandResult, Ended


@pytest.mark.parametrize(
    ("reply", "want"),
    [
        ("<tool_call>ls -l\n</tool_call>", Command("ls -l")),
        ("I look.\n<tool_call>\ncat a\n</tool_call>\n<tool_call>rm b</tool_call>", Command("cat a")),
        (
            '<tool_call>\n{"name": "bash", "arguments": {"command": "echo \\"a\\"\\n"}}\n</tool_call>',
            Command('echo "a"\n'),
        ),
        ('<tool_call>{"name": "bash", "arguments": "{\\"command\\": \\"ls\\"}"}</tool_call>', Command("ls")),
        (
            "<tool_call>\n<function=bash>\n<parameter=command>\nls\npwd\n</parameter>\n</function>\n</tool_call>",
            Command("ls\npwd"),
        ),
        ("<tool_call>submit</tool_call>", Submit()),
        ('<tool_call>{"name": "bash", "arguments": {"command": " submit "}}</tool_call>', Submit()),
        ('<tool_call>{"name": "submit", "arguments": {}}</tool_call>', Submit()),
        ("<tool_call>echo submit</tool_call>", Command("echo submit")),
        ("maybe <tool_call>ls</tool_call></think>\n<tool_call>pwd</tool_call>", Command("pwd")),
        ("maybe <tool_call>ls</tool_call></think>\nno.", FormatError(NO_TOOL_CALL)),
        ("", FormatError(NO_TOOL_CALL)),
        ("ls", FormatError(NO_TOOL_CALL)),
        ("<tool_call>ls", FormatError(NO_TOOL_CALL)),
        ("ls</tool_call>", FormatError(NO_TOOL_CALL)),
        ("<tool_call> \n</tool_call>", FormatError(NO_TOOL_CALL)),
        ('<tool_call>{"name": "bash"</tool_call>', FormatError(MALFORMED)),
        ('<tool_call>{"name": "python", "arguments": {"command": "1"}}</tool_call>', FormatError(MALFORMED)),
        ('<tool_call>{"name": "bash", "arguments": {"command": 5}}</tool_call>', FormatError(MALFORMED)),
        ('<tool_call>{"name": "bash", "arguments": ["ls"]}</tool_call>', FormatError(MALFORMED)),
        ('<tool_call>{"name": "bash", "arguments": {"command": " "}}</tool_call>', FormatError(MALFORMED)),
        ("<tool_call><function=bash></function></tool_call>", FormatError(MALFORMED)),
        ("<tool_call>{" + "[" * 100_000 + "</tool_call>", FormatError(MALFORMED)),
    ],
)
def test_replies_are_understood(reply: str, want: Any) -> None:
    assert parse_reply(reply) == want


@given(st.text())
def test_no_reply_breaks_the_parser(text: str) -> None:
    for reply in (text, f"<tool_call>{text}</tool_call>", f'<tool_call>{{"name": {text}}}</tool_call>'):
        assert isinstance(parse_reply(reply), Command | Submit | FormatError)


@pytest.mark.parametrize(
    ("ended", "code", "output", "want"),
    [
        (Ended.EXIT, 0, "a\nb\n\n", "a\nb"),
        (Ended.EXIT, 0, "", "ok"),
        (Ended.EXIT, 0, "\n", "ok"),
        (Ended.EXIT, 2, "no\n", "no\nexit 2"),
        (Ended.EXIT, 1, "", "exit 1"),
        (Ended.EXIT, -9, "", "exit 137"),
        (Ended.TIMEOUT, -9, "so far", "so far\nstopped after 5 s"),
        (Ended.OUTPUT_LIMIT, -9, "y", "y\nstopped: too much output"),
    ],
)
def test_the_policy_sees_output_and_how_it_ended(ended: Ended, code: int, output: str, want: str) -> None:
    assert tool_message(CommandResult(ended, code, output, len(output), 0.1, 0.1), 5.0) == want


def reply(**changes: Any) -> bytes:
    meta: dict[str, Any] = {
        "finish_reason": {"type": "stop", "matched": 2},
        "cached_tokens": 4,
        "weight_version": "7",
        "weight_versions": [{"version": "7", "start": 0, "end": 3}],
        "output_token_sampling_mask": [[5, 9], [6], [2, 1, 0]],
        "output_token_sampling_logprobs": [[-0.5, -0.9], [0.0], [-0.1, -3.0, -4.0]],
        "e2e_latency": 0.5,
    }
    ids = changes.pop("output_ids", [9, 6, 2])
    meta |= changes
    return json.dumps({"text": "", "output_ids": ids, "meta_info": meta}).encode()


def test_one_token_supports_are_stored_as_nothing() -> None:
    parsed = parse_generate(reply(), filtered=True, max_tokens=3)
    assert parsed.token_ids == (9, 6, 2)
    assert parsed.counts is not None
    assert parsed.counts.tolist() == [2, 0, 3]
    assert parsed.candidate_ids.tolist() == [5, 9, 2, 1, 0]
    assert parsed.logprobs.tolist() == pytest.approx([-0.9, 0.0, -0.1])
    assert (parsed.start_version, parsed.end_version, parsed.cached_tokens) == (7, 7, 4)


def test_values_that_are_not_finite_become_nan_or_stay() -> None:
    rows = [[None, -0.9], [0.0], [None, None, None]]
    parsed = parse_generate(reply(output_token_sampling_logprobs=rows), filtered=True, max_tokens=3)
    assert [math.isnan(value) for value in parsed.logprobs] == [False, False, True]
    assert math.isnan(parsed.candidate_logprobs[0])


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({"finish_reason": None}, "unfinished"),
        ({"finish_reason": {"type": "abort", "message": "NaN"}}, "aborted: NaN"),
        ({"output_ids": []}, "0 tokens, want 1 to 3"),
        ({"output_ids": [9, 6, 2, 2]}, "4 tokens, want 1 to 3"),
        ({"output_token_sampling_mask": None}, "want one list for each of 3"),
        ({"output_token_sampling_mask": [[5, 9], [6]]}, "want one list for each of 3"),
        ({"output_token_sampling_mask": [[5, 9], [7], [2, 1, 0]]}, "support of output token 1"),
        ({"output_token_sampling_logprobs": [[-0.5], [0.0], [-0.1, -3.0, -4.0]]}, "support of output token 0"),
        ({"weight_versions": [{"version": "default"}]}, "'default' is not a number"),
        ({"weight_versions": [], "weight_version": None}, "neither weight_versions nor weight_version"),
    ],
)
def test_a_reply_that_cannot_be_trusted_is_refused(changes: dict[str, Any], want: str) -> None:
    with pytest.raises(ReplyError, match=want):
        parse_generate(reply(**changes), filtered=True, max_tokens=3)


def test_plain_logprobs_must_name_the_same_tokens() -> None:
    rows = [[-1.0, 9, None], [None, 6, None], [-0.5, 2, "</s>"]]
    parsed = parse_generate(reply(output_token_logprobs=rows), filtered=False, max_tokens=3)
    assert parsed.counts is None
    assert [math.isnan(value) for value in parsed.logprobs] == [False, True, False]
    with pytest.raises(ReplyError, match="with the same ids"):
        parse_generate(reply(output_token_logprobs=rows[::-1]), filtered=False, max_tokens=3)


def test_an_unfiltered_reply_keeps_the_likeliest_candidates_and_the_drawn_token_s_own_logprob() -> None:
    rows = [[-4.0, 9, None], [-0.1, 6, None], [None, 2, None]]
    top = [[[-0.2, 5, None], [-2.0, 1, None]], [[-0.1, 6, "x"], [-3.0, 5, None]], [[-0.3, 2, None], [None, 4, None]]]
    body = reply(output_token_logprobs=rows, output_top_logprobs=top)
    parsed = parse_generate(body, filtered=False, max_tokens=3, top_logprobs=2)
    assert parsed.counts is not None
    assert parsed.counts.tolist() == [2, 2, 2]
    assert parsed.candidate_ids.tolist() == [5, 1, 6, 5, 2, 4]
    np.testing.assert_allclose(parsed.candidate_logprobs, np.float32([-0.2, -2, -0.1, -3, -0.3, np.nan]))
    np.testing.assert_allclose(parsed.logprobs, np.float32([-4.0, -0.1, np.nan]))
    for broken in (top[:2], [*top[:2], []], [*top[:2], top[0] + top[1]], [*top[:2], None], None):
        with pytest.raises(ReplyError, match="output_top_logprobs: want 1 to 2 entries for each of 3 output_ids"):
            parse_generate(
                reply(output_token_logprobs=rows, output_top_logprobs=broken),
                filtered=False,
                max_tokens=3,
                top_logprobs=2,
            )
