"""A clean load of a view folder by the reference engine's plain path: the folder's bytes, one pass, no scheduler, no cache reuse."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from motley_sampler.agent.conformance import Floats, Oracle
from motley_sampler.engines.reference.model import full_logits
from motley_sampler.engines.reference.precision import Arithmetic
from motley_sampler.engines.reference.weights import load_weights


def clean_load(folder: Path, arithmetic: Arithmetic) -> Oracle:
    """Loads when asked, and keeps nothing afterwards: it runs once per version."""

    def logits(sequences: Sequence[Sequence[int]]) -> list[Floats]:
        weights = load_weights(folder, arithmetic)
        with torch.inference_mode():
            return [rows.numpy().astype(np.float64) for rows in full_logits(weights, sequences)]

    return logits
