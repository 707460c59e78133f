"""Containers as processes: namespaces and mounts, what cannot be started, and probes inside. No control plane."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from motley_local.podspec import Mount
from motley_local.processes import become_subreaper, parent_of_each
from motley_local.runner import ISOLATION_LADDER, NO_ISOLATION, Isolation, Launch, Runner, StartError, best_isolation

PATH = os.environ.get("PATH", os.defpath)


@pytest.fixture(autouse=True)
def subreaper() -> None:
    """Containers become children of this process, as they do of the agent."""
    become_subreaper()


async def runner_with(isolation: Isolation, folder: Path) -> Runner:
    if isolation.mounts and await best_isolation(folder / "probe", [isolation]) != isolation:
        pytest.skip(f"this machine does not allow {isolation.summary}")
    return Runner(isolation)


def launch(folder: Path, script: str, mounts: list[Mount] | None = None, **env: str) -> Launch:
    return Launch(
        container_id=f"id-{folder.name}",
        argv=["bash", "-c", script],
        env={"PATH": PATH, **env},
        cwd="/",
        mounts=mounts or [],
        hostname="pod-1",
        folder=folder / "container",
        log_path=folder / "log",
    )


async def run(runner: Runner, what: Launch) -> tuple[int, str]:
    process = await runner.start(what)
    code = await process.exit_code
    runner.kill_leftovers(process)
    return code, what.log_path.read_text()


@pytest.mark.parametrize("isolation", ISOLATION_LADDER, ids=lambda one: one.summary)
async def test_mount_paths_are_real_and_leave_no_trace_on_the_host(tmp_path: Path, isolation: Isolation) -> None:
    runner = await runner_with(isolation, tmp_path)
    source, hosts = tmp_path / "source", tmp_path / "hosts"
    source.mkdir()
    (source / "file").write_text("content")
    hosts.write_text("127.64.3.4 demo-router\n")
    places = ["/motley-test-root/deep", "/etc/motley-test/conf", str(tmp_path / "absent" / "x")]
    mounts = [Mount(str(source), place) for place in places] + [Mount(str(hosts), "/etc/hosts")]
    script = (
        "cat "
        + " ".join(f"{place}/file" for place in places)
        + "; getent hosts demo-router; hostname; ls -d /etc/passwd"
    )
    code, text = await run(runner, launch(tmp_path, script, mounts))
    assert (code, text) == (0, "content" * 3 + "127.64.3.4      demo-router\npod-1\n/etc/passwd\n")
    assert not any(Path(place).parent.exists() for place in places)


@pytest.mark.parametrize("isolation", ISOLATION_LADDER, ids=lambda one: one.summary)
async def test_a_mount_may_lie_in_another_and_may_hide_the_path_to_its_source(
    tmp_path: Path, isolation: Isolation
) -> None:
    runner = await runner_with(isolation, tmp_path)
    outer, inner = tmp_path / "outer", tmp_path / "inner"
    for folder in (outer, inner):
        folder.mkdir()
        (folder / "name").write_text(folder.name)
    # The outer mount covers the folder in which both sources lie.
    mounts = [Mount(str(inner), f"{tmp_path}/sub/inner", True), Mount(str(outer), str(tmp_path))]
    script = f"cat {tmp_path}/name {tmp_path}/sub/inner/name; echo new > {tmp_path}/made; echo no > {tmp_path}/sub/inner/made"
    code, text = await run(runner, launch(tmp_path, script, mounts))
    assert code == 1
    assert text.startswith("outerinner")
    assert "Read-only file system" in text
    assert (outer / "made").read_text() == "new\n"


@pytest.mark.parametrize("isolation", [*ISOLATION_LADDER, NO_ISOLATION], ids=lambda one: one.summary)
async def test_nothing_a_container_started_outlives_it(tmp_path: Path, isolation: Isolation) -> None:
    runner = await runner_with(isolation, tmp_path)
    mark = f"leftover-{tmp_path.name}-{os.getpid()}"
    script = f"setsid bash -c 'exec -a {mark} sleep 600' & sleep 0.2; exec -a {mark} sleep 600"
    process = await runner.start(launch(tmp_path, script))
    async with asyncio.timeout(60):
        while len(_named(mark)) < 2:
            await asyncio.sleep(0.05)
        await runner.kill(process)
        while _named(mark):
            await asyncio.sleep(0.05)
    runner.reap_orphans()
    assert await process.exit_code == -signal.SIGKILL


def _named(mark: str) -> list[bytes]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if command.startswith(mark.encode()):
            found.append(command)
    return found


@pytest.mark.parametrize(
    "isolation", [ISOLATION_LADDER[0], ISOLATION_LADDER[2], NO_ISOLATION], ids=lambda one: one.summary
)
async def test_a_probe_runs_inside_and_is_cut_off_in_time(tmp_path: Path, isolation: Isolation) -> None:
    runner = await runner_with(isolation, tmp_path)
    source = tmp_path / "source"
    source.mkdir()
    mounts = [Mount(str(source), "/motley-test-probe/x")] if isolation.mounts else []
    where = "/motley-test-probe/x" if isolation.mounts else str(source)
    process = await runner.start(launch(tmp_path, f"echo up > {where}/flag; exec sleep 600", mounts, COLOUR="green"))

    async def probe(script: str, timeout_s: float = 60) -> tuple[int, str]:
        return await runner.execute(process, ["bash", "-c", script], timeout_s)

    async with asyncio.timeout(60):
        while (await probe(f"test -e {where}/flag"))[0] != 0:
            await asyncio.sleep(0.05)
        assert await probe("echo $COLOUR; exit 3") == (3, "green\n")
        assert (await probe("sleep 60", 0.3))[0] == 124
        assert (await runner.execute(process, ["no-such-program"], 60))[0] == 127
        await runner.kill(process)


@pytest.mark.parametrize(
    "isolation", [ISOLATION_LADDER[0], ISOLATION_LADDER[2], NO_ISOLATION], ids=lambda one: one.summary
)
async def test_what_cannot_start_says_why(tmp_path: Path, isolation: Isolation) -> None:
    runner = await runner_with(isolation, tmp_path)
    others = _children()
    absent = launch(tmp_path, "")
    object.__setattr__(absent, "argv", ["no-such-program"])
    with pytest.raises(StartError, match="'no-such-program': No such file or directory") as caught:
        await runner.start(absent)
    assert caught.value.code == 127
    if isolation.mounts:
        with pytest.raises(StartError, match=r"preparing the container: .*No such file"):
            await runner.start(launch(tmp_path, "true", [Mount(str(tmp_path / "absent"), "/mnt")]))
    # Its half-made processes are collected, not kept as zombies.
    async with asyncio.timeout(60):
        while _children() - others:
            runner.reap_orphans()
            await asyncio.sleep(0.05)


def _children() -> set[int]:
    return {pid for pid, parent in parent_of_each().items() if parent == os.getpid()}


async def test_a_container_dies_with_the_agent_however_it_ends(tmp_path: Path) -> None:
    mark = f"orphan-{os.getpid()}"
    program = f"""
import asyncio, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from motley_local.processes import become_subreaper, parent_of_each
from motley_local.runner import ISOLATION_LADDER, Launch, Runner, best_isolation
async def main():
    folder = Path({str(tmp_path)!r})
    runner = Runner(await best_isolation(folder / "probe"))
    await runner.start(Launch("x", ["bash", "-c", "exec -a {mark} sleep 600"], {{"PATH": {PATH!r}}}, "/", [], "h", folder, folder / "log"))
    print("started", flush=True)
    await asyncio.sleep(600)
become_subreaper()
asyncio.run(main())
"""
    agent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert agent.stdout is not None
    async with asyncio.timeout(60):
        assert await agent.stdout.readline() == b"started\n"
        while not _named(mark):
            await asyncio.sleep(0.05)
        agent.kill()
        await agent.wait()
        while _named(mark):
            await asyncio.sleep(0.05)
