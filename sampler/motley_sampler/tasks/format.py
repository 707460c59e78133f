"""Task folders in Harbor's format, read and checked.

    <task>/task.toml         timeouts, resources, metadata
    <task>/instruction.md    what the policy is asked
    <task>/environment/      files of the workspace (/app); a Dockerfile or compose file there is for clusters and stays out
    <task>/tests/test.sh     writes the reward to /logs/verifier/reward.txt or reward.json
    <task>/solution/solve.sh a reference solution (optional; the audit wants it)

Of Harbor's schema this reads single-step tasks. Sandboxes have no network, whatever allow_internet says.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

MIB = 1 << 20
SPLITS = ("train", "heldout")
BUILD_FILES = frozenset({"Dockerfile", "docker-compose.yaml", "docker-compose.yml", ".dockerignore"})
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", re.IGNORECASE)
_SIZE_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class TaskError(ValueError):
    """A task folder that cannot be used; the text names the path and what is wrong there."""


class _Verifier(msgspec.Struct, frozen=True):
    timeout_sec: float = 600.0
    env: dict[str, str] = {}


class _Agent(msgspec.Struct, frozen=True):
    timeout_sec: float | None = None


class _Environment(msgspec.Struct, frozen=True):
    memory_mb: int | None = None
    storage_mb: int | None = None
    memory: str | None = None  # schema 1.0: "2G"
    storage: str | None = None


class _Solution(msgspec.Struct, frozen=True):
    env: dict[str, str] = {}


class _Config(msgspec.Struct, frozen=True):
    """The parts of task.toml that are used here; others are left to Harbor."""

    verifier: _Verifier = _Verifier()
    agent: _Agent = _Agent()
    environment: _Environment = _Environment()
    solution: _Solution = _Solution()
    metadata: dict[str, Any] = {}
    steps: list[Any] = []


@dataclass(frozen=True)
class Task:
    name: str  # the folder's name
    split: str
    folder: Path
    instruction: str
    verifier_timeout_s: float
    agent_timeout_s: float | None  # None: only the run's own limit holds
    memory_bytes: int | None = None
    storage_bytes: int | None = None
    verifier_env: dict[str, str] = field(default_factory=dict)
    solution_env: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def environment(self) -> Path:
        return self.folder / "environment"

    @property
    def tests(self) -> Path:
        return self.folder / "tests"

    @property
    def solution(self) -> Path | None:
        folder = self.folder / "solution"
        return folder if (folder / "solve.sh").is_file() else None


def load_tasks(source: str | Path, *, cache: Path | None = None) -> list[Task]:
    """All tasks under a folder or fsspec URL, sorted by split and name.

    `source` is one task, a folder of tasks, or a folder with train/ and heldout/. `cache`: where a remote URL is copied to.
    Raises TaskError for a folder that is missing, empty, or holds one bad task: a run never goes on with half of its tasks.
    """
    root = _local(source, cache)
    if not root.is_dir():
        raise TaskError(f"{source}: no such folder of tasks")
    if (root / "task.toml").exists():
        return [load_task(root)]
    splits = [split for split in SPLITS if (root / split).is_dir()]
    tasks = [task for split in splits for task in _load_folder(root / split, split)] or _load_folder(root, "train")
    if not tasks:
        raise TaskError(f"{source}: holds no task; a task is a folder with task.toml, instruction.md and tests/test.sh")
    return tasks


def _load_folder(folder: Path, split: str) -> list[Task]:
    return [
        load_task(child, split) for child in sorted(folder.iterdir()) if child.is_dir() and child.name[0] not in "._"
    ]


def load_task(folder: Path, split: str = "train") -> Task:
    config = _read_config(folder / "task.toml")
    instruction = _read_text(folder / "instruction.md")
    if not instruction.strip():
        raise TaskError(f"{folder / 'instruction.md'}: is empty")
    for needed, what in (("environment", "is_dir"), ("tests/test.sh", "is_file")):
        if not getattr(folder / needed, what)():
            raise TaskError(f"{folder / needed}: is missing")
    environment = config.environment
    memory_mb, storage_mb = environment.memory_mb, environment.storage_mb
    return Task(
        name=folder.name,
        split=split,
        folder=folder.resolve(),
        instruction=instruction,
        verifier_timeout_s=_positive(config.verifier.timeout_sec, folder, "verifier.timeout_sec"),
        agent_timeout_s=_positive_or_none(config.agent.timeout_sec, folder, "agent.timeout_sec"),
        memory_bytes=memory_mb * MIB if memory_mb else _size(environment.memory, folder, "environment.memory"),
        storage_bytes=storage_mb * MIB if storage_mb else _size(environment.storage, folder, "environment.storage"),
        verifier_env=_plain_env(config.verifier.env, folder, "verifier.env"),
        solution_env=_plain_env(config.solution.env, folder, "solution.env"),
        metadata=config.metadata,
    )


def _read_config(path: Path) -> _Config:
    try:
        config = msgspec.convert(tomllib.loads(_read_text(path)), _Config)
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"{path}: not valid TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise TaskError(f"{path}: {error}") from error
    if config.steps:
        raise TaskError(f"{path}: steps: tasks of several steps are not supported")
    return config


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise TaskError(f"{path}: is missing") from error
    except UnicodeDecodeError as error:
        raise TaskError(f"{path}: is not UTF-8: {error}") from error


def _positive(value: float, folder: Path, name: str) -> float:
    if not value > 0:
        raise TaskError(f"{folder / 'task.toml'}: {name} must be > 0, got {value}")
    return value


def _positive_or_none(value: float | None, folder: Path, name: str) -> float | None:
    return None if value is None else _positive(value, folder, name)


def _size(text: str | None, folder: Path, name: str) -> int | None:
    if text is None:
        return None
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise TaskError(f"{folder / 'task.toml'}: {name} must be a size like 512M or 2G, got {text!r}")
    return int(float(match[1]) * _SIZE_FACTORS[match[2].upper()])


def _plain_env(env: dict[str, str], folder: Path, name: str) -> dict[str, str]:
    """Harbor fills ${NAME} from the host's environment; here that would hand a worker's secrets to a sandbox."""
    for key, value in env.items():
        if "${" in value:
            raise TaskError(f"{folder / 'task.toml'}: {name}.{key}: values from the host (${{...}}) are not supported")
    return env


def _local(source: str | Path, cache: Path | None) -> Path:
    text = str(source)
    if "://" not in text:
        return Path(text)
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    if cache is None:
        raise TaskError(f"{source}: a folder to copy remote tasks to is needed")
    import fsspec  # only remote sources need it

    filesystem, remote = fsspec.core.url_to_fs(text)
    if not filesystem.exists(remote):
        raise TaskError(f"{source}: no such folder of tasks")
    filesystem.get(f"{remote.rstrip('/')}/", f"{cache}/", recursive=True)
    return cache
