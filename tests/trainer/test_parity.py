"""Our Megatron model computes what transformers computes, from the same checkpoint."""

import os

import pytest
import torch

# transformers asks a hub for nothing here; it must not try.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"norm_topk_prob": False},
        {"num_experts_per_tok": 3},
        {"mlp_only_layers": [1]},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4, "rope_theta": 500.0},
        QWEN3,
        LLAMA,
    ],
    ids=["moe", "not-normalised", "top-3", "one-dense-layer", "tied", "no-gqa", "qwen3", "llama"],
)
def test_logits_equal_transformers(engine_of, tmp_path, config):
    import transformers

    engine = engine_of(**config)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    tokens = torch.randint(0, 96, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = oracle(tokens).logits.reshape(-1, 96)
        got = engine.logits(tokens)
    assert want.std() > 0.1  # the model says something
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)


def test_weights_come_out_as_they_went_in(engine_of, tmp_path):
    from motley_weights.checkpoints import read_checkpoint

    engine = engine_of()
    want = read_checkpoint(tmp_path / "model").tensors
    got = dict(engine.hf_tensors())
    assert sorted(got) == sorted(want)
    for name in want:
        assert torch.equal(got[name], want[name]), name


def test_rope_scaling_is_refused(engine_of):
    from motley_weights.errors import UnsupportedModelError

    with pytest.raises(UnsupportedModelError, match="rope_scaling"):
        engine_of(rope_scaling={"type": "yarn", "factor": 4.0})
