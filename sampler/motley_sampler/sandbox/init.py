"""The first process of a sandbox: sets its walls up, then runs commands that the worker sends, one after another.

It ends when the worker closes the connection, and everything in the sandbox ends with it. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import signal
import socket
import struct
import time
from typing import Any

from motley_sampler.sandbox import confine, kernel, wire
from motley_sampler.sandbox.output import BoundedOutput

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MASKED_PROC = ("/proc/kcore", "/proc/keys", "/proc/sysrq-trigger", "/proc/timer_list")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1
_DISK_CHECK_S = 0.5  # first look at the disk after this; later ones at most 5% of the time


def serve(connection: socket.socket, setup: dict[str, Any]) -> None:
    """Never returns with anything of the sandbox still running."""
    try:
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # commands must not read this process through /proc
        if setup["level"] == "Namespaces":
            _enter_root(setup)
        elif setup["level"] == "Rlimits":
            kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)  # orphans stay ours to kill
        connection.sendall(wire.pack({"ready": True}))
    except OSError as error:
        connection.sendall(wire.pack({"error": str(error)}))
        return
    shared_user = setup["level"] == "Rlimits" and setup["uid"] is None
    setup["other_processes"] = _processes_of(os.getuid()) if shared_user else 0
    program = confine.seccomp_program(kernel.MACHINE, deny_sockets=setup["level"] == "Rlimits")
    try:
        while (request := wire.receive(connection)) is not None:
            connection.sendall(wire.pack(_run(request, setup, program, connection)))
    except (ConnectionError, _HangupError):
        pass
    finally:
        kill_all(setup)


class _HangupError(Exception):
    """The worker went away while a command ran."""


# --- walls ---------------------------------------------------------------------------------------------------------


def _enter_root(setup: dict[str, Any]) -> None:
    """Builds the sandbox's own file tree on a small tmpfs and moves into it. Caller is in fresh namespaces."""
    root = setup["root"]
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,nr_inodes=1k,mode=755")
    for path in setup["system"]:
        _system_path(root, path)
    _etc(root, setup)
    _devices(root)
    for source, target, mode in setup["binds"]:
        _bind(source, root + target, read_only=mode == "ro")
    os.makedirs(root + "/proc", exist_ok=True)
    kernel.mount("proc", root + "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    for path in _MASKED_PROC:
        if os.path.exists(root + path):
            _bind(root + "/dev/null", root + path, read_only=True)
    for name in ("run", "home", "mnt"):
        os.makedirs(f"{root}/{name}", exist_ok=True)
    os.makedirs(root + "/var", exist_ok=True)
    os.symlink("/tmp", root + "/var/tmp")
    kernel.mount(
        "none", root, None, kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    )
    os.chdir(root)
    kernel.pivot_root(".", ".")
    kernel.umount_lazily(".")
    os.chdir("/")
    socket.sethostname("sandbox")
    _loopback_up()


def _system_path(root: str, path: str) -> None:
    """Shows a path of the host read-only; a symbolic link (as /bin is) is copied as a link."""
    if os.path.islink(path):
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        os.symlink(os.readlink(path), root + path)
    elif os.path.exists(path):
        _bind(path, root + path, read_only=True)


def _bind(source: str, target: str, *, read_only: bool) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if not os.path.lexists(target):
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.mount(source, target, None, kernel.MS_BIND | kernel.MS_REC)
    flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_NOSUID | _locked_flags(target)
    if not source.startswith("/dev/"):
        flags |= kernel.MS_NODEV
    kernel.mount("none", target, None, flags | (kernel.MS_RDONLY if read_only else 0))


def _locked_flags(path: str) -> int:
    """Mount flags that a user namespace may not clear, so a remount has to repeat them."""
    pairs = [(os.ST_NOEXEC, kernel.MS_NOEXEC), (os.ST_NOATIME, kernel.MS_NOATIME), (os.ST_RDONLY, kernel.MS_RDONLY)]
    pairs += [(os.ST_NODIRATIME, kernel.MS_NODIRATIME), (os.ST_RELATIME, kernel.MS_RELATIME)]
    present = os.statvfs(path).f_flag
    return sum(mount_flag for stat_flag, mount_flag in pairs if present & stat_flag)


def etc_files(uid: int) -> dict[str, str]:
    """What the sandbox's /etc holds besides the host's files that programs cannot do without."""
    return {
        "passwd": f"root:x:{uid}:{uid}:root:/home/agent:/bin/bash\n",
        "group": f"root:x:{uid}:\n",
        "hosts": "127.0.0.1 localhost sandbox\n",
        "hostname": "sandbox\n",
    }


def _etc(root: str, setup: dict[str, Any]) -> None:
    os.makedirs(root + "/etc", exist_ok=True)
    for name, text in etc_files(setup["uid"] or 0).items():
        with open(f"{root}/etc/{name}", "w") as file:
            file.write(text)


def _devices(root: str) -> None:
    os.makedirs(root + "/dev", exist_ok=True)
    for name in _DEVICES:
        _bind(f"/dev/{name}", f"{root}/dev/{name}", read_only=False)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(target, f"{root}/dev/{name}")
    os.mkdir(root + "/dev/shm")
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", root + "/dev/shm", "tmpfs", flags, "size=16m,nr_inodes=1k,mode=1777")


def _loopback_up() -> None:
    """Programs under test may serve on localhost; nothing else exists in this network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(probe, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))


# --- commands ------------------------------------------------------------------------------------------------------


def _run(request: dict[str, Any], setup: dict[str, Any], program: bytes, connection: socket.socket) -> dict[str, Any]:
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    started_s = time.monotonic()
    child = os.fork()
    if child == 0:
        _exec(request, setup, program, write_end)
    os.close(write_end)
    output = BoundedOutput(request["output_bytes"])
    try:
        ended = _watch(child, read_end, output, request, setup, connection, started_s)
        if ended != "Exit":
            kill_all(setup)
        _, status, usage = os.wait4(child, 0)
        _reap(wait=ended != "Exit")
        _drain(read_end, output)
    finally:
        os.close(read_end)
    return {
        "ended": ended,
        "exit_code": os.waitstatus_to_exitcode(status),
        "output": output.text(),
        "output_total_bytes": output.total_bytes,
        "wall_s": time.monotonic() - started_s,
        "cpu_s": usage.ru_utime + usage.ru_stime,
    }


def _watch(
    child: int,
    read_end: int,
    output: BoundedOutput,
    request: dict[str, Any],
    setup: dict[str, Any],
    connection: socket.socket,
    started_s: float,
) -> str:
    """Follows a running command until it exits or has to be stopped; says which."""
    os.set_blocking(read_end, False)
    process = os.pidfd_open(child)
    poller = select.poll()
    poller.register(process, select.POLLIN)
    poller.register(read_end, select.POLLIN)
    poller.register(connection, select.POLLRDHUP | select.POLLHUP)
    deadline_s = started_s + request["timeout_s"]
    disk_check_s = started_s + _DISK_CHECK_S
    try:
        while True:
            now_s = time.monotonic()
            if now_s >= deadline_s:
                return "Timeout"
            if now_s >= disk_check_s:
                if not _disk_within(setup):
                    return "DiskLimit"
                spent_s = time.monotonic() - now_s
                disk_check_s = now_s + max(_DISK_CHECK_S, 20 * spent_s)
            ready = poller.poll(1000 * max(0.001, min(deadline_s, disk_check_s) - now_s))
            for descriptor, event in ready:
                if descriptor == connection.fileno():
                    raise _HangupError
                if descriptor == read_end and (event & select.POLLIN):
                    _drain(read_end, output, at_most_bytes=1 << 20)
                elif descriptor == read_end:
                    poller.unregister(read_end)  # every writer closed it; the command may go on
                if descriptor == process:
                    return "Exit" if _disk_within(setup) else "DiskLimit"
            if output.total_bytes > request["output_total_bytes"]:
                return "OutputLimit"
    finally:
        os.close(process)


def _drain(read_end: int, output: BoundedOutput, at_most_bytes: int = 1 << 22) -> None:
    while at_most_bytes > 0:
        try:
            data = os.read(read_end, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            return
        output.write(data)
        at_most_bytes -= len(data)


def _exec(request: dict[str, Any], setup: dict[str, Any], program: bytes, write_end: int) -> None:
    """In the child: give up every right, then become bash. Never returns."""
    try:
        os.setsid()
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these two; an ignored signal survives exec
            signal.signal(number, signal.SIG_DFL)
        with open("/dev/null", "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(write_end, 1)
        os.dup2(write_end, 2)
        limits = request["limits"]
        _set_limits({**limits, "RLIMIT_NPROC": limits["RLIMIT_NPROC"] + setup["other_processes"]})
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        if setup["level"] == "Rlimits" and confine.landlock_abi():
            confine.restrict_files(setup["system"], setup["writable"])  # first: it opens paths that the owner may not
        kernel.drop_bounding_set()
        _set_owner(setup["uid"])
        kernel.drop_capabilities()
        confine.install_seccomp(program)
        os.umask(0o022)
        os.chdir(request["cwd"])
        os.execve("/bin/bash", ["bash", "-c", request["command"]], request["env"])
    except BaseException as error:
        with contextlib.suppress(BaseException):
            os.write(2, f"sandbox: {error}\n".encode())
    finally:
        os._exit(126)


def _processes_of(uid: int) -> int:
    """Threads of a user: the process limit counts them all, and this user runs more than the sandbox."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == uid:
                    count += len(os.listdir(f"/proc/{name}/task"))
    return count


def _set_limits(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # The soft CPU limit sends SIGXCPU, which a program may ignore; the hard one, a second later, kills.
        resource.setrlimit(number, (bound, bound + 1 if number == resource.RLIMIT_CPU and bound < hard else bound))


def _set_owner(uid: int | None) -> None:
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


# --- ends ----------------------------------------------------------------------------------------------------------


def kill_all(setup: dict[str, Any]) -> None:
    """Kills everything in the sandbox but this process. Nothing survives by forking on: signals go to all at once."""
    if setup["level"] != "Rlimits":
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # as process 1 of a pid namespace: everyone else in it
    elif setup["uid"] is not None:
        _kill_owner(setup["uid"])
    else:
        while children := _descendants():
            for process in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)


def _kill_owner(uid: int) -> None:
    killer = os.fork()
    if killer == 0:
        with contextlib.suppress(BaseException):
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)  # everything of this user; the uid belongs to one sandbox alone
        os._exit(0)
    os.waitpid(killer, 0)


