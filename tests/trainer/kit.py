"""Tiny models, tasks and trajectories for the trainer's and the buffer's tests."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from motley_api.records import Candidates, EndedBy, Trajectory, Turn, Work
from motley_api.resources.rlrun import RLRunSpec

RUN, UID = "tiny", "uid-1"
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def write_model(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A random checkpoint in BF16 under Hugging Face names."""
    import torch
    from motley_weights.names import ModelShape, expected_shapes
    from safetensors.torch import save_file

    config = CONFIG | changes
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_shapes(ModelShape.from_hf_config(config)).items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = (1 + 0.1 * noise if "norm" in name else 0.15 * noise).bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_tasks(folder: Path, *, train: int = 5, heldout: int = 2) -> Path:
    for split, count in (("train", train), ("heldout", heldout)):
        for number in range(count):
            task = folder / split / f"{split}-{number}"
            task.mkdir(parents=True)
            (task / "task.toml").write_text("")
    return folder


def spec_of(root: Path, **changes: Any) -> RLRunSpec:
    """A run of six steps, two prompts of four samples each, a checkpoint every second step."""
    fields: dict[str, Any] = {
        "model": {"source": str(root / "model"), "contextLength": 128},
        "tasks": {"source": str(root / "tasks"), "limits": {"episodeTimeoutSeconds": 60}},
        "store": {"url": f"file://{root / 'store'}"},
        "steps": 6,
        "batch": {"prompts": 2, "samplesPerPrompt": 4},
        "trainer": {"gpusPerNode": 1, "dtype": "FP32"},
        "rollout": {"sessions": 8},
        "checkpoint": {"everySteps": 2, "keep": 2},
        "algorithm": {"optimizer": {"learningRate": "0.001"}},
    }
    return RLRunSpec.model_validate(fields | changes)


def make_trajectory(
    work: Work, sample: int, *, version: int = 0, group: str = "h100-fp8", reward: float | None = None, **changes: Any
) -> Trajectory:
    """Two turns of random tokens, with supports of one to four candidates. The same arguments give the same trajectory."""
    rng = np.random.default_rng([int(work.id), sample, work.seed])
    lengths = rng.integers(3, 9, 2)
    prompt, between = 6, 4
    first = (prompt, prompt + int(lengths[0]))
    second = (first[1] + between, first[1] + between + int(lengths[1]))
    tokens = rng.integers(1, 90, second[1]).astype("<i4")
    positions = [*range(*first), *range(*second)]
    counts, ids, logq, own = [], [], [], []
    for position in positions:
        size = int(rng.integers(1, 5))
        if size == 1:
            counts.append(0)
            own.append(0.0)
            continue
        others = rng.choice(np.setdiff1d(np.arange(1, 90), tokens[position]), size - 1, replace=False)
        probabilities = rng.dirichlet(np.full(size, 3.0)).astype(np.float32)
        counts.append(size)
        ids += [int(tokens[position]), *others.tolist()]
        logq += np.log(probabilities).tolist()
        own.append(float(np.log(probabilities[0])))
    fields: dict[str, Any] = {
        "id": f"{work.id}/{sample}",
        "run": RUN,
        "work": work.id,
        "sample": sample,
        "task": work.task,
        "split": work.split,
        "group": group,
        "view": "fp8",
        "engine": f"{group}-0",
        "token_ids": tokens.tobytes(),
        "turns": [
            Turn(start=a, end=b, start_version=version, end_version=version, latency_s=0.5) for a, b in (first, second)
        ],
        "logprobs": np.array(own, "<f4").tobytes(),
        "candidates": Candidates(
            counts=np.array(counts, "<u2").tobytes(),
            ids=np.array(ids, "<u4").tobytes(),
            logprobs=np.array(logq, "<f4").tobytes(),
        ),
        "temperature": 1.0,
        "top_p": 0.97,
        "top_k": 64,
        "reward": float(sample % 2) if reward is None else reward,
        "ended_by": EndedBy.SUBMIT,
        "started_unix_s": time.time(),
        "finished_unix_s": time.time(),
    }
    return Trajectory(**(fields | changes))


def make_work(number: int = 1, *, samples: int = 4, task: str = "train-0", split: str = "train") -> Work:
    return Work(
        id=str(number),
        task=task,
        split=split,
        samples=list(range(samples)),
        seed=number,
        min_version=0,
        deadline_unix_s=time.time() + 100,
    )
