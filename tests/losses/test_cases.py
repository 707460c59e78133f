"""What users of comparable systems ran into, each on the smallest case: the number is that of the list of cases."""

from __future__ import annotations

import math
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from losses.test_loss_properties import full_support, gradient, tokens_of
from motley_api.records import Turn
from motley_api.resources.rlrun import Algorithm
from motley_trainer.batches import build_sequences
from motley_trainer.buffer.validate import RefusedError, check
from motley_trainer.losses import Mis, Objective, Support, Tis, Tokens, Unweighted, token_losses
from motley_trainer.recipe import recipe_of
from motley_trainer.tally import Column, Table, named_metrics, splits_of
from trainer.kit import RUN, make_trajectory, make_work

F64 = torch.float64
RECIPE = recipe_of(Algorithm())


def one_token_each(ratios: list[float]) -> tuple[torch.Tensor, Tokens]:
    """Tokens over two ids whose raw ratios p/q are these: q_y = p_y / ratio, p_y = .1 where that must fit below 1."""
    p = torch.tensor([0.1 if ratio < 1 else 0.9 for ratio in ratios], dtype=F64)
    logits = torch.stack([p, 1 - p], 1).log()
    q = p / torch.tensor(ratios, dtype=F64)
    support = full_support(torch.stack([q, 1 - q], 1).log(), torch.zeros(len(ratios), dtype=torch.long))
    return logits, tokens_of(support)


def test_case_1_ratio_overflow_is_finite_and_the_masked_token_is_exactly_zero():
    logits = torch.tensor([[-2.0, math.log1p(-math.exp(-2.0))], [0.0, 0.0]])
    support = full_support(torch.tensor([[-91.0, -1e-30], [math.log(0.5)] * 2]), torch.tensor([0, 0]))
    tokens = Tokens(torch.arange(2), torch.ones(2), torch.ones(2), support)
    losses, grad, stats = gradient(logits, tokens, Objective(weight=Mis(0.5, 5.0), centre=False))
    assert losses[0] == 0
    assert (grad[0] == 0).all()
    assert losses.isfinite().all()
    assert grad.isfinite().all()
    assert (grad[1] != 0).any()
    assert stats.log_ratio_N[0].item() == pytest.approx(89.0, rel=1e-5)


@pytest.mark.parametrize("missing", [float("nan"), float("inf"), float("-inf")])
def test_case_2_a_missing_log_prob_drops_its_token_and_counts_it(missing):
    trajectory = make_trajectory(make_work(), 1)
    logprobs = np.frombuffer(trajectory.logprobs, "<f4").copy()
    logprobs[1] = missing
    broken = msgspec.structs.replace(trajectory, logprobs=logprobs.tobytes())
    if not math.isinf(missing):
        check(
            broken, run=RUN, published=0, quarantined=frozenset()
        )  # NaN, which stands for null, is no reason to refuse
    (sequence,) = build_sequences([broken], RECIPE, step=1)
    logits = torch.randn(sequence.tokens.numel(), 96)
    tokens = Tokens(
        sequence.positions - 1,
        torch.ones(sequence.positions.numel()),
        torch.ones(sequence.positions.numel()),
        sequence.support,
    )
    losses, grad, stats = gradient(logits, tokens, RECIPE.objective)
    assert stats.kept_N.tolist().count(False) == 1
    assert not stats.kept_N[1]
    assert losses[1] == 0
    assert (grad[sequence.positions[1] - 1] == 0).all()
    assert grad.isfinite().all()
    assert sequence.coefficients[1] == 0


def test_case_3_top_p_biases_every_ratio_by_the_kept_mass_unless_it_is_replayed():
    probs = torch.tensor([[0.6, 0.295, 0.105]], dtype=F64)  # top-p keeps the first two: mass .895
    support = Support(torch.tensor([0, 0]), torch.tensor([0, 1]), (probs[0, :2] / 0.895).log(), torch.tensor([0]))
    for replay, want in ((False, 0.895), (True, 1.0)):
        _, stats = token_losses(probs.log(), tokens_of(support), Objective(replay=replay, centre=False))
        assert stats.log_ratio_N.exp().item() == pytest.approx(want, abs=1e-12)


def test_case_4_log_probs_from_before_the_filter_are_refused_with_what_was_seen():
    trajectory = make_trajectory(make_work(), 1)
    counts = np.frombuffer(trajectory.candidates.counts, "<u2")
    token = int(np.flatnonzero(counts)[0])  # a token that had a choice
    logprobs = np.frombuffer(trajectory.logprobs, "<f4").copy()
    logprobs[token] += np.log(0.9)  # as if .1 of the mass had not been cut off
    with pytest.raises(RefusedError, match=f"generated token {token}, .* were they taken before the filter"):
        check(
            msgspec.structs.replace(trajectory, logprobs=logprobs.tobytes()),
            run=RUN,
            published=0,
            quarantined=frozenset(),
        )


