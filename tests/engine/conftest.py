from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine import tiny


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def views(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One random MoE model in every view."""
    config = tiny.moe_config()
    weights = tiny.tensors(config)
    root = tmp_path_factory.mktemp("views")
    return {view: tiny.write_view(root / view, view, config, weights) for view in ("bf16", "fp8", "nvfp4")}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """SGLang takes a minute to import and more to start: only when asked for."""
    if "sglang" not in config.option.markexpr:
        skip = pytest.mark.skip(reason="takes minutes: pytest -m sglang")
        for item in items:
            if "sglang" in item.keywords:
                item.add_marker(skip)
