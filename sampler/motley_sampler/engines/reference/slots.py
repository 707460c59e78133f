"""Which slot of the KV cache holds which tokens, computed under which weights. Pure bookkeeping.

A slot's tokens are reused for a new request only if they were all computed under the weights version served now, and under the
request's cache key: prefixes never cross versions. An idle slot is kept until another request needs it, least recently used first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Slot:
    index: int
    tokens: list[int] = field(default_factory=list)  # whose keys and values are in the cache
    version: int = -1  # of all of them
    cache_key: str = ""
    session: str = ""
    busy: bool = False
    used_at: int = 0  # a counter, not a clock

    def forget(self) -> None:
        self.tokens, self.version, self.session = [], -1, ""


@dataclass(frozen=True)
class Placement:
    """Use `slot`; its first `cached` positions are valid once `copy_from`'s prefix was copied there (None: they already are)."""

    slot: Slot
    cached: int
    copy_from: Slot | None


class SlotTable:
    def __init__(self, slots: int, positions: int) -> None:
        self.slots = [Slot(index) for index in range(slots)]
        self.positions = positions
        self._clock = 0

    def place(
        self, prompt: Sequence[int], *, version: int, cache_key: str, session: str, reuse_at_most: int
    ) -> Placement | None:
        """A slot for a request, or None when all are busy. Marks it busy.

        reuse_at_most: positions whose logits are needed may not come from the cache; always less than the prompt's length.
        """
        idle = [slot for slot in self.slots if not slot.busy]
        if not idle:
            return None
        best, cached = self._longest_prefix(prompt, version, cache_key, session, reuse_at_most)
        # In place when nothing of another session's is lost by it; else beside it, in the slot that was idle longest.
        nobodys = best is not None and best.session in ("", session)
        in_place = best is not None and not best.busy and (nobodys or cached == len(best.tokens))
        target = (
            best
            if best is not None and in_place
            else min(idle, key=lambda slot: (bool(slot.tokens), slot.used_at, slot.index))
        )
        self._clock += 1
        copy_from = None if target is best or cached == 0 else best
        target.tokens = list(prompt[:cached])
        target.version, target.cache_key, target.session = version, cache_key, session
        target.busy, target.used_at = True, self._clock
        return Placement(target, cached, copy_from)

    def _longest_prefix(
        self, prompt: Sequence[int], version: int, cache_key: str, session: str, reuse_at_most: int
    ) -> tuple[Slot | None, int]:
        """The slot that shares most with the prompt; at the same length the session's own, then an idle one, then the first."""
        found = [
            (min(common_prefix(slot.tokens, prompt), reuse_at_most), slot)
            for slot in self.slots
            if slot.tokens and slot.version == version and slot.cache_key == cache_key
        ]
        shared = [(length, slot) for length, slot in found if length > 0]
        if not shared:
            return None, 0
        length, slot = max(
            shared, key=lambda pair: (pair[0], pair[1].session == session, not pair[1].busy, -pair[1].index)
        )
        return slot, length

    def release(self, slot: Slot) -> None:
        slot.busy = False
        self._clock += 1
        slot.used_at = self._clock

    def change_version(self) -> None:
        """Idle prefixes are worthless under new weights; a busy slot's mix of two versions is no prefix of any."""
        for slot in self.slots:
            if slot.busy:
                slot.version = -1
            else:
                slot.forget()

    def forget_session(self, session: str) -> None:
        """Its slots are the first to be taken; until then other samples of its prompt may use what they hold."""
        for slot in self.slots:
            if slot.session == session and not slot.busy:
                slot.session, slot.used_at = "", 0

    def flush(self) -> None:
        for slot in self.slots:
            if not slot.busy:
                slot.forget()
            else:
                slot.version = -1

    def used_percent(self) -> int:
        """Of all positions, those of running requests: idle prefixes are given up at once when room is needed."""
        used = sum(len(slot.tokens) for slot in self.slots if slot.busy)
        return round(100 * used / (len(self.slots) * self.positions))


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    low, high = 0, length  # a[:low] == b[:low], a[:high] != b[:high]
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
