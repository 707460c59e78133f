"""Makes sandboxes and runs commands in them, for asyncio. The strongest isolation that works here is found by trying it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from motley_api.resources.rlrun import Isolation

from motley_sampler.sandbox import confine, wire
from motley_sampler.sandbox.init import PATH

MIB = 1 << 20
WORKDIR = "/app"  # Harbor's working directory
HOME = "/home/agent"  # not /root: the interpreter may lie below that
_BASE_UID, _UIDS_PER_WORKER, _WORKERS = 200_000, 1024, 4096
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt")
_ETC = (
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "alternatives",
    "ssl",
    "ca-certificates",
    "localtime",
    "mime.types",
)
_GRACE_S = 20.0  # past a command's own timeout, before the sandbox itself counts as hung
_PREFERENCE = (Isolation.NAMESPACES, Isolation.BUBBLEWRAP, Isolation.RLIMITS)


class SandboxError(Exception):
    """The sandbox failed, not the command in it: infrastructure, never graded."""


class Ended(StrEnum):
    """Why a command stopped."""

    EXIT = "Exit"
    TIMEOUT = "Timeout"
    DISK_LIMIT = "DiskLimit"
    OUTPUT_LIMIT = "OutputLimit"


@dataclass(frozen=True)
class Limits:
    """What one command may use; disk bounds cover all that a sandbox can write to."""

    memory_bytes: int = 2048 * MIB  # of data per process; of address space four times as much
    cpu_s: int = 600  # per process
    file_bytes: int = 512 * MIB  # one file
    open_files: int = 1024
    processes: int = 256  # threads included
    disk_bytes: int = 2048 * MIB
    disk_files: int = 200_000
    output_bytes: int = 16_384  # kept: head and tail
    output_total_bytes: int = 64 * MIB  # printed: past this the command is stopped

    def rlimits(self) -> dict[str, int]:
        return {
            "RLIMIT_DATA": self.memory_bytes,
            "RLIMIT_AS": 4 * self.memory_bytes,  # runtimes reserve far more addresses than they use
            "RLIMIT_CPU": self.cpu_s,
            "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_CORE": 0,
        }


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Mount:
    """A folder of the worker in the sandbox. Read-only ones are the caller's private copies: see _PathNames."""

    source: Path
    target: str
    writable: bool = False


@dataclass(frozen=True)
class CommandResult:
    ended: Ended
    exit_code: int  # negative: killed by that signal
    output: str  # standard output and error in one, cut to Limits.output_bytes
    output_total_bytes: int
    wall_s: float
    cpu_s: float


