"""model.source and tasks.source: any fsspec URL or a path. No torch here: the supervisor looks before it starts anything."""

from __future__ import annotations

from pathlib import Path

import fsspec


class SourceError(ValueError):
    """A source that is not there or is empty. `reason` is the condition's, in CamelCase."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def check_model(source: str) -> None:
    """Errors: SourceError ModelNotFound."""
    fs, path = fsspec.core.url_to_fs(source)
    if not fs.exists(f"{path.rstrip('/')}/config.json"):
        raise SourceError("ModelNotFound", f"model.source: {source} must be a folder with config.json and safetensors")


def task_names(source: str, split: str) -> list[str]:
    """Names of the task folders (those with a task.toml) of a split, sorted."""
    fs, path = fsspec.core.url_to_fs(source)
    folder = f"{path.rstrip('/')}/{split}"
    if not fs.isdir(folder):
        return []
    names = (entry.rstrip("/").rsplit("/", 1)[-1] for entry in fs.ls(folder, detail=False))
    return sorted(name for name in names if fs.exists(f"{folder}/{name}/task.toml"))


def train_tasks(source: str) -> list[str]:
    """Errors: SourceError TasksNotFound."""
    names = task_names(source, "train")
    if not names:
        raise SourceError(
            "TasksNotFound", f"tasks.source: {source}/train must hold at least one folder with a task.toml"
        )
    return names


def local_model(source: str, scratch: Path) -> Path:
    """The model's folder on this machine; downloaded into `scratch` when it lies elsewhere."""
    fs, path = fsspec.core.url_to_fs(source)
    if "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,)):
        return Path(path)
    target = scratch / "model"
    if not (target / "config.json").exists():
        fs.get(path, str(target), recursive=True)
    return target
