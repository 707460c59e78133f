"""Reading a Hugging Face checkpoint folder: config.json, lazily loaded safetensors, and the small files beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
from torch import Tensor

from motley_weights import safetensors_io
from motley_weights.errors import CheckpointError
from motley_weights.names import ModelShape

# Small files an engine or a trainer may need besides the weights.
_MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


class LazyTensors(Mapping[str, Tensor]):
    """Tensors of a folder, each read from its memory-mapped file when asked for."""

    def __init__(self, folder: Path, files: Mapping[str, list[str]]) -> None:
        self._file_of = {name: folder / file for file, names in files.items() for name in names}
        self._open: dict[Path, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        path = self._file_of[name]
        try:
            if path not in self._open:
                self._open[path] = safetensors.safe_open(path, framework="pt")
            tensor: Tensor = self._open[path].get_tensor(name)
        except (OSError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{path}: {error}") from error
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


class Checkpoint(NamedTuple):
    config: dict[str, Any]
    tensors: Mapping[str, Tensor]


def read_checkpoint(folder: str | Path) -> Checkpoint:
    """(config, tensors) of a folder; tensors load when they are looked up.

    CheckpointError: no such folder, no config.json or not JSON, no safetensors, or a file that the index names is not
    there. UnsupportedModelError or NamesError: config.json is not of a model that the names mapping knows.
    """
    path = Path(folder)
    config = read_config(path)
    ModelShape.from_hf_config(config)
    try:
        files = safetensors_io.shard_files(path)
    except (ValueError, KeyError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path}: weights are not readable: {error}") from error
    if not files:
        raise CheckpointError(
            f"{path}: must hold {safetensors_io.SINGLE_FILE} or {safetensors_io.INDEX_FILE}; "
            "convert other weight formats to safetensors first"
        )
    absent = sorted(file for file in files if not (path / file).is_file())
    if absent:
        raise CheckpointError(f"{path}: {absent[0]} is named in {safetensors_io.INDEX_FILE} but is not there")
    return Checkpoint(config, LazyTensors(path, files))


def read_config(folder: str | Path) -> dict[str, Any]:
    """The content of config.json. CheckpointError when the folder or the file is missing or is not a JSON object."""
    path = Path(folder)
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: model path must be a folder with config.json and safetensors; it does not exist"
        )
    try:
        config = json.loads((path / "config.json").read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: config.json is missing") from None
    except ValueError as error:
        raise CheckpointError(f"{path / 'config.json'}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path / 'config.json'}: must be a JSON object")
    return config


def model_dir_files(folder: str | Path) -> dict[str, bytes]:
    """config.json and the tokenizer files of a folder, by name: what `WeightStore.publish` writes beside the
    weights.
    """
    path = Path(folder)
    return {name: (path / name).read_bytes() for name in _MODEL_FILES if (path / name).is_file()}
