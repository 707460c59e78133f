"""Episodes of a policy on simulated tasks, many at once: how the warm start measures what it has made.

All episodes advance one token at a time and in step, so every row of the cache has the same length and nothing is padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from torch import Tensor

from warmstart import toolbox, words
from warmstart.demonstrator import NO_TOOL_CALL, SUBMIT
from warmstart.families import Task
from warmstart.policy import Cache, Params, Shape, forward


@dataclass(frozen=True)
class Limits:
    turns: int = 8
    reply_tokens: int = 24
    context: int = 192
    format_errors: int = 3  # replies in a row without a tool call that end an episode


@dataclass
class Row:
    """One episode. ids are fed so far or waiting; generated marks what the policy wrote."""

    task: Task
    files: dict[str, str]
    ids: list[int]
    generated: list[bool]
    logq: list[Tensor] = field(default_factory=list)  # [vocab] each: what every generated token was drawn from
    turns: int = 0
    bad: int = 0
    reply_start: int = 0
    ended_by: str = ""
    solved: bool = False


class Language:
    """Token ids that the loop needs, and encoding."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.end = self.special(words.IM_END)
        self.pad = self.special(words.END_OF_TEXT)
        self.reply_header = self.encode(f"{words.IM_START}assistant\n")

    def special(self, word: str) -> int:
        token = self.tokenizer.token_to_id(word)
        if token is None:
            raise ValueError(f"the tokenizer has no {word}")
        return int(token)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def message(self, role: str, content: str) -> list[int]:
        return self.encode(f"{words.IM_START}{role}\n{content}{words.IM_END}")


def tool_call(reply: str) -> str | None:
    """The command of a reply, None when there is none: the text between the first pair of tags."""
    _, tag, rest = reply.partition(words.TOOL_CALL)
    command, closing, _ = rest.partition(words.TOOL_CALL_END)
    return command.strip() if tag and closing and command.strip() else None


def filtered(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """log q over the smallest set of tokens whose probability reaches top_p; -inf outside. [N, V] -> [N, V]."""
    logp = (logits / temperature).log_softmax(-1)
    if top_p >= 1:
        return logp
    ordered, order = logp.exp().sort(-1, descending=True)
    keep = torch.zeros_like(logp, dtype=torch.bool).scatter(-1, order, ordered.cumsum(-1) - ordered < top_p)
    return logp.masked_fill(~keep, float("-inf")).log_softmax(-1)


@torch.no_grad()
def play(
    params: Params,
    shape: Shape,
    tasks: Sequence[Task],
    language: Language,
    generator: torch.Generator,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    limits: Limits = Limits(),
) -> list[Row]:
    """One episode per task, sampled from the policy."""
    rows = []
    for task in tasks:
        ids = language.message("user", task.instruction) + language.reply_header
        rows.append(Row(task, dict(task.files), ids, [False] * len(ids), reply_start=len(ids)))
    live = list(rows)
    cache = Cache.empty(shape, len(rows), limits.context)
    for at in range(limits.context - 1):
        feed = torch.tensor([[row.ids[at]] for row in live])
        logits, _ = forward(params, feed, shape, cache)
        logq = filtered(logits[:, 0], temperature, top_p)
        drawn = torch.multinomial(logq.exp(), 1, generator=generator)[:, 0].tolist()
        for index, row in enumerate(live):
            if len(row.ids) == at + 1:
                row.ids.append(drawn[index])
                row.generated.append(True)
                row.logq.append(logq[index])
                if drawn[index] == language.end or len(row.ids) - row.reply_start >= limits.reply_tokens:
                    _answer(row, language, limits)
        keep = [index for index, row in enumerate(live) if not row.ended_by]
        if not keep:
            break
        if len(keep) < 0.75 * len(live):
            live = [live[index] for index in keep]
            cache.keys = [key[keep] for key in cache.keys]
            cache.values = [value[keep] for value in cache.values]
        for row in live:
            if row.ended_by and len(row.ids) < at + 3:
                row.ids.append(language.end)  # idle until the next compaction; not part of the episode
    for row in rows:
        row.ended_by = row.ended_by or "context"
        del row.ids[len(row.generated) :]
        row.solved = row.ended_by != "formatErrors" and row.files == row.task.want
    return rows


def _answer(row: Row, language: Language, limits: Limits) -> None:
    """What the environment says to the reply that just ended."""
    row.turns += 1
    reply = language.decode(row.ids[row.reply_start :]).removesuffix(words.IM_END)
    command = tool_call(reply)
    if command is None:
        row.bad += 1
        content = NO_TOOL_CALL
    else:
        row.bad = 0
        if command == SUBMIT:
            row.ended_by = "submit"
            return
        content = _run(row, command)
    if row.bad >= limits.format_errors:
        row.ended_by = "formatErrors"
    elif row.turns >= limits.turns:
        row.ended_by = "maxTurns"
    else:
        closing = [] if row.ids[-1] == language.end else [language.end]
        ids = closing + language.message("tool", content) + language.reply_header
        row.ids += ids
        row.generated += [False] * len(ids)
        row.reply_start = len(row.ids)


def _run(row: Row, command: str) -> str:
    try:
        result = toolbox.run(command, row.files, row.task.dirs)
    except toolbox.UnsupportedError:
        return "exit 2"
    row.files = result.files
    return toolbox.tool_message(result)
