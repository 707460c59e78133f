"""POST /v1/chat/completions and GET /v1/models: OpenAI's protocol over the proxy's relay."""

from __future__ import annotations

import asyncio
import datetime
import secrets
import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

from motley_sampler.router import chat
from motley_sampler.router.chat import ChatRequest, ChatTranslator, Told
from motley_sampler.router.proxy import Peek, Proxy, session_key
from motley_sampler.router.wire import RequestError, decode, json_response, log, read_body

if TYPE_CHECKING:
    from motley_sampler.router.chat_model import ChatModel


class Completions:
    """Holds the model's tokenizer and template, read at the first request."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._settings = proxy.router.settings
        self._model: ChatModel | None = None  # its imports wait until somebody chats
        self._lock = asyncio.Lock()

    async def models(self, request: web.Request) -> web.Response:
        model = {"id": self._settings.model_name, "object": "model", "created": 0, "owned_by": "motley"}
        return json_response({"object": "list", "data": [model]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        asked = decode(await read_body(request, self._settings.max_body_bytes), ChatRequest)
        chat.refuse_unsupported(asked)
        messages = chat.template_messages(asked.messages)
        model = await self._loaded()
        prompt_ids = await asyncio.to_thread(_prompt_ids, model, messages, asked)
        body = chat.generate_body(asked, prompt_ids, model.stop_ids, self._settings.context_length)
        key = session_key(request, Peek(asked.stream, asked.session_id, asked.routing_key, asked.user))
        name = secrets.token_hex(12)

        def translator(group: str, view: str) -> ChatTranslator:
            told = Told(
                id=f"chatcmpl-{name}",
                created_unix_s=int(time.time()),
                model=asked.model or self._settings.model_name,
                fingerprint=f"{group}/{view}",
                call_id=lambda index: f"call_{name}_{index}",
            )
            return ChatTranslator(asked, model, told)

        return await self._proxy.relay(
            request, body, key=key, stream=asked.stream, translator=translator, label="/v1/chat/completions"
        )

    async def _loaded(self) -> ChatModel:
        async with self._lock:
            if self._model is None:
                self._model = await asyncio.to_thread(_load, self._settings.model_source)
                log("chat-model", source=self._settings.model_source)
            return self._model


def _load(source: str) -> ChatModel:
    from motley_sampler.router import chat_model

    if not source:
        raise RequestError(501, "NoChatModel", "chat needs model.source in the run's configuration; use /generate")
    try:
        files = chat_model.read_model_folder(source)
        return chat_model.ChatModel(files, now=lambda: datetime.datetime.now(datetime.UTC))
    except chat_model.ChatModelError as error:
        raise RequestError(501, "NoChatModel", f"{error} (model.source is {source})") from error


def _prompt_ids(model: ChatModel, messages: list[dict[str, Any]], asked: ChatRequest) -> list[int]:
    from motley_sampler.router import chat_model

    try:
        return model.prompt_ids(messages, asked.tools_in_use, **(asked.chat_template_kwargs or {}))
    except chat_model.ChatModelError as error:
        raise RequestError(400, "InvalidRequest", str(error)) from error


def add_routes(app: web.Application, completions: Completions) -> None:
    app.router.add_post("/v1/chat/completions", completions.complete)
    app.router.add_get("/v1/models", completions.models)
