"""A sandbox host at each level that works on this machine."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from motley_api.resources.rlrun import Isolation
from motley_sampler.sandbox.host import Limits, Mount, Sandbox, SandboxError, SandboxHost, impossible, remove_tree

Open = Callable[..., Awaitable[Sandbox]]


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that other users can pass through, as a pod's scratch is; pytest's own folders are closed to them."""
    with tempfile.TemporaryDirectory(prefix="motley-test-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
        with contextlib.suppress(FileNotFoundError):
            remove_tree(Path(folder))
        Path(folder).mkdir(exist_ok=True)


LEVELS = [level for level in Isolation if level is not Isolation.AUTO and not impossible(level)]


@pytest_asyncio.fixture(params=LEVELS, ids=str)
async def host(request: pytest.FixtureRequest, place: Path) -> AsyncIterator[SandboxHost]:
    try:
        started = await SandboxHost.start(place / "sandboxes", request.param)
    except SandboxError as error:
        pytest.skip(f"this machine cannot: {error}")
    async with started:
        yield started


@pytest_asyncio.fixture
async def open_sandbox(host: SandboxHost, place: Path) -> AsyncIterator[Open]:
    """Makes sandboxes over a workspace place/app<N>; closes them in the end."""
    opened: list[Sandbox] = []
    numbers = itertools.count()

    async def make(limits: Limits = Limits(), **named: object) -> Sandbox:  # noqa: B008
        workspace = place / f"app{next(numbers)}"
        workspace.mkdir()
        opened.append(await host.create([Mount(workspace, "/app", writable=True)], limits, **named))  # type: ignore[arg-type]
        return opened[-1]

    yield make
    for sandbox in opened:
        await sandbox.close()
