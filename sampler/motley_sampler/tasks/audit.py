"""Proves a task sound before anyone trains on it: its solution passes, an empty patch does not, nothing leaks the fix.

Everything that the task brings runs in sandboxes, its git repository included (a repository's own configuration can run
commands).
"""

from __future__ import annotations

import asyncio
import hashlib
import shlex
import uuid
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from motley_sampler.sandbox.host import DEFAULT_LIMITS, Limits, Mount, Sandbox, SandboxError, SandboxHost, remove_tree
from motley_sampler.tasks.files import copy_tree, make_workspace
from motley_sampler.tasks.format import Task
from motley_sampler.tasks.grading import GradingError, grade

_SOLVE_TIMEOUT_S = 600.0
_GIT_TIMEOUT_S = 300.0
_BUILD_SUFFIXES = frozenset(
    {".pyc", ".pyo", ".class", ".o", ".obj", ".a", ".so", ".dll", ".dylib", ".rlib", ".whl", ".jar", ".egg"}
)
_BUILD_FOLDERS = frozenset(
    {"__pycache__", ".gradle", ".pytest_cache", ".mypy_cache", ".tox", "target", "build", "dist"}
)
_SHOWN = 5
_TELLING_BYTES = 64  # shorter contents occur twice by chance


class Problem(StrEnum):
    NO_SOLUTION = "NoSolution"
    SOLUTION_FAILS = "SolutionFails"
    EMPTY_PATCH_PASSES = "EmptyPatchPasses"
    GRADER_FAILS = "GraderFails"
    GIT_HISTORY = "LaterGitHistory"
    GIT_OBJECTS = "UnreachableGitObjects"
    FIX_IN_GIT = "FixInGitObjects"
    FIX_IN_WORKSPACE = "FixInWorkspace"
    BUILD_OUTPUT = "BuildOutput"


@dataclass(frozen=True)
class Finding:
    problem: Problem
    detail: str


async def audit(host: SandboxHost, task: Task, limits: Limits = DEFAULT_LIMITS) -> list[Finding]:
    """What is wrong with a task; an empty list is the proof that it can be used."""
    folder = host.scratch / f"audit-{uuid.uuid4().hex[:12]}"
    before, after = folder / "before", folder / "after"
    try:
        await asyncio.to_thread(make_workspace, task, before)
        findings = await _grade_empty_patch(host, task, before, limits)
        findings += await _grade_solution(host, task, before, after, limits)
        findings += _build_output(before)
        fixed = _fixed_files(before, after) if after.exists() else {}
        findings += _fix_in_workspace(task, before, fixed)
        findings += await _git_leaks(host, folder, before, after, fixed, limits)
    finally:
        await asyncio.to_thread(remove_tree, folder)
    return findings


async def _grade_empty_patch(host: SandboxHost, task: Task, before: Path, limits: Limits) -> list[Finding]:
    try:
        result = await grade(host, task, before, limits)
    except GradingError as error:
        return [Finding(Problem.GRADER_FAILS, f"on the empty patch: {error}")]
    if result.reward > 0:
        return [Finding(Problem.EMPTY_PATCH_PASSES, f"an unchanged workspace gets reward {result.reward:g}")]
    return []


async def _grade_solution(host: SandboxHost, task: Task, before: Path, after: Path, limits: Limits) -> list[Finding]:
    """Runs solve.sh on a copy, `after`, and grades that."""
    if task.solution is None:
        return [
            Finding(Problem.NO_SOLUTION, "solution/solve.sh is missing: nothing proves that the task can be solved")
        ]
    solution = after.with_name("solution")
    await asyncio.to_thread(copy_tree, before, after)
    await asyncio.to_thread(copy_tree, task.solution, solution, readable=True)
    mounts = [Mount(after, "/app", writable=True), Mount(solution, "/solution")]
    async with await host.create(mounts, limits, env=task.solution_env) as sandbox:
        solved = await sandbox.run("bash /solution/solve.sh", timeout_s=task.agent_timeout_s or _SOLVE_TIMEOUT_S)
    if solved.exit_code != 0:
        return [Finding(Problem.SOLUTION_FAILS, f"solve.sh ended with {solved.exit_code}: {solved.output[-300:]}")]
    try:
        result = await grade(host, task, after, limits)
    except GradingError as error:
        return [Finding(Problem.GRADER_FAILS, f"on the solution: {error}")]
    if result.reward < 1:
        return [Finding(Problem.SOLUTION_FAILS, f"reward {result.reward:g}: {result.output[-300:]}")]
    return []


