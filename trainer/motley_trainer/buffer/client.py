"""Rank 0's side of the socket file: plain blocking calls, no event loop in the training process."""

from __future__ import annotations

import http.client
import socket
import time
from typing import Any

import msgspec
from motley_api.records import StepRecord

from motley_trainer.buffer.batch import Batch, Commit, Durable, Notice, Resume, Resumed


class BufferUnavailableError(RuntimeError):
    """The buffer did not answer, or answered with an error."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class BufferClient:
    """path: of the socket file."""

    def __init__(self, path: str, *, timeout_s: float = 60.0) -> None:
        self._path = path
        self._timeout_s = timeout_s

    def resume(self, step: int, durable: int) -> int:
        """The attempt's number."""
        return msgspec.msgpack.decode(
            self._call("POST", "/local/resume", Resume(step=step, durable=durable)), type=Resumed
        ).attempt

    def next_batch(self, step: int, *, wait_s: float, waited_s: float) -> Batch | None:
        """None when there is none yet after `wait_s`."""
        body = self._call("GET", f"/local/batch?step={step}&wait={wait_s}&waited={waited_s}", None, extra_s=wait_s)
        return msgspec.msgpack.decode(body, type=Batch) if body else None

    def commit(self, record: StepRecord) -> None:
        self._call("POST", "/local/commit", Commit(record=record))

    def durable(self, step: int, oldest_kept: int) -> None:
        self._call("POST", "/local/durable", Durable(step=step, oldest_kept=oldest_kept))

    def notice(self, notice: Notice) -> None:
        self._call("POST", "/local/notice", notice)

    def wait_for_evaluation(self, *, limit_s: float) -> None:
        """Until no evaluation is under way, or `limit_s`."""
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            if msgspec.msgpack.decode(self._call("GET", "/local/may-finish", None), type=bool):
                return
            time.sleep(0.5)

    def _call(self, method: str, path: str, record: Any, *, extra_s: float = 0.0) -> bytes:
        connection = _UnixConnection(self._path, self._timeout_s + extra_s)
        try:
            connection.request(method, path, None if record is None else msgspec.msgpack.encode(record))
            answer = connection.getresponse()
            body = answer.read()
        except OSError as error:
            raise BufferUnavailableError(f"{method} {path}: {error}") from error
        finally:
            connection.close()
        if answer.status >= 300:
            raise BufferUnavailableError(f"{method} {path}: {answer.status} {body[:500].decode(errors='replace')}")
        return body
