"""The audit finds what an audit of real task images found: later history, unreachable objects, empty patches that pass."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from motley_sampler.sandbox.host import SandboxHost
from motley_sampler.tasks.audit import Problem, audit
from motley_sampler.tasks.format import load_task
from motley_sampler.tasks.main import app
from typer.testing import CliRunner

FIXED = "    return 2 * value  # this line is what a solution changes, and long enough to tell\n"


async def problems(host: SandboxHost, folder: Path) -> set[Problem]:
    return {finding.problem for finding in await audit(host, load_task(folder))}


def git(repository: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "init.defaultBranch=main")
    subprocess.run(["git", *identity, *arguments], cwd=repository, check=True, capture_output=True)


def repository_in(folder: Path) -> Path:
    environment = folder / "environment"
    git(environment, "init")
    git(environment, "add", ".")
    git(environment, "commit", "-m", "start")
    return environment


async def test_a_sound_task_has_no_findings(host: SandboxHost, make_task: Any) -> None:
    folder = make_task()
    repository_in(folder)
    assert await audit(host, load_task(folder)) == []


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({"solution/solve.sh": None}, {Problem.NO_SOLUTION}),
        ({"solution/solve.sh": "true\n"}, {Problem.SOLUTION_FAILS}),
        ({"solution/solve.sh": "exit 3\n"}, {Problem.SOLUTION_FAILS}),
        ({"tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n"}, {Problem.EMPTY_PATCH_PASSES}),
        ({"tests/test.sh": "exit 1\n"}, {Problem.GRADER_FAILS}),
        ({"environment/__pycache__/code.cpython-312.pyc": "bytes"}, {Problem.BUILD_OUTPUT}),
    ],
)
async def test_each_fault_is_found(
    host: SandboxHost, make_task: Any, files: dict[str, str | None], want: set[Problem]
) -> None:
    folder = make_task()
    for path, text in files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text) if text is not None else (folder / path).unlink()
    assert await problems(host, folder) == want


async def test_the_solved_file_under_another_name_is_a_leak(host: SandboxHost, make_task: Any) -> None:
    folder = make_task(**{"environment/backup.txt": f"def double(value):\n{FIXED}"})
    assert await problems(host, folder) == {Problem.FIX_IN_WORKSPACE}


async def test_later_history_is_found(host: SandboxHost, make_task: Any) -> None:
    folder = make_task()
    repository = repository_in(folder)
    git(repository, "checkout", "-b", "upstream")
    (repository / "code.py").write_text(f"def double(value):\n{FIXED}")
    git(repository, "commit", "-am", "the fix")
    git(repository, "checkout", "main")
    assert await problems(host, folder) == {Problem.GIT_HISTORY, Problem.FIX_IN_GIT}


async def test_objects_that_nothing_points_to_are_found(host: SandboxHost, make_task: Any) -> None:
    folder = make_task()
    repository = repository_in(folder)
    (repository / "code.py").write_text(f"def double(value):\n{FIXED}")
    git(repository, "commit", "-am", "the fix")
    git(repository, "reset", "--hard", "HEAD~1")
    git(repository, "reflog", "expire", "--expire=now", "--all")
    (repository / ".git" / "ORIG_HEAD").unlink()
    assert await problems(host, folder) == {Problem.GIT_OBJECTS, Problem.FIX_IN_GIT}


async def test_a_repository_cannot_run_its_commands_outside(host: SandboxHost, make_task: Any, tmp_path: Path) -> None:
    folder = make_task()
    repository = repository_in(folder)
    (repository / ".git" / "config").write_text(
        f"[core]\n\trepositoryformatversion = 0\n\tbare = false\n\tfsmonitor = touch {tmp_path}/escaped\n"
    )
    await audit(host, load_task(folder))
    assert not (tmp_path / "escaped").exists()


def test_the_command_prints_findings_and_says_by_its_exit_code(make_task: Any, tmp_path: Path) -> None:
    make_task("good")
    runner = CliRunner()
    sound = runner.invoke(app, ["audit", str(tmp_path / "tasks")])
    assert (sound.exit_code, "1 of 1 tasks are sound" in sound.output) == (0, True)
    make_task("bad", **{"tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n"})
    found = runner.invoke(app, ["audit", str(tmp_path / "tasks")])
    assert found.exit_code == 1
    assert "train/bad: EmptyPatchPasses" in found.output
    missing = runner.invoke(app, ["audit", str(tmp_path / "nowhere")])
    assert (missing.exit_code, "no such folder" in missing.output) == (2, True)