@dataclass
class SandboxHost:
    """One per worker. Sandboxes die with it, and with the worker."""

    scratch: Path
    level: Isolation
    base_uid: int | None  # root gives each sandbox a user of its own: base_uid + slot
    detail: str = ""  # for people: what else confines, and why stronger levels do not work here
    _channel: socket.socket | None = None
    _process: asyncio.subprocess.Process | None = None
    _free_slots: list[int] = field(default_factory=lambda: list(range(_UIDS_PER_WORKER - 1, -1, -1)))

    @classmethod
    async def start(cls, scratch: Path, wanted: Isolation = Isolation.AUTO) -> Self:
        """Tries levels from the strongest down. A wanted level that does not work here is an error, never a weaker one."""
        scratch.mkdir(parents=True, exist_ok=True)
        scratch.chmod(scratch.stat().st_mode | 0o111)  # the sandboxes' users pass through; they list nothing
        candidates = _PREFERENCE if wanted is Isolation.AUTO else (wanted,)
        reasons: list[str] = []
        for level in candidates:
            uid = _BASE_UID + (os.getpid() % _WORKERS) * _UIDS_PER_WORKER
            if why_not := impossible(level):
                reasons.append(f"{level}: {why_not}")
                continue
            for base_uid in _base_uids(uid):
                host = cls(scratch, level, base_uid)
                try:
                    await host._probe()
                except SandboxError as error:
                    reasons.append(f"{level}: {error}")
                    await host.close()
                    continue
                notes = [f"landlock={confine.landlock_abi()}"] if level is Isolation.RLIMITS else []
                host.detail = "; ".join([*notes, *reasons])
                return host
        raise SandboxError(
            f"no sandbox isolation of {[str(level) for level in candidates]} works here: " + "; ".join(reasons)
        )

    async def create(
        self,
        mounts: list[Mount],
        limits: Limits = DEFAULT_LIMITS,
        *,
        cwd: str = WORKDIR,
        env: Mapping[str, str] | None = None,
    ) -> Sandbox:
        """A sandbox over folders of the worker. Writable ones are handed to the sandbox's own user."""
        if not self._free_slots:
            raise SandboxError(f"more than {_UIDS_PER_WORKER} sandboxes at once")
        slot = self._free_slots.pop()
        root = self.scratch / f"root-{uuid.uuid4().hex[:12]}"
        try:
            root.mkdir()
            for name in ("tmp", "home"):
                (root / name).mkdir()
            all_mounts = [*mounts, Mount(root / "tmp", "/tmp", True), Mount(root / "home", HOME, True)]
            return await self._create(slot, root, all_mounts, limits, cwd, dict(env or {}))
        except BaseException as error:
            self._free_slots.append(slot)
            await asyncio.to_thread(remove_tree, root)
            if isinstance(error, OSError):
                raise SandboxError(f"sandbox could not be made: {error}") from error
            raise

    async def _create(
        self, slot: int, root: Path, mounts: list[Mount], limits: Limits, cwd: str, env: dict[str, str]
    ) -> Sandbox:
        uid = None if self.base_uid is None else self.base_uid + slot
        if uid is not None:
            for mount in mounts:
                if mount.writable:
                    await asyncio.to_thread(_give, mount.source, uid)
        (root / "root").mkdir()
        paths = {mount.target: str(mount.source.resolve()) for mount in mounts}
        names = _PathNames(paths, self.level)
        await asyncio.to_thread(names.rewrite_files, [mount.source for mount in mounts if not mount.writable])
        setup = self._setup(root, uid, mounts, limits, paths)
        ours, theirs = socket.socketpair()
        try:
            await self._send(setup, theirs)
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        sandbox = Sandbox(self, slot, root, reader, writer, limits, cwd, env, names)
        try:
            answer = await sandbox._receive(_GRACE_S)
        except SandboxError:
            await sandbox._drop()
            raise
        if "error" in answer:
            await sandbox._drop()
            raise SandboxError(answer["error"])
        return sandbox

    def _setup(
        self, root: Path, uid: int | None, mounts: list[Mount], limits: Limits, paths: dict[str, str]
    ) -> dict[str, Any]:
        inside = self.level is not Isolation.RLIMITS
        system = [*_SYSTEM, *(f"/etc/{name}" for name in _ETC), *_interpreter()]
        writable = [mount for mount in mounts if mount.writable]
        devices = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"]
        return {
            "level": str(self.level),
            "uid": uid,
            "bwrap": shutil.which("bwrap") or "",
            "root": str(root / "root"),
            "system": system
            if inside
            else [*system, "/etc", "/proc", *(p.source.as_posix() for p in mounts if not p.writable)],
            "binds": [[paths[mount.target], mount.target, "rw" if mount.writable else "ro"] for mount in mounts],
            "writable": [*devices, *(paths[mount.target] for mount in writable)],
            "disk_roots": [mount.target if inside else paths[mount.target] for mount in writable],
            "disk_bytes": limits.disk_bytes,
            "disk_files": limits.disk_files,
        }

    async def _send(self, setup: dict[str, Any], theirs: socket.socket) -> None:
        if self._process is None or self._process.returncode is not None:
            await self._start_launcher()
        assert self._channel is not None
        body = json.dumps(setup).encode()
        for _ in range(100):
            try:
                socket.send_fds(self._channel, [body], [theirs.fileno()])
                return
            except BlockingIOError:
                await asyncio.sleep(0.01)  # the launcher is behind by a whole socket buffer
            except OSError as error:
                raise SandboxError(f"the sandbox launcher is gone: {error}") from error
        raise SandboxError("the sandbox launcher takes no requests")

    async def _start_launcher(self) -> None:
        if self._channel is not None:
            self._channel.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        package_root = Path(__file__).resolve().parents[2]
        code = (
            f"import sys; sys.path.insert(0, {str(package_root)!r}); from motley_sampler.sandbox.launcher import main; "
        )
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", f"{code} main({theirs.fileno()})"),
            pass_fds=[theirs.fileno()],
            env={"PATH": PATH, "LANG": "C.UTF-8"},  # nothing of the worker's environment: it holds the run's token
            stdin=asyncio.subprocess.DEVNULL,
        )
        theirs.close()
        self._channel = ours

    async def _probe(self) -> None:
        """Proves the level by use: a command runs, as nobody special, writes where it may and nowhere else."""
        workspace = self.scratch / f"probe-{uuid.uuid4().hex[:8]}"
        workspace.mkdir()
        try:
            async with await self.create([Mount(workspace, WORKDIR, True)]) as sandbox:
                test = f"echo x > {WORKDIR}/made && ! (echo x > /usr/motley-probe) 2>/dev/null && cat {WORKDIR}/made"
                result = await sandbox.run(test, timeout_s=10)
            if result.exit_code != 0 or result.output != "x\n" or not (workspace / "made").exists():
                raise SandboxError(f"probe ended with {result.exit_code}: {result.output[:200]}")
        finally:
            await asyncio.to_thread(remove_tree, workspace)

    async def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            await self._process.wait()
            self._process = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