def _hashes(root: Path) -> dict[str, str]:
    """Content hash of each plain file, by its path below root; git's own folder aside."""
    found: dict[str, str] = {}
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        if path.is_file() and not path.is_symlink() and ".git" not in relative.parts:
            found[str(relative)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _fixed_files(before: Path, after: Path) -> dict[str, str]:
    """Files that the solution edited: path -> hash of the solved content. New files may be plain copies or renames."""
    old = _hashes(before)
    return {
        name: digest
        for name, digest in _hashes(after).items()
        if name in old and old[name] != digest and _is_telling(after / name) and not _is_build_output(Path(name))
    }


def _is_telling(path: Path) -> bool:
    return path.stat().st_size >= _TELLING_BYTES


def _is_build_output(relative: Path) -> bool:
    return relative.suffix in _BUILD_SUFFIXES or any(part in _BUILD_FOLDERS for part in relative.parts[:-1])


def _build_output(before: Path) -> list[Finding]:
    """Compiled files in the workspace: they may have been built from the fixed code."""
    names = [name for name in _hashes(before) if _is_build_output(Path(name))]
    return [Finding(Problem.BUILD_OUTPUT, _some(names))] if names else []


def _fix_in_workspace(task: Task, before: Path, fixed: dict[str, str]) -> list[Finding]:
    secret = {digest: f"solved {name}" for name, digest in fixed.items()}
    for folder in ("tests", "solution"):
        for name, digest in _hashes(task.folder / folder).items():
            if _is_telling(task.folder / folder / name):
                secret[digest] = f"{folder}/{name}"
    leaks = [f"{name} equals {secret[digest]}" for name, digest in _hashes(before).items() if digest in secret]
    return [Finding(Problem.FIX_IN_WORKSPACE, _some(leaks))] if leaks else []


# Questions to a repository, each answered by lines.
_LATER = "git rev-list --all --reflog --not HEAD"  # commits that a name or a log knows and HEAD does not contain
_UNREACHABLE = "git fsck --unreachable --no-reflogs --no-progress 2>/dev/null | grep '^unreachable' || true"
_FIX = 'for f in /fixed/*; do git cat-file -e "$(git hash-object --no-filters "$f")" 2>/dev/null && basename "$f"; done; true'


async def _git_leaks(
    host: SandboxHost, folder: Path, before: Path, after: Path, fixed: dict[str, str], limits: Limits
) -> list[Finding]:
    repositories = [path.parent.relative_to(before) for path in sorted(before.rglob(".git")) if path.is_dir()]
    if not repositories:
        return []
    names = sorted(fixed)
    await asyncio.to_thread(_lay_out_for_git, folder / "git", before, after, names)
    mounts = [Mount(folder / "git" / "app", "/app", writable=True), Mount(folder / "git" / "fixed", "/fixed")]
    findings: list[Finding] = []
    async with await host.create(mounts, limits, env={"GIT_CONFIG_GLOBAL": "/dev/null"}) as sandbox:
        for repository in repositories:
            later = await _lines(sandbox, repository, _LATER)
            objects = await _lines(sandbox, repository, _UNREACHABLE)
            leaked = [names[int(line)] for line in await _lines(sandbox, repository, _FIX)] if names else []
            for problem, lines in (
                (Problem.GIT_HISTORY, later),
                (Problem.GIT_OBJECTS, objects),
                (Problem.FIX_IN_GIT, leaked),
            ):
                if lines:
                    findings.append(Finding(problem, f"{repository}/.git: {len(lines)}: {_some(lines)}"))
    return findings


def _lay_out_for_git(scene: Path, before: Path, after: Path, names: list[str]) -> None:
    """Solved files lie under plain numbers, so that none of their names reaches a shell."""
    copy_tree(before, scene / "app")
    (scene / "fixed").mkdir()
    for number, name in enumerate(names):
        target = scene / "fixed" / str(number)
        target.write_bytes((after / name).read_bytes())
        target.chmod(0o644)


async def _lines(sandbox: Sandbox, repository: Path, script: str) -> list[str]:
    result = await sandbox.run(f"cd /app/{shlex.quote(str(repository))} && {{ {script}; }}", timeout_s=_GIT_TIMEOUT_S)
    if result.exit_code != 0:
        raise SandboxError(f"git in {repository} ended with {result.exit_code}: {result.output[-300:]}")
    return result.output.splitlines()


def _some(items: list[str]) -> str:
    rest = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + rest
