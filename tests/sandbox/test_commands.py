"""What a command can and cannot do, at each level of isolation."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from motley_api.resources.rlrun import Isolation
from motley_sampler.sandbox.host import MIB, Ended, Limits, Mount, SandboxError, SandboxHost


def processes_with(marker: str) -> list[str]:
    """Command lines of live processes on the whole machine that hold the marker."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if marker in line:
                found.append(line)
    return found


async def gone(marker: str) -> bool:
    """Whether the processes vanish; the kernel may take a moment to bury them."""
    for _ in range(200):
        if not processes_with(marker):
            return True
        await asyncio.sleep(0.02)
    return False


async def test_a_command_gives_output_exit_code_and_leaves_files(open_sandbox: Any, place: Path) -> None:
    sandbox = await open_sandbox()
    result = await sandbox.run("pwd; echo hi > made; echo bad >&2; exit 3", timeout_s=10)
    assert (result.ended, result.exit_code, result.output) == (Ended.EXIT, 3, "/app\nbad\n")
    assert (place / "app0" / "made").read_text() == "hi\n"


async def test_each_command_starts_a_new_shell_in_the_same_files(open_sandbox: Any) -> None:
    sandbox = await open_sandbox()
    await sandbox.run("cd /tmp; export GONE=1; echo kept > /app/file", timeout_s=10)
    result = await sandbox.run("pwd; echo [$GONE]; cat file", timeout_s=10)
    assert result.output == "/app\n[]\nkept\n"