@dataclass
class Sandbox:
    """One command at a time. Background processes of a command live until the sandbox closes or a command is stopped."""

    _host: SandboxHost
    _slot: int
    _root: Path
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    _limits: Limits
    _cwd: str
    _env: dict[str, str]
    _names: _PathNames
    _closed: bool = False
    wall_s: float = 0.0
    cpu_s: float = 0.0

    async def run(self, command: str, *, timeout_s: float, env: Mapping[str, str] | None = None) -> CommandResult:
        """Runs ``bash -c command``. Raises SandboxError when the sandbox itself fails or hangs."""
        if self._closed:
            raise SandboxError("the sandbox is closed")
        if "\0" in command:
            return CommandResult(Ended.EXIT, 126, "bash: command holds a null byte\n", 32, 0.0, 0.0)
        environment = {"PATH": _search_path(), "HOME": HOME, "LANG": "C.UTF-8", "TERM": "dumb", "TMPDIR": "/tmp"}
        environment |= {"PWD": self._cwd, "PYTHONDONTWRITEBYTECODE": "1", **self._env, **(env or {})}
        request = {
            "command": self._names.to_host(command.encode("utf-8", "replace").decode()),
            "cwd": self._names.to_host(self._cwd),
            "env": {name: self._names.to_host(value) for name, value in environment.items()},
            "timeout_s": timeout_s,
            "limits": self._limits.rlimits(),
            "output_bytes": self._limits.output_bytes,
            "output_total_bytes": self._limits.output_total_bytes,
        }
        try:
            self._writer.write(wire.pack(request))
            await self._writer.drain()
        except OSError as error:
            raise SandboxError(f"the sandbox is gone: {error}") from error
        answer = await self._receive(timeout_s + _GRACE_S)
        self.wall_s += answer["wall_s"]
        self.cpu_s += answer["cpu_s"]
        answer["ended"] = Ended(answer["ended"])
        answer["output"] = self._names.to_sandbox(answer["output"])
        return CommandResult(**answer)

    async def _receive(self, timeout_s: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout_s):
                header = await self._reader.readexactly(wire.HEADER.size)
                body = await self._reader.readexactly(wire.HEADER.unpack(header)[0])
        except TimeoutError as error:
            raise SandboxError(f"no answer from the sandbox within {timeout_s:.0f} s") from error
        except (asyncio.IncompleteReadError, OSError) as error:
            raise SandboxError("the sandbox ended by itself") from error
        message: dict[str, Any] = json.loads(body)
        return message

    async def close(self) -> None:
        """Ends every process in the sandbox. The worker's own folders stay."""
        if self._closed:
            return
        self._closed = True
        self._writer.write_eof()
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(_GRACE_S):
                await self._reader.read()  # end of file comes when the last process that held the socket is gone
        await self._drop()

    async def _drop(self) -> None:
        self._closed = True
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        await asyncio.to_thread(remove_tree, self._root)
        self._host._free_slots.insert(0, self._slot)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _PathNames:
    """Without a mount namespace the sandbox's paths are the worker's: names are rewritten on the way in and out.

    An approximation (a path that a program puts together itself is missed); Namespaces need none of it.
    """

    def __init__(self, paths: Mapping[str, str], level: Isolation) -> None:
        self._paths = dict(paths) if level is Isolation.RLIMITS else {}
        names = "|".join(re.escape(target) for target in sorted(self._paths, key=len, reverse=True))
        self._pattern = re.compile(rf"(?<![\w./-])(?:{names})(?![\w.-])") if names else None

    def to_host(self, text: str) -> str:
        return text if self._pattern is None else self._pattern.sub(lambda match: self._paths[match.group()], text)

    def rewrite_files(self, folders: list[Path]) -> None:
        """Scripts that are mounted read-only: private copies of the caller's, so they may be changed."""
        for folder in folders if self._paths else []:
            for path in folder.rglob("*"):
                if path.is_file() and not path.is_symlink():
                    with contextlib.suppress(UnicodeDecodeError):
                        path.write_text(self.to_host(path.read_text(encoding="utf-8")), encoding="utf-8")

    def to_sandbox(self, text: str) -> str:
        for target, source in self._paths.items():
            text = text.replace(source, target)
        return text


