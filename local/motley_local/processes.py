"""Child processes that cannot outlive us, and what /proc says about them. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class ChildFailedError(RuntimeError):
    """A process of the cluster ended or never became ready; the message ends with its last log lines."""


def become_subreaper() -> None:
    """Orphans among our descendants become our children instead of init's, so that we can end them."""
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def _die_with(parent_pid: int, death_signal: signal.Signals) -> Callable[[], None]:
    def in_child() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
        # The parent may have died between fork and prctl; then nobody would ever send the signal.
        if os.getppid() != parent_pid:
            os._exit(1)

    return in_child


@dataclass
class Child:
    """A running child with its own session and log file."""

    name: str
    process: subprocess.Popen[bytes]
    log_path: Path

    @classmethod
    def spawn(
        cls,
        name: str,
        command: Sequence[str],
        *,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        death_signal: signal.Signals = signal.SIGKILL,
    ) -> Child:
        """Start a command that gets ``death_signal`` when we die.

        The kernel ties this to the thread that forks, so only the main thread may start children.

        Raises:
            RuntimeError: called from another thread than the main one.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "a local cluster must be started from the main thread: its processes die with the thread that started them"
            )
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(env) if env is not None else None,
                start_new_session=True,
                preexec_fn=_die_with(os.getpid(), death_signal),
            )
        return cls(name, process, log_path)

    def check(self) -> None:
        """Raise ChildFailedError when the process has ended."""
        code = self.process.poll()
        if code is not None:
            raise ChildFailedError(f"{self.name} ended with exit code {code}; {self.log_tail()}")

    def log_tail(self, lines: int = 12) -> str:
        """The last log lines, introduced by the log's path."""
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        tail = "\n".join(f"    {line[:400]}" for line in text.splitlines()[-lines:])
        return f"last lines of {self.log_path}:\n{tail or '    (empty)'}"

    def stop(self, *, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after the grace; with no grace SIGKILL at once. Returns when it is gone."""
        if self.process.poll() is None and grace_s > 0:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=grace_s)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def parent_of_each() -> dict[int, int]:
    """Parent pid of every process that /proc shows."""
    parents: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            with open(f"/proc/{entry.name}/stat", "rb") as stat:
                # The command, in parentheses, may hold anything; the fields we want follow its last one.
                fields = stat.read().rpartition(b")")[2].split()
        except OSError:
            continue
        parents[int(entry.name)] = int(fields[1])
    return parents


def descendants(root_pid: int, parents: Mapping[int, int]) -> list[int]:
    """Every process below ``root_pid``, itself left out."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    frontier = list(children.get(root_pid, ()))
    while frontier:
        pid = frontier.pop()
        found.append(pid)
        frontier.extend(children.get(pid, ()))
    return found


def memory_mib(pids: Sequence[int]) -> float:
    """Sum of resident memory, MiB, a page that several processes share divided among them (PSS): what the machine really gives."""
    kib = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup", "rb") as rollup:
                kib += next((int(line.split()[1]) for line in rollup if line.startswith(b"Pss:")), 0)
        except OSError:
            continue
    return kib / 1024


def process_start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when it is gone or only a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
