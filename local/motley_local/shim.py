"""Turns into a container's command, after giving it namespaces and mounts of its own. Standard library only; imported by nobody.

Run as ``python -I -S shim.py FD``: FD holds the specification as JSON, written by ``runner.Runner``. The process forks; its child becomes
the container. The agent reaps the parent, reads ``{"pid": n}`` from the status pipe and writes one byte to the go pipe. Only then does the
container tie its life to the agent, by now its parent (PR_SET_PDEATHSIG holds for the parent at the time of the call). A later error is
reported on the status pipe too; a successful exec closes it without a word.

The host's file system stays visible. A mount path that the host does not have needs a folder that can be written to: the nearest existing
ancestor is replaced by a tmpfs that holds every entry of it as a bind mount (for ``/`` with pivot_root, since a chroot would forbid
user namespaces inside, which sandboxes need).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import stat
import sys

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_NOATIME, MS_NODIRATIME = 32, 1024, 2048
MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE, MS_RELATIME = 4096, 8192, 16384, 1 << 18, 1 << 21
MNT_DETACH = 2
PR_SET_PDEATHSIG = 1
OLD_ROOT = ".host-root"

libc = ctypes.CDLL(None, use_errno=True)
libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    arguments = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    if libc.mount(*arguments, flags, None if data is None else data.encode()) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"mount {source or kind or ''}: {os.strerror(error)}", target)


def unmount(target: str) -> None:
    libc.umount2(os.fsencode(target), MNT_DETACH)


def pivot_root(new: str, old: str) -> None:
    # glibc has no wrapper; the number is per architecture.
    number = {"x86_64": 155, "aarch64": 41}[os.uname().machine]
    if libc.syscall(number, os.fsencode(new), os.fsencode(old)) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"pivot_root: {os.strerror(error)}", new)


def bind(source: str, target: str) -> None:
    mount(source, target, None, MS_BIND | MS_REC)


def make_readonly(target: str) -> None:
    """Remount read-only, keeping the flags that a user namespace may not clear."""
    have = os.statvfs(target).f_flag
    keep = 0
    for held, flag in (
        (os.ST_NOSUID, MS_NOSUID),
        (os.ST_NODEV, MS_NODEV),
        (os.ST_NOEXEC, MS_NOEXEC),
        (os.ST_NOATIME, MS_NOATIME),
        (os.ST_NODIRATIME, MS_NODIRATIME),
        (os.ST_RELATIME, MS_RELATIME),
    ):
        if have & held:
            keep |= flag
    mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | keep)


def make_point(path: str, is_dir: bool) -> None:
    """Something to mount on."""
    if is_dir:
        os.makedirs(path, exist_ok=True)
    elif not os.path.lexists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))


def mirror(source: str, target: str) -> None:
    """Every entry of ``source`` as a bind mount (links as links) in the empty folder ``target``."""
    for entry in os.scandir(source):
        place = os.path.join(target, entry.name)
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), place)
            continue
        make_point(place, entry.is_dir(follow_symlinks=False))
        try:
            bind(entry.path, place)
        except OSError:
            # A socket that vanished, or a mount that this namespace may not clone: the container goes without it.
            continue


def existing_ancestor(path: str) -> str:
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def missing_anchors(targets: list[str]) -> list[str]:
    """Host folders in which a mount path is missing, outermost first."""
    anchors = {existing_ancestor(target) for target in targets if not os.path.lexists(target)}
    return sorted(anchors, key=lambda path: (path.count("/") if path != "/" else 0, path))


def writable_anchor(anchor: str, stage: str) -> None:
    """Replace a host folder by a tmpfs with the same entries."""
    info = os.stat(anchor)
    mount("tmpfs", stage, "tmpfs", MS_NOSUID | MS_NODEV, f"mode={stat.S_IMODE(info.st_mode):o}")
    mirror(anchor, stage)
    if anchor != "/":
        mount(stage, anchor, None, MS_MOVE)
        return
    os.mkdir(os.path.join(stage, OLD_ROOT))
    pivot_root(stage, os.path.join(stage, OLD_ROOT))
    os.chdir("/")
    # The clone of the folder around the stage holds a clone of the half-built root.
    unmount(stage)


def apply_mounts(mounts: list[dict[str, object]], stage: str) -> None:
    """Bind every mount to its place; parents before what lies in them."""
    # Sources are opened first: a later mount may hide the path to them.
    planned = []
    for item in mounts:
        fd = os.open(str(item["source"]), os.O_PATH | os.O_CLOEXEC)
        is_dir = stat.S_ISDIR(os.fstat(fd).st_mode)
        planned.append((os.path.realpath(str(item["target"])), fd, is_dir, bool(item.get("readonly"))))
    planned.sort(key=lambda one: (one[0].count("/"), one[0]))
    for anchor in missing_anchors([target for target, *_ in planned]):
        writable_anchor(anchor, stage)
    for target, fd, is_dir, _ in planned:
        make_point(target, is_dir)
        bind(f"/proc/self/fd/{fd}", target)
    for target, *_, readonly in planned:
        if readonly:
            make_readonly(target)
    if os.path.isdir("/" + OLD_ROOT):
        unmount("/" + OLD_ROOT)
        os.rmdir("/" + OLD_ROOT)


def enter_user_namespace() -> None:
    """A user namespace in which we stay who we are, with the right to mount until exec."""
    uid, gid = os.getuid(), os.getgid()
    os.unshare(os.CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def join(pid: int, namespaces: list[str]) -> None:
    """Enter a running container, for a probe or a hook."""
    fds = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in namespaces]
    for fd in fds:
        os.setns(fd, 0)


def report(fd: int, **fields: object) -> None:
    os.write(fd, json.dumps(fields).encode() + b"\n")


def become(spec: dict[str, object], status_fd: int) -> None:
    """Exec the command."""
    argv = [str(part) for part in spec["argv"]]  # type: ignore[attr-defined]
    env = {str(key): str(value) for key, value in spec["env"].items()}  # type: ignore[attr-defined]
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.chdir(str(spec.get("cwd") or "/"))
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        report(
            status_fd, error=f"{argv[0]!r}: {error.strerror}", code=127 if isinstance(error, FileNotFoundError) else 126
        )
        os._exit(127)


def main() -> None:
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        file.seek(0)
        spec = json.load(file)
    status_fd, go_fd = int(spec["status_fd"]), int(spec["go_fd"])
    for fd in (status_fd, go_fd):
        os.set_inheritable(fd, False)
    try:
        if spec.get("nice"):
            os.nice(int(spec["nice"]))
        if spec.get("join"):
            join(int(spec["join"]), list(spec["join_namespaces"]))
        else:
            if spec.get("user_namespace"):
                enter_user_namespace()
            flags = os.CLONE_NEWNS | os.CLONE_NEWUTS if spec.get("mount_namespace") else 0
            flags |= os.CLONE_NEWPID if spec.get("pid_namespace") else 0
            if flags:
                os.unshare(flags)
        # Joining or making a PID namespace holds for children only.
        child = os.fork()
        if child != 0:
            # A container becomes the agent's own child; a probe is waited for here, and its exit code passed on.
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF if spec.get("join") else 0)
        os.setsid()
        if spec.get("mount_namespace"):
            mount(None, "/", None, MS_REC | MS_PRIVATE)
            pid = int(os.readlink("/proc/self"))
            apply_mounts(list(spec["mounts"]), str(spec["stage"]))
            if spec.get("pid_namespace"):
                mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
            if spec.get("hostname"):
                hostname = str(spec["hostname"]).encode()
                libc.sethostname(hostname, len(hostname))
        else:
            pid = 0 if spec.get("join") else os.getpid()
    except OSError as error:
        report(status_fd, error=f"preparing the container: {error}", code=128)
        os._exit(128)
    if not spec.get("join"):
        report(status_fd, pid=pid)
        if os.read(go_fd, 1) != b"g":
            os._exit(129)  # the agent died meanwhile
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    become(spec, status_fd)


main()
