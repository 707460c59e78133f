from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import msgspec
import pytest
from motley_api import records
from motley_api.resources.rlrun import Guard
from motley_operator import replaying
from motley_operator.planner.cost import EngineRate
from planner import study

COLLAPSE = [0.01] * 6 + [0.02, 0.05, 0.09, 0.2, 0.4, 0.9, 2.0, 4.0]


def ledger() -> list[records.StepRecord]:
    """KL grows from the seventh step on, the reward falls with it."""
    found = []
    for number, kl in enumerate(COLLAPSE, 1):
        group = records.GroupStep(name="h100-fp8", view="fp8", samples=64, turns=100, kl=records.Ratio(kl, 1.0))
        reward = records.Ratio(0.7 if number < 12 else 0.2, 1.0)
        found.append(study.step(number, kl=kl, groups=[group], reward=reward))
    return found


def test_a_folder_and_a_jsonl_file_replay_alike(tmp_path: Path) -> None:
    for record in ledger():
        (tmp_path / f"step-{record.step:06d}.json").write_bytes(msgspec.json.encode(record))
    (tmp_path / "evaluation-000000.json").write_text("{}")  # lies beside the steps
    lines = tmp_path / "ledger.jsonl"
    lines.write_bytes(b"\n".join(map(msgspec.json.encode, reversed(ledger()))))
    assert replaying.read_ledger(tmp_path) == replaying.read_ledger(lines) == ledger()


def test_a_recorded_collapse_is_paused_before_the_reward_falls() -> None:
    found = replaying.replay(ledger(), Guard())
    assert found.paused_at is not None
    assert found.paused_at < 12
    assert found.alarms[-1].action == "Pause"
    assert "KL" in found.alarms[-1].why
    assert replaying.replay(ledger()[:6], Guard()).alarms == ()


def test_work_is_priced_by_turns_and_unknown_without_a_rate() -> None:
    rate = EngineRate("h100-fp8", Decimal(4), Decimal(1000), 16)
    shown = replaying.document(replaying.replay(ledger(), Guard(), [rate], Decimal("0.005")))
    # 14 steps x 100 turns x 4/1000, against 0.005 a turn
    assert (shown["workPricedUSD"], shown["baselineUSD"], shown["savingPercent"]) == ("5.6", "7", "20.0")
    assert replaying.document(replaying.replay(ledger(), Guard()))["workPricedUSD"] is None


def test_what_is_not_a_ledger_says_so(tmp_path: Path) -> None:
    with pytest.raises(replaying.LedgerError, match="no step record"):
        replaying.read_ledger(tmp_path)
    (tmp_path / "step-000001.json").write_text("{}")
    with pytest.raises(replaying.LedgerError, match=r"step-000001\.json: not a step record"):
        replaying.read_ledger(tmp_path)
