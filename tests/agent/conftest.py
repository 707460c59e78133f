from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from agent.rig import Rig


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
async def make_rig(tmp_path: Path) -> AsyncIterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(**options: Any) -> Rig:
        made.append(Rig(tmp_path, **options))
        return made[-1]

    yield make
    for rig in made:
        await rig.engine.stop()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """SGLang takes a minute to import and more to start: only when asked for."""
    if "sglang" not in config.option.markexpr:
        skip = pytest.mark.skip(reason="takes minutes: pytest -m sglang")
        for item in items:
            if "sglang" in item.keywords:
                item.add_marker(skip)
