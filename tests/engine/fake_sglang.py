"""A stand-in for `python -m sglang.launch_server`: SGLang's endpoints in the recorded shape, with the reference engine's tokens.

Run as a program of its own with the arguments that a real server gets; those that it does not know are ignored.
"""

from __future__ import annotations

import argparse
import copy
import json
import signal
from pathlib import Path
from typing import Any

from aiohttp import web
from engine import exchanges, tiny
from motley_sampler.engines.protocol import BadRequest, EngineError, Unavailable, parse_json
from motley_sampler.engines.reference.engine import ReferenceEngine

Json = dict[str, Any]


class FakeSglang:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._recorded: Json = exchanges.recorded()["exchanges"]
        running = arguments.max_running_requests
        self._engine = ReferenceEngine(
            tiny.EXACT, slots=running + 4, max_running=running, context_length=arguments.context_length
        )

    def app(self) -> web.Application:
        app = web.Application()
        app.on_startup.append(self._start)
        app.on_cleanup.append(self._stop)
        app.add_routes(
            [
                web.get("/health", self._plain("health")),
                web.get("/health_generate", self._plain("health_generate")),
                web.get("/server_info", self._server_info),
                web.get("/v1/loads", self._loads),
                web.post("/generate", self._generate),
                web.post("/pause_generation", self._pause),
                web.post("/continue_generation", self._continue),
                web.post("/abort_request", self._abort),
                web.post("/flush_cache", self._flush),
                web.post("/update_weights_from_disk", self._update),
            ]
        )
        return app

    async def _start(self, app: web.Application) -> None:
        await self._engine.start(Path(self._arguments.model_path), int(self._arguments.weight_version))
        _outlive_updates(self._engine)

    async def _stop(self, app: web.Application) -> None:
        await self._engine.stop()

    # --- shapes ---------------------------------------------------------------------------------------------------

    def _say(self, name: str, **changes: Any) -> web.Response:
        """The recorded answer, with what is known better."""
        found = self._recorded[name]
        answer = copy.deepcopy(found["answer"])
        if not isinstance(answer, dict):
            return web.Response(text=answer, status=found["status"])
        return web.json_response(answer | changes, status=found["status"])

    def _plain(self, name: str) -> Any:
        async def handler(request: web.Request) -> web.Response:
            return self._say(name)

        return handler

    def _refusal(self, message: str) -> web.Response:
        answer = copy.deepcopy(self._recorded["refused_top_k"]["answer"])
        answer["error"]["message"] = message
        return web.json_response(answer, status=self._recorded["refused_top_k"]["status"])

    def _reply(self, ours: Json) -> Json:
        """A reply in the recorded shape: SGLang's further fields as recorded, the fields that both have from the engine."""
        finished = ours["meta_info"]["finish_reason"] is not None
        names = ("generate", "generate_prompt_logprobs", "generate_supports", "generate_selected")
        known = {key for name in (names if finished else ("stream_first",)) for key in self._meta(name)}
        shape = copy.deepcopy(self._recorded["generate" if finished else "stream_first"]["answer"])
        meta = {key: value for key, value in shape["meta_info"].items() if key not in exchanges.ON_REQUEST}
        meta |= {key: value for key, value in ours["meta_info"].items() if key in known}
        meta["cached_tokens_details"] = {"device": meta["cached_tokens"], "host": 0} if meta["cached_tokens"] else None
        if "output_token_logprobs" in meta:
            meta["output_token_logprobs_length"] = len(meta["output_token_logprobs"])
        if "output_top_logprobs" in meta:
            meta["input_top_logprobs"] = []
        return shape | {"output_ids": ours["output_ids"], "meta_info": meta}

    def _meta(self, name: str) -> Json:
        meta: Json = self._recorded[name]["answer"]["meta_info"]
        return meta

    # --- endpoints ------------------------------------------------------------------------------------------------

    async def _server_info(self, request: web.Request) -> web.Response:
        given = self._arguments
        return self._say(
            "server_info",
            context_length=given.context_length,
            max_running_requests=given.max_running_requests,
            weight_version=given.weight_version,
        )

    async def _loads(self, request: web.Request) -> web.Response:
        load = self._engine.load()
        rank = copy.deepcopy(self._recorded["loads"]["answer"]["loads"][0])
        rank |= {
            "num_running_reqs": load.running,
            "num_waiting_reqs": load.queued,
            "token_usage": load.kv_used_percent / 100,
        }
        return self._say("loads", loads=[rank])

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        try:
            body = parse_json(await request.read())
            if body.get("stream"):
                return await self._stream(request, body)
            found = await self._engine.generate(body)
        except BadRequest as error:
            return self._refusal(str(error))
        except Unavailable as error:
            return web.json_response({"error": {"message": str(error)}}, status=503)
        if isinstance(found, list):
            return web.json_response([self._reply(one) for one in found])
        return web.json_response(self._reply(found))

    async def _stream(self, request: web.Request, body: Json) -> web.StreamResponse:
        parts = self._engine.stream(body)
        first = await anext(parts)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + json.dumps(self._reply(first)).encode() + b"\n\n")
        async for part in parts:
            await response.write(b"data: " + json.dumps(self._reply(part)).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _pause(self, request: web.Request) -> web.Response:
        await self._engine.pause()
        return self._say("pause_generation")

    async def _continue(self, request: web.Request) -> web.Response:
        await self._engine.resume()
        return self._say("continue_generation")

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        await self._engine.abort(body["rid"], everything=body["abort_all"])
        return self._say("abort_request")

    async def _flush(self, request: web.Request) -> web.Response:
        await self._engine.flush_cache()
        return self._say("flush_cache")

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        try:
            await self._engine.update(Path(body["model_path"]), int(body["weight_version"]))
        except EngineError as error:
            return self._say("update_refused", message=str(error))
        return self._say("update_weights_from_disk")


def _outlive_updates(engine: ReferenceEngine) -> None:
    """Prefixes cross versions, as they do in SGLang's radix cache: keeping them apart is the adapter's work."""
    assert engine._scheduler is not None
    table = engine._scheduler.table
    place = table.place
    table.place = lambda prompt, **wanted: place(prompt, **{**wanted, "version": 0})  # type: ignore[method-assign]
    table.change_version = lambda: None  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("model-path", "host", "weight-version"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("port", "context-length", "max-running-requests"):
        parser.add_argument(f"--{name}", type=int, required=True)
    arguments, _ = parser.parse_known_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    web.run_app(FakeSglang(arguments).app(), host=arguments.host, port=arguments.port, print=None, access_log=None)


if __name__ == "__main__":
    main()
