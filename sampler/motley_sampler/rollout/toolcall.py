"""What a reply asks for: one bash command, the end of the episode, or nothing that can be understood. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from motley_sampler.sandbox.host import CommandResult, Ended

OPEN, CLOSE = "<tool_call>", "</tool_call>"
SUBMIT = "submit"
NO_TOOL_CALL = "error: no tool call"
MALFORMED = "error: malformed tool call"
_FUNCTION = re.compile(r"<function=([\w-]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=command>\n?(.*?)\n?</parameter>", re.DOTALL)


@dataclass(frozen=True)
class Command:
    text: str


@dataclass(frozen=True)
class Submit:
    pass


@dataclass(frozen=True)
class FormatError:
    message: str  # what the environment answers


Action = Command | Submit | FormatError


def parse_reply(text: str) -> Action:
    """The first tool call after the reply's thinking, in any of three spellings.

    JSON (``{"name": "bash", "arguments": {"command": "ls"}}``), Qwen3-Coder's XML (``<function=bash><parameter=command>``), or
    the bare command.
    """
    spoken = text.rpartition("</think>")[2]
    _, opened, rest = spoken.partition(OPEN)
    body, closed, _ = rest.partition(CLOSE)
    body = body.strip()
    if not opened or not closed or not body:
        return FormatError(NO_TOOL_CALL)
    if body.startswith("{"):
        command = _from_json(body)
    elif body.startswith("<function="):
        command = _from_xml(body)
    else:
        command = body
    if command is None or not command.strip():
        return FormatError(MALFORMED)
    return Submit() if command.strip() == SUBMIT else Command(command)


def _from_json(body: str) -> str | None:
    try:
        call = json.loads(body)
        arguments = call.get("arguments", {})
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return None
    return _command(call.get("name"), arguments.get("command") if isinstance(arguments, dict) else None)


def _from_xml(body: str) -> str | None:
    function = _FUNCTION.search(body)
    if function is None:
        return None
    parameter = _PARAMETER.search(function[2])
    return _command(function[1], None if parameter is None else parameter[1])


def _command(name: object, command: object) -> str | None:
    if name == SUBMIT:
        return SUBMIT
    return command if name == "bash" and isinstance(command, str) else None


def tool_message(result: CommandResult, timeout_s: float) -> str:
    """What the policy sees of a command: its output, then how it ended unless that was well, ``ok`` for nothing at all."""
    lines = [result.output.rstrip("\n")] if result.output.strip("\n") else []
    match result.ended:
        case Ended.TIMEOUT:
            lines.append(f"stopped after {timeout_s:g} s")
        case Ended.DISK_LIMIT | Ended.OUTPUT_LIMIT:
            lines.append(
                f"stopped: {'too many bytes on disk' if result.ended is Ended.DISK_LIMIT else 'too much output'}"
            )
        case Ended.EXIT if result.exit_code:
            lines.append(f"exit {result.exit_code if result.exit_code > 0 else 128 - result.exit_code}")
    return "\n".join(lines) or "ok"
