"""`motley operator`, `motley plan`, `motley watch`. The framework is imported by the operator alone: the other two stay light."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated

import typer
from motley_api import keys

ENV_WATCH_NAMESPACE = "MOTLEY_WATCH_NAMESPACE"
ENV_RECONCILE_SECONDS = "MOTLEY_RECONCILE_SECONDS"
ENV_LOG_LEVEL = "MOTLEY_LOG_LEVEL"
IMAGES = {
    "sampler": "MOTLEY_IMAGE_SAMPLER",
    "trainer": "MOTLEY_IMAGE_TRAINER",
    "rollout": "MOTLEY_IMAGE_ROLLOUT",
    "router": "MOTLEY_IMAGE_ROUTER",
}
UNHEALTHY_AFTER_S = 60.0  # without the loop turning, or without an answer about the lease
SILENT_AFTER_S = 180.0  # a watch that does not show what was written: paused, or dead


class ConfigurationError(Exception):
    """An environment variable that makes no sense."""


def configure_logging(level: str) -> None:
    if level.upper() not in logging.getLevelNamesMapping():
        raise ConfigurationError(
            f"{ENV_LOG_LEVEL} must be one of {', '.join(logging.getLevelNamesMapping())}, got {level!r}"
        )
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.WARNING,
        format="time=%(asctime)s level=%(levelname)s logger=%(name)s %(message)s",
    )
    logging.getLogger("motley").setLevel(level.upper())


def reconcile_seconds(env: Mapping[str, str]) -> float:
    text = env.get(ENV_RECONCILE_SECONDS, "") or "3"
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 3600:
        raise ConfigurationError(f"{ENV_RECONCILE_SECONDS} must be a number of seconds from 0.1 to 3600, got {text!r}")
    return value


def overdue(*, loop_s: float, lease_s: float, silence: Mapping[str, timedelta]) -> str:
    """What /healthz says: ages that are past their limits; "" when none is."""
    ages = {
        "the loop turned": (loop_s, UNHEALTHY_AFTER_S),
        "the lease was looked at": (lease_s, UNHEALTHY_AFTER_S),
        **{
            f"a {kind} was written that no watch has shown": (owed.total_seconds(), SILENT_AFTER_S)
            for kind, owed in sorted(silence.items())
        },
    }
    return "; ".join(
        f"{age:.0f} s since {what} (limit {limit:.0f} s)" for what, (age, limit) in ages.items() if age > limit
    )


async def serve_operator(env: Mapping[str, str]) -> int:
    """Watches, leads or waits, reconciles; until SIGTERM. The exit code: 1 when a part of it ended by itself."""
    from motley_operator import handlers, metrics
    from motley_operator.cache import WATCHED, utc_now
    from motley_operator.controller import Controller, Pace
    from motley_operator.kube import Kube, load_credentials
    from motley_operator.leadership import Leadership
    from motley_operator.measure import Telemetry
    from motley_operator.planner.model import Settings

    log = logging.getLogger("motley.operator")
    credentials = load_credentials(env)
    namespace = env.get(ENV_WATCH_NAMESPACE) or None
    active_s = reconcile_seconds(env)
    kube, telemetry, shown = Kube(credentials), Telemetry(window_s=20 * active_s), metrics.Metrics()
    lease_kube = Kube(credentials)  # so that a renewal never waits for a connection behind a thousand other requests
    images = {f"image_{role}": env[name] for role, name in IMAGES.items() if env.get(name)}
    pace = Pace(active_s=active_s, nodes_s=10 * active_s, resize_s=20 * active_s)
    controller = Controller(
        kube,
        telemetry,
        shown,
        settings=Settings(**images),
        namespace=namespace,
        clock=time.monotonic,
        utc_now=utc_now,
        pace=pace,
    )
    identity = env.get(keys.ENV_POD_NAME) or f"{os.uname().nodename}-{os.getpid()}"
    leadership = Leadership(
        lease_kube,
        namespace=env.get(keys.ENV_NAMESPACE) or credentials.namespace,
        identity=identity,
        clock=time.monotonic,
    )

    def refresh() -> None:
        shown.leader.set(leadership.is_leader)
        shown.objects.set(controller.cache.size())
        shown.runs.set(len(controller.memory))
        for method, count in (kube.requests + lease_kube.requests).items():
            shown.requests.labels(method).set(count)
        silence = controller.cache.silence(utc_now())
        for kind in WATCHED:
            shown.silence.labels(kind).set(silence[kind].total_seconds() if kind in silence else 0.0)

    def unhealthy() -> str:
        now = time.monotonic()
        return overdue(
            loop_s=now - controller.last_progress_s,
            lease_s=now - leadership.last_contact_s,
            silence=controller.cache.silence(utc_now()),
        )

    host = env.get(keys.ENV_POD_IP) or "localhost"
    runners = await metrics.serve(
        host, keys.OPERATOR_METRICS_PORT, keys.OPERATOR_HEALTH_PORT, shown, refresh, unhealthy
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    parts = [
        asyncio.create_task(handlers.watch(controller, credentials, namespace), name="watch"),
        asyncio.create_task(leadership.run(), name="leadership"),
        asyncio.create_task(controller.fill_and_run(lambda: leadership.is_leader), name="reconcile"),
        asyncio.create_task(controller.resync_forever(), name="resync"),
    ]
    stopping = asyncio.create_task(stop.wait())
    log.info("event=started identity=%s namespace=%s server=%s", identity, namespace or "all", credentials.server)
    await asyncio.wait([*parts, stopping], return_when=asyncio.FIRST_COMPLETED)
    # The framework takes SIGTERM for itself: its part then ends without an error.
    ended = [
        part
        for part in parts
        if part.done() and (part is not parts[0] or part.cancelled() or part.exception() is not None)
    ]
    for part in ended:
        error = "cancelled" if part.cancelled() else str(part.exception())
        log.error("event=part_ended part=%s error=%r", part.get_name(), error)
    for running in (*parts, stopping):
        running.cancel()
    await asyncio.gather(*parts, stopping, return_exceptions=True)
    await leadership.release()
    for runner in runners:
        await runner.cleanup()
    await telemetry.close()
    await kube.close()
    await lease_kube.close()
    log.info("event=stopped identity=%s", identity)
    return 1 if ended else 0


def operator() -> None:
    """Run the operator. Configured by environment: KUBECONFIG or the pod's service account, MOTLEY_WATCH_NAMESPACE (default: all),
    MOTLEY_RECONCILE_SECONDS (3), MOTLEY_LOG_LEVEL (INFO), MOTLEY_IMAGE_{SAMPLER,TRAINER,ROLLOUT,ROUTER}."""
    from motley_operator.kube import NoClusterError

    if any(argument in ("-h", "--help") for argument in sys.argv[1:]):
        print(operator.__doc__)
        return
    try:
        configure_logging(os.environ.get(ENV_LOG_LEVEL) or "INFO")
        code = asyncio.run(serve_operator(os.environ))
    except (ConfigurationError, NoClusterError) as error:
        print(f"motley operator: {error}", file=sys.stderr)
        sys.exit(keys.EXIT_CONFIG)
    sys.exit(code)


def plan() -> None:
    """What would be placed, shared and paid for a manifest, and why."""
    typer.run(_plan)


def _plan(
    file: Annotated[
        str,
        typer.Option(
            "--file", "-f", help="Manifest with an RLRun and, optionally, SamplerGroups; - is standard input."
        ),
    ],
    output: Annotated[str, typer.Option("--output", "-o", help="table or json.")] = "table",
    available: Annotated[
        str, typer.Option("--available", help="GPUs to choose from, in place of the nodes': H100=16,B200=8.")
    ] = "",
    gpus: Annotated[int | None, typer.Option("--gpus", min=0, help="Most GPUs that samplers may hold in all.")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Do not look at the current cluster.")] = False,
) -> None:
    """Show what would be placed, shared and paid for a manifest, and why. Looks at the nodes of the current cluster if there is one."""
    from motley_operator import preview

    sys.exit(preview.main(file, output, available, gpus, offline))


def replay() -> None:
    """When the guard would have acted on a recorded ledger, and what the run's work cost."""
    typer.run(_replay)


def _replay(
    ledger: Annotated[str, typer.Argument(help="The run's ledger folder of step-*.json, or a .jsonl file.")],
    manifest: Annotated[
        str, typer.Option("--file", "-f", help="RLRun manifest with its guard, prices and groups; default: defaults.")
    ] = "",
    output: Annotated[str, typer.Option("--output", "-o", help="table or json.")] = "table",
) -> None:
    """Run guard and cost on a recorded ledger: each alarm and action, with its step and numbers."""
    from motley_operator import replaying

    sys.exit(replaying.main(ledger, manifest, output))


def watch() -> None:
    """A run, live in the terminal."""
    typer.run(_watch)


def _watch(
    name: Annotated[str, typer.Argument(help="Name of the RLRun.")],
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="Its namespace; default: the kubeconfig's.")] = "",
    every: Annotated[float, typer.Option("--every", min=0.5, help="Seconds between looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print once and leave.")] = False,
) -> None:
    """Follow a run: step, reward, KL per group, shares, cost, decisions. Ends when the run does."""
    from motley_operator import follow

    sys.exit(asyncio.run(follow.main(name, namespace, every, once)))


if __name__ == "__main__":
    operator()
