"""Copies of workspaces: plain files, folders and links only, so that nothing but content passes from one sandbox to the next."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path

from motley_sampler.tasks.format import BUILD_FILES, Task


def make_workspace(task: Task, target: Path) -> None:
    """The workspace as the policy first sees it: environment/ without the files that build container images."""
    copy_tree(task.environment, target, leave_out=BUILD_FILES)


def copy_tree(source: Path, target: Path, *, leave_out: frozenset[str] = frozenset(), readable: bool = False) -> None:
    """Copies a tree that may have been written by the policy.

    Links are copied as links, never followed; sockets, pipes and devices are left behind, and so are set-user-id bits.
    `leave_out`: names at the top. `readable`: everyone may read the copy.
    """
    target.mkdir(parents=True, exist_ok=True)
    pending = [(source, target)]
    while pending:
        folder, copy = pending.pop()
        for entry in _entries(folder):
            if folder == source and entry.name in leave_out:
                continue
            destination = copy / entry.name
            if entry.is_symlink():
                destination.symlink_to(os.readlink(entry.path))
            elif entry.is_dir(follow_symlinks=False):
                destination.mkdir()
                pending.append((Path(entry.path), destination))
            elif entry.is_file(follow_symlinks=False):
                _copy_file(entry, destination, readable=readable)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with contextlib.suppress(PermissionError), os.scandir(folder) as found:
        return sorted(found, key=lambda entry: entry.name)
    os.chmod(folder, 0o700)  # closed by the policy; not root, so the folder is ours to open
    with os.scandir(folder) as found:
        return sorted(found, key=lambda entry: entry.name)


def _copy_file(entry: os.DirEntry[str], destination: Path, *, readable: bool) -> None:
    status = entry.stat(follow_symlinks=False)
    if not os.access(entry.path, os.R_OK):
        os.chmod(entry.path, 0o600)
    shutil.copyfile(entry.path, destination, follow_symlinks=False)
    mode = stat.S_IMODE(status.st_mode) & 0o777 | 0o600
    os.chmod(destination, mode | 0o444 if readable else mode)
    os.utime(destination, ns=(status.st_atime_ns, status.st_mtime_ns))
