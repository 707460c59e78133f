"""Grading: the policy's files in a fresh sandbox, the task's tests beside them, one reward out of it.

What goes wrong with the grader is an infrastructure failure and never a reward: GradingError carries its kind. The reward
is read from a folder that exists only for the verifier, after every process of its sandbox is dead.

What this cannot prevent, as in any harness of this kind: a test.sh that runs the policy's code runs it beside the reward file.
Tests that must withstand a cheating policy run its code as another user or compute the reward from its output.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import stat
import uuid
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from motley_sampler.sandbox.host import (
    DEFAULT_LIMITS,
    CommandResult,
    Ended,
    Limits,
    Mount,
    SandboxError,
    SandboxHost,
    remove_tree,
)
from motley_sampler.tasks.files import copy_tree
from motley_sampler.tasks.format import Task

_MAX_REWARD_BYTES = 4096


class GradingFailure(StrEnum):
    TIMEOUT = "GraderTimeout"
    LIMIT = "GraderLimit"
    NO_REWARD = "GraderNoReward"
    INVALID_REWARD = "GraderInvalidReward"
    SANDBOX = "GraderSandbox"


class GradingError(Exception):
    def __init__(self, kind: GradingFailure, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


@dataclass(frozen=True)
class Grade:
    reward: float
    output: str  # what the verifier printed, for people
    wall_s: float
    cpu_s: float


async def grade(host: SandboxHost, task: Task, workspace: Path, limits: Limits = DEFAULT_LIMITS) -> Grade:
    """Grades the files in `workspace` (left untouched). Raises GradingError when there is no trustworthy reward."""
    folder = host.scratch / f"grade-{uuid.uuid4().hex[:12]}"
    try:
        await asyncio.to_thread(_lay_out, task, workspace, folder)
        result = await _run_tests(host, task, folder, limits)
        reward = read_reward(folder / "logs" / "verifier")
    except (SandboxError, OSError) as error:
        raise GradingError(GradingFailure.SANDBOX, str(error)) from error
    except GradingError as error:
        if error.kind is GradingFailure.NO_REWARD:
            error.detail = f"exit code {result.exit_code}: {result.output[-500:]}"
        raise
    finally:
        await asyncio.to_thread(remove_tree, folder)
    return Grade(reward, result.output, result.wall_s, result.cpu_s)


def _lay_out(task: Task, workspace: Path, folder: Path) -> None:
    copy_tree(workspace, folder / "app")
    copy_tree(task.tests, folder / "tests", readable=True)
    (folder / "logs" / "verifier").mkdir(parents=True)


async def _run_tests(host: SandboxHost, task: Task, folder: Path, limits: Limits) -> CommandResult:
    mounts = [
        Mount(folder / "app", "/app", writable=True),
        Mount(folder / "tests", "/tests"),
        Mount(folder / "logs", "/logs", writable=True),
    ]
    async with await host.create(mounts, limits, env=task.verifier_env) as sandbox:
        result = await sandbox.run("bash /tests/test.sh", timeout_s=task.verifier_timeout_s)
    match result.ended:
        case Ended.EXIT:
            return result
        case Ended.TIMEOUT:
            raise GradingError(GradingFailure.TIMEOUT, f"verifier ran past {task.verifier_timeout_s:g} s")
        case _:
            raise GradingError(GradingFailure.LIMIT, f"verifier stopped: {result.ended}")


def read_reward(folder: Path) -> float:
    """reward.txt holds one number; without it reward.json holds one number under "reward", or one number in all."""
    text = _read_plain_file(folder / "reward.txt")
    if text is not None:
        return _number(text.strip(), "reward.txt")
    text = _read_plain_file(folder / "reward.json")
    if text is None:
        raise GradingError(GradingFailure.NO_REWARD, "neither reward.txt nor reward.json was written")
    try:
        rewards = json.loads(text)
    except ValueError as error:
        raise GradingError(GradingFailure.INVALID_REWARD, f"reward.json is not JSON: {error}") from error
    if isinstance(rewards, dict):
        rewards = rewards.get("reward", next(iter(rewards.values())) if len(rewards) == 1 else None)
    if isinstance(rewards, bool) or not isinstance(rewards, int | float):
        raise GradingError(GradingFailure.INVALID_REWARD, f"reward.json holds no single number: {text[:200]!r}")
    return _number(str(rewards), "reward.json")


def _number(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise GradingError(GradingFailure.INVALID_REWARD, f"{name} holds {text[:200]!r}, not a finite number")
    return value


def _read_plain_file(path: Path) -> str | None:
    """None when there is no such file. A link or a device in its place is refused: it would be read with our rights."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise GradingError(GradingFailure.INVALID_REWARD, f"{path.name} cannot be read: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise GradingError(GradingFailure.INVALID_REWARD, f"{path.name} is not a plain file")
        return file.read(_MAX_REWARD_BYTES).decode(errors="replace")
