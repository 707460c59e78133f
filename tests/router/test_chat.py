"""OpenAI's chat over /generate: prompts, replies, streams, tools, refusals."""

from __future__ import annotations

import asyncio
import datetime
import json
import pathlib
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from motley_api import keys
from motley_sampler.engines.protocol import parse_generate
from motley_sampler.router import chat
from motley_sampler.router.chat import ChatRequest, ChatTranslator, Told
from motley_sampler.router.chat_model import ChatModel, ChatModelError, read_model_folder
from motley_sampler.router.wire import RequestError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

StageOf = Callable[..., Awaitable[Any]]

TEMPLATE = (
    "{%- for tool in tools or [] %}<tool>{{ tool | tojson }}</tool>{% endfor -%}"
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments.x }}]{% endfor -%}"
    "{{ '<|im_end|>' }}{% endfor -%}"
    "{%- if messages[0].role == 'robot' %}{{ raise_exception('no robots') }}{% endif -%}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"
)


def tokenizer() -> Tokenizer:
    """A byte-level tokenizer: ids 0..255 are bytes in the order of tokenizers' alphabet, then three added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.add_tokens(["<tool_call>"])
    return made


TOKENIZER = tokenizer()
END = TOKENIZER.token_to_id("<|im_end|>")


def model_files() -> dict[str, bytes]:
    config = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
    return {"tokenizer.json": TOKENIZER.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


def chat_model() -> ChatModel:
    return ChatModel(model_files(), now=lambda: datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC))


MODEL = chat_model()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@pytest.fixture
async def chat_stage(stage_of: StageOf, tmp_path: pathlib.Path) -> Any:
    for name, content in model_files().items():
        (tmp_path / name).write_bytes(content)
    stage = await stage_of(model_source=tmp_path.as_uri(), model_name="demo", context_length=200)
    await stage.engine("e1", max_sessions=16)
    await stage.fleet(g=1000)
    return stage


async def ask(stage: Any, reply: str, **request: Any) -> tuple[int, Any]:
    stage.engines["e1"].output_ids = [*ids(reply), END]
    stage.engines["e1"].finish_reason = {"type": "stop", "matched": END}
    body = {"messages": [{"role": "user", "content": "Hi"}]} | request
    return await stage.call("POST", "/v1/chat/completions", body)


BASH = {
    "type": "function",
    "function": {"name": "bash", "parameters": {"properties": {"command": {"type": "string"}}}},
}
CALL = 'Let me look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


async def test_a_completion_asks_the_engine_with_the_templates_tokens_and_answers_as_openai_does(
    chat_stage: Any,
) -> None:
    status, answer = await ask(chat_stage, "Héllo", max_tokens=9, temperature=0.5, seed=3)
    assert status == 200
    raw, _ = chat_stage.engines["e1"].seen[0]
    prompt = ids("<|im_start|>user\nHi<|im_end|><|im_start|>assistant\n")
    assert msgspec.json.decode(raw) == {
        "input_ids": prompt,
        "sampling_params": {
            "skip_special_tokens": False,
            "max_new_tokens": 9,
            "stop_token_ids": [END],
            "temperature": 0.5,
            "sampling_seed": 3,
        },
        "stream": False,
    }
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "Héllo"}, "finish_reason": "stop"}
    ]
    # é is two bytes, so Héllo is 6 tokens, and the end is one.
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 7,
        "total_tokens": len(prompt) + 7,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert answer["system_fingerprint"] == "g/bf16/v7"
    assert answer["model"] == "demo"


async def test_the_reference_engine_accepts_what_a_chat_asks(chat_stage: Any) -> None:
    """It refuses unknown sampling parameters, and those that it does not have."""
    await ask(chat_stage, "x", max_tokens=5, temperature=0.5, top_p=0.9, top_k=20, seed=1, stop="END", logprobs=True)
    body = msgspec.json.decode(chat_stage.engines["e1"].seen[0][0])
    (asked,), _ = parse_generate(body, vocab_size=400, context_length=200)
    sampling = asked.sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (5, 0.5, 0.9, 20)
    assert (sampling.sampling_seed, sampling.stop_token_ids) == (1, [END])


async def test_without_a_limit_the_reply_may_fill_the_context_and_no_more(chat_stage: Any) -> None:
    prompt = len(ids("<|im_start|>user\nHi<|im_end|><|im_start|>assistant\n"))
    await ask(chat_stage, "x")
    await ask(chat_stage, "x", max_completion_tokens=10_000)
    limits = [msgspec.json.decode(raw)["sampling_params"]["max_new_tokens"] for raw, _ in chat_stage.engines["e1"].seen]
    assert limits == [200 - prompt, 200 - prompt]
    status, answer = await ask(chat_stage, "x", messages=[{"role": "user", "content": "y" * 200}])
    assert (status, answer["reason"]) == (400, "ContextLengthExceeded")


async def test_turns_of_one_user_reach_one_engine(chat_stage: Any) -> None:
    other = await chat_stage.engine("e2", max_sessions=16)
    for _ in range(5):
        assert (await ask(chat_stage, "x", user="agent"))[0] == 200
    assert other.seen == []
    assert len(chat_stage.engines["e1"].seen) == 5


async def events_of(stage: Any, reply: str, **request: Any) -> list[Any]:
    status, text = await ask(stage, reply, stream=True, **request)
    assert status == 200
    assert text.endswith("data: [DONE]\n\n")
    return [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n")[:-2]]


def content_of(events: list[Any]) -> str:
    return "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"])


async def test_a_stream_tells_the_same_text_piece_by_piece_and_ends_with_usage(chat_stage: Any) -> None:
    events = await events_of(chat_stage, "Héllo wörld €", stream_options={"include_usage": True})
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert content_of(events) == "Héllo wörld €"
    assert len(events) > 10  # really in pieces
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == len(ids("Héllo wörld €")) + 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}


async def test_tool_calls_are_read_from_whole_replies_and_from_streams_alike(chat_stage: Any) -> None:
    _, answer = await ask(chat_stage, CALL, tools=[BASH])
    message = answer["choices"][0]["message"]
    assert message["content"] == "Let me look."
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "bash", "arguments": '{"command": "ls"}'}
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    prompt = MODEL.text(msgspec.json.decode(chat_stage.engines["e1"].seen[0][0])["input_ids"])
    assert '<tool>{"type": "function", "function": {"name": "bash"' in prompt
    events = await events_of(chat_stage, CALL, tools=[BASH])
    assert content_of(events).strip() == "Let me look."
    deltas = [one for e in events for one in e["choices"][0]["delta"].get("tool_calls", [])]
    assert [(one["index"], one["function"]) for one in deltas] == [(0, call["function"])]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_without_tools_a_tool_tag_is_just_text(chat_stage: Any) -> None:
    for more in ({}, {"tools": [BASH], "tool_choice": "none"}):
        _, answer = await ask(chat_stage, CALL, **more)
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": CALL}
        assert content_of(await events_of(chat_stage, CALL, **more)) == CALL


async def test_an_earlier_call_and_its_result_reach_the_template(chat_stage: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 5}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]
    await ask(chat_stage, "x", messages=messages)
    want = (
        "<|im_start|>user\nab<|im_end|><|im_start|>assistant\n[f 5]<|im_end|>"
        "<|im_start|>tool\ndone<|im_end|><|im_start|>assistant\n"
    )
    assert msgspec.json.decode(chat_stage.engines["e1"].seen[0][0])["input_ids"] == ids(want)


async def test_a_stop_string_cuts_whole_replies_and_streams_at_the_same_place(chat_stage: Any) -> None:
    _, answer = await ask(chat_stage, "one two three", stop=["three", " tw"])
    assert answer["choices"][0]["message"]["content"] == "one"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert content_of(await events_of(chat_stage, "one two three", stop=["three", " tw"])) == "one"
    sampling = msgspec.json.decode(chat_stage.engines["e1"].seen[0][0])["sampling_params"]
    assert "stop" not in sampling


async def test_log_probs_are_told_for_each_token(chat_stage: Any) -> None:
    _, answer = await ask(chat_stage, "ab", logprobs=True, top_logprobs=2)
    rows = answer["choices"][0]["logprobs"]["content"]
    assert [(row["token"], row["logprob"], row["bytes"]) for row in rows[:2]] == [("a", -0.5, [97]), ("b", -0.5, [98])]
    assert [top["token"] for top in rows[0]["top_logprobs"]] == ["a", "b"]
    events = await events_of(chat_stage, "ab", logprobs=True)
    told = [row["token"] for e in events for row in (e["choices"][0].get("logprobs") or {}).get("content", [])]
    assert told == ["a", "b", "<|im_end|>"]


@pytest.mark.parametrize(
    ("request_more", "want_message"),
    [
        ({"messages": []}, "messages must hold at least one message"),
        ({"messages": [{"content": "x"}]}, "messages[0].role must be a string"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "parts of type text"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "no robots"),
        ({"messages": "x"}, "Expected `array`"),
        ({"n": 2}, "n must be 1, got 2"),
        ({"tool_choice": "required"}, "tool_choice must be auto or none"),
        ({"response_format": {"type": "json_object"}}, "response_format.type must be text"),
        ({"max_tokens": 0}, "max_completion_tokens must be at least 1"),
        ({"top_logprobs": 21}, "top_logprobs must be between 0 and 20"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs must not hold messages"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name_and_reaches_no_engine(
    chat_stage: Any, request_more: dict[str, Any], want_message: str
) -> None:
    status, answer = await ask(chat_stage, "x", **request_more)
    assert status == 400
    assert want_message in answer["error"]["message"]
    assert chat_stage.engines["e1"].seen == []


async def test_a_router_without_a_model_says_what_chat_needs(stage_of: StageOf, tmp_path: pathlib.Path) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]}
    status, answer = await (await stage_of()).call("POST", "/v1/chat/completions", body)
    assert (status, answer["reason"]) == (501, "NoChatModel")
    assert "model.source" in answer["message"]
    status, answer = await (await stage_of(model_source=str(tmp_path))).call("POST", "/v1/chat/completions", body)
    assert status == 501
    assert "must hold tokenizer.json" in answer["message"]


async def test_a_long_completion_is_kept_alive_in_both_forms(stage_of: StageOf, tmp_path: pathlib.Path) -> None:
    for name, content in model_files().items():
        (tmp_path / name).write_bytes(content)
    stage = await stage_of(model_source=str(tmp_path), keep_alive_s=0.02)
    engine = await stage.engine("e1")
    await stage.fleet(g=1000)
    engine.output_ids = [*ids("ok"), END]
    for stream in (False, True):
        go_on = asyncio.Event()

        async def slow(request: web.Request, body: dict[str, Any], go_on: asyncio.Event = go_on) -> web.StreamResponse:
            await go_on.wait()
            if not body["stream"]:
                return web.json_response(engine.reply(body))
            event = b"data: " + msgspec.json.encode(engine.reply(body)) + b"\n\n"
            return web.Response(body=event, content_type="text/event-stream")

        engine.script = slow
        body = {"messages": [{"role": "user", "content": "x"}], "stream": stream}
        async with stage.client.post(stage.url + "/v1/chat/completions", json=body) as response:
            early = await response.content.readexactly(14 if stream else 2)
            go_on.set()
            rest = (await response.content.read()).decode()
        if stream:
            assert early == b": keep-alive\n\n"
            events = [json.loads(e[6:]) for e in rest.split("\n\n") if e.startswith("data: {")]
            assert content_of(events) == "ok"
        else:
            assert early == b"  "
            assert json.loads(rest)["choices"][0]["message"]["content"] == "ok"


async def test_an_engine_that_aborts_is_a_failure_and_not_an_empty_reply(chat_stage: Any) -> None:
    async def aborts(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        meta = {"finish_reason": {"type": "abort", "message": "out of memory"}}
        return web.json_response({"output_ids": [], "meta_info": meta})

    chat_stage.engines["e1"].script = aborts
    status, answer = await ask(chat_stage, "x")
    assert (status, answer["reason"]) == (503, "EngineAborted")
    assert "out of memory" in answer["message"]


async def test_a_dead_engine_costs_a_chat_only_a_retry(chat_stage: Any) -> None:
    other = await chat_stage.engine("e2")
    other.output_ids = [*ids("from e2"), END]
    await chat_stage.engines["e1"].stop()
    for stream in (False, True):
        body = {"messages": [{"role": "user", "content": "x"}], "user": f"u{stream}", "stream": stream}
        status, answer = await chat_stage.call("POST", "/v1/chat/completions", body)
        assert status == 200
        if stream:
            events = [json.loads(event[6:]) for event in answer.split("\n\n") if event.startswith("data: {")]
            assert content_of(events) == "from e2"
        else:
            assert answer["choices"][0]["message"]["content"] == "from e2"
        await chat_stage.beat("e1")  # its agent still reports; only its server is gone
    assert len(other.seen) == 2


async def test_models_lists_the_run(chat_stage: Any) -> None:
    _, answer = await chat_stage.call("GET", "/v1/models", **{keys.ROUTING_KEY_HEADER: "k"})
    assert [one["id"] for one in answer["data"]] == ["demo"]


# The pure parts.


def translator(request: ChatRequest) -> ChatTranslator:
    return ChatTranslator(request, MODEL, Told("id", 0, "m", "g/bf16", lambda index: f"call_{index}"))


PIECES = [*"ab<tol_ca>€é{} ", CALL, "<tool_call>", "</tool_call>", "STOP"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)


@given(TEXTS, st.booleans(), st.sampled_from([None, "STOP", ["b", "é"]]), st.booleans(), st.data())
@settings(max_examples=150, deadline=None)
def test_a_stream_says_exactly_what_the_whole_reply_says(
    text: str, tools: bool, stop: Any, incremental: bool, data: st.DataObject
) -> None:
    """However the engine batches its tokens and however the network cuts its events."""
    request = ChatRequest(messages=[], stream=True, tools=[BASH] if tools else None, stop=stop)
    output = [*ids(text), END]
    meta = {"finish_reason": {"type": "stop"}, "completion_tokens": len(output)}
    whole = json.loads(translator(request).whole(msgspec.json.encode({"output_ids": output, "meta_info": meta})))
    wire, told = b"", 0
    while told < len(output):
        upto = data.draw(st.integers(told + 1, len(output)))
        part = {"completion_tokens": upto, "finish_reason": {"type": "stop"} if upto == len(output) else None}
        event = {"output_ids": output[told if incremental else 0 : upto], "meta_info": part}
        wire += b"data: " + msgspec.json.encode(event) + b"\n\n"
        told = upto
    wire += b"data: [DONE]\n\n"
    streamed, out, at = translator(request), b"", 0
    while at < len(wire):
        end = data.draw(st.integers(at + 1, len(wire)))
        out += streamed.piece(wire[at:end])
        at = end
    out += streamed.end()
    events = [json.loads(e[6:]) for e in out.decode().split("\n\n") if e.startswith("data: {")]
    message = whole["choices"][0]["message"]
    calls = [one for e in events for one in e["choices"][0]["delta"].get("tool_calls", [])]
    assert [one["function"] for one in calls] == [one["function"] for one in message.get("tool_calls", [])]
    want_text, got_text = message["content"] or "", content_of(events)
    if calls:  # a whole reply trims the text around its calls; a stream has told it already
        assert "".join(got_text.split()) == "".join(want_text.split())
    else:
        assert got_text == want_text
    assert events[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]


@pytest.mark.parametrize(
    ("text", "tools", "want_content", "want_calls"),
    [
        (CALL, [BASH], "Let me look.", [("bash", {"command": "ls"})]),
        ("<tool_call>ls -l</tool_call>", [BASH], "", [("bash", {"command": "ls -l"})]),
        ("<tool_call>ls -l", [BASH], "", [("bash", {"command": "ls -l"})]),
        ("<tool_call>ls</tool_call>", [BASH, BASH], "<tool_call>ls</tool_call>", []),
        ("<tool_call></tool_call>x", [BASH], "<tool_call></tool_call>x", []),
        ('a<tool_call>{"name":"f"}</tool_call>b<tool_call>{"name":"g"}</tool_call>', [BASH], "ab", [("f", {}), ("g", {})]),
        ("none", [BASH], "none", []),
    ],
)  # fmt: skip
def test_tool_calls_are_read_as_json_or_as_the_only_tools_only_parameter(
    text: str, tools: list[Any], want_content: str, want_calls: list[Any]
) -> None:
    content, calls = chat.tool_calls(text, tools, str)
    assert content == want_content
    assert [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in calls] == want_calls


def test_a_stream_that_ends_without_a_reason_is_a_failure() -> None:
    half = translator(ChatRequest(messages=[], stream=True))
    half.piece(b'data: {"output_ids": [70], "meta_info": {"completion_tokens": 1, "finish_reason": null}}\n\n')
    with pytest.raises(RequestError, match="without a finish reason"):
        half.end()


@pytest.mark.parametrize("reply", [b"nonsense", b"[]", b"{}", b'{"error": "x"}', b'{"output_ids": null}'])
def test_an_engines_reply_that_cannot_be_read_is_the_engines_failure(reply: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        translator(ChatRequest(messages=[])).whole(reply)
    assert caught.value.status == 502


def test_model_folders_that_cannot_chat_say_what_is_missing(tmp_path: pathlib.Path) -> None:
    now = datetime.datetime.now
    with pytest.raises(ChatModelError, match=r"must hold tokenizer\.json"):
        ChatModel({}, now=now)
    files = model_files()
    with pytest.raises(ChatModelError, match="must hold a chat template"):
        ChatModel(files | {"tokenizer_config.json": b"{}"}, now=now)
    with pytest.raises(ChatModelError, match="chat template cannot be read"):
        ChatModel(files | {"chat_template.jinja": b"{% for %}"}, now=now)
    with pytest.raises(ChatModelError, match="tokenizer cannot be read"):
        ChatModel(files | {"tokenizer.json": b"{}"}, now=now)
    with pytest.raises(ChatModelError, match="cannot be read"):
        read_model_folder("no-such-protocol://x")
    assert read_model_folder(str(tmp_path / "absent")) == {}


def test_generation_config_names_the_stop_tokens_before_the_tokenizer_does() -> None:
    now = datetime.datetime.now
    assert ChatModel(model_files(), now=now).stop_ids == [END]
    several = model_files() | {"generation_config.json": b'{"eos_token_id": [5, 6]}'}
    assert ChatModel(several, now=now).stop_ids == [5, 6]
