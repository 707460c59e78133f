"""Rewards, and everything that must never become one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from motley_sampler.sandbox.host import SandboxHost
from motley_sampler.tasks.files import make_workspace
from motley_sampler.tasks.format import load_task
from motley_sampler.tasks.grading import GradingError, GradingFailure, grade, read_reward


async def reward_of(host: SandboxHost, folder: Path, tmp_path: Path, **files: str) -> float:
    """Grades the task's initial workspace with some files replaced."""
    task = load_task(folder)
    workspace = tmp_path / "work"
    make_workspace(task, workspace)
    for path, text in files.items():
        (workspace / path.replace("__", ".")).write_text(text)
    return (await grade(host, task, workspace)).reward


async def test_solved_files_get_one_and_others_zero(host: SandboxHost, make_task: Any, tmp_path: Path) -> None:
    assert await reward_of(host, make_task(), tmp_path) == 0.0
    assert await reward_of(host, make_task(), tmp_path / "again", code__py="2 * value") == 1.0


async def test_graded_files_stay_as_they_were(host: SandboxHost, make_task: Any, tmp_path: Path) -> None:
    script = "echo broken > code.py; rm -f /app/other; echo 0.25 > /logs/verifier/reward.txt"
    assert await reward_of(host, make_task(**{"tests/test.sh": script}), tmp_path, other="x") == 0.25
    assert (tmp_path / "work" / "other").exists()
    assert "broken" not in (tmp_path / "work" / "code.py").read_text()


@pytest.mark.parametrize(
    ("script", "want"),
    [
        ("true", GradingFailure.NO_REWARD),
        ("exit 7", GradingFailure.NO_REWARD),
        ("kill -9 $$", GradingFailure.NO_REWARD),
        ("echo nan > /logs/verifier/reward.txt", GradingFailure.INVALID_REWARD),
        ("echo passed > /logs/verifier/reward.txt", GradingFailure.INVALID_REWARD),
        (": > /logs/verifier/reward.txt", GradingFailure.INVALID_REWARD),
        ("ln -s {outside} /logs/verifier/reward.txt", GradingFailure.INVALID_REWARD),
        ("mkfifo /logs/verifier/reward.txt", GradingFailure.INVALID_REWARD),
        ('echo \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json', GradingFailure.INVALID_REWARD),
        ("echo '{' > /logs/verifier/reward.json", GradingFailure.INVALID_REWARD),
        ("echo 1 > /logs/verifier/reward.txt; sleep 300", GradingFailure.TIMEOUT),
        ("echo 1 > /logs/verifier/reward.txt; yes", GradingFailure.LIMIT),
    ],
)
async def test_a_grader_that_fails_gives_no_reward(
    host: SandboxHost, make_task: Any, tmp_path: Path, script: str, want: GradingFailure
) -> None:
    (tmp_path / "outside").write_text("1")  # a link to it would be a reward, were it followed
    script = script.replace("{outside}", str(tmp_path / "outside"))
    timeout_s = 1.0 if "sleep" in script else 60.0
    folder = make_task(**{"tests/test.sh": script, "task.toml": f"[verifier]\ntimeout_sec = {timeout_s}\n"})
    with pytest.raises(GradingError) as error:
        await reward_of(host, folder, tmp_path)
    assert error.value.kind is want


async def test_a_verifier_that_fails_after_writing_its_reward_has_said_it(
    host: SandboxHost, make_task: Any, tmp_path: Path
) -> None:
    assert (
        await reward_of(host, make_task(**{"tests/test.sh": "echo 0 > /logs/verifier/reward.txt; exit 1"}), tmp_path)
        == 0
    )


async def test_the_policys_files_cannot_bring_a_reward_along(host: SandboxHost, make_task: Any, tmp_path: Path) -> None:
    """Neither a reward in the workspace nor a link out of it reaches the verifier's own folder."""
    folder = make_task(**{"tests/test.sh": "ls -A /logs/verifier | wc -l > /logs/verifier/reward.txt"})
    task = load_task(folder)
    workspace = tmp_path / "work"
    make_workspace(task, workspace)
    (workspace / "logs" / "verifier").mkdir(parents=True)
    (workspace / "logs" / "verifier" / "reward.txt").write_text("1")
    (workspace / "reward.txt").write_text("1")
    # The shell opens reward.txt before ls runs: it finds that one file, made by itself.
    assert (await grade(host, task, workspace)).reward == 1.0
    (folder / "tests" / "test.sh").write_text("cat /logs/verifier/* 2>/dev/null; exit 0")
    with pytest.raises(GradingError, match="GraderNoReward"):
        await grade(host, task, workspace)


async def test_the_tests_cannot_be_changed_from_inside(host: SandboxHost, make_task: Any, tmp_path: Path) -> None:
    script = "echo x > /tests/planted 2>/dev/null && r=0 || r=1; echo $r > /logs/verifier/reward.txt"
    folder = make_task(**{"tests/test.sh": script})
    assert await reward_of(host, folder, tmp_path) == 1.0
    assert [path.name for path in (folder / "tests").iterdir()] == ["test.sh"]


async def test_the_verifiers_environment_is_set(host: SandboxHost, make_task: Any, tmp_path: Path) -> None:
    toml = '[verifier]\ntimeout_sec = 20.0\nenv = { POINTS = "0.5" }\n'
    folder = make_task(**{"task.toml": toml, "tests/test.sh": "echo $POINTS > /logs/verifier/reward.txt"})
    assert await reward_of(host, folder, tmp_path) == 0.5


@pytest.mark.parametrize(
    ("text", "want"), [('{"reward": 0.5, "style": 1}', 0.5), ('{"score": 1}', 1.0), ("0.75", 0.75), ("1", 1.0)]
)
def test_reward_json_is_read(tmp_path: Path, text: str, want: float) -> None:
    (tmp_path / "reward.json").write_text(text)
    assert read_reward(tmp_path) == want


def test_reward_txt_comes_first(tmp_path: Path) -> None:
    (tmp_path / "reward.json").write_text("1")
    (tmp_path / "reward.txt").write_text(" 0.0\n")
    assert read_reward(tmp_path) == 0.0
