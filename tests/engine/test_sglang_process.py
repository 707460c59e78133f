"""The server as a child process, with a small program in its place."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from engine import tiny
from motley_sampler.engines.protocol import EngineError
from motley_sampler.engines.sglang.engine import SglangEngine


def _stand_in(tmp_path: Path, program: str) -> Path:
    """A python that runs `program` whatever it is asked to run."""
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\n{program}")
    script.chmod(0o755)
    return script


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_server_that_ends_while_starting_is_an_error_and_not_a_wait(tmp_path: Path) -> None:
    python = _stand_in(tmp_path, "raise SystemExit(7)")
    engine = SglangEngine(str(python), lambda folder, version: [], "http://127.0.0.1:9")
    with pytest.raises(EngineError, match="ended while starting, with code 7"):
        await engine.start(tmp_path, 1)
    await engine.stop()


async def test_stopping_ends_the_server_and_its_children(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, signal, time\n"
        "child = os.fork()\n"
        "if child:\n"
        f"    pathlib.Path({str(tmp_path / 'pids')!r}).write_text(f'{{os.getpid()}} {{child}}')\n"
        "else:\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "time.sleep(600)\n"
    )
    engine = SglangEngine(str(_stand_in(tmp_path, program)), lambda folder, version: [], "http://127.0.0.1:9")
    starting = asyncio.create_task(engine.start(tmp_path, 1))
    await tiny.until(lambda: (tmp_path / "pids").exists() and bool((tmp_path / "pids").read_text()))
    server, child = (int(pid) for pid in (tmp_path / "pids").read_text().split())
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await engine.stop()
    await tiny.until(lambda: not _running(server) and not _running(child))


async def test_the_server_dies_with_an_agent_that_was_killed(tmp_path: Path) -> None:
    server = _stand_in(
        tmp_path, f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    agent = (
        "import asyncio, pathlib\n"
        "from motley_sampler.engines.sglang.engine import SglangEngine\n"
        f"engine = SglangEngine({str(server)!r}, lambda folder, version: [], 'http://127.0.0.1:9')\n"
        "asyncio.run(engine.start(pathlib.Path('.'), 1))\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", agent, env=env)
    await tiny.until(lambda: (tmp_path / "pid").exists() and bool((tmp_path / "pid").read_text()))
    pid = int((tmp_path / "pid").read_text())
    assert _running(pid)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    await tiny.until(lambda: not _running(pid))
