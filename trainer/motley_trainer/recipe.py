"""From RLRun.spec.algorithm to what the loss and the optimizer are told. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from motley_api.resources.rlrun import (
    Advantage,
    Algorithm,
    Clip,
    ImportanceSamplingMode,
    SequenceMask,
    SequenceMaskMode,
    Switch,
)

from motley_trainer import losses
from motley_trainer.losses import (
    DriftMask,
    GeometricMask,
    Level,
    Mis,
    Objective,
    RatioMask,
    Reduction,
    Tis,
    TokenWeight,
    Unweighted,
    VTrace,
)


@dataclass(frozen=True)
class Recipe:
    """range_low, range_high: raw ratios outside are counted as out of range, whatever the weights do with them."""

    objective: Objective
    normalise_std: bool
    reduction: Reduction
    range_low: float
    range_high: float


def recipe_of(algorithm: Algorithm) -> Recipe:
    """Errors: ValueError naming the choice that contradicts another; the API server refuses those at apply."""
    sampling = algorithm.importance_sampling
    low, high = float(sampling.low), float(sampling.high)
    return Recipe(
        objective=Objective(
            weight=_weight(sampling.mode, low, high),
            level=Level(sampling.level.value),
            sequence_mask=_sequence_mask(algorithm.sequence_mask),
            centre=algorithm.score_centering is Switch.ENABLED,
            replay=algorithm.mask_replay is Switch.ENABLED,
            clip=_clip(algorithm.clip),
            entropy_bonus=float(algorithm.entropy_bonus),
            reference_kl=float(algorithm.reference_kl),
        ),
        normalise_std=algorithm.advantage is Advantage.GROUP_MEAN_STD,
        reduction=Reduction(algorithm.loss_reduction.value),
        range_low=low,
        range_high=high,
    )


def _weight(mode: ImportanceSamplingMode, low: float, high: float) -> TokenWeight | VTrace:
    match mode:
        case ImportanceSamplingMode.NONE:
            return Unweighted()
        case ImportanceSamplingMode.TIS:
            return Tis(high)
        case ImportanceSamplingMode.MIS:
            return Mis(low, high)
        case ImportanceSamplingMode.VTRACE:
            return VTrace(rho=high, trace=1.0)


def _sequence_mask(mask: SequenceMask | None) -> losses.SequenceMask | None:
    match mask:
        case None:
            return None
        case SequenceMask(mode=SequenceMaskMode.DRIFT, drift=str(drift)):
            return DriftMask(float(drift))
        case SequenceMask(mode=SequenceMaskMode.RATIO, low=str(low), high=str(high)):
            return RatioMask(float(low), float(high))
        case SequenceMask(mode=SequenceMaskMode.GEOMETRIC, low=str(low), high=str(high)):
            return GeometricMask(float(low), float(high))
    raise ValueError(f"algorithm.sequenceMask: mode {mask.mode.value} lacks its bounds")


def _clip(clip: Clip | None) -> losses.Clip | None:
    if clip is None:
        return None
    return losses.Clip(
        low=float(clip.low),
        high=float(clip.high),
        old=losses.OldPolicy(clip.old_policy.value),
        level=Level(clip.level.value),
    )


def learning_rate(base: float, warmup_steps: int, step: int) -> float:
    """Of step 1, 2, ...: grows linearly over the warm-up, then stays."""
    return base * min(1.0, step / warmup_steps) if warmup_steps else base
