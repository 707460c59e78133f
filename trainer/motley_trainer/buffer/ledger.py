"""The run's ledger in the store: one JSON file a step, <run>/ledger/step-000010.json. Anyone may read it."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import fsspec
import msgspec
from motley_api.records import EvaluationRecord, StepRecord

log = logging.getLogger(__name__)


class Ledger:
    """url: <store>/<run>. A file is written beside its place and moved there, so that no reader sees half of one.

    Writing answers whether it went well and raises nothing: people read the ledger, training does not, and a store that has a bad
    moment must not end a run. The buffer keeps every record, so that `mend` can write later what is missing.
    """

    def __init__(self, url: str) -> None:
        self._fs, root = fsspec.core.url_to_fs(url)
        self._root = f"{root.rstrip('/')}/ledger"

    def path(self, step: int) -> str:
        return f"{self._root}/step-{step:06d}.json"

    def write(self, record: StepRecord) -> bool:
        return self._write(self.path(record.step), msgspec.json.encode(record))

    def write_evaluation(self, record: EvaluationRecord) -> bool:
        return self._write(f"{self._root}/evaluation-{record.step:06d}.json", msgspec.json.encode(record))

    def supersede(self, records: list[StepRecord]) -> None:
        """Steps of an attempt that did not survive make room for their repetition, and stay to be counted."""
        for record in records:
            name = f"{self._root}/superseded/attempt-{record.attempt:03d}-step-{record.step:06d}.json"
            self._write(name, msgspec.json.encode(record))
            try:
                if self._fs.exists(self.path(record.step)):
                    self._fs.rm_file(self.path(record.step))
            except Exception as error:  # as below; its repetition will replace it
                log.warning("event=ledger_not_removed path=%s error=%r", self.path(record.step), str(error)[:300])

    def mend(self, records: Iterable[StepRecord]) -> None:
        """Writes those whose file is not there."""
        try:
            there = {path.rsplit("/", 1)[1] for path in self._fs.ls(self._root, detail=False, refresh=True)}
        except FileNotFoundError:
            there = set()
        except Exception as error:  # as below
            log.warning("event=ledger_not_listed error=%r", str(error)[:300])
            return
        for record in records:
            if self.path(record.step).rsplit("/", 1)[1] not in there:
                self.write(record)

    def _write(self, path: str, data: bytes) -> bool:
        partial = f"{path}.partial"
        try:
            self._fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
            self._fs.pipe_file(partial, data)
            self._fs.mv(partial, path)
        except (
            Exception
        ) as error:  # client libraries of stores have exceptions of their own: it is told, and tried again
            log.warning("event=ledger_not_written path=%s error=%r", path, str(error)[:300])
            return False
        return True
