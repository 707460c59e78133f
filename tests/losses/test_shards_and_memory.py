"""However logits are laid out (halves of the vocabulary, halves of the batch, packed rows, never made at all), the loss and its
gradient are the same; and what they cost grows with the candidates."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from losses.shards import OBJECTIVES, VOCABULARY, hidden_and_weight, whole
from losses.test_losses_against_oracle import as_tokens, random_case
from motley_trainer.losses import Objective, Support, Tokens, candidate_logits, token_losses, token_losses_from_hidden

F64 = torch.float64


def graded(logits, given, objective, **options):
    leaf = logits.clone().requires_grad_(True)
    losses, stats = token_losses(leaf, given, objective, **options)
    losses.sum().backward()
    return losses.detach(), leaf.grad, stats


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two processes over gloo computed of the same inputs."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    program = str(Path(__file__).with_name("shards.py"))
    running = [
        subprocess.Popen(
            [sys.executable, program, str(port), str(rank), str(folder)], env=environment, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    for process in running:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors.decode()[-2000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_two_halves_of_the_vocabulary_give_the_whole_loss_and_gradient(ranks, name):
    logits, given = whole()
    want_losses, want_grad, stats = graded(logits, given, OBJECTIVES[name])
    assert (want_grad != 0).any()
    for losses, _, entropy, kl in (rank[f"tensor/{name}"] for rank in ranks):
        torch.testing.assert_close((losses, entropy, kl), (want_losses, stats.entropy_N, stats.kl_N))
    got = torch.cat([rank[f"tensor/{name}"][1] for rank in ranks], 1)
    torch.testing.assert_close(got, want_grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_two_halves_of_the_batch_add_up_to_the_whole_loss_and_gradient(ranks, name):
    logits, given = whole()
    want_losses, want_grad, _ = graded(logits, given, OBJECTIVES[name])
    for total, grad in (rank[f"data/{name}"] for rank in ranks):
        torch.testing.assert_close((total, grad), (want_losses.sum(), want_grad), rtol=1e-10, atol=1e-12)


def test_two_halves_of_the_output_layer_give_the_gradient_of_the_whole(ranks):
    hidden, weight = (x.requires_grad_(True) for x in hidden_and_weight())
    _, given = whole()
    losses, _ = token_losses(hidden @ weight.T, given, Objective())
    losses.sum().backward()
    for got, hidden_grad, _ in (rank["hidden"] for rank in ranks):
        torch.testing.assert_close((got, hidden_grad), (losses.detach(), hidden.grad), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.cat([rank["hidden"][2] for rank in ranks]), weight.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_packed_rows_equal_padded_ones(name):
    """Tokens' rows anywhere, in any order, with rows of prompts and padding between them."""
    logits, given = whole()
    want_losses, want_grad, _ = graded(logits, given, OBJECTIVES[name])
    places = torch.tensor([9, 2, 7, 0, 4, 5])
    packed = torch.full((11, VOCABULARY), float("nan"), dtype=F64)
    packed[places] = logits
    losses, grad, _ = graded(packed, replace(given, rows_N=places), OBJECTIVES[name])
    torch.testing.assert_close((losses, grad[places]), (want_losses, want_grad), rtol=1e-12, atol=1e-12)
    others = torch.ones(11, dtype=torch.bool)
    others[places] = False
    assert (grad[others] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["final", "head", "entropy"])
def test_a_gradient_over_the_logits_is_the_same_gradient_in_their_memory(name, dtype):
    logits, given = whole()
    logits = torch.cat([logits, torch.full((2, VOCABULARY), 3.0, dtype=F64)]).to(dtype)  # two rows that no token names
    want_losses, want_grad, _ = graded(logits, given, OBJECTIVES[name])
    made = (logits.clone().requires_grad_(True) * 1).detach().requires_grad_(True)
    losses, _ = token_losses(made, given, OBJECTIVES[name], overwrite_logits=True)
    losses.sum().backward()
    assert torch.equal(losses.detach(), want_losses)
    assert torch.equal(made.grad, want_grad)
    assert made.grad.data_ptr() == made.data_ptr()


