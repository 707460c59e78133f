"""OpenAI's chat completions in terms of SGLang's /generate: requests one way, replies and event streams the other.
Pure.

Covers text messages, tools (calls in <tool_call> tags, as Qwen and Hermes models write them), stop strings,
log-probs, and streaming. Not covered, and refused by name: several choices, images and audio, forced tool calls,
response formats.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from motley_sampler.router.wire import RequestError

if TYPE_CHECKING:
    from motley_sampler.router.chat_model import ChatModel

RESERVED_FOR_TEMPLATES = frozenset(
    {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "pad_token"}
)
TOOL_OPEN, TOOL_CLOSE = "<tool_call>", "</tool_call>"


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions; fields that are not here are ignored. top_k and min_p as SGLang adds them."""

    messages: list[dict[str, Any]]
    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    session_id: Any = None
    routing_key: Any = None
    user: Any = None

    @property
    def tools_in_use(self) -> list[dict[str, Any]] | None:
        return self.tools if self.tools and self.tool_choice != "none" else None

    @property
    def stop_strings(self) -> list[str]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [one for one in given if one]


def refuse_unsupported(request: ChatRequest) -> None:
    """Raises RequestError 400 naming the field and what is allowed."""
    if not request.messages:
        raise _invalid("messages must hold at least one message")
    if request.n not in (None, 1):
        raise _invalid(f"n must be 1, got {request.n}: send one request for each choice")
    if request.tool_choice not in (None, "auto", "none"):
        raise _invalid(f"tool_choice must be auto or none, got {request.tool_choice!r}")
    if request.response_format is not None and request.response_format.get("type") != "text":
        raise _invalid(f"response_format.type must be text, got {request.response_format.get('type')!r}")
    limit = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    if limit is not None and limit < 1:
        raise _invalid(f"max_completion_tokens must be at least 1, got {limit}")
    if reserved := RESERVED_FOR_TEMPLATES & (request.chat_template_kwargs or {}).keys():
        raise _invalid(f"chat_template_kwargs must not hold {', '.join(sorted(reserved))}")
    if request.top_logprobs is not None and not 0 <= request.top_logprobs <= 20:
        raise _invalid(f"top_logprobs must be between 0 and 20, got {request.top_logprobs}")


