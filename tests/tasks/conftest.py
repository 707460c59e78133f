"""Small tasks made on the spot, and sandboxes to run them in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from motley_sampler.sandbox.host import SandboxHost

Make = Callable[..., Path]
FIX = "def double(value):\n    return 2 * value  # this line is what a solution changes, and long enough to tell\n"
BROKEN = FIX.replace("2 * value", "value")


@pytest.fixture
def make_task(tmp_path: Path) -> Make:
    """A task folder; keyword arguments replace its files by path (None leaves one out)."""

    def make(name: str = "double", root: Path | None = None, **files: str | None) -> Path:
        folder = (root or tmp_path / "tasks") / name
        contents: dict[str, str | None] = {
            "task.toml": '[verifier]\ntimeout_sec = 20.0\n[agent]\ntimeout_sec = 20.0\n[environment]\nmemory = "256M"\n',
            "instruction.md": "Make double(value) return twice its value.\n",
            "environment/code.py": BROKEN,
            "environment/Dockerfile": "FROM scratch\nCOPY . /app\n",
            "tests/test.sh": "grep -q '2 \\* value' /app/code.py && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n",
            "solution/solve.sh": "sed -i 's/return value/return 2 * value/' code.py\n",
            **{path.replace("__", "/"): text for path, text in files.items()},
        }
        for path, text in contents.items():
            if text is not None:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_text(text)
        return folder

    return make


@pytest_asyncio.fixture
async def host(tmp_path: Path) -> AsyncIterator[SandboxHost]:
    async with await SandboxHost.start(tmp_path / "sandboxes") as started:
        yield started
