"""A demonstrator that knows each task's solution and has bad habits.

The habits are whole, likely mistakes of a beginner (guessing instead of reading, ``sed`` without ``-i``, ``>`` for ``>>``, the wrong
file, stopping early), not noise on every token: a policy that imitates them succeeds less than half of the time, and can learn from
its reward which of its habits to drop.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from warmstart import toolbox
from warmstart.families import Task
from warmstart.words import TOOL_CALL, TOOL_CALL_END

NO_TOOL_CALL = "error: no tool call"  # what the rollout answers to a reply without one
SUBMIT = "submit"


@dataclass(frozen=True)
class Habits:
    """Probabilities of each habit, per episode except `untagged` (per reply)."""

    guess: float = 0.22  # writes without reading
    slip: float = 0.23  # reads, then writes in a way that looks right and is not
    early: float = 0.1  # reads, then submits
    peek: float = 0.08  # looks at something that it does not need
    untagged: float = 0.03  # forgets the tool-call tags; repeats itself with them


EXPERT = Habits(0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Episode:
    task: Task
    messages: tuple[tuple[str, str], ...]  # (role, content): user, then assistant and tool in turn
    solved: bool


def plan(task: Task, rng: random.Random, habits: Habits) -> list[str]:
    """The commands of one episode, ``submit`` last."""
    reads, writes = list(task.reads), list(task.writes)
    draw = rng.random()
    if draw < habits.guess:
        guess = rng.choice([lure for lure in task.lures if lure != task.hidden and lure not in task.instruction])
        reads, writes = [], [command.replace(task.hidden, guess) for command in writes]
    elif draw < habits.guess + habits.slip:
        writes = list(rng.choice(task.slips))
    elif draw < habits.guess + habits.slip + habits.early:
        writes = writes[:-1]
    if rng.random() < habits.peek:
        reads.insert(0, rng.choice(_peeks(task)))
    return [*reads, *writes, SUBMIT]


def _peeks(task: Task) -> list[str]:
    mentioned = [path for path in task.files if path in task.instruction]
    folders = sorted({path.split("/")[0] + "/" for path in mentioned} or {"src/"})
    return [f"cat {path}" for path in mentioned] + [f"ls {folder}" for folder in folders]


def demonstrate(task: Task, rng: random.Random, habits: Habits) -> Episode:
    """One whole episode, played against the task's files."""
    messages = [("user", task.instruction)]
    files = dict(task.files)
    for command in plan(task, rng, habits):
        if rng.random() < habits.untagged:
            messages += [("assistant", command), ("tool", NO_TOOL_CALL)]
        messages.append(("assistant", f"{TOOL_CALL}{command}{TOOL_CALL_END}"))
        if command != SUBMIT:
            result = toolbox.run(command, files, task.dirs)
            files = result.files
            messages.append(("tool", toolbox.tool_message(result)))
    return Episode(task, tuple(messages), files == task.want)
