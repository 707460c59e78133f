"""Container processes: start with namespaces and mounts, wait, signal, and run probes inside."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from motley_local.podspec import Mount
from motley_local.processes import descendants, parent_of_each

SHIM = Path(__file__).with_name("shim.py")
ENV_CONTAINER_ID = "MOTLEY_LOCAL_CONTAINER"
KILL_POLL_S = 0.1
PODS_NICE = 5  # the control plane answers also when pods use every core


@dataclass(frozen=True)
class Isolation:
    """What this machine lets us give a container."""

    mounts: bool  # a mount namespace: mount paths and /etc/hosts are real
    pids: bool  # a PID namespace: killing the first process kills them all
    user: bool  # through a user namespace, because we are not root

    @property
    def summary(self) -> str:
        if not self.mounts:
            return "none: mount paths are rewritten, Service names do not resolve"
        return f"mount{' and PID' if self.pids else ''} namespaces{' in a user namespace' if self.user else ''}"

    @property
    def namespaces(self) -> list[str]:
        """Namespaces to join for a probe, in the order that permissions allow."""
        names = ["user"] if self.user else []
        names += ["mnt", "uts"] if self.mounts else []
        return names + (["pid"] if self.pids else [])


NO_ISOLATION = Isolation(mounts=False, pids=False, user=False)
ISOLATION_LADDER = (
    Isolation(mounts=True, pids=True, user=False),
    Isolation(mounts=True, pids=False, user=False),
    Isolation(mounts=True, pids=True, user=True),
    Isolation(mounts=True, pids=False, user=True),
)


class StartError(RuntimeError):
    """The command could not be started; with the exit code that a container runtime would report."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Launch:
    """Everything that a container's process is made from."""

    container_id: str
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    mounts: Sequence[Mount]
    hostname: str
    folder: Path  # scratch of this container: the staging point for mounts
    log_path: Path


@dataclass
class Process:
    """A running container."""

    pid: int
    launch: Launch
    exit_code: asyncio.Future[int] = field(repr=False)  # negative: ended by that signal

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the container's first process, as container runtimes do."""
        if not self.exit_code.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _spec_fd(spec: Mapping[str, Any]) -> int:
    fd = os.memfd_create("container")
    os.write(fd, json.dumps(spec).encode())
    return fd


def _mark_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _readline(fd: int) -> bytes:
    """One line, or what came before the end, from a pipe."""
    loop = asyncio.get_running_loop()
    os.set_blocking(fd, False)
    data = b""
    while not data.endswith(b"\n"):
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_reader(fd, _mark_done, ready)
        try:
            await ready
        finally:
            loop.remove_reader(fd)
        chunk = os.read(fd, 65536)
        if not chunk:
            break
        data += chunk
    return data


