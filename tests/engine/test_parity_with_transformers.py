"""In float32 the engine computes what transformers computes, to the order of additions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine import tiny
from motley_sampler.engines.reference.model import full_logits
from motley_sampler.engines.reference.weights import load_weights

CONFIGS: dict[str, dict[str, Any]] = {
    "experts of every token at once": tiny.moe_config(),
    "experts one by one": tiny.moe_config(num_experts=24, num_experts_per_tok=4),
    "one dense layer, shares not renormalised": tiny.moe_config(mlp_only_layers=[0], norm_topk_prob=False),
    "qwen3": tiny.dense_config("qwen3", tie_word_embeddings=True),
    "llama": tiny.dense_config("llama", rms_norm_eps=1e-5),
}


def _transformers(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize("name", CONFIGS)
async def test_logits_and_greedy_tokens_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    folder = tiny.write_view(tmp_path / "view", "bf16", config, tiny.tensors(config, seed=3))
    model = _transformers(folder)
    prompts = [tiny.prompt(23, seed=1), tiny.prompt(9, seed=2)]
    with torch.inference_mode():
        got = full_logits(load_weights(folder, tiny.EXACT), prompts)
        for logits, tokens in zip(got, prompts, strict=True):
            want = model(torch.tensor([tokens])).logits[0]
            torch.testing.assert_close(logits, want, rtol=0, atol=1e-4)
        want_greedy = model.generate(
            torch.tensor([prompts[0]]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, 23:].tolist()
    engine = await tiny.started(folder)
    reply = await engine.generate(tiny.body(prompts[0], 20, sampling={"temperature": 0}))
    await engine.stop()
    assert isinstance(reply, dict)
    assert reply["output_ids"] == want_greedy


async def test_reported_logprobs_are_those_of_transformers(views: dict[str, Path]) -> None:
    """Prompt tokens at temperature 1; drawn tokens at their temperature, before and after the filter."""
    tokens = tiny.prompt(15, seed=4)
    engine = await tiny.started(views["bf16"])
    reply = await engine.generate(
        tiny.body(tokens, 10, sampling={"temperature": 0.7}, logprob_start_len=0, top_logprobs_num=3)
    )
    await engine.stop()
    assert isinstance(reply, dict)
    meta, output = reply["meta_info"], reply["output_ids"]
    with torch.inference_mode():
        logits = _transformers(views["bf16"])(torch.tensor([tokens + output])).logits[0].double()
    plain = logits.log_softmax(-1)
    want_prompt = [plain[index, token].item() for index, token in enumerate(tokens[1:])]
    assert meta["input_token_logprobs"][0] == [None, tokens[0], None]
    assert [row[0] for row in meta["input_token_logprobs"][1:]] == pytest.approx(want_prompt, abs=1e-4)
    scaled = (logits[14:-1] / 0.7).log_softmax(-1)
    for index, token in enumerate(output):
        assert meta["output_token_logprobs"][index] == [
            pytest.approx(scaled[index, token].item(), abs=1e-4),
            token,
            None,
        ]
        kept = meta["output_token_sampling_mask"][index]
        want_support = scaled[index, kept] - scaled[index, kept].exp().sum().log()
        assert meta["output_token_sampling_logprobs"][index] == pytest.approx(want_support.tolist(), abs=1e-4)
        want_top = scaled[index].topk(3)
        assert [row[1] for row in meta["output_top_logprobs"][index]] == want_top.indices.tolist()
