"""What is compared: arms as the resource's own Algorithm, and the fleets they sample on. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from motley_api import keys
from motley_api.resources.rlrun import Algorithm

# Without top-p the sampler still keeps the 64 likeliest of 384 tokens, for what it keeps is what gets recorded: centering and an exact
# KL need that. The rest holds less than a thousandth of the mass.
TOP_K = 64
TOP_P = "0.97"
REFRESH_STEPS = 6  # an engine takes new weights every so many steps


@dataclass(frozen=True)
class Engine:
    """One engine of a group: how many of a step's samples it draws, and how stale they are.

    At step s with (s - 1) % REFRESH_STEPS == phase it takes the version that is `delay` steps old and draws its samples of the
    next REFRESH_STEPS steps with it: their lag is delay .. delay + REFRESH_STEPS - 1. Phases differ, so that every step sees
    the same mixture of lags.
    """

    group: str
    gpu_type: str
    view: str
    kv_cache_precision: str
    samples: int
    delay: int
    phase: int


# The study's eight groups with their shares of 64 samples (largest remainder). Mean lag 3.9, weighted by samples.
MIXED = (
    Engine("h100-fp8", "H100", keys.VIEW_FP8, "FP8", 6, 1, 0),
    Engine("h200-fp8", "H200", keys.VIEW_FP8, "FP8", 12, 1, 1),
    Engine("b200-nvfp4", "B200", keys.VIEW_NVFP4, "FP8", 12, 1, 4),
    Engine("b300-nvfp4", "B300", keys.VIEW_NVFP4, "FP8", 18, 2, 3),
    Engine("a100-bf16", "A100-80GB", keys.VIEW_BF16, "FP8", 2, 1, 2),
    Engine("rtx6000-bf16", "RTX-PRO-6000", keys.VIEW_BF16, "FP8", 2, 3, 5),
    Engine("h100-bf16", "H100", keys.VIEW_BF16, "FP8", 6, 2, 0),
    Engine("h200-bf16", "H200", keys.VIEW_BF16, "FP8", 6, 1, 2),
)


def _control(delay: int, phase: int, samples: int) -> Engine:
    return Engine("b200-bf16", "B200", keys.VIEW_BF16, "BF16", samples, delay, phase)


# The control: one group of B200 in BF16 with a BF16 KV cache, whose engines lag just as the mixed fleet's do.
HOMOGENEOUS = tuple(
    _control(delay, phase, sum(engine.samples for engine in MIXED if (engine.delay, engine.phase) == (delay, phase)))
    for delay, phase in sorted({(engine.delay, engine.phase) for engine in MIXED})
)
FLEETS: Mapping[str, Sequence[Engine]] = {"mixed": MIXED, "homogeneous": HOMOGENEOUS}


@dataclass(frozen=True)
class Arm:
    name: str
    fleet: str
    algorithm: Algorithm


@dataclass(frozen=True)
class Settings:
    """Of every arm alike. learning_rate is some hundred times that of a large model, as the demo's is: that is what makes a few
    steps of lag matter."""

    steps: int = 48
    prompts: int = 8
    samples_per_prompt: int = 8
    learning_rate: str = "0.0015"
    beta2: str = "0.98"
    warmup_steps: int = 3
    gradient_clip: str = "1"
    turns: int = 5
    tokens_per_turn: int = 16
    context_tokens: int = 192


def algorithm(settings: Settings, *, mis: bool, centre: bool, top_p: bool) -> Algorithm:
    """Everything that two arms could differ in is in here; what the resource refuses cannot be compared."""
    chosen: dict[str, Any] = {
        "importanceSampling": {"mode": "MIS" if mis else "None"},
        "scoreCentering": "Enabled" if centre else "Disabled",
        "maskReplay": "Enabled" if top_p else "Disabled",
        "sampling": {"topP": TOP_P if top_p else "1", "topK": TOP_K},
        "optimizer": {
            "learningRate": settings.learning_rate,
            "beta2": settings.beta2,
            "gradientClip": settings.gradient_clip,
            "warmupSteps": settings.warmup_steps,
        },
    }
    return Algorithm.model_validate(chosen)


def arms(settings: Settings) -> Mapping[str, Arm]:
    """By name, in the table's order."""
    grpo = algorithm(settings, mis=False, centre=False, top_p=False)
    recipe = algorithm(settings, mis=True, centre=True, top_p=True)
    mixed = {
        "grpo": grpo,
        "grpo_mis": algorithm(settings, mis=True, centre=False, top_p=False),
        "grpo_topp": algorithm(settings, mis=False, centre=False, top_p=True),
        "sc": algorithm(settings, mis=False, centre=True, top_p=False),
        "sc_mis": algorithm(settings, mis=True, centre=True, top_p=False),
        "sc_mis_topp": recipe,
    }
    control = {"homogeneous_grpo": grpo, "homogeneous_sc_mis_topp": recipe}
    return {name: Arm(name, "mixed", chosen) for name, chosen in mixed.items()} | {
        name: Arm(name, "homogeneous", chosen) for name, chosen in control.items()
    }
