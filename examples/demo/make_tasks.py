"""Writes the demo's task folders in Harbor's format: ``python examples/demo/make_tasks.py``. Seeded: it writes the same bytes each time."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from warmstart.families import FAMILIES, Task, make  # noqa: E402

SEED = 7  # of the committed tasks
TRAIN_PER_FAMILY, HELDOUT_PER_FAMILY = 5, 2

TASK_TOML = """\
version = "1.0"

[metadata]
author_name = "Motley"
difficulty = "easy"
category = "files"
tags = ["{family}"]

[agent]
timeout_sec = 60.0

[verifier]
timeout_sec = 10.0

[environment]
build_timeout_sec = 60.0
cpus = 1
memory_mb = 256
storage_mb = 64
allow_internet = false
"""

DOCKERFILE = """\
FROM debian:stable-slim
WORKDIR /app
COPY . /app/
"""


def quoted(text: str) -> str:
    """As a word of bash; the demo's texts hold letters, digits, ``. / =``, spaces and newlines only."""
    return "$'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"


def test_script(task: Task) -> str:
    """Bash builtins only: no process is started for a file. Right when the folder holds exactly the wanted files."""
    want = task.want
    checks = [f"[[ ${{#found[@]}} -eq {len(want)} ]]"]
    checks += [
        f'[[ -f {path} && "$(<{path})" == {quoted(text.rstrip(chr(10)))} ]]' for path, text in sorted(want.items())
    ]
    return "\n".join(
        [
            "#!/bin/bash",
            "cd /app || exit 1",
            "shopt -s nullglob",
            "found=(*/*)",
            "reward=0",
            "if " + " &&\n   ".join(checks) + "; then",
            "  reward=1",
            "fi",
            "[[ -d /logs/verifier ]] || mkdir -p /logs/verifier",
            'echo "$reward" > /logs/verifier/reward.txt',
            "",
        ]
    )


def solve_script(task: Task) -> str:
    return "\n".join(["#!/bin/bash", "set -e", "cd /app", *task.reads, *task.writes, ""])


def write_task(folder: Path, task: Task) -> None:
    scripts = {"tests/test.sh": test_script(task), "solution/solve.sh": solve_script(task)}
    texts = {
        "task.toml": TASK_TOML.format(family=task.family),
        "instruction.md": task.instruction + "\n",
        "environment/Dockerfile": DOCKERFILE,
        **{f"environment/{path}": text for path, text in task.files.items()},
        **scripts,
    }
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in scripts:
        (folder / name).chmod(0o755)


def suite(seed: int) -> dict[str, dict[str, Task]]:
    """split -> task name -> task. No instruction repeats, so no held-out task was trained on."""
    rng = random.Random(seed)
    seen: set[str] = set()
    out: dict[str, dict[str, Task]] = {}
    for split, count in (("train", TRAIN_PER_FAMILY), ("heldout", HELDOUT_PER_FAMILY)):
        out[split] = {}
        for family in FAMILIES:
            for index in range(count):
                task = make(family, rng)
                while task.instruction in seen:
                    task = make(family, rng)
                seen.add(task.instruction)
                out[split][f"{family}-{index + 1:02d}"] = task
    return out


def write_suite(out: Path, seed: int = SEED) -> None:
    for split, tasks in suite(seed).items():
        folder = out / split
        shutil.rmtree(folder, ignore_errors=True)
        for name, task in tasks.items():
            write_task(folder / name, task)
        print(f"wrote {folder} tasks={len(tasks)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "tasks")
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args()
    write_suite(args.out, args.seed)


if __name__ == "__main__":
    main()
