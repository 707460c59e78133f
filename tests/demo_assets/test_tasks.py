"""Every committed task: its solution passes, doing nothing fails, a guess and each slip fail; the folders are what the script writes."""

import os
import random
import shutil
import subprocess
from pathlib import Path

import make_tasks
import pytest
from warmstart import demonstrator
from warmstart.families import FAMILIES, Task

TASKS = Path(make_tasks.__file__).parent / "tasks"
SUITE = make_tasks.suite(make_tasks.SEED)
ALL = [(split, name) for split, tasks in SUITE.items() for name in tasks]


def grade(folder: Path, script: str, room: Path) -> int:
    """`script` run on a fresh copy of the workspace, then the hidden test; /app and /logs stand for folders of `room`."""
    app, logs = room / "app", room / "logs"
    shutil.copytree(folder / "environment", app, ignore=shutil.ignore_patterns("Dockerfile"))
    for text in (script, (folder / "tests" / "test.sh").read_text()):
        placed = text.replace("/app", str(app)).replace("/logs", str(logs))
        environment = {"PATH": os.environ["PATH"], "LC_ALL": "C"}
        subprocess.run(["bash", "-c", placed], cwd=app, env=environment, check=True, stdout=subprocess.DEVNULL)
    return int((logs / "verifier" / "reward.txt").read_text())


@pytest.mark.parametrize(("split", "name"), ALL)
def test_solution_passes_and_doing_nothing_fails(split: str, name: str, tmp_path: Path) -> None:
    folder = TASKS / split / name
    assert grade(folder, (folder / "solution" / "solve.sh").read_text(), tmp_path / "solved") == 1
    assert grade(folder, "", tmp_path / "empty") == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_guess_and_every_slip_fail(family: str, tmp_path: Path) -> None:
    name = f"{family}-01"
    task, folder = SUITE["train"][name], TASKS / "train" / name
    rng = random.Random(0)
    guess = demonstrator.plan(task, rng, demonstrator.Habits(guess=1, slip=0, early=0, peek=0, untagged=0))[:-1]
    early = demonstrator.plan(task, rng, demonstrator.Habits(guess=0, slip=0, early=1, peek=0, untagged=0))[:-1]
    for index, commands in enumerate([guess, early, *task.slips]):
        assert grade(folder, "\n".join([*commands, "true"]), tmp_path / str(index)) == 0, commands


def test_folders_are_what_the_script_writes(tmp_path: Path) -> None:
    for split, tasks in SUITE.items():
        for name, task in tasks.items():
            make_tasks.write_task(tmp_path / split / name, task)

    def tree(root: Path) -> dict[str, str]:
        return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}

    assert tree(TASKS) == tree(tmp_path)


def test_hidden_value_is_not_in_the_instruction() -> None:
    for split, name in ALL:
        task: Task = SUITE[split][name]
        assert task.hidden not in task.instruction


def test_heldout_instructions_are_new() -> None:
    train = {task.instruction for task in SUITE["train"].values()}
    heldout = {task.instruction for task in SUITE["heldout"].values()}
    assert len(train) + len(heldout) == len(ALL)
    assert not train & heldout


def test_test_script_starts_no_process() -> None:
    """Only builtins when the log folder is there, as the harness makes it."""
    for split, name in ALL:
        text = (TASKS / split / name / "tests" / "test.sh").read_text()
        first_words = {line.split()[0] for line in text.splitlines() if not line.startswith("#")}
        assert first_words <= {"cd", "shopt", "found=(*/*)", "reward=0", "if", "[[", "reward=1", "fi", "echo"}, (
            first_words
        )