def impossible(level: Isolation) -> str:
    """Why a level need not be tried; empty: it may work."""
    if level is Isolation.BUBBLEWRAP and os.geteuid() == 0:
        return "for workers that are not root"  # root needs no help, and bwrap's sandboxes would be root's
    if level is Isolation.BUBBLEWRAP and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    return ""


def _base_uids(uid: int) -> tuple[int | None, ...]:
    """Users to try for sandboxes. The machine's root is bound by no process limit, so its sandboxes must get users of
    their own; root of a user namespace may have none to give."""
    if os.geteuid() != 0:
        return (None,)
    with open("/proc/self/uid_map") as file:
        real_root = file.read().split() == ["0", "0", "4294967295"]
    return (uid,) if real_root else (uid, None)


def _interpreter() -> tuple[str, ...]:
    """The worker's own Python, where that lies outside the system's folders: then it may be the only one there is."""
    prefix = os.path.realpath(sys.base_prefix)
    return () if prefix.startswith("/usr") else (prefix,)


def _search_path() -> str:
    return ":".join([PATH, *(f"{prefix}/bin" for prefix in _interpreter())])


def _give(folder: Path, uid: int) -> None:
    """Hands a tree to a sandbox's user; links themselves, never what they point to."""
    os.lchown(folder, uid, uid)
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            os.lchown(os.path.join(parent, name), uid, uid)


def remove_tree(path: Path) -> None:
    """Removes a tree that a sandbox wrote: folders it closed to their owner are opened first."""
    for _ in range(2):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        for parent, folders, _files in os.walk(path):
            for name in (*folders, ""):
                with contextlib.suppress(OSError):
                    folder = os.path.join(parent, name)
                    if not os.path.islink(folder):
                        os.chmod(folder, 0o700)
    if path.exists():
        raise SandboxError(f"{path} could not be removed")
