"""`python shards.py PORT RANK FOLDER`: one of two ranks that hold half of the vocabulary, or half of the batch, each."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from losses.test_losses_against_oracle import as_tokens, random_case
from motley_trainer.losses import (
    Clip,
    DriftMask,
    Level,
    Mis,
    Objective,
    OldPolicy,
    Tis,
    Tokens,
    Unweighted,
    VocabShard,
    VTrace,
    token_losses,
    token_losses_from_hidden,
)

VOCABULARY, TOKENS, WIDTH = 8, 6, 5
OBJECTIVES = {
    "final": Objective(),
    "head": Objective(replay=False),
    "entropy": Objective(replay=False, entropy_bonus=0.2),
    "tis": Objective(weight=Tis(2.0), centre=False),
    "sequence-mis": Objective(weight=Mis(0.2, 5.0), level=Level.SEQUENCE, centre=False),
    "vtrace": Objective(weight=VTrace(), centre=False),
    "drift": Objective(weight=Tis(2.0), sequence_mask=DriftMask(0.05), centre=False),
    "gspo": Objective(weight=Unweighted(), clip=Clip(old=OldPolicy.SAMPLER, level=Level.SEQUENCE), centre=False),
}


def whole() -> tuple[torch.Tensor, Tokens]:
    z, rows, advantages = random_case(11, vocabulary=VOCABULARY, tokens=TOKENS, complete=True, mismatch=0.5)
    given = replace(as_tokens(rows, advantages), sequence_N=torch.tensor([0, 0, 1, 1, 2, 2]))
    return torch.tensor(z), given


def hidden_and_weight() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return (
        torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=generator),
        torch.randn(VOCABULARY, WIDTH, dtype=torch.float64, generator=generator),
    )


def main(port: int, rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    group, half = dist.group.WORLD, VOCABULARY // 2
    shard = VocabShard(rank * half, half, group)
    logits, given = whole()
    found: dict[str, object] = {}
    for name, objective in OBJECTIVES.items():
        leaf = logits[:, shard.start : shard.start + half].clone().requires_grad_(True)
        losses, stats = token_losses(leaf, given, objective, shard=shard)
        losses.sum().backward()
        found[f"tensor/{name}"] = (losses.detach(), leaf.grad, stats.entropy_N, stats.kl_N)
        # Half of the sequences each: gradients are of the rank's own rows, and add up.
        mine = given.select((given.sequence_N % 2) == rank)
        leaf = logits.clone().requires_grad_(True)
        losses, _ = token_losses(leaf, mine, objective)
        losses.sum().backward()
        total = losses.detach().sum()
        dist.all_reduce(total)
        dist.all_reduce(leaf.grad)
        found[f"data/{name}"] = (total, leaf.grad)
    hidden, weight = hidden_and_weight()
    hidden.requires_grad_(True)
    part = weight[shard.start : shard.start + half].clone().requires_grad_(True)
    losses, _ = token_losses_from_hidden(hidden, part, given, Objective(), shard=shard)
    losses.sum().backward()
    found["hidden"] = (losses.detach(), hidden.grad, part.grad)
    torch.save(found, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
