"""A tiny model, and stores that fail on purpose."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from motley_api.keys import STANDARD_VIEWS
from motley_weights import names
from motley_weights.backend import Backend, Chunk, open_backend
from motley_weights.store import PublishReport, WeightStore

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "vocab_size": 24,
    "max_position_embeddings": 64,
}


class Model:
    """A small model whose weights are a function of a seed, and of the steps trained since."""

    files: Mapping[str, bytes] = {"config.json": json.dumps(CONFIG).encode(), "tokenizer.json": b'{"model": {}}'}

    def __init__(self, seed: int = 0, **changes: Any) -> None:
        self.config = {**CONFIG, **changes}
        self.files = {**Model.files, "config.json": json.dumps(self.config).encode()}
        generator = torch.Generator().manual_seed(seed)
        shapes = names.expected_shapes(names.ModelShape.from_hf_config(self.config))
        self.tensors = {
            name: (torch.randn(size, generator=generator) * 0.05).to(torch.bfloat16) for name, size in shapes.items()
        }

    def step(self, seed: int, share: float = 0.01) -> None:
        """About `share` of the elements move by one unit in the last place, as a training step does."""
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in self.tensors.items():
            moved = torch.rand(tensor.shape, generator=generator) < share
            direction = torch.where(torch.rand(tensor.shape, generator=generator) < 0.5, 1, -1).to(torch.int16)
            bits = tensor.view(torch.int16)
            self.tensors[name] = torch.where(moved & (bits != 0), bits + direction, bits).view(torch.bfloat16)

    def publish(self, store: WeightStore, version: int, views: Iterable[str] = STANDARD_VIEWS) -> PublishReport:
        return store.publish(version, self.tensors.items(), model_dir_files=self.files, views=list(views))


class FaultyBackend:
    """A backend whose `failing` decides at every write what goes wrong: (operation, path) -> None or an action on the
    inner one.

    Reads pass through.
    """

    def __init__(self, inner: Backend, failing: Callable[[str, str], Callable[..., None] | None]) -> None:
        self.inner = inner
        self.failing = failing
        self.writes: list[tuple[str, str]] = []

    def _do(self, operation: str, path: str, content: Any) -> None:
        self.writes.append((operation, path))
        instead = self.failing(operation, path)
        if instead is not None:
            instead(self.inner, path, content)
        else:
            getattr(self.inner, operation)(path, content)

    def write(self, path: str, chunks: Iterable[Chunk]) -> None:
        self._do("write", path, list(chunks))

    def replace(self, path: str, content: bytes) -> None:
        self._do("replace", path, content)

    def read(self, path: str) -> bytes:
        return self.inner.read(path)

    def read_chunks(self, path: str) -> Iterator[bytes]:
        return self.inner.read_chunks(path)

    def size(self, path: str) -> int:
        return self.inner.size(path)

    def list(self, path: str) -> list[str]:
        return self.inner.list(path)

    def remove(self, path: str) -> None:
        self.inner.remove(path)


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def make_model() -> type[Model]:
    return Model


@pytest.fixture
def faulty() -> type[FaultyBackend]:
    return FaultyBackend


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty store."""
    if request.param == "file":
        yield f"file://{tmp_path / 'store'}"
        return
    root = f"memory://{uuid.uuid4().hex}"
    yield root
    open_backend(root).remove("")
