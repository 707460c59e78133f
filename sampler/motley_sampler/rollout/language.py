"""Text to tokens and back, by the model's own tokenizer and chat template. Token in, token out.

A transcript only ever grows at its end: what a tool result adds is encoded by itself and appended, and nothing that was sent
or sampled before is encoded again. So the ids recorded are the ids sampled, and every turn's prefix is in the engine's cache.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
from tokenizers import Tokenizer

MODEL_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
)
_REPLY = "\ue000reply\ue001"  # private-use characters: no template or tool result holds this
BASH_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a bash command in /app. The command `submit` alone ends the work.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command to run."}},
            "required": ["command"],
        },
    },
}
SYSTEM_PROMPT = (
    "You work on a task in the folder /app, through the bash tool. Each call starts a new shell in /app. There is no network. "
    "When the task is done, call bash with the command: submit"
)

Message = dict[str, Any]


class LanguageError(ValueError):
    """A model folder whose tokenizer or template cannot be used."""


@dataclass(frozen=True)
class Language:
    """One model's tokens."""

    tokenizer: Tokenizer
    template: jinja2.Template
    takes_tools: bool
    variables: dict[str, Any]  # what the template may use besides messages: bos_token and the like
    stop_ids: tuple[int, ...]
    special_texts: tuple[str, ...]

    def opening(self, instruction: str) -> list[int]:
        """The first prompt. A template that takes no tools comes from a model that was trained on this loop as it is."""
        return self._encode(self._render(self._first_messages(instruction), reply_next=True))

    def after_reply(self, reply_ids: Sequence[int], result: str) -> list[int]:
        """What follows a reply: its end, where the reply lacks one, the tool result, and the next reply's header."""
        messages = [
            *self._first_messages("-"),
            {"role": "assistant", "content": _REPLY},
            {"role": "tool", "name": "bash", "content": self._defused(result)},
        ]
        text = self._render(messages, reply_next=True)
        _, found, rest = text.rpartition(_REPLY)
        if not found:
            raise LanguageError("the chat template does not show what an assistant said: its turns cannot be continued")
        if reply_ids and (last := self.tokenizer.id_to_token(reply_ids[-1])) and reply_ids[-1] in self.stop_ids:
            rest = rest.removeprefix(last)
        return self._encode(rest)

    def decode(self, ids: Sequence[int]) -> str:
        """A reply's text without the token that ended it."""
        kept = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        return str(self.tokenizer.decode(list(kept), skip_special_tokens=False))

    def _first_messages(self, instruction: str) -> list[Message]:
        user = {"role": "user", "content": instruction.strip()}
        return [{"role": "system", "content": SYSTEM_PROMPT}, user] if self.takes_tools else [user]

    def _render(self, messages: list[Message], *, reply_next: bool) -> str:
        tools = [BASH_TOOL] if self.takes_tools else None
        try:
            return self.template.render(
                messages=messages, tools=tools, add_generation_prompt=reply_next, **self.variables
            )
        except jinja2.TemplateError as error:
            raise LanguageError(f"the chat template failed: {error}") from error

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def _defused(self, text: str) -> str:
        """A command's output must not end its own message: control tokens in it are broken up."""
        for special in self.special_texts:
            if special in text:
                text = text.replace(special, f"{special[0]} {special[1:]}")
        return text


def load_language(folder: Path) -> Language:
    """Reads a Hugging Face model folder: tokenizer.json, and the template beside it or in tokenizer_config.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise LanguageError(f"{path}: is missing; only models with a fast tokenizer can be rolled out")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _json(folder / "tokenizer_config.json")
    source = _template_source(folder, config)
    added = json.loads(path.read_text(encoding="utf-8")).get("added_tokens", [])
    return Language(
        tokenizer=tokenizer,
        template=_environment().from_string(source),
        takes_tools="tools" in source,
        variables={name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token")},
        stop_ids=_stop_ids(folder, tokenizer, config),
        special_texts=tuple(token["content"] for token in added if token.get("special") and len(token["content"]) > 1),
    )


def fetch_model_files(source: str, cache: Path) -> Path:
    """The small files of a model folder, here: a path as it is, a remote URL's copied to `cache`."""
    if "://" not in source or source.startswith("file://"):
        return Path(source.removeprefix("file://"))
    import fsspec  # only remote sources need it

    filesystem, remote = fsspec.core.url_to_fs(source)
    cache.mkdir(parents=True, exist_ok=True)
    for name in MODEL_FILES:
        if filesystem.exists(f"{remote.rstrip('/')}/{name}"):
            filesystem.get_file(f"{remote.rstrip('/')}/{name}", str(cache / name))
    return cache


def _template_source(folder: Path, config: dict[str, Any]) -> str:
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):  # several templates under names
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("tool_use", named.get("default"))
    if not isinstance(source, str):
        raise LanguageError(f"{folder}: neither chat_template.jinja nor chat_template in tokenizer_config.json")
    return source


def _environment() -> jinja2.Environment:
    """As transformers sets it up: templates are written against that. Templates are data and run sandboxed."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    return environment


def _stop_ids(folder: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> tuple[int, ...]:
    """Where a reply ends: the end of a message, and what the model's own configuration says."""
    found: list[int] = []
    for source in (_json(folder / "generation_config.json"), _json(folder / "config.json")):
        listed = source.get("eos_token_id")
        found += listed if isinstance(listed, list) else [] if listed is None else [listed]
    for text in ("<|im_end|>", _token_text(config.get("eos_token"))):
        token = tokenizer.token_to_id(text) if text else None
        found += [] if token is None else [token]
    if not found:
        raise LanguageError(f"{folder}: no end-of-turn token: eos_token_id is nowhere and there is no <|im_end|>")
    return tuple(dict.fromkeys(found))


def _token_text(entry: Any) -> str:
    return str(entry.get("content", "")) if isinstance(entry, dict) else str(entry or "")


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
