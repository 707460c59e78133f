"""A command's output, kept to a bounded size: its head and its tail, however much it prints."""

from __future__ import annotations


class BoundedOutput:
    """Keeps the first and the last `limit_bytes` / 2 bytes of what is written to it."""

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes < 2:
            raise ValueError(f"limit_bytes must be >= 2, got {limit_bytes}")
        self._head_limit = (limit_bytes + 1) // 2
        self._tail_limit = limit_bytes - self._head_limit
        self._head = bytearray()
        self._tail = bytearray()
        self.total_bytes = 0

    def write(self, data: bytes) -> None:
        self.total_bytes += len(data)
        room = self._head_limit - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        del self._tail[: max(0, len(self._tail) - self._tail_limit)]

    @property
    def dropped_bytes(self) -> int:
        return self.total_bytes - len(self._head) - len(self._tail)

    def text(self) -> str:
        """UTF-8, undecodable bytes replaced; a note stands where bytes were left out."""
        if not self.dropped_bytes:
            return bytes(self._head + self._tail).decode(errors="replace")
        head = self._head.decode(errors="replace").rstrip("\ufffd")  # a character cut in two at the edge is not shown
        tail = self._tail.decode(errors="replace").lstrip("\ufffd")
        return f"{head}\n[{self.dropped_bytes} bytes left out]\n{tail}"
