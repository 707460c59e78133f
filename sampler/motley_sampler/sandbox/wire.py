"""Messages between a worker, its launcher and the sandboxes: JSON with a four-byte length in front, over Unix sockets."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
HEADER = struct.Struct("!I")


def pack(message: dict[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"message of {len(body)} bytes is longer than {MAX_MESSAGE_BYTES}")
    return HEADER.pack(len(body)) + body


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """The next message of a blocking socket; None when the other end closed it."""
    header = _exactly(connection, HEADER.size)
    if header is None:
        return None
    body = _exactly(connection, HEADER.unpack(header)[0])
    if body is None:
        return None
    message: dict[str, Any] = json.loads(body)
    return message


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts: list[bytes] = []
    while count:
        part = connection.recv(min(count, 1 << 16))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
