"""Tokens per second of the reference engine beside transformers' generate, on the same weights, prompts and sampling.

    python benchmarks/engine.py [--models demo,llama-135m] [--repeats 3]

Both compute in float32 on one core and take turns in the same run; seconds are of CPU time, of all threads. The engine does what it
does for a group: it draws by top-k and top-p, and reports each token's log-prob and candidates; transformers draws by the same
filters and reports nothing.

- 1, 8, 32: so many requests at once, prompts of 64 tokens, 64 new tokens each. transformers gets them as one batch.
- ragged: 32 requests of 8 to 120 new tokens, at most 8 at a time. transformers takes them as they came, eight by eight, and each batch
  lasts as long as its longest; the engine fills a place that becomes free.
- turns: 8 sessions of four turns, each turn the conversation so far and 16 tokens more, 16 new tokens. The engine finds the
  conversation in its prefix cache; transformers is called anew.

The larger model generates a third as many tokens in each. Only tokens that were asked for count. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from motley_sampler.engines.reference.engine import ReferenceEngine
from motley_sampler.engines.reference.precision import Arithmetic, Compute

ROOT = Path(__file__).resolve().parent.parent
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "top_k": 20}
CONTEXT = 512
AT_ONCE, PLACES = 32, 8
Prompts = list[list[int]]
# SmolLM2-135M's shape, with random weights: what it says does not change what it costs.
LLAMA_135M = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49_152,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Side:
    """One of the two: (prompts, new tokens of each, most at a time) -> what it generated."""

    name: str
    generate: Callable[[Prompts, list[int], int], Awaitable[Prompts]]


@dataclass(frozen=True)
class Case:
    name: str
    new: list[int]  # tokens of each request
    places: int
    turns: int = 1
    prompt: int = 64


def cases(model: str) -> tuple[Case, ...]:
    shorter = 1 if model == "demo" else 3
    ragged = [random.Random(index).randrange(8, 121) // shorter for index in range(AT_ONCE)]
    return (
        *(Case(str(size), [64 // shorter] * size, size) for size in (1, 8, 32)),
        Case("ragged", ragged, PLACES),
        Case("turns", [16] * PLACES, PLACES, turns=4, prompt=16),
    )


def folder_of(name: str, root: Path) -> Path:
    """A Hugging Face folder in BF16."""
    if name == "demo":
        return ROOT / "examples/demo/model"
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = root / name
    LlamaForCausalLM(LlamaConfig(**LLAMA_135M)).bfloat16().save_pretrained(folder)
    return folder


async def engine_side(folder: Path) -> tuple[Side, ReferenceEngine]:
    engine = ReferenceEngine(
        Arithmetic(Compute.FP32), slots=AT_ONCE + 4, max_running=AT_ONCE, context_length=CONTEXT, seed=lambda: 1
    )
    await engine.start(folder, 1)
    runs = 0

    async def generate(prompts: Prompts, new: list[int], places: int) -> Prompts:
        """`places` requests are under way at any time."""
        nonlocal runs
        runs += 1
        gate = asyncio.Semaphore(places)

        async def one(index: int) -> list[int]:
            async with gate:
                reply = await engine.generate(
                    {
                        "input_ids": prompts[index],
                        "sampling_params": {**SAMPLING, "max_new_tokens": new[index], "ignore_eos": True},
                        "return_logprob": True,
                        "return_sampling_mask": True,
                        "sampling_logprobs_mode": "support",
                        "session_id": f"{index}",
                    }
                )
            assert isinstance(reply, dict)
            output: list[int] = reply["output_ids"]
            return output

        return list(await asyncio.gather(*(one(index) for index in range(len(prompts)))))

    return Side("engine", generate), engine


def transformers_side(folder: Path) -> Side:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    async def generate(prompts: Prompts, new: list[int], places: int) -> Prompts:
        """All prompts are of one length: nothing is padded."""
        found: Prompts = []
        for start in range(0, len(prompts), places):
            batch, wanted = prompts[start : start + places], new[start : start + places]
            ids = torch.tensor(batch)
            with torch.inference_mode():
                out = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=max(wanted),
                    do_sample=True,
                    eos_token_id=None,
                    pad_token_id=0,
                    **SAMPLING,
                )
            rows = out[:, ids.shape[1] :].tolist()
            found += [row[:count] for row, count in zip(rows, wanted, strict=True)]
        return found

    return Side("transformers", generate)


async def seconds(side: Side, case: Case, vocabulary: int, seed: int) -> float:
    """Of all turns of all requests. Each call has prompts of its own, so that no cache knows them."""
    random_ = random.Random(f"{case.name}/{seed}")
    prompts = [[random_.randrange(vocabulary) for _ in range(case.prompt)] for _ in case.new]
    took_s = 0.0
    for _ in range(case.turns):
        began_s = time.process_time()
        replies = await side.generate(prompts, case.new, case.places)
        took_s += time.process_time() - began_s
        assert [len(reply) for reply in replies] == case.new
        more = [[random_.randrange(vocabulary) for _ in range(16)] for _ in case.new]
        prompts = [[*a, *b, *c] for a, b, c in zip(prompts, replies, more, strict=True)]
    return took_s


async def measure(model: str, folder: Path, repeats: int) -> dict[str, dict[str, float]]:
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    ours, engine = await engine_side(folder)
    sides = (ours, transformers_side(folder))
    rates: dict[str, dict[str, float]] = {}
    for case in cases(model):
        tokens = sum(case.new) * case.turns
        took_s: dict[str, list[float]] = {side.name: [] for side in sides}
        for repeat in range(repeats):
            for side in sides:
                took_s[side.name].append(await seconds(side, case, vocabulary, repeat))
        rates[case.name] = {name: tokens / statistics.median(times) for name, times in took_s.items()}
        ours_s, theirs_s = (rates[case.name][side.name] for side in sides)
        print(f"| {case.name} | {ours_s:,.0f} | {theirs_s:,.0f} | {ours_s / theirs_s:.2f} |", flush=True)
    await engine.stop()
    return rates


async def run(models: list[str], repeats: int) -> dict[str, Any]:
    found: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as root:
        for model in models:
            print(f"\n| {model} | engine tok/s | transformers tok/s | ratio |\n| --- | --- | --- | --- |", flush=True)
            found[model] = await measure(model, folder_of(model, Path(root)), repeats)
    ratios = {
        model: {case: round(rate["engine"] / rate["transformers"], 2) for case, rate in rates.items()}
        for model, rates in found.items()
    }
    every = [ratio for cases in ratios.values() for ratio in cases.values()]
    return {
        "tokensPerSecondRatioVsTransformers": round(statistics.geometric_mean(every), 2),
        "least": min(every),
        "ratios": ratios,
        "tokensPerSecond": {
            model: {case: {side: round(rate, 1) for side, rate in both.items()} for case, both in rates.items()}
            for model, rates in found.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default="demo,llama-135m")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    print(json.dumps(asyncio.run(run(options.models.split(","), options.repeats))))


if __name__ == "__main__":
    main()
