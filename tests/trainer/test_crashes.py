"""kill -9 between any two effects of the trainer, over and over in one run: the run that comes out is the one that an
uninterrupted trainer makes of the same batches, bit for bit."""

import contextlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from motley_api.records import StepRecord
from motley_trainer.buffer.db import BufferDb
from trainer.kit import RUN, UID, write_model

HERE = Path(__file__).parent
# In the order in which they come. `buffer`: the supervisor dies with the rank.
PLAN = [
    {"point": "first-published", "step": 0, "buffer": False},
    {"point": "rewound", "step": 0, "buffer": True},
    {"point": "batch", "step": 1, "buffer": False},
    {"point": "published", "step": 1, "buffer": True},
    {"point": "committed", "step": 2, "buffer": False},
    {"point": "saved", "step": 2, "buffer": False},
    {"point": "tracked", "step": 2, "buffer": True},
    {"point": "durable", "step": 4, "buffer": False},
    {"point": "rewound", "step": 4, "buffer": False},
    {"point": "started", "step": 4, "buffer": True},
    {"point": "trained", "step": 7, "buffer": False},
    {"point": "published", "step": 7, "buffer": False},
    {"point": "committed", "step": 7, "buffer": True},
    {"point": "batch", "step": 10, "buffer": True},
    {"point": "tracked", "step": 12, "buffer": False},
    {"point": "finished", "step": 16, "buffer": False},
]


@contextlib.contextmanager
def keeping_the_buffer_up(root, environment):
    """Starts the supervisor's half again whenever it dies, until the gang's half has ended."""
    address = f"127.{random.randint(10, 99)}.{random.randint(0, 255)}.{random.randint(1, 254)}"
    command = [sys.executable, str(HERE / "fault_pod.py"), "buffer", str(root), address]
    processes = []

    def start():
        process = subprocess.Popen(command, env=environment)
        processes.append(process)
        (root / "buffer.pid").write_text(str(process.pid))

    def look():
        if processes[-1].poll() is not None:
            start()

    start()
    try:
        yield look
    finally:
        processes[-1].kill()
        processes[-1].wait()


@pytest.fixture(scope="module")
def wreck(tmp_path_factory):
    """The folder of a run that went through every crash of the plan."""
    root = tmp_path_factory.mktemp("wreck")
    write_model(root / "model")
    (root / "scratch").mkdir()
    (root / "plan.json").write_text(json.dumps(PLAN))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    with (
        keeping_the_buffer_up(root, environment) as look,
        subprocess.Popen([sys.executable, str(HERE / "fault_pod.py"), "gang", str(root)], env=environment) as gang,
    ):
        for _ in range(6000):  # ten minutes on a crowded machine; 40 s on an idle one
            with contextlib.suppress(subprocess.TimeoutExpired):
                gang.wait(timeout=0.1)
                break
            look()
        else:
            gang.kill()
        assert gang.returncode == 0
    return root


@pytest.fixture
def db(wreck):
    database = BufferDb(wreck / "store" / RUN / "buffer" / "buffer.sqlite3", run_uid=UID)
    yield database
    database.close()


def test_every_planned_crash_happened(wreck):
    assert json.loads((wreck / "plan.json").read_text()) == []
    killed = [line.split()[0] for line in (wreck / "killed.txt").read_text().splitlines()]
    assert killed == [crash["point"] for crash in PLAN]


def test_the_ledger_has_each_step_once(wreck, db):
    import msgspec

    files = sorted((wreck / "store" / RUN / "ledger").glob("step-*.json"))
    records = [msgspec.json.decode(path.read_bytes(), type=StepRecord) for path in files]
    assert [record.step for record in records] == list(range(1, 17))
    assert records == db.steps_after(0)
    attempts = [record.attempt for record in records]
    assert attempts == sorted(attempts)
    # 17 incarnations; three died before their attempt began, the last found all steps done: the 13th made step 16
    assert attempts[-1] == 13
    assert db.get("attempt") == 14


def test_no_trajectory_is_lost_or_trained_on_twice(db):
    trained = db.trained_ids()
    assert len({name for _, name in trained}) == len(trained)
    assert {step: sum(1 for at, _ in trained if at == step) for step in range(1, 17)} == dict.fromkeys(range(1, 17), 8)
    fates = dict(db._db.execute("select coalesce(fate, 'waiting'), count(*) from trajectories group by 1").fetchall())
    # What was refused came from a version that a crash took back; everything acknowledged is trained on or still waits.
    assert set(fates) <= {"trained", "waiting", "refused"}


def test_the_weights_are_those_of_an_uninterrupted_run_on_the_same_batches(wreck, db, one_process, monkeypatch):
    """Batches of the last kept steps are still there: from the checkpoint before them to the end without a stop."""
    import torch
    from motley_trainer.checkpoints import CheckpointFolder
    from motley_trainer.megatron import checkpoint
    from motley_trainer.rank import Start, _engine
    from motley_trainer.recipe import learning_rate, recipe_of
    from motley_trainer.step import train_step
    from motley_weights.checkpoints import read_checkpoint
    from motley_weights.names import ModelShape
    from trainer.fault_pod import settings_of

    settings = settings_of(wreck)
    folder = CheckpointFolder(wreck / "store" / RUN / "checkpoints", run_uid=UID)
    assert folder.newest() == 16
    source = read_checkpoint(wreck / "model")
    shape = ModelShape.from_hf_config(source.config)
    engine = _engine(settings, shape, one_process, source.tensors, folder, Start(14, 1))
    for step in (15, 16):
        batch = db.recorded_batch(step)
        rate = learning_rate(0.001, 0, step)
        train_step(engine, batch, recipe_of(settings.spec.algorithm), learning_rate=rate)
        want = dict(engine.hf_tensors())
        got = read_checkpoint(wreck / "store" / RUN / "views" / "bf16" / f"v{step:06d}").tensors
        assert all(torch.equal(got[name], want[name]) for name in want), step
    uninterrupted = {name: parameter.detach().clone() for name, parameter in engine._bare.named_parameters()}
    checkpoint.load(engine, folder.path(16))
    for name, parameter in engine._bare.named_parameters():
        assert torch.equal(parameter, uninterrupted[name]), name  # float32, after two more steps of Adam


def test_killed_processes_leave_none_behind(wreck):
    import psutil

    commands = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert [command for command in commands if str(wreck) in command] == []


def test_pointers_end_at_the_last_step(wreck):
    from motley_weights.store import WeightStore

    store = WeightStore(f"file://{wreck}/store", RUN)
    assert {view: store.latest(view) for view in store.views()} == {"bf16": 16, "fp8": 16, "nvfp4": 16}