def _wait_for_exit(pid: int) -> asyncio.Future[int]:
    """A future with the exit code of a child of ours; reaps it. Negative: the signal that ended it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[int] = loop.create_future()
    pidfd = os.pidfd_open(pid)

    def on_exit() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        if not future.done():
            future.set_result(os.waitstatus_to_exitcode(status))

    loop.add_reader(pidfd, on_exit)
    return future


class Runner:
    """Starts containers with one kind of isolation. The agent must be a subreaper."""

    def __init__(self, isolation: Isolation) -> None:
        self.isolation = isolation
        self.pids: set[int] = set()
        self._shims: set[int] = set()

    async def start(self, launch: Launch) -> Process:
        """Start a container.

        Raises:
            StartError: its mounts or its command do not work.
        """
        status_read, status_write = os.pipe()
        go_read, go_write = os.pipe()
        stage = launch.folder / "stage"
        stage.mkdir(parents=True, exist_ok=True)
        launch.log_path.parent.mkdir(parents=True, exist_ok=True)
        spec = {
            "argv": list(launch.argv),
            "env": {**launch.env, ENV_CONTAINER_ID: launch.container_id},
            "cwd": launch.cwd,
            "mounts": [{"source": one.source, "target": one.target, "readonly": one.readonly} for one in launch.mounts],
            "hostname": launch.hostname,
            "stage": str(stage),
            "mount_namespace": self.isolation.mounts,
            "pid_namespace": self.isolation.pids,
            "user_namespace": self.isolation.user,
            "nice": PODS_NICE,
            "status_fd": status_write,
            "go_fd": go_read,
        }
        try:
            with launch.log_path.open("ab") as log:
                shim = self._spawn(spec, (status_write, go_read), log.fileno(), log.fileno())
            os.close(status_write)
            os.close(go_read)
            status_write = go_read = -1
            await self._reap_shim(shim)
            answer = json.loads(
                await _readline(status_read) or b'{"error": "the container ended while it was prepared", "code": 128}'
            )
            if "error" in answer:
                raise StartError(str(answer["error"]), int(answer["code"]))
            pid = int(answer["pid"])
            self.pids.add(pid)
            exit_code = _wait_for_exit(pid)
            exit_code.add_done_callback(lambda _: self.pids.discard(pid))
            try:
                os.write(go_write, b"g")
                # Exec closes the pipe; a line instead is the reason why there was none.
                failure = await _readline(status_read)
            except BaseException:
                os.kill(pid, signal.SIGKILL)
                raise
            if failure:
                await exit_code
                answer = json.loads(failure)
                raise StartError(str(answer["error"]), int(answer["code"]))
            return Process(pid, launch, exit_code)
        finally:
            for fd in (status_read, status_write, go_read, go_write):
                if fd >= 0:
                    os.close(fd)

    def _spawn(self, spec: Mapping[str, Any], fds: Sequence[int], stdout: int, stderr: int) -> subprocess.Popen[bytes]:
        spec_fd = _spec_fd(spec)
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(SHIM), str(spec_fd)],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(spec_fd, *fds),
                env={},
            )
        finally:
            os.close(spec_fd)
        self._shims.add(process.pid)
        return process

    async def _reap_shim(self, shim: subprocess.Popen[bytes]) -> int:
        """Exit code of the first of the shim's two processes; Popen is told, so that it will not wait again."""
        shim.returncode = await _wait_for_exit(shim.pid)
        self._shims.discard(shim.pid)
        return shim.returncode

    async def execute(self, process: Process, argv: Sequence[str], timeout_s: float) -> tuple[int, str]:
        """Run a command inside a container, for probes and hooks: exit code and the end of its output. A timeout is code 124."""
        output_read, output_write = os.pipe()
        unused_read, unused_write = os.pipe()
        spec: dict[str, Any] = {
            "argv": list(argv),
            "env": {**process.launch.env, ENV_CONTAINER_ID: process.launch.container_id},
            "cwd": process.launch.cwd,
            "status_fd": output_write,
            "go_fd": unused_read,
            "nice": PODS_NICE,
            "join": process.pid,
            "join_namespaces": self.isolation.namespaces,
        }
        try:
            shim = self._spawn(spec, (output_write, unused_read), output_write, output_write)
        finally:
            os.close(output_write)
            os.close(unused_read)
            os.close(unused_write)
        output = asyncio.create_task(_read_all(output_read))
        ended = asyncio.create_task(self._reap_shim(shim))
        try:
            await asyncio.wait([ended, output], timeout=timeout_s, return_when=asyncio.ALL_COMPLETED)
            if ended.done() and output.done():
                return ended.result(), output.result()
            return 124, f"command timed out after {timeout_s:g} s"
        finally:
            if not ended.done():
                kill_tree(shim.pid)
                await ended
            output.cancel()
            await asyncio.gather(output, return_exceptions=True)
            os.close(output_read)

    async def kill(self, process: Process) -> None:
        """End a container and everything that it started, at once."""
        process.signal(signal.SIGKILL)
        while not process.exit_code.done():
            # A PID namespace ends only when each of its processes was waited for, and those that came from a probe that
            # was cut off are ours to wait for.
            await asyncio.wait([process.exit_code], timeout=KILL_POLL_S)
            self.reap_orphans()
        self.kill_leftovers(process)

    def kill_leftovers(self, process: Process) -> None:
        """Without a PID namespace, kill what a container's ended first process left behind, by the mark in its environment."""
        if self.isolation.pids:
            return
        mark = f"{ENV_CONTAINER_ID}={process.launch.container_id}".encode()
        for pid in descendants(os.getpid(), parent_of_each()):
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes()
            except OSError:
                continue
            if mark in environment.split(b"\0"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def reap_orphans(self) -> None:
        """Collect ended orphans that became our children; containers and shims are waited for elsewhere."""
        skip = self.pids | self._shims
        me = os.getpid()
        for pid, parent in parent_of_each().items():
            if parent == me and pid not in skip:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


async def _read_all(fd: int, limit: int = 4096) -> str:
    """The end of what comes through a pipe."""
    kept = b""
    while chunk := await _readline(fd):
        kept = (kept + chunk)[-limit:]
    return kept.decode(errors="replace")


def kill_tree(pid: int) -> None:
    """Kill a process and everything below it."""
    for one in [pid, *descendants(pid, parent_of_each())]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


async def best_isolation(folder: Path, candidates: Sequence[Isolation] = ISOLATION_LADDER) -> Isolation:
    """The most that works here, found by starting a container that needs it."""
    source = folder / "probe"
    source.mkdir(parents=True, exist_ok=True)
    (source / "seen").write_text("yes")
    for isolation in candidates:
        launch = Launch(
            container_id="probe",
            argv=["cat", "/motley-local-probe/a/seen"],
            env={"PATH": os.environ.get("PATH", os.defpath)},
            cwd="/",
            mounts=[Mount(str(source), "/motley-local-probe/a", True)],
            hostname="probe",
            folder=folder,
            log_path=folder / "probe.log",
        )
        try:
            process = await Runner(isolation).start(launch)
        except (StartError, OSError):
            continue
        if await process.exit_code == 0:
            return isolation
    return NO_ISOLATION