def _descendants() -> list[int]:
    """Live processes below this one; dead ones that nobody has reaped do not count."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
                state, parent = file.read().rsplit(")", 1)[1].split()[:2]
                if state != "Z":
                    parents[int(name)] = int(parent)
    found = {os.getpid()}
    while more := {process for process, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {os.getpid()})


def _reap(*, wait: bool) -> None:
    """Collects dead orphans; with `wait`, until none is left: after kill_all the next command meets an empty sandbox."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0 if wait else os.WNOHANG)[0]:
            pass


def _disk_within(setup: dict[str, Any]) -> bool:
    """Whether the writable folders hold no more than their bytes and files."""
    left_bytes, left_files = setup["disk_bytes"], setup["disk_files"]
    pending = list(setup["disk_roots"])
    while pending:
        entries = _entries(pending.pop())
        if entries is None:
            return False
        left_files -= len(entries)
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                else:
                    left_bytes -= entry.stat(follow_symlinks=False).st_blocks * 512
        if left_bytes < 0 or left_files < 0:
            return False
    return True


def _entries(folder: str) -> list[os.DirEntry[str]] | None:
    """None when the command closed the folder to us for good: what cannot be counted counts as too much."""
    for _ in range(2):
        try:
            with os.scandir(folder) as found:
                return list(found)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except PermissionError:
            with contextlib.suppress(OSError):
                os.chmod(folder, 0o700)
    return None