def template_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates read them: content as text, arguments of earlier tool calls as objects."""
    return [_template_message(index, message) for index, message in enumerate(messages)]


def _template_message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message.get("role"), str):
        raise _invalid(f"{where}.role must be a string")
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                raise _invalid(f"{where}.content must be text, or a list of parts of type text")
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise _invalid(f"{where}.content must be text, or a list of parts of type text")
    out = message | {"content": content if content is not None else ""}
    if calls := message.get("tool_calls"):
        out["tool_calls"] = [_template_call(where, call) for call in calls]
    return out


def _template_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _invalid(f"{where}.tool_calls must each hold a function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise _invalid(f"{where}.tool_calls: arguments of {function['name']} must be JSON: {error}") from error
    return dict(call) | {"function": function | {"arguments": arguments}}


def generate_body(request: ChatRequest, prompt_ids: list[int], stop_ids: list[int], context_length: int) -> bytes:
    """The /generate request. Only parameters that the agent gave are named, so that engines may refuse what they lack.

    Stop strings are not sent: engines without a tokenizer cannot see them, so replies are cut here.
    """
    limit = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    room = context_length - len(prompt_ids) if context_length else None
    if room is not None and room < 1:
        raise RequestError(
            400,
            "ContextLengthExceeded",
            f"the messages take {len(prompt_ids)} tokens; the context holds {context_length}",
        )
    sampling: dict[str, Any] = {"skip_special_tokens": False}
    if limit is None:
        limit = room
    if limit is not None:
        sampling["max_new_tokens"] = limit if room is None else min(limit, room)
    if stop_ids:
        sampling["stop_token_ids"] = stop_ids
    given = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": request.min_p,
        "frequency_penalty": request.frequency_penalty,
        "presence_penalty": request.presence_penalty,
        "sampling_seed": request.seed,
    }
    sampling |= {name: value for name, value in given.items() if value is not None}
    body: dict[str, Any] = {"input_ids": prompt_ids, "sampling_params": sampling, "stream": request.stream}
    if request.logprobs:
        body |= {"return_logprob": True, "top_logprobs_num": request.top_logprobs or 0}
    return msgspec.json.encode(body)


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """What every reply of one request says of itself."""

    id: str
    created_unix_s: int
    model: str
    fingerprint: str  # "<group>/<view>": the weights version follows
    call_id: Callable[[int], str]


class ChatTranslator:
    """One attempt's reply, from SGLang's schema to OpenAI's. Text is cut at the first stop string."""

    def __init__(self, request: ChatRequest, model: ChatModel, told: Told) -> None:
        self._request, self._model, self._told = request, model, told
        self._ids: list[int] = []
        self._step = model.pieces()
        self._text = _CutText(request.stop_strings, holds_tools=request.tools_in_use is not None)
        self._buffer = b""
        self._meta: dict[str, Any] = {}
        self._spoke = False
        self._logprobs_told = 0

    # A whole reply.

    def whole(self, body: bytes) -> bytes:
        reply = _object(body)
        ids, meta = _ids_of(reply), reply.get("meta_info") or {}
        text, cut = _cut(self._model.text(ids), self._request.stop_strings)
        content, calls = self._calls(text)
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
        if calls:
            message["tool_calls"] = calls
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": _finish(meta, cut, bool(calls))}
        if self._request.logprobs:
            choice["logprobs"] = {"content": self._logprobs(meta, 0, len(ids))}
        return msgspec.json.encode(self._head("chat.completion", meta) | {"choices": [choice], "usage": _usage(meta)})

    # A stream.

    def piece(self, chunk: bytes) -> bytes:
        """SGLang's events in, whole or in parts; OpenAI's events out."""
        self._buffer += chunk
        out = b""
        *events, self._buffer = self._buffer.replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"data:") and line[5:].strip() not in (b"", b"[DONE]"):
                    out += self._event(line[5:].strip())
        return out

    def end(self) -> bytes:
        if not self._request.stream:
            return b""
        finish = self._meta.get("finish_reason") or {}
        if not finish:
            raise RequestError(502, "EngineFailed", "the engine's stream ended without a finish reason")
        # An unfinished character at the very end reads as the replacement character, as in a whole reply.
        out = self._delta_text(self._text.add(self._model.text(self._ids)[self._text.seen :]))
        content, calls = self._calls(self._text.rest())
        out += self._delta_text(content)
        for index, call in enumerate(calls):
            out += self._chunk({"tool_calls": [{"index": index} | call]})
        out += self._chunk({}, finish=_finish(self._meta, self._text.cut, bool(calls)))
        if self._request.stream_options is not None and self._request.stream_options.include_usage:
            usage = self._head("chat.completion.chunk", self._meta) | {"choices": [], "usage": _usage(self._meta)}
            out += _data(usage)
        return out + b"data: [DONE]\n\n"

    def _event(self, data: bytes) -> bytes:
        reply = _object(data)
        self._meta = reply.get("meta_info") or {}
        text = ""
        for token_id in self._new_ids(_ids_of(reply)):
            self._ids.append(token_id)
            text += self._step(token_id)
        delta = self._text.add(text)
        first = b"" if self._spoke else self._chunk({"role": "assistant", "content": ""})
        self._spoke = True
        return first + self._delta_text(delta)

    def _new_ids(self, ids: list[int]) -> list[int]:
        """SGLang's events hold all ids so far; started with incremental output, only the new ones."""
        total = int(self._meta.get("completion_tokens", len(ids)))
        return ids[len(self._ids) :] if total == len(ids) else ids

    def _delta_text(self, text: str) -> bytes:
        return self._chunk({"content": text}) if text else b""

    def _chunk(self, delta: dict[str, Any], *, finish: str | None = None) -> bytes:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish}
        if self._request.logprobs and len(self._ids) > self._logprobs_told:
            choice["logprobs"] = {"content": self._logprobs(self._meta, self._logprobs_told, len(self._ids))}
            self._logprobs_told = len(self._ids)
        return _data(self._head("chat.completion.chunk", self._meta) | {"choices": [choice]})

    # Both.

    def _head(self, kind: str, meta: dict[str, Any]) -> dict[str, Any]:
        told = self._told
        version = meta.get("weight_version", "unknown")
        return {
            "id": told.id,
            "object": kind,
            "created": told.created_unix_s,
            "model": told.model,
            "system_fingerprint": f"{told.fingerprint}/{version}",
        }

    def _calls(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        tools = self._request.tools_in_use
        return tool_calls(text, tools, self._told.call_id) if tools else (text, [])

    def _logprobs(self, meta: dict[str, Any], start: int, end: int) -> list[dict[str, Any]]:
        rows = (meta.get("output_token_logprobs") or [])[-(end - start) :] if end > start else []
        tops = (meta.get("output_top_logprobs") or [])[-(end - start) :] if end > start else []
        out = []
        for index, (logprob, token_id, *_) in enumerate(rows):
            top = tops[index] if index < len(tops) and tops[index] else []
            out.append(self._logprob(logprob, token_id) | {"top_logprobs": [self._logprob(*one[:2]) for one in top]})
        return out

    def _logprob(self, logprob: float, token_id: int) -> dict[str, Any]:
        token = self._model.token(token_id)
        return {"token": token, "logprob": logprob, "bytes": list(token.encode())}


class _CutText:
    """Text as it grows: what may be told now, holding back what could begin a stop string or a tool call."""

    def __init__(self, stops: list[str], *, holds_tools: bool) -> None:
        self._stops = stops
        self._holds = [*stops, TOOL_OPEN] if holds_tools else stops
        self._held = ""
        self._in_tool = False
        self._holds_tools = holds_tools
        self.seen = 0  # characters that came in
        self.cut = False

    def add(self, text: str) -> str:
        self.seen += len(text)
        if self.cut:
            return ""
        self._held, self.cut = _cut(self._held + text, self._stops)
        if self._holds_tools and TOOL_OPEN in self._held:
            self._in_tool = True
            at = self._held.index(TOOL_OPEN)
        elif self._in_tool:
            at = 0
        else:
            at = len(self._held) if self.cut else _safe_length(self._held, self._holds)
        told, self._held = self._held[:at], self._held[at:]
        return told

    def rest(self) -> str:
        held, self._held = self._held, ""
        return held


def _safe_length(text: str, marks: list[str]) -> int:
    """Characters before the longest tail that a mark could begin with."""
    for start in range(max(0, len(text) - max(map(len, marks), default=0) + 1), len(text)):
        if any(mark.startswith(text[start:]) for mark in marks):
            return start
    return len(text)


def _cut(text: str, stops: list[str]) -> tuple[str, bool]:
    places = [text.find(stop) for stop in stops if stop in text]
    return (text[: min(places)], True) if places else (text, False)


def tool_calls(
    text: str, tools: list[dict[str, Any]], call_id: Callable[[int], str]
) -> tuple[str, list[dict[str, Any]]]:
    """Text outside the calls, and the calls. A call that cannot be read stays in the text.

    Between the tags stands {"name": ..., "arguments": {...}}, or, for models with a single tool of a single parameter,
    just that parameter's text.
    """
    content = ""
    calls: list[dict[str, Any]] = []
    while TOOL_OPEN in text:
        before, _, after = text.partition(TOOL_OPEN)
        inside, closed, behind = after.partition(TOOL_CLOSE)
        content += before
        call = _call(inside, tools)
        if call is None:
            content += TOOL_OPEN + inside + closed
        else:
            name, arguments = call
            function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            calls.append({"id": call_id(len(calls)), "type": "function", "function": function})
        text = behind
    content += text
    return (content.strip() if calls else content), calls


def _call(inside: str, tools: list[dict[str, Any]]) -> tuple[str, Any] | None:
    try:
        call = json.loads(inside)
    except ValueError:
        call = None
    if isinstance(call, dict) and isinstance(call.get("name"), str):
        return call["name"], call.get("arguments", call.get("parameters", {}))
    if len(tools) == 1 and inside.strip():
        function = tools[0].get("function") or {}
        parameters = (function.get("parameters") or {}).get("properties") or {}
        if len(parameters) == 1 and isinstance(function.get("name"), str):
            return function["name"], {next(iter(parameters)): inside.strip()}
    return None


def _finish(meta: dict[str, Any], cut: bool, calls: bool) -> str:
    if calls:
        return "tool_calls"
    if cut:
        return "stop"
    kind = (meta.get("finish_reason") or {}).get("type")
    return "length" if kind == "length" else "stop"


def _usage(meta: dict[str, Any]) -> dict[str, Any]:
    prompt, completion = int(meta.get("prompt_tokens", 0)), int(meta.get("completion_tokens", 0))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": int(meta.get("cached_tokens", 0))},
    }


def _object(data: bytes) -> dict[str, Any]:
    try:
        reply = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise RequestError(502, "EngineFailed", f"the engine's reply is not JSON: {error}") from error
    if not isinstance(reply, dict):
        raise RequestError(502, "EngineFailed", f"the engine's reply must be an object, got {type(reply).__name__}")
    if "error" in reply:
        raise RequestError(502, "EngineFailed", f"the engine says: {reply['error']}")
    finish = (reply.get("meta_info") or {}).get("finish_reason") or {}
    if finish.get("type") == "abort":
        raise RequestError(503, "EngineAborted", f"the engine aborted: {finish.get('message', '')}", retry_after_s=1)
    return reply


def _ids_of(reply: dict[str, Any]) -> list[int]:
    ids = reply.get("output_ids")
    if not isinstance(ids, list):
        raise RequestError(502, "EngineFailed", "the engine's reply must hold output_ids")
    return ids


def _data(event: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


def _invalid(message: str) -> RequestError:
    return RequestError(400, "InvalidRequest", message)
