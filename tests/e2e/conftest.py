from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """SGLang takes a minute to import and more to start: only when asked for."""
    if "sglang" not in config.option.markexpr:
        skip = pytest.mark.skip(reason="takes minutes: pytest -m sglang")
        for item in items:
            if "sglang" in item.keywords:
                item.add_marker(skip)
