"""/metrics and /healthz."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

from aiohttp import web
from motley_api.resources import RLRunStatus
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from motley_operator.cache import RunKey

# Histograms' buckets: 1 ms to 10 s, three for each doubling or so, so that a p99 read from them is near the real one.
SECONDS = tuple(round(0.001 * 10 ** (step / 8), 4) for step in range(33))


class Metrics:
    """Registered apart from the process's default registry, so that tests can have several."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        run, group = ["namespace", "run"], ["namespace", "run", "group"]
        self.reconciles = Counter(
            "motley_reconciles_total", "Reconciles by result.", ["result"], registry=self.registry
        )
        self.seconds = Histogram(
            "motley_reconcile_seconds",
            "Time of one reconcile.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.wait = Histogram(
            "motley_reconcile_wait_seconds",
            "From when a run was due to when its reconcile began.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.runs = Gauge(
            "motley_runs", "Runs that were looked at since the start, and are still there.", registry=self.registry
        )
        self.status_writes = Counter(
            "motley_status_writes_total", "Statuses written.", ["kind"], registry=self.registry
        )
        self.leader = Gauge("motley_leader", "1 while this replica leads.", registry=self.registry)
        self.objects = Gauge("motley_cached_objects", "Objects and pods in the cache.", registry=self.registry)
        self.requests = Gauge(
            "motley_api_requests",
            "Requests to the API server since the start, by method.",
            ["method"],
            registry=self.registry,
        )
        self.silence = Gauge(
            "motley_watch_silence_seconds",
            "For how long a watch has not shown what was written; 0 when it has.",
            ["kind"],
            registry=self.registry,
        )
        self.step = Gauge("motley_run_step", "Newest optimizer step.", run, registry=self.registry)
        self.reward = Gauge("motley_run_reward", "Mean reward of the newest step.", run, registry=self.registry)
        self.kl = Gauge("motley_run_kl_nats", "KL(q||p) of the newest step, nats a token.", run, registry=self.registry)
        self.billed = Gauge(
            "motley_run_billed_usd",
            "Dollars billed so far; absent while a price is missing.",
            run,
            registry=self.registry,
        )
        self.share = Gauge(
            "motley_group_share_milli", "Share of new sessions, thousandths.", group, registry=self.registry
        )
        self.ready = Gauge("motley_group_ready_engines", "Ready engines.", group, registry=self.registry)
        self._groups: dict[RunKey, set[str]] = {}

    def show(self, key: RunKey, status: RLRunStatus) -> None:
        if status.step is not None:
            self.step.labels(*key).set(status.step)
        if status.reward is not None:
            self.reward.labels(*key).set(float(status.reward))
        if status.mismatch is not None and status.mismatch.kl is not None:
            self.kl.labels(*key).set(float(status.mismatch.kl))
        if status.totals is not None and status.totals.billed_usd is not None:
            self.billed.labels(*key).set(float(status.totals.billed_usd))
        now = {group.name for group in status.groups}
        for name in self._groups.get(key, set()) - now:
            self._remove(self.share, *key, name)
            self._remove(self.ready, *key, name)
        self._groups[key] = now
        for group in status.groups:
            self.share.labels(*key, group.name).set(float(Decimal(group.share_percent) * 10))
            self.ready.labels(*key, group.name).set(group.ready)

    def forget(self, key: RunKey) -> None:
        """A deleted run leaves no series behind."""
        for gauge in (self.step, self.reward, self.kl, self.billed):
            self._remove(gauge, *key)
        for name in self._groups.pop(key, set()):
            self._remove(self.share, *key, name)
            self._remove(self.ready, *key, name)

    @staticmethod
    def _remove(gauge: Gauge, *labels: str) -> None:
        if labels in gauge._metrics:
            gauge.remove(*labels)


async def serve(
    host: str,
    metrics_port: int,
    health_port: int,
    metrics: Metrics,
    refresh: Callable[[], None],
    unhealthy: Callable[[], str],
) -> list[web.AppRunner]:
    """Both servers, on the pod's own address."""

    async def show_metrics(_: web.Request) -> web.Response:
        refresh()
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def show_health(_: web.Request) -> web.Response:
        reason = unhealthy()
        return web.Response(status=503 if reason else 200, text=reason or "ok")

    runners = []
    for port, path, handler in ((metrics_port, "/metrics", show_metrics), (health_port, "/healthz", show_health)):
        app = web.Application()
        app.router.add_get(path, handler)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, host, port).start()
        runners.append(runner)
    return runners
