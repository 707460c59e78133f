"""``motley tasks``: what people do with task folders before a run."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from motley_api.resources.rlrun import Isolation

from motley_sampler.sandbox.host import SandboxError, SandboxHost
from motley_sampler.tasks.audit import Finding, audit
from motley_sampler.tasks.format import Task, TaskError, load_tasks

app = typer.Typer(help="Task folders in Harbor's format.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps `audit` a subcommand while it is the only one."""


@app.command("audit")
def audit_command(
    source: Annotated[str, typer.Argument(help="One task, a folder of tasks, or a folder with train/ and heldout/.")],
    isolation: Annotated[Isolation, typer.Option(help="How the sandboxes are walled off.")] = Isolation.AUTO,
    jobs: Annotated[int, typer.Option(min=1, help="Tasks audited at once.")] = 2,
) -> None:
    """Proves in sandboxes that each solution passes and an empty patch fails, and looks for leaks of the fix."""
    try:
        with tempfile.TemporaryDirectory(prefix="motley-audit-") as scratch:
            tasks = load_tasks(source, cache=Path(scratch) / "tasks")
            bad = asyncio.run(_audit_all(tasks, Path(scratch), isolation, jobs))
    except (TaskError, SandboxError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(f"{len(tasks) - bad} of {len(tasks)} tasks are sound")
    if bad:
        raise typer.Exit(1)


async def _audit_all(tasks: list[Task], scratch: Path, isolation: Isolation, jobs: int) -> int:
    """Prints as results come, in the order of the tasks; returns how many have findings."""
    slots = asyncio.Semaphore(jobs)
    async with await SandboxHost.start(scratch, isolation) as host:
        typer.echo(f"isolation={host.level}{' ' + host.detail if host.detail else ''}", err=True)

        async def one(task: Task) -> list[Finding]:
            async with slots:
                return await audit(host, task)

        async with asyncio.TaskGroup() as group:
            running = [(task, group.create_task(one(task))) for task in tasks]
            bad = 0
            for task, result in running:
                findings = await result
                bad += bool(findings)
                for finding in findings:
                    typer.echo(f"{task.split}/{task.name}: {finding.problem}: {finding.detail}")
    return bad


def main() -> None:
    app()


if __name__ == "__main__":
    main()
