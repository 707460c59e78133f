"""What a worker measures."""

from __future__ import annotations

from motley_api.records import EndedBy, TrajectoryAck
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LATENCY_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 6, 8, 10, 15, 20, 30, 60, 120, 300, 600)


class Metrics:
    """One registry a process, so that tests may have several workers."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"motley_rollout_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"motley_rollout_{name}", text, labels, registry=self.registry)

        self.episodes = counter("episodes", "Episodes finished, by why they ended.", "ended_by")
        self.failures = counter("infrastructure_failures", "Episodes that were not graded, by what failed.", "kind")
        self.abandoned = counter("abandoned_episodes", "Episodes dropped without a record, by why.", "reason")
        self.retries = counter("retries", "Requests sent again, by why.", "reason")
        self.deliveries = counter("deliveries", "Trajectories that the trainer answered for.", "outcome")
        self.delivery_failures = counter("delivery_failures", "Requests with trajectories that failed.")
        self.sandbox_seconds = counter("sandbox_seconds", "Time of commands and graders in sandboxes.", "kind")
        self.sessions = gauge("sessions", "Episodes running.")
        self.sessions_limit = gauge("sessions_limit", "Episodes that may run at once.")
        self.spool = gauge("spool_trajectories", "Finished trajectories not yet acknowledged.")
        self.spool_bytes = gauge("spool_bytes", "Their size on disk.")
        self.isolation = gauge("sandbox_isolation_info", "How sandboxes are walled off; always 1.", "isolation")
        self.turn_latency = Histogram(
            "motley_rollout_turn_latency_seconds",
            "Request sent to last token, queueing and prefill included.",
            ["group"],
            registry=self.registry,
            buckets=_LATENCY_BUCKETS_S,
        )
        for ended_by in EndedBy:  # from the start, so that a rate over them is right
            self.episodes.labels(ended_by.value)

    def turn(self, group: str, latency_s: float) -> None:
        self.turn_latency.labels(group).observe(latency_s)

    def sandbox(self, wall_s: float, cpu_s: float) -> None:
        self.sandbox_seconds.labels("wall").inc(wall_s)
        self.sandbox_seconds.labels("cpu").inc(cpu_s)

    def retried(self, reason: str) -> None:
        self.retries.labels(reason).inc()

    def acked(self, ack: TrajectoryAck) -> None:
        for outcome, count in (
            ("accepted", len(ack.accepted)),
            ("duplicate", len(ack.duplicates)),
            ("refused", len(ack.refused)),
        ):
            if count:
                self.deliveries.labels(outcome).inc(count)

    def text(self) -> bytes:
        return generate_latest(self.registry)
