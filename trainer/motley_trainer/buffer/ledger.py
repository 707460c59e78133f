"""The run's ledger in the store: one JSON file a step, <run>/ledger/step-000010.json. Anyone may read it."""

from __future__ import annotations

import fsspec
import msgspec
from motley_api.records import EvaluationRecord, StepRecord


class Ledger:
    """url: <store>/<run>. A file is written beside its place and moved there, so that no reader sees half of one."""

    def __init__(self, url: str) -> None:
        self._fs, root = fsspec.core.url_to_fs(url)
        self._root = f"{root.rstrip('/')}/ledger"

    def path(self, step: int) -> str:
        return f"{self._root}/step-{step:06d}.json"

    def write(self, record: StepRecord) -> None:
        self._write(self.path(record.step), msgspec.json.encode(record))

    def write_evaluation(self, record: EvaluationRecord) -> None:
        self._write(f"{self._root}/evaluation-{record.step:06d}.json", msgspec.json.encode(record))

    def supersede(self, records: list[StepRecord]) -> None:
        """Steps of an attempt that did not survive make room for their repetition, and stay to be counted."""
        for record in records:
            name = f"{self._root}/superseded/attempt-{record.attempt:03d}-step-{record.step:06d}.json"
            self._write(name, msgspec.json.encode(record))
            if self._fs.exists(self.path(record.step)):
                self._fs.rm_file(self.path(record.step))

    def _write(self, path: str, data: bytes) -> None:
        self._fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
        partial = f"{path}.partial"
        self._fs.pipe_file(partial, data)
        self._fs.mv(partial, path)
