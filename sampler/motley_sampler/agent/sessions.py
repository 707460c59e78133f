"""Which sessions this engine has served, and when it last heard of each. Time is an argument."""

from __future__ import annotations

from collections import OrderedDict


class SessionBook:
    """Bounded: the session unheard of for longest is forgotten first."""

    def __init__(self, limit: int = 10_000) -> None:
        self._limit = limit
        self._heard_at: OrderedDict[str, float] = OrderedDict()

    def touch(self, session: str, now: float) -> None:
        if not session:
            return
        self._heard_at[session] = now
        self._heard_at.move_to_end(session)
        while len(self._heard_at) > self._limit:
            self._heard_at.popitem(last=False)

    def knows(self, session: str) -> bool:
        return session in self._heard_at

    def forget(self, session: str) -> None:
        self._heard_at.pop(session, None)

    def active(self, now: float, idle_s: float) -> int:
        """Sessions heard of within idle_s."""
        return sum(now - heard < idle_s for heard in self._heard_at.values())
