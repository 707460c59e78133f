"""Forks sandboxes for a worker: a small process with little memory, so that a new sandbox costs milliseconds.

Run as ``python -I -S -c "...main(fd)"`` with one end of a Unix socket pair. Each message names a sandbox and carries one
more socket, over which that sandbox is spoken to. Standard library only.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from typing import Any

from motley_sampler.sandbox import init, kernel, wire

NAMESPACES = kernel.CLONE_NEWNS | kernel.CLONE_NEWUTS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET
_MAX_SETUP_BYTES = 1 << 16


def main(descriptor: int) -> None:
    """Serves until the worker closes its end; running sandboxes then see their own connections close."""
    requests = socket.socket(fileno=descriptor)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the worker's to answer
    while True:
        body, descriptors, _, _ = socket.recv_fds(requests, _MAX_SETUP_BYTES, 1)
        if not body:
            return
        connection = socket.socket(fileno=descriptors[0])
        if os.fork() == 0:
            requests.close()
            _start(connection, json.loads(body))
        connection.close()
        _reap()


def _start(connection: socket.socket, setup: dict[str, Any]) -> None:
    """In the child: becomes the sandbox's first process, or its parent that leaves at once. Never returns."""
    status = 1
    try:
        os.setsid()
        if setup["level"] == "Namespaces":
            try:
                _enter_namespaces()
            except OSError as error:
                connection.sendall(wire.pack({"error": str(error)}))
                os._exit(1)
            if os.fork() != 0:
                os._exit(0)
        elif setup["level"] == "Bubblewrap":
            _exec_bubblewrap(connection, setup)
        init.serve(connection, setup)
        status = 0
    except BaseException:
        traceback.print_exc(file=sys.stderr)
    finally:
        os._exit(status)


_INSIDE = "/run/motley"  # where a sandbox of bubblewrap's finds this package's first process


def _exec_bubblewrap(connection: socket.socket, setup: dict[str, Any]) -> None:
    """Becomes bwrap, which sets up the same walls as init does by itself, and then starts init in them."""
    arguments = [setup["bwrap"], "--unshare-all", "--as-pid-1", "--uid", "0", "--gid", "0", "--hostname", "sandbox"]
    for path in setup["system"]:
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        else:
            arguments += ["--ro-bind-try", path, path]
    for name, text in init.etc_files(0).items():
        source = os.path.join(setup["root"], name)
        with open(source, "w") as file:
            file.write(text)
        arguments += ["--ro-bind", source, f"/etc/{name}"]
    arguments += ["--dev", "/dev", "--proc", "/proc", "--dir", "/run", "--dir", "/mnt", "--symlink", "/tmp", "/var/tmp"]
    for source, target, mode in setup["binds"]:
        arguments += ["--ro-bind" if mode == "ro" else "--bind", source, target]
    shared = os.path.join(setup["root"], "shm")  # a tmpfs of bwrap's would have no bound that we could set
    os.mkdir(shared)
    setup["disk_roots"].append("/dev/shm")
    arguments += ["--bind", shared, "/dev/shm", "--remount-ro", "/dev"]
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for name in ("__init__.py", "sandbox"):
        arguments += ["--ro-bind", os.path.join(package, name), f"{_INSIDE}/motley_sampler/{name}"]
    read_end, write_end = os.pipe()
    os.write(write_end, json.dumps(setup).encode())  # not in the arguments: those anyone can read
    os.close(write_end)
    code = f"import sys; sys.path.insert(0, {_INSIDE!r}); from motley_sampler.sandbox.launcher import inside; "
    code += f"inside({connection.fileno()}, {read_end})"
    arguments += ["--remount-ro", "/", "--", os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", code]
    os.set_inheritable(connection.fileno(), True)
    os.set_inheritable(read_end, True)
    os.execv(setup["bwrap"], arguments)


def inside(connection_fd: int, setup_fd: int) -> None:
    """Where bwrap hands over."""
    with os.fdopen(setup_fd, "rb") as file:
        setup = json.loads(file.read())
    connection = socket.socket(fileno=connection_fd)
    connection.set_inheritable(False)
    init.serve(connection, setup)


def _enter_namespaces() -> None:
    if os.geteuid() == 0:
        kernel.unshare(NAMESPACES)
        return
    uid, gid = os.geteuid(), os.getegid()
    kernel.unshare(NAMESPACES | kernel.CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
