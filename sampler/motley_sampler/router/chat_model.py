"""Tokenizer and chat template of a Hugging Face model folder, without transformers: tokenizers and jinja2 only."""

from __future__ import annotations

import datetime
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import fsspec
import jinja2
import jinja2.ext
import jinja2.sandbox
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


class ChatModelError(Exception):
    """A model folder that cannot serve chat, or messages that its template refuses."""


class ChatModel:
    """Messages to token ids and back, as the model was trained to read them."""

    def __init__(self, files: Mapping[str, bytes], *, now: Callable[[], datetime.datetime]) -> None:
        """`files` holds the contents of FILES, those that exist. Raises ChatModelError naming what is missing."""
        if "tokenizer.json" not in files:
            raise ChatModelError("the model folder must hold tokenizer.json")
        try:
            self._tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
            config = json.loads(files.get("tokenizer_config.json", b"{}"))
            generation = json.loads(files.get("generation_config.json", b"{}"))
        except Exception as error:  # tokenizers raises bare Exception
            raise ChatModelError(f"the model folder's tokenizer cannot be read: {error}") from error
        template = files["chat_template.jinja"].decode() if "chat_template.jinja" in files else _template_of(config)
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(template)
        except jinja2.TemplateError as error:
            raise ChatModelError(f"the chat template cannot be read: {error}") from error
        self._special = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token")}
        self.stop_ids = self._stop_ids(generation)

    def prompt_ids(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, **more: Any) -> list[int]:
        """The conversation up to where the assistant speaks. Raises ChatModelError when the template refuses it."""
        try:
            text = self._template.render(
                messages=messages, tools=tools, add_generation_prompt=True, **self._special, **more
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise ChatModelError(f"the chat template refuses the messages: {error}") from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def text(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def token(self, token_id: int) -> str:
        """One token as it stands in the text; an unfinished character reads as the replacement character."""
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def pieces(self) -> Callable[[int], str]:
        """Decodes token by token: what each adds, empty while a character is unfinished."""
        stream = DecodeStream(skip_special_tokens=True)
        return lambda token_id: stream.step(self._tokenizer, token_id) or ""

    def _stop_ids(self, generation: Mapping[str, Any]) -> list[int]:
        eos = generation.get("eos_token_id")
        if eos is None and self._special["eos_token"]:
            eos = self._tokenizer.token_to_id(self._special["eos_token"])
        return [eos] if isinstance(eos, int) else list(eos or ())


def read_model_folder(source: str) -> dict[str, bytes]:
    """FILES of a folder given by path or fsspec URL. Raises ChatModelError when it cannot be read."""
    try:
        files, root = fsspec.core.url_to_fs(source)
        found = {}
        for name in FILES:
            path = str(pathlib.PurePosixPath(root) / name)
            if files.exists(path):
                found[name] = files.cat_file(path)
        return found
    except (OSError, ValueError, ImportError) as error:
        raise ChatModelError(f"the model folder {source} cannot be read: {error}") from error


def _template_of(config: Mapping[str, Any]) -> str:
    """A string, or the one named default among several."""
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {one["name"]: one["template"] for one in template}.get("default")
    if not isinstance(template, str):
        raise ChatModelError("the model folder must hold a chat template: chat_template.jinja or tokenizer_config.json")
    return template


def _token_text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """As transformers does it: plain JSON, not escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
