"""What a step makes of the vocabulary's size: nothing under mask replay, else the logits once, in the model's dtype."""

import pytest
import torch
from motley_api.resources.rlrun import Algorithm
from motley_trainer.recipe import recipe_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainer.kit import make_trajectory, make_work

VOCABULARY = 96


class Made(TorchDispatchMode):
    """dtypes of the new tensors with a row for every token and a column for every id."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows
        self.dtypes = []
        self._seen = []  # alive, so that no address comes twice

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        known = {tensor.untyped_storage().data_ptr() for tensor in self._seen}
        for tensor in tree_leaves(out):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.numel() >= self.rows * VOCABULARY
                and tensor.shape[-1] == VOCABULARY
                and tensor.untyped_storage().data_ptr() not in known
            ):
                self._seen.append(tensor)
                self.dtypes.append(tensor.dtype)
        return out


def trained(engine, algorithm):
    from motley_trainer.batches import build_sequences
    from motley_trainer.step import accumulate

    recipe = recipe_of(Algorithm.model_validate(algorithm))
    sequences = build_sequences([make_trajectory(make_work(1), sample) for sample in range(4)], recipe, step=1)
    rows = len(sequences) * max(sequence.tokens.numel() for sequence in sequences)
    with Made(rows) as made:
        accumulate(engine, sequences, range(len(sequences)), recipe, max_tokens=10_000)
    assert engine.reduce_gradients()
    return made.dtypes, [parameter.main_grad.clone() for parameter in engine._bare.parameters()]


@pytest.fixture(autouse=True)
def few_rows_at_a_time(monkeypatch):
    """The loss goes over a real batch's logits in parts; over this tiny one's, too."""
    from motley_trainer.losses import vocab

    monkeypatch.setattr(vocab, "CHUNK_ELEMENTS", {"cpu": 2 * VOCABULARY, "cuda": 2 * VOCABULARY})


def test_mask_replay_makes_no_logits(engine_of):
    made, gradients = trained(engine_of(dtype=torch.bfloat16), {})
    assert made == []
    assert max(gradient.abs().max().item() for gradient in gradients) > 1e-3


def test_without_replay_logits_are_made_once_and_in_the_model_s_dtype(engine_of):
    made, gradients = trained(engine_of(dtype=torch.bfloat16), {"maskReplay": "Disabled"})
    assert made == [torch.bfloat16]
    assert max(gradient.abs().max().item() for gradient in gradients) > 1e-3


@pytest.mark.parametrize("config", [{}, {"tie_word_embeddings": True}], ids=["head", "tied"])
def test_gradients_are_those_of_the_way_over_logits(engine_of, monkeypatch, config):
    from motley_trainer import step
    from motley_trainer.losses import token_losses

    def over_logits(engine, tokens, trained, objective):
        return token_losses(engine.logits(tokens), trained, objective)

    _, got = trained(engine_of(**config), {})
    monkeypatch.setattr(step, "_token_losses", over_logits)
    made, want = trained(engine_of(**config), {})
    assert made  # that way does make them
    assert max(gradient.abs().max().item() for gradient in want) > 1e-3
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-7)
