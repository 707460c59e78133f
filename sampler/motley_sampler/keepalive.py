"""Replies that take long: bytes that mean nothing go out while an engine thinks, so that no middlebox drops the connection.

Before a JSON body they are spaces, between events of a stream they are comments. The first of them commits the status to 200;
a failure after that is told in the body, as {"error": {"message": …, "code": <the status it would have had>}}. Pure.
"""

from __future__ import annotations

import msgspec

KEEP_ALIVE_S = 15.0  # of silence; middleboxes are known to cut after a minute, or after 350 s


class _Error(msgspec.Struct, frozen=True):
    message: str = ""
    code: int = 500


class _Failed(msgspec.Struct, frozen=True):
    error: _Error


def late_failure(body: bytes) -> tuple[int, str] | None:
    """(status, message) of a whole reply with status 200 that tells a failure; None for any other."""
    if not body.lstrip()[:9].startswith(b'{"error"'):
        return None
    try:
        error = msgspec.json.decode(body, type=_Failed).error
    except msgspec.DecodeError:
        return None
    return (error.code if 400 <= error.code <= 599 else 500), error.message


def failure_body(status: int, message: str) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "code": status}})