@pytest.mark.parametrize(("weight", "want_tis"), [(Tis(5.0), 2.1418), (Mis(0.5, 5.0), 0.4751), (Unweighted(), 4.5359)])
def test_case_5_raw_ratios_are_reported_before_truncation(weight, want_tis):
    # raw .606531, 12.182494, .818731: mean 4.5359; what is left of them after TIS(5): 2.1418, after MIS: .4751
    logits, tokens = one_token_each([0.606531, 12.182494, 0.818731])
    objective = Objective(weight=weight, centre=False)
    losses, stats = token_losses(logits, tokens, objective)
    owner = SimpleNamespace(trajectory=SimpleNamespace(group="g", view="fp8"), lag=0)
    table = Table(splits_of([owner]))
    recipe = SimpleNamespace(objective=objective, range_low=0.5, range_high=5.0)
    table.add(losses, stats, torch.zeros(3, dtype=torch.long), recipe)
    found = named_metrics(table, [owner], Objective())
    assert found["ois"] == pytest.approx(4.5359, abs=5e-5)
    assert found["tis"] == pytest.approx(want_tis, abs=5e-5)
    assert found["mis_mask_fraction_high"] == pytest.approx(1 / 3)
    assert found["mis_mask_fraction_low"] == 0.0
    assert found["ois/group/g"] == found["ois/view/fp8"] == found["ois/lag/0-1"] == found["ois"]


def test_case_6_after_a_resume_nothing_is_accepted_from_a_version_that_is_not_published_again():
    ahead = make_trajectory(make_work(), 1, version=7)
    with pytest.raises(RefusedError, match="version: 7 is not published in this attempt; the newest is 5"):
        check(ahead, run=RUN, published=5, quarantined=frozenset())
    check(ahead, run=RUN, published=7, quarantined=frozenset())


def test_case_7_the_growth_alarm_fires_before_a_creeping_mismatch_becomes_nan():
    # |log p - log q| creeps from .011 to .2 over 40 steps; k3 of such a difference d is near d^2 / 2
    from motley_api.records import Ratio, StepRecord
    from motley_api.resources.rlrun import Guard
    from motley_operator.planner import guard

    def record(step: int) -> StepRecord:
        difference = 0.011 * (0.2 / 0.011) ** (step / 40)
        none = Ratio(0.0, 1.0)
        return StepRecord(
            run="r",
            step=step,
            attempt=1,
            started_unix_s=0.0,
            finished_unix_s=1.0,
            wait_s=0.0,
            train_s=1.0,
            publish_s=0.0,
            reward=none,
            kl=Ratio(difference**2 / 2, 1.0),
            out_of_range=none,
            entropy=Ratio(1.0, 1.0),
            grad_norm=1.0,
            loss=0.0,
            lag=none,
            groups=[],
        )

    steps = [record(step) for step in range(1, 41)]
    held, acted = None, None
    for upto in range(1, 41):
        verdict = guard.judge(Guard(), 1, held, guard.series(steps[:upto]), [])
        held = verdict.status
        if verdict.paused and acted is None:
            acted = upto
    assert acted is not None
    assert acted < 40


def test_case_8_a_nan_in_one_group_s_logits_is_counted_against_that_group():
    logits, tokens = one_token_each([1.1, 1.2])
    logits[1] = float("nan")  # of the second sequence
    losses, stats = token_losses(logits, tokens, RECIPE.objective)
    owners = [
        SimpleNamespace(trajectory=SimpleNamespace(group=name, view="bf16"), lag=0) for name in ("sound", "broken")
    ]
    table = Table(splits_of(owners))
    table.add(losses, stats, torch.tensor([0, 1]), RECIPE)
    assert table.row("group/broken")[Column.BAD] == 1
    assert table.row("group/sound")[Column.BAD] == 0
    assert all(math.isfinite(value) for value in table.row("all").values())


def test_case_16_age_counts_from_the_version_that_began_the_reply():
    # an update in mid-generation: v5 began it, v6 ended it; step 8 trains v7
    trajectory = make_trajectory(make_work(), 1)
    turns = [
        Turn(start=turn.start, end=turn.end, start_version=5, end_version=6, latency_s=1.0) for turn in trajectory.turns
    ]
    (sequence,) = build_sequences([msgspec.structs.replace(trajectory, turns=turns)], RECIPE, step=8)
    assert sequence.lag == 7 - 5
