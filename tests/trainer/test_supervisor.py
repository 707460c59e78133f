"""`motley trainer` as a process: its exit codes, and what it does when asked to stop."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from motley_api import keys
from motley_trainer.buffer.db import BufferDb
from motley_trainer.main import first_pod, torchrun_command
from motley_trainer.settings import SettingsError, from_environment
from trainer.kit import RUN, UID, make_trajectory, spec_of, write_model, write_tasks


@pytest.fixture
def pod(tmp_path):
    """Environment of a trainer's pod with an address of its own; fields of the spec may be changed."""

    def make(**changes):
        (tmp_path / "run.json").write_text(json.dumps(spec_of(tmp_path, **changes).to_json_dict()))
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            keys.ENV_RUN: RUN,
            keys.ENV_RUN_UID: UID,
            keys.ENV_RUN_CONFIG: str(tmp_path / "run.json"),
            keys.ENV_TOKEN: "secret",
            keys.ENV_POD_IP: f"127.{random.randint(100, 120)}.{random.randint(0, 255)}.{random.randint(1, 254)}",
            keys.ENV_STORE_URL: f"file://{tmp_path}/store",
            keys.ENV_SCRATCH: str(tmp_path),
        }

    return make


def run(environment):
    command = [sys.executable, "-m", "motley_trainer.main"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_a_model_that_is_not_there_ends_with_the_reason_last(pod, tmp_path):
    write_tasks(tmp_path / "tasks")
    done = run(pod())
    assert done.returncode == keys.EXIT_CONFIG
    assert done.stderr.splitlines()[-1].startswith("ModelNotFound: model.source: ")


def test_an_empty_tasks_folder_ends_with_the_reason_last(pod, tmp_path):
    write_model(tmp_path / "model")
    (tmp_path / "tasks" / "train").mkdir(parents=True)
    done = run(pod())
    assert done.returncode == keys.EXIT_CONFIG
    assert done.stderr.splitlines()[-1].startswith("TasksNotFound: tasks.source: ")


def test_missing_environment_is_named_all_at_once(pod):
    environment = pod()
    del environment[keys.ENV_TOKEN], environment[keys.ENV_POD_IP]
    with pytest.raises(SettingsError, match=f"{keys.ENV_TOKEN}, {keys.ENV_POD_IP} must be set"):
        from_environment(environment)


def test_a_finished_run_ends_at_once_and_one_with_more_steps_does_not(pod, tmp_path):
    folder = tmp_path / "store" / RUN / "buffer"
    folder.mkdir(parents=True)
    db = BufferDb(folder / "buffer.sqlite3", run_uid=UID)
    db.put(finished=1, step=6)
    db.close()
    assert run(pod(steps=6)).returncode == 0
    assert "ModelNotFound" in run(pod(steps=7)).stderr  # it goes on to look for its model


def test_one_pod_needs_no_meeting_point_and_several_meet_at_the_first(pod):
    alone = torchrun_command(from_environment(pod()), {})
    assert "--standalone" in alone
    several = {**pod(trainer={"nodes": 3, "gpusPerNode": 2}), "JOB_COMPLETION_INDEX": "2", "HOSTNAME": "tiny-trainer-2"}
    several.pop("MASTER_ADDR", None)  # a test before this one may have met others in this process
    command = torchrun_command(from_environment(several), several)
    for want in ("--nnodes=3", "--nproc-per-node=2", "--node-rank=2", "--master-addr=tiny-trainer-0.tiny-gang"):
        assert want in command
    with pytest.raises(SettingsError, match="HOSTNAME"):
        first_pod("laptop", RUN)


@pytest.mark.slow
def test_asked_to_stop_it_saves_what_no_checkpoint_covers_and_says_so(pod, tmp_path):
    import http.client

    import msgspec
    from motley_api.records import TrainerStatus, Work, encode
    from motley_trainer.checkpoints import CheckpointFolder

    write_model(tmp_path / "model")
    write_tasks(tmp_path / "tasks")
    environment = pod(steps=500, checkpoint={"everySteps": 400, "keep": 1})

    def call(method, path, body=None):
        connection = http.client.HTTPConnection(environment[keys.ENV_POD_IP], keys.TRAINER_PORT, timeout=30)
        connection.request(method, path, body, {"Authorization": "Bearer secret"})
        return connection.getresponse().read()

    with subprocess.Popen([sys.executable, "-m", "motley_trainer.main"], env=environment) as process:
        step = 0
        while step < 2 and process.poll() is None:
            try:
                works = msgspec.json.decode(call("POST", "/v1/work", b'{"worker":"w/1","sessions":8}'), type=list[Work])
                version = msgspec.json.decode(call("GET", "/v1/status"), type=TrainerStatus).weights_version
                ready = [make_trajectory(work, sample, version=version) for work in works for sample in work.samples]
                call("POST", "/v1/trajectories", encode(ready))
                step = msgspec.json.decode(call("GET", "/v1/status"), type=TrainerStatus).step
            except OSError:
                pass  # it is still starting
            time.sleep(0.2)  # the trainer needs the processor more than we do
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 143  # not 0: the Job's index is not done
    saved = CheckpointFolder(tmp_path / "store" / RUN / "checkpoints", run_uid=UID).newest()
    db = BufferDb(tmp_path / "store" / RUN / "buffer" / "buffer.sqlite3", run_uid=UID)
    assert saved == db.get("durable") == db.get("step") >= 2
    db.close()


def test_an_earlier_runs_folder_is_refused_and_says_what_to_do(pod, tmp_path):
    folder = tmp_path / "store" / RUN / "buffer"
    folder.mkdir(parents=True)
    db = BufferDb(folder / "buffer.sqlite3", run_uid="uid-0")
    db.put(finished=1, step=6)
    db.close()
    refused = run(pod())
    assert refused.returncode == keys.EXIT_CONFIG
    last = refused.stderr.splitlines()[-1]
    assert last.startswith(
        f"RunFolderExists: store.url: file://{tmp_path}/store/{RUN} holds an earlier run of this name (uid uid-0)"
    )
    assert "set store.onExisting to Resume" in last
    # The same folder, gone on with: all of its six steps are done.
    assert run(pod(store={"url": f"file://{tmp_path}/store", "onExisting": "Resume"})).returncode == 0


def test_a_run_that_is_gone_on_with_trusts_its_own_checkpoints(tmp_path):
    from motley_trainer.checkpoints import CheckpointFolder

    path = tmp_path / "buffer.sqlite3"
    BufferDb(path, run_uid="uid-0").close()
    saved = CheckpointFolder(tmp_path, run_uid="uid-0")
    (saved.begin(4) / "weights").write_bytes(b"w")
    saved.complete(4, keep=1)
    taken = BufferDb(path, run_uid=UID, take_over=True)
    assert CheckpointFolder(tmp_path, run_uid=taken.run_uid).newest() == 4
    taken.close()


def test_a_run_goes_back_once_for_each_step_that_is_asked_for(pod, tmp_path):
    from motley_trainer.checkpoints import CheckpointFolder
    from motley_trainer.main import _rewind

    settings = from_environment(pod(checkpoint={"rewindToStep": 25}))
    folder = CheckpointFolder(settings.durable_folder("checkpoints"), run_uid=UID)

    def save(step):
        (folder.begin(step) / "weights").write_bytes(b"w")
        folder.complete(step, keep=5)

    db = BufferDb(tmp_path / "buffer.sqlite3", run_uid=UID)
    with pytest.raises(SettingsError, match=r"NoSuchCheckpoint: checkpoint.rewindToStep: .*none is.*got 25"):
        _rewind(settings, db)
    for step in (10, 20, 30):
        save(step)
    db.put(step=34, finished=1)
    _rewind(settings, db)
    assert (folder.newest(), db.get("finished")) == (20, 0)
    save(30)
    _rewind(settings, db)  # the pod was preempted: what was trained since stays
    assert folder.newest() == 30
    db.close()


@pytest.mark.parametrize(("leaves", "want_code"), [(True, keys.EXIT_STOPPED), (False, 0)])
def test_a_pod_whose_gang_left_early_is_not_done(pod, monkeypatch, leaves, want_code):
    """The pod that was evicted is not this one: its ranks end with 0 after the save, and the Job must not count its index as done."""
    import asyncio

    from motley_trainer import main

    rank = "import os, pathlib; pathlib.Path(os.environ['MOTLEY_LEFT_EARLY']).touch()" if leaves else "pass"
    monkeypatch.setattr(main, "torchrun_command", lambda settings, environment: [sys.executable, "-c", rank])
    assert asyncio.run(main._follow(from_environment({**pod(), "JOB_COMPLETION_INDEX": "1"}))) == want_code
