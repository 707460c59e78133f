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
        init.serve(connection, setup)
        status = 0
    except BaseException:
        traceback.print_exc(file=sys.stderr)
    finally:
        os._exit(status)


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
