"""/metrics: the newest step, and the mismatch per group under the names that users of Miles and verl know."""

from __future__ import annotations

from motley_api.records import GroupStep, Ratio, StepRecord, TrainerStatus
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest


def value(ratio: Ratio) -> float | None:
    return ratio.num / ratio.den if ratio.den else None


class TrainerMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._step = self._gauge("motley_trainer_step", "Newest finished optimizer step")
        self._version = self._gauge("motley_trainer_weights_version", "Newest version published in every view")
        self._durable = self._gauge("motley_trainer_durable_version", "Newest version that a checkpoint covers")
        self._buffered = self._gauge("motley_trainer_buffered_trajectories", "Trajectories waiting for a batch")
        self._outstanding = self._gauge("motley_trainer_outstanding_episodes", "Episodes handed out and not delivered")
        self._attempt = self._gauge("motley_trainer_attempt", "Starts of the gang")
        self._run = {
            name: self._gauge(f"motley_{name}", text)
            for name, text in {
                "reward": "Mean reward of the trained samples",
                "grad_norm": "Gradient norm before clipping",
                "loss": "Surrogate loss",
                "entropy": "Entropy of the trainer's distribution per trained token, nats",
                "train_s": "Seconds of the last step's training",
                "wait_s": "Seconds the last step waited for samples",
                "publish_s": "Seconds of publishing the last weights",
            }.items()
        }
        self._split = self._labelled(
            "motley_step_metric", "Further numbers of the last step by name", ["name", "split", "key"]
        )
        self._groups = {
            name: self._labelled(f"motley_group_{name}", text, ["group", "view"])
            for name, text in {
                "train_rollout_kl": "KL(q||p) per trained token, nats",
                "out_of_range_share": "Share of tokens whose raw ratio is outside the range",
                "ess_ratio": "Effective sample size over samples",
                "entropy": "Entropy per trained token, nats",
                "reward": "Mean reward",
                "avg_staleness": "Steps between sampling and training",
            }.items()
        }
        self._samples = Counter("motley_group_samples", "Samples trained on", ["group", "view"], registry=self.registry)
        self._discarded = Counter(
            "motley_group_discarded_samples", "Samples not trained on", ["group", "view"], registry=self.registry
        )
        self._tokens = Counter(
            "motley_group_trained_tokens", "Tokens trained on", ["group", "view"], registry=self.registry
        )
        self._refused = Counter("motley_trainer_refused_trajectories", "Trajectories refused", registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry)

    def _labelled(self, name: str, text: str, labels: list[str]) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def refused(self, count: int) -> None:
        self._refused.inc(count)

    def step(self, record: StepRecord) -> None:
        for name, number in {
            "reward": value(record.reward),
            "grad_norm": record.grad_norm,
            "loss": record.loss,
            "entropy": value(record.entropy),
            "train_s": record.train_s,
            "wait_s": record.wait_s,
            "publish_s": record.publish_s,
        }.items():
            if number is not None:
                self._run[name].set(number)
        for name, number in record.metrics.items():
            metric, _, rest = name.partition("/")
            split, _, key = rest.partition("/")
            self._split.labels(metric, split or "all", key).set(number)
        for group in record.groups:
            self._group(group)

    def _group(self, group: GroupStep) -> None:
        labels = (group.name, group.view)
        for name, ratio in {
            "train_rollout_kl": group.kl,
            "out_of_range_share": group.out_of_range,
            "ess_ratio": group.ess,
            "entropy": group.entropy,
            "reward": group.reward,
            "avg_staleness": group.lag,
        }.items():
            number = value(ratio)
            if number is not None:
                self._groups[name].labels(*labels).set(number)
        self._samples.labels(*labels).inc(group.samples)
        self._discarded.labels(*labels).inc(group.discarded)
        self._tokens.labels(*labels).inc(group.trained_tokens)

    def render(self, status: TrainerStatus) -> bytes:
        self._step.set(status.step)
        self._version.set(status.weights_version)
        self._durable.set(status.durable_version)
        self._buffered.set(status.buffered)
        self._outstanding.set(status.outstanding)
        self._attempt.set(status.attempt)
        return generate_latest(self.registry)
