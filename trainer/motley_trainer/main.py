"""`motley trainer`: a pod of the training gang. Pod 0 also holds the trajectory buffer; every pod runs torchrun.

Exit codes: 0 the steps are done (at once, when they were done before); 143 this pod or another one of the gang was asked to
stop, after a save; 78 settings or sources that can never work, with the reason last on stderr; 1 the gang failed more often than
torchrun restarts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from aiohttp import web
from motley_api import keys
from motley_api.resources.rlrun import OnExisting

from motley_trainer import logs
from motley_trainer.buffer.core import BufferCore
from motley_trainer.buffer.db import BufferBrokenError, BufferDb, ForeignBufferError
from motley_trainer.buffer.ledger import Ledger
from motley_trainer.buffer.service import RUNNER_OPTIONS, BufferService
from motley_trainer.checkpoints import CheckpointFolder
from motley_trainer.settings import ENV_LEFT, ENV_SOCKET, Settings, SettingsError, from_environment
from motley_trainer.source import SourceError, check_layout, check_model, task_names, train_tasks

log = logging.getLogger("motley_trainer")

LINGER_S = 10.0  # the final status stays readable
MAX_RESTARTS = 5  # of the gang by torchrun, before the pod itself is restarted


def main() -> None:
    logs.configure("trainer")
    try:
        settings = from_environment()
        code = asyncio.run(_lead(settings) if settings.index == 0 else _follow(settings))
    except (SettingsError, BufferBrokenError) as error:
        print(error, file=sys.stderr, flush=True)  # alone and last: it becomes the run's condition
        code = keys.EXIT_CONFIG
    sys.exit(code)


async def _lead(settings: Settings) -> int:
    """Pod 0: the buffer, and this pod's part of the gang."""
    db = _open_buffer(settings)
    settings = replace(settings, run_uid=db.run_uid)
    _rewind(settings, db)
    if db.get("finished") and db.get("step") >= settings.spec.steps:
        log.info("event=already_finished step=%d", db.get("step"))
        return 0
    core = BufferCore(
        run=settings.run,
        spec=settings.spec,
        db=db,
        ledger=Ledger(settings.run_url),
        train_tasks=[],
        heldout_tasks=task_names(settings.spec.tasks.source, "heldout"),
        fleet_file=settings.fleet_file,
    )
    service = BufferService(core, token=settings.token)
    # A socket's path ends at 107 bytes, and TMPDIR may be longer than that.
    with tempfile.TemporaryDirectory(
        prefix="motley-", dir="/tmp" if len(tempfile.gettempdir()) > 80 else None
    ) as folder:
        socket = Path(folder) / "buffer.sock"
        async with _serving(service, settings, socket):
            try:
                check_model(settings.spec.model.source)
                check_layout(
                    settings.spec.model.source,
                    tensor=settings.spec.trainer.tensor_parallel,
                    expert=settings.spec.trainer.expert_parallel,
                )
                core.train_tasks = train_tasks(settings.spec.tasks.source)
            except SourceError as error:
                # Serving while one looks: a store that takes long to answer must not look like a dead pod.
                raise SettingsError(f"{error.reason}: {error}") from error
            code = await _gang(settings, socket)
            if code == 0 and core.finished:
                await _linger()
            return code if code or core.finished else 1


def _open_buffer(settings: Settings) -> BufferDb:
    """Errors: SettingsError when an earlier run of this name left its folder and the spec does not say to go on with it."""
    resume = settings.spec.store.on_existing is OnExisting.RESUME
    try:
        return BufferDb(
            settings.durable_folder("buffer") / "buffer.sqlite3", run_uid=settings.run_uid, take_over=resume
        )
    except ForeignBufferError as error:
        raise SettingsError(
            f"RunFolderExists: store.url: {settings.run_url} holds an earlier run of this name (uid {error.owner}): set"
            " store.onExisting to Resume to go on from its last checkpoint, or move that folder away, or choose another"
            " metadata.name"
        ) from error


