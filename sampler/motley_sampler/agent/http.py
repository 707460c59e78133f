"""The agent's address: SGLang's HTTP schema for the engine behind it, gated, and the agent's own few routes."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from motley_api import keys, records

from motley_sampler.agent import metrics
from motley_sampler.agent.agent import Agent
from motley_sampler.engines.protocol import BadRequest, EngineError, Json, Unavailable, parse_json
from motley_sampler.keepalive import KEEP_ALIVE_S, failure_body

log = logging.getLogger("motley.sampler")
VERSION_HEADER = "X-Motley-Version"
OPEN_PATHS = ("/health", "/metrics", "/motley/alive")  # what probes and scrapers ask, and nothing of the run in it


def make_app(agent: Agent, *, keep_alive_s: float = KEEP_ALIVE_S) -> web.Application:
    app = web.Application(
        middlewares=[_errors, _authorise(agent.settings.token)], client_max_size=agent.settings.body_bytes
    )
    routes = _Routes(agent, keep_alive_s)
    app.add_routes(
        [
            web.get("/health", routes.health),
            web.get("/health_generate", routes.health_generate),
            web.get("/metrics", routes.metrics),
            web.get("/model_info", routes.model_info),
            web.get("/server_info", routes.server_info),
            web.get("/v1/loads", routes.loads),
            web.post("/generate", routes.generate),
            web.post("/flush_cache", routes.flush_cache),
            web.post("/abort_request", routes.abort_request),
            web.post("/pause_generation", routes.pause),
            web.post("/continue_generation", routes.resume),
            web.post("/update_weights_from_disk", routes.update_weights),
            web.get("/motley/alive", routes.alive),
            web.get("/motley/status", routes.status),
            web.post("/motley/drain", routes.drain),
            web.delete("/motley/sessions/{session}", routes.close_session),
        ]
    )
    return app


def _json(content: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(content), status=status, content_type="application/json", headers=headers
    )


def _error(status: int, message: str, headers: dict[str, str] | None = None, **more: object) -> web.Response:
    """SGLang's shape of an error."""
    return _json({"error": {"message": message}, **more}, status, headers)


