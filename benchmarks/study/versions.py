"""Published versions, which of them a late engine serves, and for which steps it draws with one. Pure."""

from __future__ import annotations

from collections import OrderedDict


class Ring[T]:
    """Keeps the newest `depth` + 1 versions: what is `delay` versions old, or as old as the run where that is younger."""

    def __init__(self, depth: int) -> None:
        if depth < 0:
            raise ValueError(f"depth must be >= 0, got {depth}")
        self._depth = depth
        self._held: OrderedDict[int, T] = OrderedDict()

    def publish(self, version: int, content: T) -> None:
        """Errors: ValueError unless versions come one after another."""
        if self._held and version != self.newest + 1:
            raise ValueError(f"version must be {self.newest + 1}, got {version}")
        self._held[version] = content
        while len(self._held) > self._depth + 1:
            self._held.popitem(last=False)

    @property
    def newest(self) -> int:
        return next(reversed(self._held))

    def behind(self, delay: int) -> tuple[int, T]:
        """(version, content). Errors: ValueError for a delay beyond the ring's depth."""
        if not 0 <= delay <= self._depth:
            raise ValueError(f"delay must be 0 to {self._depth}, got {delay}")
        version = max(self.newest - delay, next(iter(self._held)))
        return version, self._held[version]


def steps_due(step: int, *, phase: int, period: int) -> range:
    """The steps that an engine draws for at `step` (1, 2, ...): up to its next refresh when it refreshes now or the run starts,
    none otherwise."""
    into_period = (step - 1 - phase) % period
    return range(step, step + period - into_period) if into_period == 0 or step == 1 else range(0)