def test_the_graph_keeps_no_logits_alive_under_replay():
    import gc
    import weakref

    logits, given = whole()
    for objective, alive in ((Objective(), False), (Objective(replay=False), True)):
        leaf = logits.clone().requires_grad_(True)
        made = leaf * 2  # as an output layer makes them: nobody else holds them
        watched = weakref.ref(made)
        losses, _ = token_losses(made, given, objective)
        del made
        gc.collect()
        assert (watched() is not None) is alive
        losses.sum().backward()
        assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("seed", range(4))
def test_losses_from_hidden_states_equal_those_from_their_logits(seed, temperature):
    _, rows, advantages = random_case(seed, vocabulary=VOCABULARY, tokens=6, complete=True)
    given = replace(as_tokens(rows, advantages), temperature_N=torch.full((6,), temperature, dtype=F64))
    hidden, weight = (x.requires_grad_(True) for x in hidden_and_weight())
    losses, stats = token_losses(hidden @ weight.T, given, Objective())
    losses.sum().backward()
    want = losses.detach(), hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    got, got_stats = token_losses_from_hidden(hidden, weight, given, Objective())
    got.sum().backward()
    torch.testing.assert_close((got.detach(), hidden.grad, weight.grad), want, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got_stats.kl_N, stats.kl_N, rtol=1e-10, atol=1e-12)
    assert got_stats.kept_N.all()


def test_candidates_that_had_no_rival_are_not_multiplied_out():
    # the rows of W that only single candidates name hold NaN: nothing reads them
    hidden, weight = hidden_and_weight()
    weight[3] = float("nan")
    token_C, ids_C = torch.tensor([0, 1, 1]), torch.tensor([3, 1, 2])
    got = candidate_logits(hidden, weight, torch.tensor([0, 1]), token_C, ids_C, skip_single=True)
    torch.testing.assert_close(
        got, torch.stack([torch.tensor(0.0, dtype=F64), hidden[1] @ weight[1], hidden[1] @ weight[2]])
    )
    assert candidate_logits(hidden, weight, torch.tensor([0, 1]), token_C, ids_C).isnan().tolist() == [
        True,
        False,
        False,
    ]


def test_losses_from_hidden_states_need_replay_and_the_right_shard():
    hidden, weight = hidden_and_weight()
    _, given = whole()
    with pytest.raises(ValueError, match="replay"):
        token_losses_from_hidden(hidden, weight, given, Objective(replay=False))
    from motley_trainer.losses import VocabShard

    with pytest.raises(ValueError, match="shard holds 3 ids"):
        token_losses_from_hidden(hidden, weight, given, Objective(), shard=VocabShard(0, 3))


def test_no_tensor_of_the_vocabulary_s_size_but_the_gradient_is_made():
    """Counts what torch allocates: under replay from logits one gradient of their dtype, from hidden states none."""
    from torch.utils._python_dispatch import TorchDispatchMode

    tokens, vocabulary = 64, 4096

    class Largest(TorchDispatchMode):
        """Elements of float32 or wider tensors of the vocabulary's size that operations returned."""

        def __init__(self) -> None:
            super().__init__()
            self.wide = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.float32, torch.float64):
                    self.wide = max(self.wide, tensor.numel())
            return out

    support = Support(
        torch.arange(tokens).repeat_interleave(2),
        torch.arange(2 * tokens),
        torch.full((2 * tokens,), 0.5).log(),
        torch.arange(tokens) * 2,
    )
    given = Tokens(torch.arange(tokens), torch.ones(tokens), torch.ones(tokens), support)
    for objective in (Objective(), Objective(replay=False)):
        leaf = torch.randn(tokens, vocabulary).bfloat16().requires_grad_(True)
        with pytest.MonkeyPatch.context() as patch:
            from motley_trainer.losses import vocab

            patch.setitem(vocab.CHUNK_ELEMENTS, "cpu", 4 * vocabulary)
            with Largest() as largest:
                losses, _ = token_losses(leaf, given, objective)
                losses.sum().backward()
        assert largest.wide <= 4 * vocabulary  # a chunk of four rows, never 64
        assert leaf.grad.dtype is torch.bfloat16
