"""When an engine has been replaced often enough: it is retired, and its share moves to the others.

A process that gives up is started again by the kubelet, in the same pod, so its scratch space remembers how often. A retired
engine stays up, loads nothing and says so: another start would only cost what the last ones did. A new pod begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

FILE = "gave-up.json"


def recent(gave_up_at_s: Sequence[float], now_s: float, within_s: float) -> list[float]:
    """Times of the window that ends now. A time in the future (the clock was set back) counts."""
    return [at_s for at_s in gave_up_at_s if now_s - at_s <= within_s]


@dataclass(frozen=True)
class Retirement:
    """`most` ends of a process within `within_s` seconds retire its engine. clock: in seconds since the epoch."""

    scratch: Path
    most: int
    within_s: float
    clock: Callable[[], float]

    def gave_up(self) -> int:
        """Notes one more. Returns how many there are in the window."""
        times = [*self._recent(), self.clock()]
        path = self.scratch / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(times))
        return len(times)

    def due(self) -> bool:
        return len(self._recent()) >= self.most

    def _recent(self) -> list[float]:
        try:
            times = msgspec.json.decode((self.scratch / FILE).read_bytes(), type=list[float])
        except (FileNotFoundError, msgspec.DecodeError):
            return []  # a file cut short by a crash: counting begins anew
        return recent(times, self.clock(), self.within_s)
