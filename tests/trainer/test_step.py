"""One optimizer step: invariances, what is reported, and what a NaN does."""

import msgspec
import numpy as np
import pytest
import torch
from motley_api.records import Candidates
from motley_api.resources.rlrun import Algorithm
from motley_trainer.buffer.batch import Batch, GroupTally
from motley_trainer.recipe import recipe_of
from trainer.kit import make_trajectory, make_work

RECIPE = recipe_of(Algorithm())


def batch_of(trajectories, step=1, **changes):
    return Batch(step=step, waited_s=0.0, replayed=False, trajectories=trajectories, **changes)


def samples(prompts=2, count=4):
    groups = ["h100-fp8", "b200-nvfp4"]
    return [
        make_trajectory(make_work(p), s, group=groups[s // 2 % 2], view=["fp8", "nvfp4"][s // 2 % 2])
        for p in range(1, prompts + 1)
        for s in range(count)
    ]


def weights(engine):
    return {name: tensor.clone() for name, tensor in engine._bare.state_dict().items() if tensor is not None}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def on_policy(engine, trajectory):
    """The trajectory as if the engine itself had drawn it: its own probabilities over each support."""
    from motley_trainer.batches import build_sequences

    (sequence,) = build_sequences([trajectory], RECIPE, step=1)
    with torch.no_grad():
        logits = engine.logits(sequence.tokens[None])
    candidates = trajectory.candidates
    counts = np.frombuffer(candidates.counts, "<u2")
    ids = np.frombuffer(candidates.ids, "<u4").astype(np.int64)
    own, logq, at = [], [], 0
    for position, count in zip(sequence.positions.tolist(), counts.tolist(), strict=True):
        if count == 0:
            own.append(0.0)
            continue
        row = logits[position - 1, torch.from_numpy(ids[at : at + count])].log_softmax(0)
        logq += row.tolist()
        own.append(row[list(ids[at : at + count]).index(int(sequence.tokens[position]))].item())
        at += count
    return msgspec.structs.replace(
        trajectory,
        logprobs=np.array(own, "<f4").tobytes(),
        candidates=Candidates(candidates.counts, candidates.ids, np.array(logq, "<f4").tobytes()),
    )


def test_cutting_a_batch_into_microbatches_changes_nothing(engine_of):
    # Gradients, not weights: Adam's first step is the sign of a gradient, and blows rounding up.
    from motley_trainer.batches import build_sequences
    from motley_trainer.step import accumulate

    engine = engine_of()
    sequences = build_sequences(samples(), RECIPE, step=1)
    results = []
    for max_tokens in (10_000, 70, 1):
        table = accumulate(engine, sequences, range(len(sequences)), RECIPE, max_tokens=max_tokens)
        assert engine.reduce_gradients()
        results.append((table.sums, [parameter.main_grad.clone() for parameter in engine._bare.parameters()]))
    want_sums, want_gradients = results[0]
    assert max(gradient.abs().max().item() for gradient in want_gradients) > 1e-3
    for sums, gradients in results[1:]:
        torch.testing.assert_close(sums, want_sums, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(gradients, want_gradients, rtol=1e-4, atol=1e-7)


def test_the_engine_s_own_samples_have_ratio_one_and_no_correction(engine_of):
    from motley_trainer.step import train_step

    engine = engine_of()
    batch = batch_of([on_policy(engine, trajectory) for trajectory in samples()])
    outcome = train_step(engine, batch, RECIPE, learning_rate=0.0)
    kl = outcome.ratios["kl"]
    assert abs(kl.num / kl.den) < 1e-7  # float32 rounding
    assert outcome.metrics["ois"] == pytest.approx(1.0, abs=1e-5)
    assert outcome.metrics["ess_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert outcome.metrics["sc_correction"] < 1e-5
    assert outcome.ratios["out_of_range"].num == 0


def test_a_step_makes_rewarded_tokens_likelier(engine_of):
    from motley_trainer.step import train_step

    engine = engine_of(rate=1e-2)
    trajectories = [on_policy(engine, trajectory) for trajectory in samples(prompts=1)]
    good = [trajectory for trajectory in trajectories if trajectory.reward == 1.0]

    def likelihood():
        from motley_trainer.batches import build_microbatch, build_sequences
        from motley_trainer.losses import token_losses

        sequences = build_sequences(good, RECIPE, step=1)
        length = max(s.tokens.numel() for s in sequences)
        micro = build_microbatch(
            sequences, range(len(good)), rows=len(good), multiple=1, length=length, device=torch.device("cpu")
        )
        with torch.no_grad():
            _, stats = token_losses(engine.logits(micro.tokens), micro.trained, RECIPE.objective)
        return stats.log_ratio_N.sum().item()

    before = likelihood()
    train_step(engine, batch_of(trajectories), RECIPE, learning_rate=1e-2)
    assert likelihood() > before + 0.1


@pytest.mark.parametrize("replay", ["Enabled", "Disabled"])
def test_a_reference_penalty_holds_the_policy_near_the_weights_it_started_from(engine_of, replay):
    from motley_trainer.step import train_step

    def trained(coefficient):
        engine = engine_of(rate=1e-2, dtype=torch.bfloat16)
        engine.keep_reference()
        start = weights(engine)
        recipe = recipe_of(Algorithm.model_validate({"referenceKL": coefficient, "maskReplay": replay}))
        outcomes = [
            train_step(engine, batch_of(samples(), step=step), recipe, learning_rate=1e-2) for step in range(1, 6)
        ]
        with engine.as_reference():
            assert same(weights(engine), start)  # the policy moved, the reference did not
        assert not same(weights(engine), start)
        return [outcome.metrics["kl_loss"] for outcome in outcomes]

    weak, strong = trained("0.000001"), trained("1")
    assert weak[0] == strong[0] == 0.0  # before the first update policy and reference are one
    assert 0 < strong[-1] < weak[-1] / 2


def test_equal_rewards_move_nothing(engine_of):
    from motley_trainer.step import train_step

    engine = engine_of(clip=0.0)
    before = weights(engine)
    outcome = train_step(
        engine,
        batch_of([msgspec.structs.replace(trajectory, reward=1.0) for trajectory in samples()]),
        RECIPE,
        learning_rate=1e-2,
    )
    assert outcome.grad_norm == 0.0
    assert same(before, weights(engine))


def test_a_gradient_that_is_not_finite_skips_the_step_and_names_its_group(engine_of):
    from motley_trainer.step import step_record, train_step

    engine = engine_of()
    before = weights(engine)
    poisoned = [
        msgspec.structs.replace(t, reward=3e38 * (1 + t.sample % 2)) if t.group == "b200-nvfp4" else t
        for t in samples()
    ]
    # Advantages are group means: only one prompt's samples of that group may be huge, or they would reach the others.
    poisoned = [
        msgspec.structs.replace(t, work=t.group, task=t.group, id=f"{t.group}/{n}") for n, t in enumerate(poisoned)
    ]
    batch = batch_of(poisoned)
    outcome = train_step(engine, batch, RECIPE, learning_rate=1e-2)
    assert outcome.skipped
    assert outcome.blamed == ("b200-nvfp4",)
    assert same(before, weights(engine))
    record = step_record(outcome, batch, run="r", attempt=1, started_unix_s=0.0, train_s=1.0, publish_s=0.0)
    assert b"null" not in msgspec.json.encode(record)  # NaN is no JSON
    # and the next step trains
    after = train_step(engine, batch_of(samples(), step=2), RECIPE, learning_rate=1e-2)
    assert not after.skipped
    assert not same(before, weights(engine))


def test_weights_that_are_already_nan_are_blamed_on_no_single_group_only_when_all_fail(engine_of):
    from motley_trainer.step import train_step

    engine = engine_of()
    with torch.no_grad():
        engine._bare.decoder.final_layernorm.weight[0] = float("nan")
    outcome = train_step(engine, batch_of(samples()), RECIPE, learning_rate=1e-2)
    assert outcome.skipped
    assert outcome.blamed == ("b200-nvfp4", "h100-fp8")


def test_groups_are_reported_one_by_one_and_add_up(engine_of):
    from motley_trainer.step import train_step

    engine = engine_of()
    tallies = [GroupTally(name="late", view="bf16", discarded=3, infrastructure_failures=2)]
    outcome = train_step(engine, batch_of(samples(), tallies=tallies), RECIPE, learning_rate=1e-3)
    by_name = {group.name: group for group in outcome.groups}
    assert sorted(by_name) == ["b200-nvfp4", "h100-fp8", "late"]
    assert (by_name["late"].samples, by_name["late"].discarded, by_name["late"].infrastructure_failures) == (0, 3, 2)
    assert by_name["h100-fp8"].samples == 4
    assert by_name["h100-fp8"].turns == 8
    assert (by_name["h100-fp8"].reward.num, by_name["h100-fp8"].reward.den) == (2.0, 4.0)
    for field in ("kl", "out_of_range", "entropy"):
        assert sum(getattr(g, field).num for g in outcome.groups) == pytest.approx(outcome.ratios[field].num)
        assert sum(getattr(g, field).den for g in outcome.groups) == outcome.ratios[field].den
    assert sum(g.trained_tokens for g in outcome.groups) == outcome.ratios["kl"].den
    for name in (
        "train_rollout_kl",
        "train_rollout_kl_exact",
        "entropy",
        "ois",
        "ess_ratio",
        "mis_mask_fraction_low",
        "sc_correction",
    ):
        for split in ("", "/group/h100-fp8", "/view/nvfp4", "/lag/0-1"):
            assert f"{name}{split}" in outcome.metrics
    # Means of splits are averaged by their tokens.
    for kind, keys in (("group", ("h100-fp8", "b200-nvfp4")), ("view", ("fp8", "nvfp4"))):
        of = [f"/{kind}/{key}" for key in keys]
        tokens = [outcome.metrics[f"trained_tokens{split}"] for split in of]
        assert sum(tokens) == outcome.metrics["trained_tokens"]
        total = sum(n * outcome.metrics[f"ois{split}"] for n, split in zip(tokens, of, strict=True))
        assert total / sum(tokens) == pytest.approx(outcome.metrics["ois"])
    low_high = outcome.metrics["mis_mask_fraction_low"] + outcome.metrics["mis_mask_fraction_high"]
    assert low_high == pytest.approx(outcome.ratios["out_of_range"].num / outcome.ratios["out_of_range"].den)


def test_dropped_tokens_are_counted_and_the_step_goes_on(engine_of):
    from motley_trainer.step import train_step

    trajectories = samples()
    logprobs = np.frombuffer(trajectories[1].logprobs, "<f4").copy()
    logprobs[:3] = np.nan
    trajectories[1] = msgspec.structs.replace(trajectories[1], logprobs=logprobs.tobytes())
    outcome = train_step(engine_of(), batch_of(trajectories), RECIPE, learning_rate=1e-3)
    assert not outcome.skipped
    assert sum(g.dropped_tokens for g in outcome.groups) == 3
    assert np.isfinite(outcome.grad_norm)
