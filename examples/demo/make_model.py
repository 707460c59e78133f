"""Makes the demo's warm-started policy and its tasks: ``python examples/demo/make_model.py``. Takes some minutes on one core.

Writes examples/demo/model and examples/demo/tasks. Seeded: the same machine and torch version give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn import functional

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import make_tasks  # noqa: E402
from warmstart import policy, rollout, tokens  # noqa: E402
from warmstart.demonstrator import EXPERT, Habits, demonstrate  # noqa: E402
from warmstart.families import FAMILIES, make  # noqa: E402
from warmstart.policy import Params, Shape  # noqa: E402
from warmstart.rollout import Language  # noqa: E402


def transcripts(
    language: Language, rng: random.Random, count: int, habits: Habits
) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` fresh episodes -> (ids [B, T], written-by-the-policy [B, T])."""
    rows: list[tuple[list[int], list[bool]]] = []
    for _ in range(count):
        episode = demonstrate(make(rng.choice(list(FAMILIES)), rng), rng, habits)
        ids: list[int] = []
        mask: list[bool] = []
        for role, content in episode.messages:
            message = language.message(role, content)
            ids += message
            header = len(language.reply_header)
            mask += [role == "assistant" and index >= header for index in range(len(message))]
        rows.append((ids, mask))
    longest = max(len(ids) for ids, _ in rows)
    pad = language.pad
    return (
        torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in rows]),
        torch.tensor([mask + [False] * (longest - len(mask)) for _, mask in rows]),
    )


def train(
    params: Params, shape: Shape, language: Language, *, seed: int, steps: int, batch: int, peak_lr: float
) -> None:
    """Imitation of the expert first, so that copying is learnt, then of the demonstrator with its habits. In place."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(params.values(), lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.01)
    started = time.monotonic()
    for step in range(steps):
        progress = step / steps
        lr = peak_lr * min(1.0, (step + 1) / 50) * (1.0 if progress < 0.6 else max(0.03, (1 - progress) / 0.4))
        for group in optimizer.param_groups:
            group["lr"] = lr
        ids, mask = transcripts(language, rng, batch, EXPERT if progress < 0.4 else Habits())
        logits, balance = policy.forward(params, ids[:, :-1], shape)
        where = mask[:, 1:]
        loss = functional.cross_entropy(logits[where], ids[:, 1:][where])
        optimizer.zero_grad()
        (loss + 0.01 * balance).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(params.values(), 1.0)
        optimizer.step()
        if step % 100 == 99 or step == steps - 1:
            print(
                f"step={step + 1}/{steps} loss={loss:.3f} balance={balance:.2f} seconds={time.monotonic() - started:.0f}",
                flush=True,
            )


def success(params: Params, shape: Shape, language: Language, *, seed: int, per_family: int) -> dict[str, float]:
    """Share of solved episodes per family, of the BF16 weights, at temperature 1 on fresh tasks."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    tasks = [make(family, rng) for family in FAMILIES for _ in range(per_family)]
    rows = rollout.play(params, shape, tasks, language, generator, top_p=0.99)
    solved: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        solved[row.task.family].append(float(row.solved))
        solved["all"].append(float(row.solved))
        solved["formatErrors"].append(float(row.ended_by == "formatErrors"))
        solved["turns"].append(row.turns)
        solved["generatedTokens"].append(sum(row.generated))
        solved["tokens"].append(len(row.ids))
    return {name: round(sum(values) / len(values), 3) for name, values in solved.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "model")
    parser.add_argument("--tasks", type=Path, default=HERE / "tasks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    make_tasks.write_suite(args.tasks)
    shape = Shape()
    tokenizer = tokens.build()
    language = Language(tokenizer)
    params = {name: value.requires_grad_(True) for name, value in policy.init(shape, args.seed).items()}
    print(f"parameters={sum(value.numel() for value in params.values())} vocabulary={shape.vocab}", flush=True)
    train(params, shape, language, seed=args.seed, steps=args.steps, batch=args.batch, peak_lr=args.lr)
    checkpoint = policy.to_checkpoint(params)
    write(args.out, checkpoint, shape, language)
    measured = success(policy.from_checkpoint(checkpoint, shape), shape, language, seed=99, per_family=64)
    print("measured " + " ".join(f"{name}={value}" for name, value in measured.items()), flush=True)


def write(out: Path, checkpoint: Params, shape: Shape, language: Language) -> None:
    out.mkdir(parents=True, exist_ok=True)
    end, pad = language.end, language.pad
    save_file(checkpoint, out / "model.safetensors", metadata={"format": "pt"})
    language.tokenizer.save(str(out / "tokenizer.json"))
    for name, content in {
        "config.json": policy.hf_config(shape, eos=end, pad=pad),
        "generation_config.json": {"eos_token_id": end, "pad_token_id": pad, "do_sample": True, "temperature": 1.0},
        "tokenizer_config.json": tokens.config(),
    }.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    print(f"wrote {out}", flush=True)


if __name__ == "__main__":
    main()
