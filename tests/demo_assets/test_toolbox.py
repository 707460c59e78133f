"""The simulated commands answer what real bash answers."""

import dataclasses
import os
import random
import subprocess
from pathlib import Path

import pytest
from motley_sampler.rollout import toolcall
from motley_sampler.sandbox import host
from warmstart import demonstrator, families, toolbox

MANY_HABITS = demonstrator.Habits(guess=0.3, slip=0.3, early=0.1, peek=0.5, untagged=0.2)


def write(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def read(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}


def bash(command: str, root: Path) -> tuple[str, int]:
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
        check=False,
    )
    return done.stdout, done.returncode


@pytest.mark.parametrize("family", families.FAMILIES)
def test_simulated_episode_equals_real_bash(family: str, tmp_path: Path) -> None:
    rng = random.Random(f"bash {family}")
    for episode in range(8):
        task = families.make(family, rng)
        root = tmp_path / str(episode)
        write(root, task.files)
        files = dict(task.files)
        for command in demonstrator.plan(task, rng, MANY_HABITS)[:-1]:
            result = toolbox.run(command, files, task.dirs)
            files = result.files
            assert (result.output, result.code) == bash(command, root), command
            assert files == read(root), command


FILES = {"conf/port": "12\n", "src/a.py": "x = 12\ny = 12 12\n", "src/b.py": "x = 3\n", "logs/a.log": "one\ntwo\n"}


@pytest.mark.parametrize(
    "command",
    [
        "cat conf/none",
        "cat conf",
        "cat conf/",
        "cat conf/port conf/none src/b.py",
        "cat none/port",
        "ls src",
        "ls src/",
        "ls conf/port",
        "ls none",
        "echo a b",
        "echo 5 > conf/port",
        "echo 5 > conf/new",
        "echo 5 >> logs/a.log",
        "echo 5 > none/port",
        "echo 5 > conf",
        "sed s/12/5/ src/a.py",
        "sed -i s/12/5/ src/a.py",
        "sed -i s/x = 1/z/ src/none.py",
        "sed -i s/1./z/ src/a.py",
        "sed s/12/5/ src/none.py",
        "sed -i s/12/5/ src/none.py",
        "rm conf/port",
        "rm conf/none",
        "rm none/x",
        "rm conf",
        "mv conf/port logs/port",
        "mv conf/port src/a.py",
        "mv conf/none logs/port",
        "grep -l 12 src/*",
        "grep -l x src/*",
        "grep -l 77 src/*",
        "grep -l 12 src/a.py",
        "grep -l 12 src/none.py",
    ],
)
def test_command_equals_real_bash(command: str, tmp_path: Path) -> None:
    try:
        result = toolbox.run(command, FILES, frozenset({"conf", "src", "logs"}))
    except toolbox.UnsupportedError:
        if " = " in command:  # a pattern with spaces needs quotes, which the small language has not
            return
        raise
    write(tmp_path, FILES)
    assert (result.output, result.code) == bash(command, tmp_path)
    assert result.files == read(tmp_path)


@pytest.mark.parametrize(
    "command",
    ["cat ../x", "cat $HOME", "cat `id`", "echo 'a' > conf/port", "cat a | cat", "rm -rf conf", "cat", "", "sed -n p conf/port",
     "echo a > b > c", "cat conf/port/x", "mv conf/port conf/port"],
)  # fmt: skip
def test_command_outside_the_small_language_is_refused(command: str) -> None:
    with pytest.raises(toolbox.UnsupportedError):
        toolbox.run(command, FILES, frozenset({"conf", "src", "logs"}))


@pytest.mark.parametrize(
    ("output", "code", "want_message"),
    [("", 0, "ok"), ("12\n", 0, "12"), ("", 1, "exit 1"),
     ("cat: x: No such file or directory\n", 1, "cat: x: No such file or directory\nexit 1")],
)  # fmt: skip
def test_tool_message_shows_output_and_a_code_that_is_not_zero(output: str, code: int, want_message: str) -> None:
    assert toolbox.tool_message(toolbox.Result(output, code, {})) == want_message


@pytest.mark.parametrize("ended_in", [("", 0), ("12\n", 0), ("", 1), ("cat: x: No such file or directory\n", 1)])
def test_tool_message_is_the_one_that_rollout_workers_send(ended_in: tuple[str, int]) -> None:
    output, code = ended_in
    fields = {field.name: None for field in dataclasses.fields(host.CommandResult)}
    real = host.CommandResult(**{**fields, "output": output, "exit_code": code, "ended": host.Ended.EXIT})  # type: ignore[arg-type]
    assert toolbox.tool_message(toolbox.Result(output, code, {})) == toolcall.tool_message(real, timeout_s=1.0)
