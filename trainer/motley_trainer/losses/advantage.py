"""Group-relative advantages (GRPO, arXiv:2402.03300 section 4.1)."""

from __future__ import annotations

import torch
from torch import Tensor


def group_advantages(
    rewards_S: Tensor, prompt_S: Tensor, *, normalise_std: bool = False, epsilon: float = 1e-6
) -> Tensor:
    """Reward minus the mean of its prompt's rewards, [S].

    prompt_S: int64[S], 0 .. P-1, the prompt that each sequence answers. An ungraded sequence (reward NaN: an
    infrastructure failure) leaves the mean and gets advantage 0. With `normalise_std` the difference is divided by the
    population standard deviation of the group plus `epsilon` (the original GRPO); off for score centering.
    """
    if rewards_S.shape != prompt_S.shape:
        raise ValueError(f"rewards and prompts differ in shape: {rewards_S.shape=} {prompt_S.shape=}")
    if rewards_S.numel() == 0:
        return rewards_S
    graded_S = rewards_S.isfinite()
    safe_S = rewards_S.where(graded_S, torch.zeros_like(rewards_S))
    prompts = int(prompt_S.max()) + 1

    def prompt_mean(values_S: Tensor) -> Tensor:
        count_P = torch.zeros(prompts, dtype=safe_S.dtype).index_add(0, prompt_S, graded_S.to(safe_S.dtype))
        return torch.zeros(prompts, dtype=safe_S.dtype).index_add(0, prompt_S, values_S) / count_P.clamp_min(1)

    centred_S = (safe_S - prompt_mean(safe_S)[prompt_S]).where(graded_S, torch.zeros_like(safe_S))
    if not normalise_std:
        return centred_S
    return centred_S / (prompt_mean(centred_S.square()).sqrt()[prompt_S] + epsilon)
