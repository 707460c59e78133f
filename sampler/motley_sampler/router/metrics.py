"""What the router measures. Gauges are read from the table when asked for; counters count decisions as they happen."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from motley_sampler.router import placement
from motley_sampler.router.placement import Engine, Limits
from motley_sampler.router.table import Table

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """One registry a process, so that tests may have several routers."""

    def __init__(self, table: Table, clock: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_TableGauges(table, clock))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"motley_router_{name}", text, labels, registry=self.registry)

        self.sessions = counter("sessions", "Sessions placed.", "group")
        self.renewals = counter("lease_renewals", "Leases renewed.")
        self.relearned = counter("leases_relearned", "Leases of sessions that the router did not know.", "group")
        self.expired = counter("leases_expired", "Sessions whose holder stopped renewing.")
        self.repins = counter("repins", "Sessions moved to another engine of their group.", "group")
        self.lost = counter("lost_sessions", "Sessions whose group had no engine left for them.", "group")
        self.refusals = counter("refusals", "Sessions refused.", "reason")
        self.proxied = counter("proxied_requests", "Requests relayed to engines.", "path", "outcome")
        self.keep_alives = counter("keep_alives", "Keep-alive bytes written into replies that took long.")
        self.proxy_retries = counter("proxy_retries", "Relayed requests sent again to another engine of the group.")
        self.place_seconds = Histogram(
            "motley_router_place_seconds",
            "Time to place a session.",
            registry=self.registry,
            buckets=(1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 1e-1),
        )

    def text(self) -> bytes:
        return generate_latest(self.registry)


def engine_condition(engine: Engine, now_s: float, limits: Limits) -> str:
    """One word for an engine: Ready, Suspect, TimedOut, Draining or NotReady."""
    return placement.not_serving(engine, now_s, limits) or (placement.SUSPECT if engine.suspect else "Ready")


class _TableGauges(Collector):
    def __init__(self, table: Table, clock: Callable[[], float]) -> None:
        self._table, self._clock = table, clock

    def collect(self) -> Iterator[GaugeMetricFamily]:
        now_s, table = self._clock(), self._table
        per_group: dict[str, GaugeMetricFamily] = {}
        for name, text in (
            ("sessions_active", "Sessions of a group."),
            ("group_share_milli", "Share of new sessions, in thousandths."),
            ("group_capacity_sessions", "Sessions that a group can hold, as the operator measured or was told."),
            ("group_engines_ready", "Engines that may be given sessions."),
        ):
            per_group[name] = GaugeMetricFamily(f"motley_router_{name}", text, labels=["group"])
        for row in table.group_sessions(now_s):
            per_group["sessions_active"].add_metric([row.name], row.active)
            per_group["group_share_milli"].add_metric([row.name], row.share_milli)
            per_group["group_capacity_sessions"].add_metric([row.name], row.capacity_sessions)
            per_group["group_engines_ready"].add_metric([row.name], row.engines_ready)
        yield from per_group.values()
        yield GaugeMetricFamily("motley_router_leases", "Leases held.", value=table.sessions_active)
        generation = table.fleet.generation if table.fleet else -1
        yield GaugeMetricFamily("motley_router_fleet_generation", "Generation of the fleet document.", value=generation)
        yield from self._engines(now_s)

    def _engines(self, now_s: float) -> Iterator[GaugeMetricFamily]:
        states = GaugeMetricFamily("motley_router_engines", "Engines by state.", labels=["state"])
        ages = GaugeMetricFamily(
            "motley_router_engine_heartbeat_age_seconds", "Time since an engine's last heartbeat.", labels=["engine"]
        )
        sessions = GaugeMetricFamily("motley_router_engine_sessions", "Sessions of an engine.", labels=["engine"])
        counts = dict.fromkeys(
            ("Ready", placement.SUSPECT, placement.NOT_READY, placement.DRAINING, placement.TIMED_OUT), 0
        )
        for engine_id, engine in sorted(self._table.engines.items()):
            counts[engine_condition(engine, now_s, self._table.limits)] += 1
            ages.add_metric([engine_id], now_s - engine.heard_s)
            sessions.add_metric([engine_id], self._table.view.sessions_of_engine.get(engine_id, 0))
        for state, count in counts.items():
            states.add_metric([state], count)
        yield from (states, ages, sessions)
