"""A trainer pod in miniature for the fault tests: `python fault_pod.py buffer ROOT ADDRESS` is the supervisor's half with a
rollout worker beside it; `python fault_pod.py gang ROOT` forks one training process after another, each killed with
SIGKILL at the next point of ROOT/plan.json, until one of them finishes. Forking spares the imports.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import uuid
from pathlib import Path

from motley_api.records import Work, WorkRequest, encode
from motley_trainer.settings import ENV_SOCKET, Settings
from trainer.kit import RUN, UID, make_trajectory, spec_of

STEPS = 16


def settings_of(root: Path, address: str = "127.0.0.1") -> Settings:
    return Settings(
        run=RUN,
        run_uid=UID,
        namespace="default",
        token="secret",
        pod_name="pod-0",
        pod_ip=address,
        store_url=f"file://{root}/store",
        scratch=root / "scratch",
        fleet_file=None,
        index=0,
        spec=spec_of(root, steps=STEPS),
    )


# ------------------------------------------------------------------------------------------------ the buffer's half
async def serve(root: Path, address: str) -> None:
    import aiohttp
    import msgspec
    from motley_trainer.buffer.core import BufferCore
    from motley_trainer.buffer.db import BufferDb
    from motley_trainer.buffer.ledger import Ledger
    from motley_trainer.buffer.service import BufferService
    from motley_trainer.main import _serving

    settings = settings_of(root, address)
    core = BufferCore(
        run=RUN,
        spec=settings.spec,
        db=BufferDb(settings.durable_folder("buffer") / "buffer.sqlite3", run_uid=UID),
        ledger=Ledger(settings.run_url),
        train_tasks=[f"train-{number}" for number in range(5)],
        heldout_tasks=[],
    )
    service = BufferService(core, token=settings.token)
    (root / "buffer.sock").unlink(missing_ok=True)
    worker = f"rollout-0/{uuid.uuid4().hex[:8]}"
    async with (
        _serving(service, settings, root / "buffer.sock"),
        aiohttp.ClientSession(f"http://{address}:8100", headers={"Authorization": "Bearer secret"}) as client,
    ):
        while True:
            async with client.post(
                "/v1/work", data=msgspec.json.encode(WorkRequest(worker=worker, sessions=8))
            ) as answer:
                works = msgspec.json.decode(await answer.read(), type=list[Work])
            for work in works:
                version = core.db.get("published")
                body = encode([make_trajectory(work, sample, version=version) for sample in work.samples])
                async with client.post("/v1/trajectories", data=body) as answer:
                    await answer.read()
            await asyncio.sleep(0 if works else 0.05)


# ------------------------------------------------------------------------------------------------ the gang's half
def gang(root: Path) -> None:
    import torch

    torch.set_num_threads(1)
    import torch._dynamo  # the optimizer imports it

    for _ in range(100):
        child = os.fork()
        if child == 0:
            train(root)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            sys.exit(os.WEXITSTATUS(status))
    sys.exit("a hundred starts were not enough")


def train(root: Path) -> None:
    """One incarnation. A point of the plan is struck out before it kills, so that it kills once."""
    from motley_trainer.buffer.client import BufferClient, BufferUnavailableError
    from motley_trainer.rank import run

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
    os.environ[ENV_SOCKET] = str(root / "buffer.sock")
    plan_file = root / "plan.json"

    def at(name: str, step: int) -> None:
        plan = json.loads(plan_file.read_text())
        if plan and plan[0]["point"] == name and step >= plan[0]["step"]:
            plan_file.write_text(json.dumps(plan[1:]))
            with (root / "killed.txt").open("a") as log:
                print(name, step, file=log)
            if plan[0]["buffer"]:
                os.kill(int((root / "buffer.pid").read_text()), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(200):  # the supervisor's half may be starting
        try:
            BufferClient(os.environ[ENV_SOCKET])._call("GET", "/local/may-finish", None)
            break
        except BufferUnavailableError:
            signal.sigtimedwait([], 0.05)
    try:
        run(settings_of(root), at=at)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    root = Path(sys.argv[2])
    if sys.argv[1] == "buffer":
        asyncio.run(serve(root, sys.argv[3]))
    gang(root)