def _authorise(token: str) -> Middleware:
    want = f"Bearer {token}".encode()

    @web.middleware
    async def authorise(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode()
        if request.path not in OPEN_PATHS and not hmac.compare_digest(given, want):
            return _error(401, "Authorization must be Bearer and the run's token")
        return await handler(request)

    return authorise


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Unavailable as error:
        return _error(503, str(error), {"Retry-After": "1"})
    except EngineError as error:
        return _error(error.status, str(error))


async def _body(request: web.Request, limit: int) -> Json:
    """The JSON object. A body over the limit is refused by its announced length, before it is read."""
    too_long = BadRequest(f"body must have at most {limit} bytes")
    if request.content_length is not None and request.content_length > limit:
        raise too_long
    try:
        data = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise too_long from None
    return parse_json(data)


class _Routes:
    def __init__(self, agent: Agent, keep_alive_s: float) -> None:
        self._agent, self._keep_alive_s = agent, keep_alive_s

    # --- generation -----------------------------------------------------------------------------------------------

    async def generate(self, request: web.Request) -> web.StreamResponse:
        agent = self._agent
        body = await _body(request, agent.settings.body_bytes)
        session = body.get("session_id") or request.headers.get(keys.ROUTING_KEY_HEADER, "")
        if not isinstance(session, str):
            raise BadRequest(f"session_id must be a string, got {type(session).__name__}")
        if session:
            body["session_id"] = session
        too_old = agent.admit(session, _min_version(request))
        if too_old is not None:
            message = f"weights version {too_old} is served, the request needs a newer one"
            return _error(409, message, {"Retry-After": "1"}, version=too_old)
        agent.in_flight += 1
        began_s = time.monotonic()
        try:
            answer = await (self._streamed if body.get("stream") is True else self._whole)(request, body)
            agent.standing.turn_took(time.monotonic() - began_s)
            return answer
        finally:
            agent.in_flight -= 1
            agent.admit_again(session)

    async def _whole(self, request: web.Request, body: Json) -> web.StreamResponse:
        """One JSON body, with spaces before it while it takes long."""
        work = asyncio.ensure_future(self._released(body))
        response: web.StreamResponse | None = None
        try:
            while not (await asyncio.wait([work], timeout=self._keep_alive_s))[0]:
                if response is None:
                    response = web.StreamResponse(headers={"Content-Type": "application/json"})
                    await response.prepare(request)
                await response.write(b" ")
            if response is None:
                return _json(work.result(), headers={VERSION_HEADER: str(self._agent.standing.version)})
            try:
                told = msgspec.json.encode(work.result())
            except EngineError as error:
                told = failure_body(error.status, str(error))
            await response.write(told)
            await response.write_eof()
            return response
        finally:
            work.cancel()

    async def _released(self, body: Json) -> object:
        agent, lineage = self._agent, self._agent.standing.lineage
        reply = await agent.engine.generate(body)
        if isinstance(reply, list):
            return [await agent.release(one, lineage) for one in reply]
        return await agent.release(reply, lineage)

    async def _streamed(self, request: web.Request, body: Json) -> web.StreamResponse:
        """Server-sent events. Until the first token, or the first sign of life in its place, nothing is sent, so that a
        refusal still has its status."""
        agent, lineage = self._agent, self._agent.standing.lineage
        chunks = _or_silence(agent.engine.stream(body), self._keep_alive_s)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            async for chunk in chunks:
                event = b": keep-alive\n\n" if chunk is None else _event(await agent.release(chunk, lineage))
                if not response.prepared:
                    response.headers[VERSION_HEADER] = str(agent.standing.version)
                    await response.prepare(request)
                await response.write(event)
        except EngineError as error:
            if not response.prepared:
                raise
            await response.write(b"data: " + failure_body(error.status, str(error)) + b"\n\n")
        finally:
            await chunks.aclose()
        await response.write(b"data: [DONE]\n\n")
        return response

    # --- what the engine is ---------------------------------------------------------------------------------------

    async def health(self, request: web.Request) -> web.Response:
        """200 only while this engine takes new sessions."""
        state = self._agent.state()
        content = {"ready": state.ready, "version": state.version, "reason": state.reason, "message": state.message}
        return _json(content, 200 if state.ready else 503)

    async def health_generate(self, request: web.Request) -> web.Response:
        """200 when the engine really decodes a token."""
        self._agent.admit("", 0)
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}, "extra_key": "health"}
        await self._agent.engine.generate(body, counted=False)
        return _json({"status": "ok"})

    async def alive(self, request: web.Request) -> web.Response:
        alive = self._agent.alive()
        return _json({"alive": alive, "stalledSeconds": round(self._agent.stalled_s(), 1)}, 200 if alive else 503)

    async def status(self, request: web.Request) -> web.Response:
        return web.Response(body=records.encode_json(self._agent.state()), content_type="application/json")

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=metrics.render(self._agent.state()), content_type="text/plain")

    async def model_info(self, request: web.Request) -> web.Response:
        return _json(self._agent.engine.model_info())

    async def server_info(self, request: web.Request) -> web.Response:
        settings = self._agent.settings
        spec = settings.spec
        return _json(
            {
                **self._agent.engine.model_info(),
                "engine": spec.engine.type.value,
                "gpu_type": spec.gpu_type.value,
                "precision": spec.precision.value,
                "kv_cache_precision": spec.kv_cache_precision.value,
                "view": settings.view,
                "group": settings.group,
            }
        )

    async def loads(self, request: web.Request) -> web.Response:
        """SGLang's /v1/loads for its one data-parallel rank."""
        load, info = self._agent.engine.load(), self._agent.engine.model_info()
        total = info.get("max_total_num_tokens", 0)
        rank = {
            "dp_rank": 0,
            "num_running_reqs": load.running,
            "num_waiting_reqs": load.queued,
            "num_total_reqs": load.running + load.queued,
            "max_total_num_tokens": total,
            "num_used_tokens": total * load.kv_used_percent // 100,
            "token_usage": load.kv_used_percent / 100,
            "cache_hit_rate": load.cached_tokens / load.prompt_tokens if load.prompt_tokens else 0.0,
            "max_running_requests": info.get("max_running_requests", 0),
        }
        return _json({"dp_rank_count": 1, "loads": [rank]})

    # --- control --------------------------------------------------------------------------------------------------

    async def flush_cache(self, request: web.Request) -> web.Response:
        await self._agent.engine.flush_cache()
        return _json({"success": True})

    async def abort_request(self, request: web.Request) -> web.Response:
        body = await _body(request, self._agent.settings.body_bytes)
        await self._agent.engine.abort(str(body.get("rid", "")), everything=body.get("abort_all") is True)
        return _json({"success": True})

    async def pause(self, request: web.Request) -> web.Response:
        await self._agent.engine.pause()
        return _json({"status": "ok"})

    async def resume(self, request: web.Request) -> web.Response:
        await self._agent.engine.resume()
        return _json({"status": "ok"})

    async def update_weights(self, request: web.Request) -> web.Response:
        """Proven like any version. The folder must lie in this pod's scratch space."""
        body = await _body(request, self._agent.settings.body_bytes)
        path, version = body.get("model_path"), body.get("weight_version")
        if not isinstance(path, str) or not isinstance(version, str) or not version.isdecimal():
            raise BadRequest("model_path must be a folder, and weight_version a whole number as a string")
        folder, scratch = Path(path).resolve(), self._agent.settings.scratch.resolve()
        if not folder.is_relative_to(scratch) or not folder.is_dir():
            raise BadRequest(f"model_path must be a folder in {keys.ENV_SCRATCH}, got {path}")
        verdict = await self._agent.apply_folder(folder, int(version))
        message = f"{verdict.reason}: {verdict.message}" if verdict.reason else f"version {version} is served"
        return _json({"success": verdict.passed, "message": message}, 200 if verdict.passed else 400)

    async def drain(self, request: web.Request) -> web.Response:
        self._agent.leave()
        return web.Response(body=records.encode_json(self._agent.state()), content_type="application/json", status=202)

    async def close_session(self, request: web.Request) -> web.Response:
        """Its holder is done: the prefix may go, and a drain need not wait."""
        await self._agent.close_session(request.match_info["session"])
        return web.Response(status=204)


def _min_version(request: web.Request) -> int:
    text = request.headers.get(keys.MIN_VERSION_HEADER, "-1")
    try:
        return int(text)
    except ValueError:
        raise BadRequest(f"{keys.MIN_VERSION_HEADER} must be a whole number, got {text!r}") from None


def _event(content: object) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


async def _or_silence(chunks: AsyncIterator[Json], silence_s: float) -> AsyncGenerator[Json | None]:
    """Passes chunks on; None whenever none came for so long."""
    upcoming = asyncio.ensure_future(anext(chunks, None))
    try:
        while True:
            done, _ = await asyncio.wait([upcoming], timeout=silence_s)
            if not done:
                yield None
                continue
            chunk = upcoming.result()
            if chunk is None:
                return
            upcoming = asyncio.ensure_future(anext(chunks, None))
            yield chunk
    finally:
        upcoming.cancel()