async def test_the_workers_secrets_are_not_in_the_environment(
    open_sandbox: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTLEY_TOKEN", "run-token-7d1")
    sandbox = await open_sandbox()
    result = await sandbox.run("env; cat /proc/*/environ 2>/dev/null", timeout_s=10)
    assert "PATH=" in result.output
    assert "run-token-7d1" not in result.output


async def test_other_folders_of_the_worker_are_out_of_reach(open_sandbox: Any, place: Path) -> None:
    store = place / "store"
    store.mkdir(mode=0o777)
    (store / "weights").write_text("secret")
    sandbox = await open_sandbox()
    path = str(store).replace(
        "/tmp", "/t''mp"
    )  # Rlimits would rewrite the name; a program that builds it is not stopped so
    result = await sandbox.run(f"cat {path}/weights; echo x > {path}/planted; ls {path}", timeout_s=10)
    assert "secret" not in result.output
    assert [path.name for path in store.iterdir()] == ["weights"]


async def test_the_system_cannot_be_written(open_sandbox: Any) -> None:
    sandbox = await open_sandbox()
    result = await sandbox.run(
        "for d in / /usr /etc /bin /opt /dev /run /home; do echo x > $d/motley-test && echo wrote $d; done",
        timeout_s=10,
    )
    assert "wrote" not in result.output
    assert not Path("/usr/motley-test").exists()
    shared = await sandbox.run("echo x > /tmp/x && echo x > ~/x && echo fine", timeout_s=10)
    assert shared.output.endswith("fine\n")


async def test_nothing_on_the_network_is_reached(open_sandbox: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        sandbox = await open_sandbox()
        result = await sandbox.run(f"(exec 3<>/dev/tcp/127.0.0.1/{port}) && echo connected", timeout_s=10)
        assert "connected" not in result.output
        assert result.exit_code != 0
        with socket.create_connection(("127.0.0.1", port), timeout=5):  # the same address answers outside
            pass


async def test_a_timeout_kills_everything_inside(open_sandbox: Any) -> None:
    sandbox = await open_sandbox()
    marker = f"86{os.getpid()}"
    command = f"trap '' TERM INT HUP; (setsid sleep {marker} &) ; nohup sleep {marker} & sleep {marker}"
    result = await sandbox.run(command, timeout_s=0.5)
    assert result.ended is Ended.TIMEOUT
    assert await gone(f"sleep {marker}")
    again = await sandbox.run("echo still here", timeout_s=10)
    assert again.output == "still here\n"


async def test_a_fork_bomb_is_stopped(open_sandbox: Any) -> None:
    sandbox = await open_sandbox(Limits(processes=40))
    await sandbox.run("bomb() { bomb | bomb & }; bomb; sleep 30", timeout_s=1)
    result = await sandbox.run("echo alive", timeout_s=20)
    assert result.output == "alive\n"


async def test_closing_kills_background_processes(open_sandbox: Any) -> None:
    sandbox = await open_sandbox()
    marker = f"87{os.getpid()}"
    result = await sandbox.run(f"nohup setsid sleep {marker} > /dev/null 2>&1 & echo started", timeout_s=10)
    assert result.output == "started\n"
    await sandbox.run("true", timeout_s=10)
    assert processes_with(f"sleep {marker}")  # a server that a task started lives on between commands
    await sandbox.close()
    assert await gone(f"sleep {marker}")


async def test_a_background_process_that_holds_the_output_does_not_hold_the_command(open_sandbox: Any) -> None:
    sandbox = await open_sandbox()
    result = await sandbox.run("sleep 300 & echo done", timeout_s=60)
    assert (result.ended, result.output) == (Ended.EXIT, "done\n")


async def test_long_output_is_cut_to_head_and_tail(open_sandbox: Any) -> None:
    sandbox = await open_sandbox(Limits(output_bytes=40))
    result = await sandbox.run("printf 'start%01000dend' 7", timeout_s=10)
    # 1008 bytes; the first 20 and the last 20 are kept
    assert result.output == "start" + "0" * 15 + "\n[968 bytes left out]\n" + "0" * 16 + "7end"
    assert result.output_total_bytes == 1008


async def test_an_endless_flood_of_output_is_stopped(open_sandbox: Any) -> None:
    sandbox = await open_sandbox(Limits(output_total_bytes=4 * MIB))
    result = await sandbox.run("yes", timeout_s=60)
    assert result.ended is Ended.OUTPUT_LIMIT
    assert len(result.output) < 20_000


async def test_bytes_that_are_no_text_are_shown_as_such(open_sandbox: Any) -> None:
    sandbox = await open_sandbox()
    result = await sandbox.run(r"printf 'a\xff\x00b'", timeout_s=10)
    assert result.output == "a\ufffd\0b"


async def test_filling_the_disk_is_stopped(open_sandbox: Any, place: Path) -> None:
    sandbox = await open_sandbox(Limits(disk_bytes=8 * MIB, file_bytes=4 * MIB))
    one = await sandbox.run("head -c 64M /dev/zero > big; stat -c %s big", timeout_s=30)
    assert one.output.endswith(f"{4 * MIB}\n")  # one file: the kernel refuses
    command = "i=0; while true; do head -c 1M /dev/zero > many$i || exit 9; i=$((i+1)); sleep 0.02; done"
    many = await sandbox.run(command, timeout_s=60)
    assert many.ended is Ended.DISK_LIMIT
    used = sum(path.stat().st_size for path in (place / "app0").iterdir())
    assert used < 256 * MIB  # found while it ran, not when the disk was full


async def test_too_many_files_are_noticed(open_sandbox: Any) -> None:
    sandbox = await open_sandbox(Limits(disk_files=100))
    result = await sandbox.run("for i in $(seq 300); do : > f$i; done", timeout_s=30)
    assert result.ended is Ended.DISK_LIMIT


async def test_memory_is_bounded(open_sandbox: Any) -> None:
    sandbox = await open_sandbox(Limits(memory_bytes=64 * MIB))
    small = await sandbox.run("head -c 16M /dev/zero | tail | wc -c", timeout_s=30)
    large = await sandbox.run("head -c 256M /dev/zero | tail | wc -c", timeout_s=30)
    assert small.output == f"{16 * MIB}\n"
    assert f"{256 * MIB}" not in large.output


async def test_cpu_time_is_bounded(open_sandbox: Any) -> None:
    sandbox = await open_sandbox(Limits(cpu_s=1))
    result = await sandbox.run("trap '' XCPU; while :; do :; done", timeout_s=120)
    assert (result.ended, result.exit_code) == (Ended.EXIT, -9)


async def test_privileges_cannot_be_regained(open_sandbox: Any, host: SandboxHost) -> None:
    sandbox = await open_sandbox()
    result = await sandbox.run("grep -E 'CapEff|CapBnd|NoNewPrivs|Seccomp:' /proc/self/status", timeout_s=10)
    fields = dict(re.findall(r"(\w+):\s*(\w+)", result.output))
    if host.level is Isolation.RLIMITS and os.geteuid() != 0:
        fields["CapBnd"] = "0" * 16  # only a privileged process can shrink it; no_new_privs makes it moot
    assert fields == {"CapEff": "0" * 16, "CapBnd": "0" * 16, "NoNewPrivs": "1", "Seccomp": "2"}
    for attempt in (
        "unshare -Ur true",
        "mount -t tmpfs none /tmp",
        "setpriv --reuid 0 --clear-groups mount --bind /usr /tmp",
    ):
        assert (await sandbox.run(attempt, timeout_s=10)).exit_code != 0, attempt


async def test_a_null_byte_is_the_commands_error(open_sandbox: Any) -> None:
    sandbox = await open_sandbox()
    assert (await sandbox.run("echo a\0b", timeout_s=10)).exit_code == 126
    assert (await sandbox.run("echo ok", timeout_s=10)).output == "ok\n"


async def test_sandboxes_do_not_see_each_other(open_sandbox: Any) -> None:
    one, other = await open_sandbox(), await open_sandbox()
    await one.run("echo one > /tmp/shared; nohup sleep 300 > /dev/null 2>&1 &", timeout_s=10)
    result = await other.run("cat /tmp/shared; kill -9 -1; echo tried", timeout_s=10)
    assert "one" not in result.output.replace("shared", "")
    assert (await one.run("cat /tmp/shared", timeout_s=10)).output == "one\n"


async def test_a_dead_sandbox_is_an_error_of_its_own(host: SandboxHost, place: Path) -> None:
    workspace = place / "work"
    workspace.mkdir()
    sandbox = await host.create([Mount(workspace, "/app", writable=True)])
    sandbox._writer.close()
    with pytest.raises(SandboxError):
        await sandbox.run("true", timeout_s=1)


async def test_a_launcher_that_died_is_started_again(host: SandboxHost, place: Path) -> None:
    workspace = place / "work"
    workspace.mkdir()
    assert host._process is not None
    host._process.kill()
    await host._process.wait()
    async with await host.create([Mount(workspace, "/app", writable=True)]) as sandbox:
        assert (await sandbox.run("echo back", timeout_s=10)).output == "back\n"


async def test_many_sandboxes_at_once(open_sandbox: Any) -> None:
    async def one(number: int) -> str:
        sandbox = await open_sandbox()
        await sandbox.run(f"echo {number} > file", timeout_s=60)
        return str((await sandbox.run("cat file", timeout_s=60)).output)

    outputs = await asyncio.gather(*(one(number) for number in range(32)))
    assert outputs == [f"{number}\n" for number in range(32)]


async def test_a_wanted_level_that_does_not_work_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(place))  # no bwrap there
    with pytest.raises(SandboxError, match="Bubblewrap"):
        await SandboxHost.start(place / "scratch", Isolation.BUBBLEWRAP)


async def test_everything_ends_with_the_worker(place: Path) -> None:
    """Even a worker that is killed outright leaves no process behind."""
    marker = f"88{os.getpid()}"
    script = (
        "import asyncio, sys, pathlib\n"
        "from motley_sampler.sandbox.host import *\n"
        "async def main(folder):\n"
        "    host = await SandboxHost.start(folder / 's')\n"
        "    (folder / 'w').mkdir()\n"
        "    sandbox = await host.create([Mount(folder / 'w', '/app', True)])\n"
        f"    await sandbox.run('nohup setsid sleep {marker} > /dev/null 2>&1 & true', timeout_s=10)\n"
        "    print('ready', flush=True)\n"
        f"    await sandbox.run('sleep {marker}', timeout_s=600)\n"
        "asyncio.run(main(pathlib.Path(sys.argv[1])))\n"
    )
    import sys

    environment = {**os.environ, "PYTHONPATH": ":".join(path for path in sys.path if path)}
    worker = subprocess.Popen(
        [sys.executable, "-c", script, str(place)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == "ready\n"
    assert processes_with(f"sleep {marker}")
    worker.kill()
    worker.wait()
    assert await gone(f"sleep {marker}")