def _rewind(settings: Settings, db: BufferDb) -> None:
    """Once for each value of the field: back to a checkpoint from before. Errors: SettingsError."""
    wanted = settings.spec.checkpoint.rewind_to_step
    if wanted is None or db.get("rewound") == wanted:
        return
    try:
        step = CheckpointFolder(settings.durable_folder("checkpoints"), run_uid=settings.run_uid).rewind(wanted)
    except ValueError as error:
        raise SettingsError(f"NoSuchCheckpoint: checkpoint.rewindToStep: {error}") from error
    db.rewind(wanted)
    db.put(finished=0)
    log.info("event=rewound to_step=%d from_step=%d", step, db.get("step"))


async def _follow(settings: Settings) -> int:
    return await _gang(settings, None)


async def _linger() -> None:
    log.info("event=finished linger_s=%.0f", LINGER_S)
    await _sleep_or_stop(LINGER_S)


async def _sleep_or_stop(seconds: float) -> None:
    """SIGTERM ends the wait."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()


@contextlib.asynccontextmanager
async def _serving(service: BufferService, settings: Settings, socket: Path) -> AsyncIterator[None]:
    """Both doors of the buffer, on this pod's own address and on a socket file that only this pod's user can open."""
    runners = []
    for app in (service.public_app(), service.local_app()):
        runner = web.AppRunner(app, **RUNNER_OPTIONS)
        await runner.setup()
        runners.append(runner)
    try:
        await web.TCPSite(runners[0], settings.pod_ip, keys.TRAINER_PORT).start()
        await web.UnixSite(runners[1], str(socket)).start()
        log.info("event=serving address=%s:%d", settings.pod_ip, keys.TRAINER_PORT)
        yield
    finally:
        for runner in runners:
            await runner.cleanup()
        service.close()


async def _gang(settings: Settings, socket: Path | None) -> int:
    """torchrun, until it ends. SIGTERM goes on to it: the ranks finish their step, save and leave."""
    left = settings.scratch / "left-early"
    left.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        ENV_LEFT: str(left),
        keys.ENV_RUN_UID: settings.run_uid,  # an earlier run's, where its folder is gone on with
    }
    environment.setdefault("OMP_NUM_THREADS", "1")
    if socket is not None:
        environment[ENV_SOCKET] = str(socket)
    # A session of its own: a signal to the whole pod reaches the ranks once, through torchrun.
    process = await asyncio.create_subprocess_exec(
        *torchrun_command(settings, environment), env=environment, start_new_session=True
    )
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        log.info("event=stopping")
        with contextlib.suppress(ProcessLookupError):
            process.terminate()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop)
    try:
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
    log.info("event=gang_ended code=%d", code)
    if stopped or left.exists():
        return keys.EXIT_STOPPED
    return 0 if code == 0 else 1


def torchrun_command(settings: Settings, environment: dict[str, str]) -> list[str]:
    """One pod is a gang of its own; several meet at pod 0, each with the rank that its index says: rank 0 must be where
    the buffer is."""
    trainer = settings.spec.trainer
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={trainer.nodes}",
        f"--nproc-per-node={trainer.gpus_per_node}",
        f"--max-restarts={MAX_RESTARTS}",
        "--monitor-interval=1",
    ]
    if trainer.nodes == 1:
        command += ["--standalone", f"--local-addr={settings.pod_ip}"]
    else:
        command += [
            "--rdzv-backend=static",
            f"--node-rank={settings.index}",
            f"--master-addr={environment.get('MASTER_ADDR') or first_pod(environment.get('HOSTNAME', ''), settings.run)}",
            f"--master-port={keys.RENDEZVOUS_PORT}",
        ]
    return [*command, "-m", "motley_trainer.rank"]


def first_pod(hostname: str, run: str) -> str:
    """<job>-3 -> <job>-0.<run>-gang: an Indexed Job's pods are named by index; the gang's headless Service makes DNS names."""
    job, _, index = hostname.rpartition("-")
    if not job or not index.isdecimal():
        raise SettingsError(f"HOSTNAME: is {hostname!r}, want '<job>-<index>'; or set MASTER_ADDR")
    return f"{job}-0.{run}-gang"


if __name__ == "__main__":
    main()
