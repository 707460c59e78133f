"""model.source and tasks.source: any fsspec URL or a path. No torch here: the supervisor looks before it starts anything."""

from __future__ import annotations

import json
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


def check_layout(source: str, *, tensor: int, expert: int) -> None:
    """Whether the model's own sizes can be cut that way, before a gang finds out again and again.

    Errors: SourceError LayoutImpossible, naming the field and the model's number.
    """
    fs, path = fsspec.core.url_to_fs(source)
    try:
        config = json.loads(fs.cat_file(f"{path.rstrip('/')}/config.json"))
    except ValueError as error:
        raise SourceError("ModelNotFound", f"model.source: {source}/config.json must be JSON: {error}") from error
    experts = "num_experts" if "num_experts" in config else "num_local_experts"
    cuts = [("tensorParallel", tensor, name) for name in ("num_attention_heads", "num_key_value_heads")]
    cuts.append(("expertParallel", expert, experts))
    if expert == 1:  # else the experts' own matrices are whole
        cuts.append(("tensorParallel", tensor, "moe_intermediate_size"))
    for field, parts, name in cuts:
        size = config.get(name)
        if isinstance(size, int) and size % parts:
            raise SourceError("LayoutImpossible", f"trainer.{field}: {parts} must divide the model's {name}, {size}")
        if size is None and field == "expertParallel" and parts > 1:
            raise SourceError(
                "LayoutImpossible", f"trainer.{field}: must be 1 for a model without experts, got {parts}"
            )


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
