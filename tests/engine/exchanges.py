"""What the adapter says to an SGLang server and what it hears: one script of exchanges, for the real server and for its stand-in.

recorded/sglang-<version>.json holds the real server's answers, shortened; `MOTLEY_RECORD_SGLANG=1 make test-sglang` writes it. The
stand-in answers in the shape of that file, and both are held to it: same status, same keys, same types.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

RECORDED = Path(__file__).parent / "recorded"
# Of /server_info, which repeats every argument of the server, only what is read.
SERVER_INFO = ("context_length", "max_running_requests", "max_total_num_tokens", "version", "weight_version")
PER_TOKEN = ("output_token_logprobs", "output_token_sampling_mask", "output_token_sampling_logprobs")
# Of meta_info: there when the request asks for it.
ON_REQUEST = (
    *PER_TOKEN,
    "input_token_logprobs",
    "output_top_logprobs",
    "input_top_logprobs",
    "output_token_logprobs_length",
    "output_token_sampling_mask_length",
)
PROMPT = [5, 17, 3, 42, 8, 21, 60, 2]
LONG = 400  # new tokens of a request that is to be met half-way

Json = dict[str, Any]


def recorded() -> Json:
    """The newest recording: version, and exchanges by name."""
    found: Json = json.loads(max(RECORDED.glob("sglang-*.json")).read_text())
    return found


def record(heard: Json) -> None:
    version = heard["server_info"]["answer"]["version"]
    content = {"version": version, "exchanges": shorten(heard)}
    RECORDED.mkdir(exist_ok=True)
    (RECORDED / f"sglang-{version}.json").write_text(json.dumps(content, indent=1) + "\n")


SOMETIMES = {"decode_throughput"}  # of replies that are longer than one token


def schema(value: Any) -> Any:
    """Keys and types. A list is the union of its elements' types: lengths say nothing."""
    match value:
        case dict():
            return {key: schema(value[key]) for key in sorted(value.keys() - SOMETIMES)}
        case list():
            kinds = {json.dumps(schema(item), sort_keys=True): schema(item) for item in value}
            return [kinds[key] for key in sorted(kinds)]
        case None:
            return "null"
        case bool():
            return "bool"
        case int() | float():
            return "number"
        case _:
            return type(value).__name__


def request(new: int = 3, **more: Any) -> Json:
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "max_new_tokens": new, "ignore_eos": True}
    return {"input_ids": PROMPT, "sampling_params": sampling | more.pop("sampling", {}), **more}


EVERYTHING = {"return_logprob": True, "return_sampling_mask": True, "sampling_logprobs_mode": "support"}
# name -> (method, path, body); /health first, as an agent does.
PLAIN: dict[str, tuple[str, str, Json | None]] = {
    "health": ("GET", "/health", None),
    "health_generate": ("GET", "/health_generate", None),
    "server_info": ("GET", "/server_info", None),
    "loads": ("GET", "/v1/loads", None),
    "generate": ("POST", "/generate", request()),
    "generate_prompt_logprobs": ("POST", "/generate", request(**EVERYTHING, logprob_start_len=0, extra_key="a")),
    "generate_supports": ("POST", "/generate", request(**EVERYTHING, rid="one", session_id="s", extra_key="b")),
    "generate_selected": (
        "POST",
        "/generate",
        request(return_logprob=True, return_sampling_mask=True, top_logprobs_num=2),
    ),
    "generate_batch": ("POST", "/generate", request() | {"input_ids": [PROMPT, PROMPT[:5]]}),
    "generate_stopped": (
        "POST",
        "/generate",
        request(40, sampling={"stop_token_ids": list(range(32)), "ignore_eos": False}),
    ),
    "refused_top_k": ("POST", "/generate", request(return_sampling_mask=True, sampling={"top_k": -1})),
    "refused_length": ("POST", "/generate", {**request(), "input_ids": PROMPT * 100}),
    "pause_generation": ("POST", "/pause_generation", {"mode": "in_place"}),
    "continue_generation": ("POST", "/continue_generation", {}),
    "abort_request": ("POST", "/abort_request", {"rid": "nobody", "abort_all": False}),
    "flush_cache": ("POST", "/flush_cache", {}),
}


async def all_of(url: str, folder: Path, empty: Path) -> dict[str, Json]:
    """Runs the script against a server; folder: a view that it can load, under version 2; empty: one without weights.

    (SGLang 0.5.23 does not survive a file that ends too early: it rolls back to the same file.)
    """
    heard: dict[str, Json] = {}
    async with aiohttp.ClientSession(base_url=url, timeout=aiohttp.ClientTimeout(total=120)) as client:
        for name, (method, path, body) in PLAIN.items():
            heard[name] = await _ask(client, method, path, body)
        heard["server_info"]["answer"] = {key: heard["server_info"]["answer"][key] for key in SERVER_INFO}
        parts = [part async for part in _stream(client, request(4, **EVERYTHING))]
        heard["stream_first"] = {"status": 200, "answer": parts[0]}
        heard["stream_last"] = {"status": 200, "answer": parts[-1]}
        heard["aborted"] = await _met_half_way(
            client, "/abort_request", {"rid": "aborted", "abort_all": False}, "aborted"
        )
        update = {"model_path": str(folder), "weight_version": "2", "flush_cache": False}
        heard["updated"] = await _met_half_way(client, "/update_weights_from_disk", update, "updated")
        heard["update_weights_from_disk"] = await _ask(client, "POST", "/update_weights_from_disk", update)
        worse = {"model_path": str(empty), "weight_version": "3", "flush_cache": False}
        heard["update_refused"] = await _ask(client, "POST", "/update_weights_from_disk", worse)
        heard["update_mended"] = await _ask(client, "POST", "/update_weights_from_disk", update)
    return heard


async def _ask(client: aiohttp.ClientSession, method: str, path: str, body: Json | None) -> Json:
    async with client.request(method, path, json=body) as answer:
        data = await answer.read()
    try:
        content = json.loads(data) if data else ""
    except ValueError:
        content = data.decode()
    return {"status": answer.status, "answer": content}


async def _stream(client: aiohttp.ClientSession, body: Json) -> AsyncIterator[Json]:
    async with client.post("/generate", json={**body, "stream": True}) as answer:
        async for line in answer.content:
            data = line.strip().removeprefix(b"data:").strip()
            if data and data != b"[DONE]":
                yield json.loads(data)


async def _met_half_way(client: aiohttp.ClientSession, path: str, body: Json, rid: str) -> Json:
    """The last part of a stream, in the middle of which another call came.

    Each has a rid of its own: two seconds after a stream SGLang aborts whatever runs under its rid.
    """
    last: Json = {}
    async with contextlib.aclosing(_stream(client, request(LONG, rid=rid))) as parts:
        last = await anext(parts)
        paused = path.startswith("/update")
        if paused:
            await _ask(client, "POST", "/pause_generation", {"mode": "in_place"})
        calling = asyncio.create_task(_ask(client, "POST", path, body))
        if paused:
            await calling
            await _ask(client, "POST", "/continue_generation", {})
        async for part in parts:
            last = part
        await calling
    return {"status": 200, "answer": last}


def shorten(value: Any, most: int = 6) -> Any:
    """For the file: long lists lose their middle, which no schema shows."""
    match value:
        case dict():
            return {key: shorten(item, most) for key, item in value.items()}
        case list() if len(value) > most:
            return [shorten(item, most) for item in value[:most]]
        case list():
            return [shorten(item, most) for item in value]
        case float():
            return round(value, 6)
        case str() if "/" in value:
            return value.rpartition("/")[2]
        case _:
            return value
