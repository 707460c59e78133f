"""The committed policy: an ordinary Qwen3-MoE checkpoint, small, and the network that the warm start trained."""

import random
from pathlib import Path

import make_model
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from warmstart import families, policy, rollout, tokens
from warmstart.rollout import Language

MODEL = Path(__file__).resolve().parents[2] / "examples" / "demo" / "model"
SHAPE = policy.Shape()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def params() -> policy.Params:
    return policy.from_checkpoint(load_file(MODEL / "model.safetensors"), SHAPE)


@pytest.fixture(scope="module")
def language() -> Language:
    return Language(tokens.load(MODEL))


def test_checkpoint_is_bf16_and_about_a_megabyte() -> None:
    tensors = load_file(MODEL / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert (MODEL / "model.safetensors").stat().st_size < 1 << 20
    assert all(size % 16 == 0 for name, tensor in tensors.items() if "proj" in name for size in tensor.shape)


def test_transformers_loads_every_weight_and_agrees_on_logits(params: policy.Params) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, output_loading_info=True)
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert {name: sorted(info[name]) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")} == {
        "missing_keys": [],
        "unexpected_keys": [],
        "mismatched_keys": [],
    }
    ids = torch.randint(0, SHAPE.vocab, (3, 70), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want_logits = model(ids).logits
        logits, _ = policy.forward(params, ids, SHAPE)
    assert (logits - want_logits).abs().max() < 2e-4


def test_config_and_checkpoint_have_one_shape() -> None:
    config = AutoConfig.from_pretrained(MODEL)
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (
        SHAPE.vocab,
        SHAPE.hidden,
        SHAPE.layers,
    )
    assert config.eos_token_id == tokens.load(MODEL).token_to_id("<|im_end|>")
    assert (config.norm_topk_prob, config.tie_word_embeddings) == (True, False)


def test_cached_decoding_equals_the_whole_forward_pass(params: policy.Params) -> None:
    ids = torch.randint(0, SHAPE.vocab, (2, 20), generator=torch.Generator().manual_seed(1))
    cache = policy.Cache.empty(SHAPE, 2, 32)
    with torch.no_grad():
        whole, _ = policy.forward(params, ids, SHAPE)
        first, _ = policy.forward(params, ids[:, :8], SHAPE, cache)
        rest = [policy.forward(params, ids[:, at : at + 1], SHAPE, cache)[0] for at in range(8, 20)]
    assert torch.allclose(torch.cat([first, *rest], 1), whole, atol=1e-4)


def test_recorded_distribution_is_the_one_the_whole_forward_pass_gives(
    params: policy.Params, language: Language
) -> None:
    rng = random.Random(0)
    tasks = [families.make(family, rng) for family in families.FAMILIES]
    rows = rollout.play(params, SHAPE, tasks, language, torch.Generator().manual_seed(0), top_p=0.97)
    for row in rows:
        with torch.no_grad():
            logits, _ = policy.forward(params, torch.tensor([row.ids[:-1]]), SHAPE)
        where = torch.tensor(row.generated[1:])
        want_logq = rollout.filtered(logits[0, where], 1.0, 0.97)
        assert (torch.stack(row.logq).exp() - want_logq.exp()).abs().max() < 1e-3


def test_policy_has_room_to_learn_in_every_family(params: policy.Params, language: Language) -> None:
    """Near 0.4 overall, and between 0.1 and 0.8 in each family: groups of samples then differ in reward."""
    rng = random.Random(5)
    per_family = 48
    tasks = [families.make(family, rng) for family in families.FAMILIES for _ in range(per_family)]
    rows = rollout.play(params, SHAPE, tasks, language, torch.Generator().manual_seed(5), top_p=0.97)
    solved = [row.solved for row in rows]
    assert 0.3 < sum(solved) / len(solved) < 0.5
    for index, family in enumerate(families.FAMILIES):
        share = sum(solved[index * per_family : (index + 1) * per_family]) / per_family
        assert 0.1 < share < 0.8, (family, share)
    assert sum(row.ended_by == "formatErrors" for row in rows) < 0.03 * len(rows)
    assert sum(len(row.ids) for row in rows) / len(rows) < 100


def test_warm_start_is_repeatable(language: Language) -> None:
    def trained() -> policy.Params:
        params = {name: value.requires_grad_(True) for name, value in policy.init(SHAPE, 1).items()}
        make_model.train(params, SHAPE, language, seed=1, steps=4, batch=4, peak_lr=3e-3)
        return policy.to_checkpoint(params)

    first, second = trained(), trained()
    assert all(torch.equal(first[name], second[name]) for name in first)
    start = policy.to_checkpoint(policy.init(SHAPE, 1))
    assert not torch.equal(first["lm_head.weight"], start["lm_head.weight"])
