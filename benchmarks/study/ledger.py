"""A recorded run as one file: the product's StepRecords, one JSON line a step."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
from motley_api.records import StepRecord

KEPT_METRICS = (
    "ess_ratio",
    "ois",
    "tis",
    "train_rollout_kl",
    "sc_correction",
    "mis_mask_fraction_low",
    "mis_mask_fraction_high",
)


def slim(record: StepRecord) -> StepRecord:
    """Without the metrics' splits: groups are records of their own, and a file of eighty steps stays small."""
    kept = {name: float(f"{value:.6g}") for name, value in record.metrics.items() if name in KEPT_METRICS}
    return msgspec.structs.replace(record, metrics=kept)


def append(path: Path, record: StepRecord) -> None:
    with path.open("ab") as file:
        file.write(msgspec.json.encode(slim(record)) + b"\n")


def read(path: Path) -> list[StepRecord]:
    """Errors: OSError, msgspec.DecodeError."""
    lines = path.read_bytes().splitlines()
    return [msgspec.json.decode(line, type=StepRecord) for line in lines if line.strip()]


def write(path: Path, records: Iterable[StepRecord]) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(slim(record)) + b"\n" for record in records))
