"""Samples of an unfiltered sampler with its likeliest candidates only: from a real engine's reply to a training step."""

import json

import msgspec
import numpy as np
import pytest
import torch
from motley_api.resources.rlrun import Algorithm
from motley_trainer.batches import build_sequences
from motley_trainer.buffer.batch import Batch
from motley_trainer.buffer.validate import check
from motley_trainer.losses import build_head_support
from motley_trainer.recipe import recipe_of
from trainer.kit import RUN, make_trajectory, make_work, write_model

TOP = 3
RECIPE = recipe_of(
    Algorithm.model_validate({"maskReplay": "Disabled", "sampling": {"topP": "1", "topK": -1, "topLogprobsNum": TOP}})
)


def test_the_sampled_token_stands_beside_a_head_that_lacks_it():
    support = build_head_support(
        torch.tensor([7, 2]),
        torch.tensor([-4.0, -0.1]),
        torch.tensor([2, 1]),
        torch.tensor([5, 1, 2]),
        torch.tensor([-0.2, -2.0, -0.1]),
    )
    assert support.token_C.tolist() == [0, 0, 0, 1]
    assert support.ids_C.tolist() == [5, 1, 7, 2]
    assert support.head_C.tolist() == [True, True, False, True]
    assert support.chosen_N.tolist() == [2, 3]
    torch.testing.assert_close(support.logq_C, torch.tensor([-0.2, -2.0, -4.0, -0.1]))


def test_a_head_without_candidates_is_refused():
    nothing = (torch.zeros(0, dtype=torch.long), torch.zeros(0))
    with pytest.raises(ValueError, match="the head of token 0 has 0 candidates"):
        build_head_support(torch.tensor([7]), torch.tensor([-4.0]), torch.tensor([0]), *nothing)


async def sampled(model, count):
    """Trajectories of the reference engine on the trainer's own weights, as a rollout worker records them."""
    from motley_sampler.engines.reference.engine import ReferenceEngine
    from motley_sampler.engines.reference.precision import Arithmetic, Compute
    from motley_sampler.rollout.reply import parse_generate
    from motley_sampler.rollout.transcript import Transcript

    engine = ReferenceEngine(Arithmetic(Compute.FP32), slots=4, max_running=4)
    await engine.start(model, 0)
    try:
        found = []
        for sample in range(count):
            prompt = [1, 2, 3 + sample]
            answer = await engine.generate(
                {
                    "input_ids": prompt,
                    "sampling_params": {"max_new_tokens": 12, "sampling_seed": sample, "ignore_eos": True},
                    "return_logprob": True,
                    "top_logprobs_num": TOP,
                }
            )
            reply = parse_generate(json.dumps(answer).encode(), filtered=False, max_tokens=12, top_logprobs=TOP)
            transcript = Transcript()
            transcript.add_context(prompt)
            transcript.add_reply(reply, latency_s=0.1, tool_call=True)
            found.append(
                msgspec.structs.replace(
                    make_trajectory(make_work(1), sample),
                    token_ids=transcript.token_bytes(),
                    turns=transcript.turns,
                    logprobs=transcript.logprob_bytes(),
                    candidates=transcript.candidates(head=True),
                    top_p=1.0,
                    top_k=-1,
                    reward=float(sample % 2),
                )
            )
        return found
    finally:
        await engine.stop()


async def test_a_run_over_heads_trains_from_a_real_engine_s_replies(engine_of, tmp_path):
    from motley_trainer.step import train_step

    engine = engine_of()
    trajectories = await sampled(write_model(tmp_path / "model"), 4)
    for trajectory in trajectories:
        check(trajectory, run=RUN, published=0, quarantined=frozenset())
    sequences = build_sequences(trajectories, RECIPE, step=1)
    heads = torch.cat([sequence.support.head_C for sequence in sequences])
    assert not heads.all()  # some token was drawn from outside its head
    outcome = train_step(
        engine, Batch(step=1, waited_s=0.0, replayed=False, trajectories=trajectories), RECIPE, learning_rate=1e-3
    )
    assert outcome.ratios["kl"].num / outcome.ratios["kl"].den < 1e-3  # BF16 weights are the trainer's own, in float32
    assert outcome.metrics["ois"] == pytest.approx(1.0, abs=1e-2)
    mass = np.mean(
        [np.exp(np.frombuffer(t.candidates.logprobs, "<f4")).reshape(-1, TOP).sum(1).mean() for t in trajectories]
    )
    assert outcome.metrics["sc_rollout_head_mass"] == pytest.approx(mass, abs=1e-3)
    assert outcome.metrics["sc_tail_ratio"] == pytest.approx(1.0, abs=2e-2)
    assert outcome.grad_norm > 0
    assert not outcome.skipped
