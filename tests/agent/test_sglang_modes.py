"""A real SGLang server that is told to report other log-probs than we train on. A server of its own: the switch is read at its start."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent.rig import publish
from agent.test_sglang import CONFIG, REAL, sglang_rig

pytestmark = REAL


async def test_a_server_that_reports_logprobs_from_before_the_temperature_is_refused_with_the_mode_it_showed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    rig = sglang_rig(tmp_path, real=True)
    publish(rig, 1, config=CONFIG)
    try:
        await rig.agent.look()
        state = rig.agent.state()
        assert (state.ready, state.version) == (False, -1)
        assert (state.reason, state.logprob_mode) == ("ModeMismatch", "BeforeTemperature"), state.message
    finally:
        await rig.agent.engine.stop()
