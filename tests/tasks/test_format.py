"""Task folders as Harbor writes them, and the errors for those that it would not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from motley_sampler.tasks.files import copy_tree, make_workspace
from motley_sampler.tasks.format import MIB, TaskError, load_task, load_tasks


def test_a_task_is_read(make_task: Any) -> None:
    toml = """
    schema_version = "1.1"
    [task]
    name = "motley/double"
    [metadata]
    difficulty = "easy"
    [verifier]
    timeout_sec = 90.0
    env = { MODE = "strict" }
    [agent]
    timeout_sec = 300
    [environment]
    build_timeout_sec = 600.0
    cpus = 2
    memory_mb = 2048
    storage = "1.5G"
    allow_internet = true
    """
    folder = make_task(**{"task.toml": toml})
    task = load_task(folder, "heldout")
    assert (task.name, task.split, task.metadata) == ("double", "heldout", {"difficulty": "easy"})
    assert (task.verifier_timeout_s, task.agent_timeout_s) == (90.0, 300.0)
    assert (task.memory_bytes, task.storage_bytes) == (2048 * MIB, 1536 * MIB)
    assert task.verifier_env == {"MODE": "strict"}


def test_an_almost_empty_toml_takes_harbors_defaults(make_task: Any) -> None:
    task = load_task(make_task(**{"task.toml": ""}))
    assert (task.verifier_timeout_s, task.agent_timeout_s, task.memory_bytes) == (600.0, None, None)


@pytest.mark.parametrize(
    ("path", "text", "want"),
    [
        ("task.toml", None, r"task\.toml: is missing"),
        ("task.toml", "[verifier\n", r"task\.toml: not valid TOML"),
        ("task.toml", '[verifier]\ntimeout_sec = "soon"\n', r"task\.toml: .*timeout_sec"),
        ("task.toml", "[verifier]\ntimeout_sec = 0\n", r"verifier\.timeout_sec must be > 0, got 0"),
        ("task.toml", "[agent]\ntimeout_sec = nan\n", r"agent\.timeout_sec must be > 0, got nan"),
        (
            "task.toml",
            '[environment]\nmemory = "lots"\n',
            r"environment\.memory must be a size like 512M or 2G, got 'lots'",
        ),
        ("task.toml", '[verifier]\nenv = { KEY = "${OPENAI_API_KEY}" }\n', r"verifier\.env\.KEY: values from the host"),
        ("task.toml", "[[steps]]\nname = 'one'\n", r"tasks of several steps are not supported"),
        ("instruction.md", None, r"instruction\.md: is missing"),
        ("instruction.md", " \n", r"instruction\.md: is empty"),
        ("tests/test.sh", None, r"tests/test\.sh: is missing"),
    ],
)
def test_a_bad_task_is_named_with_what_is_wrong(make_task: Any, path: str, text: str | None, want: str) -> None:
    folder = make_task(**{path: text})
    with pytest.raises(TaskError, match=want) as error:
        load_task(folder)
    assert str(folder) in str(error.value)


def test_a_task_without_environment_is_refused(make_task: Any) -> None:
    folder = make_task(**{"environment/code.py": None, "environment/Dockerfile": None})
    with pytest.raises(TaskError, match="environment: is missing"):
        load_task(folder)


def test_splits_are_read_in_order(make_task: Any, tmp_path: Path) -> None:
    for split, name in (("train", "b"), ("train", "a"), ("heldout", "a")):
        make_task(name, root=tmp_path / "set" / split)
    tasks = load_tasks(tmp_path / "set")
    assert [(task.split, task.name) for task in tasks] == [("train", "a"), ("train", "b"), ("heldout", "a")]
    assert [task.name for task in load_tasks(f"file://{tmp_path}/set")] == ["a", "b", "a"]


def test_a_plain_folder_of_tasks_and_one_task_are_read_too(make_task: Any, tmp_path: Path) -> None:
    folder = make_task("one")
    assert [task.split for task in load_tasks(tmp_path / "tasks")] == ["train"]
    assert [task.name for task in load_tasks(folder)] == ["one"]


def test_a_remote_folder_is_copied_here(make_task: Any, tmp_path: Path) -> None:
    import fsspec

    make_task("one", root=tmp_path / "set" / "train")
    fsspec.filesystem("memory").put(f"{tmp_path}/set/", "memory://bucket/set/", recursive=True)
    tasks = load_tasks("memory://bucket/set", cache=tmp_path / "cache")
    assert [(task.split, task.name) for task in tasks] == [("train", "one")]


@pytest.mark.parametrize(("source", "want"), [("nowhere", "no such folder"), (".", "holds no task")])
def test_a_missing_or_empty_folder_is_refused(tmp_path: Path, source: str, want: str) -> None:
    with pytest.raises(TaskError, match=want):
        load_tasks(tmp_path / source)


def test_one_bad_task_refuses_the_whole_set(make_task: Any, tmp_path: Path) -> None:
    make_task("good")
    make_task("bad", **{"tests/test.sh": None})
    with pytest.raises(TaskError, match="bad/tests"):
        load_tasks(tmp_path / "tasks")


def test_files_that_build_images_stay_out_of_the_workspace(make_task: Any, tmp_path: Path) -> None:
    task = load_task(make_task(**{"environment/sub/Dockerfile": "kept: it lies deeper\n"}))
    make_workspace(task, tmp_path / "app")
    found = sorted(str(path.relative_to(tmp_path / "app")) for path in (tmp_path / "app").rglob("*") if path.is_file())
    assert found == ["code.py", "sub/Dockerfile"]


def test_a_copy_holds_plain_content_only(tmp_path: Path) -> None:
    import os

    source = tmp_path / "source"
    (source / "closed").mkdir(parents=True)
    (source / "closed" / "file").write_text("x")
    (source / "closed").chmod(0)
    (source / "link").symlink_to("/etc/passwd")
    (source / "program").write_text("#!/bin/sh\n")
    (source / "program").chmod(0o4711)
    os.mkfifo(source / "pipe")
    copy_tree(source, tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy").rglob("*")) == ["closed", "file", "link", "program"]
    assert os.readlink(tmp_path / "copy" / "link") == "/etc/passwd"
    assert (tmp_path / "copy" / "program").stat().st_mode & 0o7777 == 0o711
