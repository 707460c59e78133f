"""Megatron's and transformers' logits on the same weights, through the mapping and the store."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("megatron_parity.py")


@pytest.fixture(scope="module")
def differences() -> dict[str, dict[str, float]]:
    root = SCRIPT.parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT)],
        env={"PYTHONPATH": f"{root / 'api'}:{root / 'weights'}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe", "llama"])
def test_megatron_and_transformers_agree_on_the_same_weights(differences: dict[str, dict[str, float]], model: str):
    assert differences[model]["spread"] > 0.3  # logits that differ among themselves: else anything agrees
    assert differences[model]["transformers"] < 1e-5


@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe", "llama"])
def test_a_model_loaded_back_from_hugging_face_names_is_the_same_model(
    differences: dict[str, dict[str, float]], model: str
):
    assert differences[model]["unloaded"] == 0
    assert differences[model]["back"] == 0.0


def test_transformers_dequantises_the_fp8_golden_file_to_the_same_values(differences: dict[str, dict[str, float]]):
    assert differences["fp8"]["transformers"] == 0.0
