"""A recorded run as one file: the product's StepRecords, one JSON line a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from motley_api.records import Ratio, StepRecord

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


def fixture(record: StepRecord) -> bytes:
    """One line for a test's ledger: what the guard reads, still a StepRecord. Times are a minute a step; measures that are 0, or of
    which there are none, are left to their defaults, and floats keep five digits."""
    kept = msgspec.structs.replace(
        record,
        started_unix_s=60.0 * (record.step - 1),
        finished_unix_s=60.0 * record.step,
        wait_s=0.0,
        train_s=0.0,
        publish_s=0.0,
        metrics={},
        groups=[msgspec.structs.replace(group, ess=Ratio(), turn_latency_s=Ratio()) for group in record.groups],
    )
    plain: dict[str, Any] = msgspec.to_builtins(kept)
    required = {field.name for field in msgspec.structs.fields(StepRecord) if field.required}
    plain["groups"] = [{name: value for name, value in group.items() if _said(value)} for group in plain["groups"]]
    return json.dumps(
        _rounded({name: value for name, value in plain.items() if name in required or _said(value)}),
        separators=(",", ":"),
    ).encode()


def _said(value: Any) -> bool:
    return bool(value["den"]) if isinstance(value, dict) and "den" in value else bool(value)


def _rounded(value: Any) -> Any:
    match value:
        case float():
            return float(f"{value:.5g}")
        case dict():
            return {name: _rounded(item) for name, item in value.items()}
        case list():
            return [_rounded(item) for item in value]
    return value
