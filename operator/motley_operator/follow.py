"""`motley watch`: a run's status, drawn again whenever it is looked at."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import aiohttp
from motley_api.resources import RLRunStatus
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from motley_operator import observe
from motley_operator.kube import ApiError, Kube, NoClusterError, user_credentials

Json = dict[str, Any]
UNKNOWN = "-"


def or_unknown(value: object, unit: str = "") -> str:
    return UNKNOWN if value is None or value == "" else f"{value}{unit}"


def headline(name: str, body: Json, status: RLRunStatus) -> Text:
    steps = body.get("spec", {}).get("steps", "?")
    parts = [
        f"{name}  {status.status or 'Pending'}",
        f"step {or_unknown(status.step)}/{steps}",
        f"reward {or_unknown(status.reward)}",
        f"KL {or_unknown(status.mismatch.kl if status.mismatch else None)}",
        f"growth {or_unknown(status.mismatch.growth if status.mismatch else None)}",
        f"groups {or_unknown(status.groups_ready)}",
    ]
    return Text("   ".join(parts), style="bold")


def groups_table(status: RLRunStatus) -> Table:
    table = Table(expand=False)
    for column in ("group", "GPU", "precision"):
        table.add_column(column)
    for column in (
        "engines",
        "sessions",
        "share",
        "samples",
        "KL",
        "x run",
        "out of range",
        "version",
        "lag",
        "$/Mtok",
    ):
        table.add_column(column, justify="right")
    for group in status.groups:
        table.add_row(
            group.name,
            group.gpu_type.value,
            group.precision.value,
            f"{group.ready}/{group.engines}",
            str(group.capacity_sessions),
            f"{group.share_percent}%",
            str(group.samples),
            or_unknown(group.kl),
            or_unknown(group.kl_ratio),
            or_unknown(group.out_of_range_percent, "%"),
            str(group.version),
            or_unknown(group.lag),
            or_unknown(group.usd_per_million_tokens),
        )
    return table


def cost_line(status: RLRunStatus) -> Text:
    step, total = status.cost_per_step, status.totals
    if step is None:
        return Text(f"cost so far: ${or_unknown(total.billed_usd if total else None)}")
    split = [
        f"samplers {or_unknown(step.sampler_usd)}",
        f"trainer {or_unknown(step.trainer_usd)}",
        f"idle {or_unknown(step.idle_usd)}",
        f"discarded {or_unknown(step.discarded_usd)}, of it stale {or_unknown(step.stale_usd)}",
    ]
    return Text(
        f"$/step: billed {or_unknown(step.billed_usd)} ({'; '.join(split)}), work-priced {or_unknown(step.work_priced_usd)} "
        f"(masked {or_unknown(step.masked_usd)}) against {or_unknown(step.baseline_usd)} on the baseline: "
        f"saving {or_unknown(step.saving_percent, '%')};  total ${or_unknown(total.billed_usd if total else None)}"
    )


def troubles(status: RLRunStatus) -> list[Text]:
    """Conditions that a person should read."""
    bad_when_true = {"QuotaExceeded"}
    quiet = {"Suspended", "Succeeded"}
    return [
        Text(f"{condition.type}: {condition.reason}: {condition.message}", style="yellow")
        for condition in status.conditions
        if condition.type not in quiet
        and condition.status != "Unknown"
        and (condition.status == "True") == (condition.type in bad_when_true)
    ]


def drawing(name: str, body: Json) -> RenderableType:
    status = observe.run_status(body)
    decisions = [
        Text(f"{decision.time}  {decision.what}  ({decision.why})", style="dim") for decision in status.decisions[-5:]
    ]
    return Group(headline(name, body, status), groups_table(status), cost_line(status), *troubles(status), *decisions)


def ended(body: Json) -> bool:
    succeeded = next((item for item in observe.run_status(body).conditions if item.type == "Succeeded"), None)
    return succeeded is not None and succeeded.status != "Unknown"


async def main(name: str, namespace: str, every_s: float, once: bool) -> int:
    """0 when the run completed, 1 when it failed or is not there."""
    try:
        credentials = user_credentials()
    except NoClusterError as error:
        print(f"motley watch: {error}", file=sys.stderr)
        return 1
    kube, console = Kube(credentials), Console()
    try:
        with Live(console=console, auto_refresh=False, transient=False) as live:
            while True:
                body = await kube.get("RLRun", namespace or credentials.namespace, name)
                if body is None:
                    live.stop()
                    print(
                        f"motley watch: no RLRun {name!r} in namespace {namespace or credentials.namespace!r}",
                        file=sys.stderr,
                    )
                    return 1
                live.update(drawing(name, body), refresh=True)
                if once:
                    return 0
                if ended(body):
                    succeeded = next(item for item in observe.run_status(body).conditions if item.type == "Succeeded")
                    return 0 if succeeded.status == "True" else 1
                await asyncio.sleep(every_s)
    except (ApiError, aiohttp.ClientError, OSError, TimeoutError) as error:
        print(f"motley watch: {error}", file=sys.stderr)
        return 1
    finally:
        await kube.close()
