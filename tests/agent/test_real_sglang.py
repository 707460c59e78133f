"""The real SGLang server, on a CPU, behind the agent: conformance, supports, updates under way, as for any engine.

Minutes of start-up: only with `pytest -m sglang` and an environment that has sglang.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from agent.rig import Rig, publish, settings
from engine import tiny
from engine.test_sglang_arguments import SGLANG_PYTHON
from motley_sampler.agent.build import build_agent
from motley_sampler.agent.http import make_app

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.skipif(not SGLANG_PYTHON.exists(), reason="sglang is not installed (make venv-sglang)"),
]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path)
    spec = settings(tmp_path).spec.model_dump(by_alias=True)
    spec["engine"] = {"type": "SGLang", "args": ["--device=cpu"]}
    made.settings = settings(
        tmp_path,
        spec=type(settings(tmp_path).spec).model_validate(spec),
        sglang_python=str(SGLANG_PYTHON),
        engine_port=_free_port(),
        hang_s=300.0,  # the machine may be busy with other tests
    )
    made.agent = build_agent(made.settings)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    yield made
    await made.agent.engine.stop()


async def test_sglang_conforms_reports_supports_and_updates_under_way(rig: Rig) -> None:
    agent = rig.agent
    publish(rig, 1)
    await agent.look()
    assert (agent.state().ready, agent.state().version) == (True, 1), agent.state().message
    assert agent.state().logprob_mode == "AfterFilter"
    # The oracle is float32 over the same bytes, and so is this server.
    assert agent.state().canary_max_abs_diff is not None
    assert agent.state().canary_max_abs_diff < 1e-3

    client = await rig.client_for(make_app(agent))
    reply = await (await client.post("/generate", json=tiny.body(tiny.prompt(8), 6, session_id="s"))).json()
    meta = reply["meta_info"]
    assert (len(reply["output_ids"]), meta["start_version"], meta["end_version"]) == (6, 1, 1)
    assert [len(ids) for ids in meta["output_token_sampling_mask"]] == [
        len(values) for values in meta["output_token_sampling_logprobs"]
    ]
    assert all(token in ids for token, ids in zip(reply["output_ids"], meta["output_token_sampling_mask"], strict=True))
    too_new = await client.post("/generate", json=tiny.body(tiny.prompt(8)), headers={"X-Motley-Min-Version": "2"})
    assert too_new.status == 409
    bad = await client.post("/generate", json={**tiny.body([1]), "sampling_params": {"top_k": -1, "max_new_tokens": 1}})
    assert bad.status == 400

    longs = [
        asyncio.create_task(client.post("/generate", json=tiny.body(tiny.prompt(8, seed=index), 110)))
        for index in range(4)
    ]
    await tiny.until(lambda: agent.state().running > 0, timeout_s=120)
    publish(rig, 2)
    await agent.look()
    assert (agent.state().ready, agent.state().version) == (True, 2), agent.state().message
    for long in longs:
        answer = await (await long).json()
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 110}
        assert answer["meta_info"]["end_version"] in (1, 2)
    again = await (await client.post("/generate", json=tiny.body(tiny.prompt(8), 6, session_id="s"))).json()
    assert (again["meta_info"]["start_version"], again["meta_info"]["cached_tokens"]) == (2, 0)
    await client.close()
