"""From RLRun.spec.algorithm to what the loss and the optimizer are told. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from motley_api.resources.rlrun import Advantage, Algorithm, ImportanceSamplingMode, Switch

from motley_trainer.losses import Mis, Objective, Reduction, Tis, TokenWeight, Unweighted


@dataclass(frozen=True)
class Recipe:
    """range_low, range_high: raw ratios outside are counted as out of range, whatever the weights do with them."""

    objective: Objective
    normalise_std: bool
    reduction: Reduction
    range_low: float
    range_high: float


def recipe_of(algorithm: Algorithm) -> Recipe:
    low, high = float(algorithm.importance_sampling.low), float(algorithm.importance_sampling.high)
    centre = algorithm.score_centering is Switch.ENABLED
    # PPO's clip belongs to plain GRPO only: with weights or centering the ratio is corrected already.
    clips = not centre and algorithm.importance_sampling.mode is ImportanceSamplingMode.NONE
    return Recipe(
        objective=Objective(
            weight=_weight(algorithm.importance_sampling.mode, low, high),
            centre=centre,
            replay=algorithm.mask_replay is Switch.ENABLED,
            clip_low=float(algorithm.clip.low) if clips else None,
            clip_high=float(algorithm.clip.high) if clips else None,
        ),
        normalise_std=algorithm.advantage is Advantage.GROUP_MEAN_STD,
        reduction=Reduction(algorithm.loss_reduction.value),
        range_low=low,
        range_high=high,
    )


def _weight(mode: ImportanceSamplingMode, low: float, high: float) -> TokenWeight:
    match mode:
        case ImportanceSamplingMode.NONE:
            return Unweighted()
        case ImportanceSamplingMode.TIS:
            return Tis(high)
        case ImportanceSamplingMode.MIS:
            return Mis(low, high)


def learning_rate(base: float, warmup_steps: int, step: int) -> float:
    """Of step 1, 2, ...: grows linearly over the warm-up, then stays."""
    return base * min(1.0, step / warmup_steps) if warmup_steps else base
