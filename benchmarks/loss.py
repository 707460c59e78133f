# ruff: noqa: N815  (shapes in suffixes)
"""Time and peak memory of the loss, forward and backward, at a vocabulary of 151,936: beside plain torch and Miles.

    python benchmarks/loss.py [--tokens 512] [--repeats 3] [--miles-path CHECKOUT]      (or MILES_PATH=CHECKOUT)

CHECKOUT is a Miles tree with miles/backends/training_utils/loss/hub/score_centering (or loss_hub/score_centering), as its fork
sii-avalanche/miles has at 4d412b5; nothing of it is kept here, and without one those rows are left out. Every contender runs in a
process of its own on the same inputs, one thread each. Memory is the peak of the resident set above what the process held before its
inputs: the logits count, in every row; where the output layer is part of the case, its weight and that weight's gradient, which all must
hold, do not. Time is CPU time, the least of the repeats. Losses and gradients
of all must agree before any number is printed. The last line of the output is JSON.

Legend: T = tokens, V = vocabulary, H = width of the hidden states, K = padded candidates (Miles, plain torch), C = ragged ones (ours).
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import supports
import torch
from motley_trainer.losses import (
    Mis,
    Objective,
    Support,
    Tokens,
    build_support,
    token_losses,
    token_losses_from_hidden,
)
from torch import Tensor

VOCABULARY, HIDDEN, HEAD, SUPPORT_WIDTH = 151_936, 512, 128, 64
LOW, HIGH = 0.5, 5.0
MILES_CHUNKS = (-1, 256)  # its default, and what its own long-context recipes set
HUBS = ("loss.hub", "loss_hub")
PACKAGE = "miles.backends.training_utils.{hub}.score_centering"


@dataclass(frozen=True)
class Case:
    """What the loss is given. hidden: the output layer is part of it. complete: mask replay, else a top-128 head."""

    name: str
    dtype: torch.dtype
    complete: bool
    hidden: bool


CASES = {
    case.name: case
    for case in (
        Case("replay-bf16", torch.bfloat16, True, False),
        Case("replay-fp32", torch.float32, True, False),
        Case("head-bf16", torch.bfloat16, False, False),
        Case("head-fp32", torch.float32, False, False),
        Case("replay-from-hidden-bf16", torch.bfloat16, True, True),
    )
}


@dataclass(frozen=True)
class Inputs:
    leaf: Tensor  # logits [T, V], or hidden states [T, H]
    weight_VH: Tensor | None
    support: Support
    ids_TK: Tensor  # -1: no candidate
    logq_TK: Tensor
    sampled_T: Tensor
    logq_T: Tensor
    advantage_T: Tensor


# ------------------------------------------------------------------------------------------------ inputs
def make_inputs(case: Case, tokens: int) -> Inputs:
    rng = np.random.default_rng(7)
    generator = torch.Generator().manual_seed(7)
    if case.complete:
        counts, ids, logq, sampled = supports.ragged(rng, tokens, VOCABULARY)
        logq_T = torch.zeros(tokens)
        support = build_support(
            torch.from_numpy(sampled),
            logq_T,
            torch.from_numpy(counts.astype(np.int64)),
            torch.from_numpy(ids.astype(np.int64)),
            torch.from_numpy(logq),
        )
    else:
        support = head_support(rng, tokens)
    size_T = torch.bincount(support.token_C, minlength=tokens)
    width = SUPPORT_WIDTH if case.complete else HEAD
    column_C = torch.arange(support.token_C.numel()) - (size_T.cumsum(0) - size_T)[support.token_C]
    ids_TK = torch.full((tokens, width), -1)
    ids_TK[support.token_C, column_C] = support.ids_C
    logq_TK = torch.zeros(tokens, width)
    logq_TK[support.token_C, column_C] = support.logq_C
    columns = HIDDEN if case.hidden else VOCABULARY
    leaf = torch.empty(tokens, columns, dtype=case.dtype).normal_(generator=generator)
    weight_VH = None
    if case.hidden:
        weight_VH = torch.empty(VOCABULARY, HIDDEN, dtype=case.dtype).normal_(std=HIDDEN**-0.5, generator=generator)
        weight_VH.requires_grad_(True)
    return Inputs(
        leaf=leaf.requires_grad_(True),
        weight_VH=weight_VH,
        support=support,
        ids_TK=ids_TK,
        logq_TK=logq_TK,
        sampled_T=support.ids_C[support.chosen_N],
        logq_T=support.logq_C[support.chosen_N],
        advantage_T=torch.randn(tokens, generator=generator),
    )


def head_support(rng: np.random.Generator, tokens: int) -> Support:
    """The sampler's 128 likeliest ids with mass .9 together, the sampled token among them."""
    q = rng.dirichlet(np.full(HEAD, 0.1), tokens) * 0.9 + 1e-6
    chosen = [int(rng.choice(HEAD, p=row / row.sum())) for row in q]
    ids = np.stack([rng.choice(VOCABULARY, HEAD, replace=False) for _ in range(tokens)])
    return Support(
        torch.arange(tokens).repeat_interleave(HEAD),
        torch.from_numpy(ids).reshape(-1),
        torch.from_numpy(np.log(q)).float().reshape(-1),
        torch.arange(tokens) * HEAD + torch.tensor(chosen),
    )


# ------------------------------------------------------------------------------------------------ contenders
def ours(case: Case, given: Inputs, *, overwrite: bool = True) -> Tensor:
    tokens = Tokens(
        rows_N=torch.arange(given.leaf.shape[0]),
        advantage_N=given.advantage_T,
        temperature_N=torch.ones(given.leaf.shape[0]),
        support=given.support,
    )
    objective = Objective(weight=Mis(LOW, HIGH), replay=case.complete)
    if given.weight_VH is not None:
        return token_losses_from_hidden(given.leaf, given.weight_VH, tokens, objective)[0]
    return token_losses(given.leaf, tokens, objective, overwrite_logits=overwrite)[0]


def dense(case: Case, given: Inputs) -> Tensor:
    """The formula as one would write it down: log-softmax over the vocabulary, masked to the support under replay."""
    logits_TV = given.leaf if given.weight_VH is None else torch.nn.functional.linear(given.leaf, given.weight_VH)
    z_TV = logits_TV.float()
    valid_TK = given.ids_TK >= 0
    if case.complete:
        allowed_TV = torch.zeros_like(z_TV, dtype=torch.bool)
        allowed_TV[given.support.token_C, given.support.ids_C] = True
        z_TV = z_TV.masked_fill(~allowed_TV, -torch.inf)
    logp_TV = z_TV.log_softmax(-1)
    logp_TK = logp_TV.gather(1, given.ids_TK.clamp_min(0)).masked_fill(~valid_TK, 0.0)
    logp_T = logp_TV.gather(1, given.sampled_T[:, None])[:, 0]
    with torch.no_grad():
        p_TK, q_TK = logp_TK.exp() * valid_TK, given.logq_TK.exp() * valid_TK
        rho_T = (1 - q_TK.sum(1)).clamp_min(1e-6) / (1 - p_TK.sum(1)).clamp_min(1e-6)
        inside_T = ((rho_T >= 1 / HIGH) & (rho_T <= 1 / LOW)).float()
        alpha_T = torch.zeros_like(rho_T) if case.complete else inside_T
        coefficient_TK = p_TK * within(logp_TK - given.logq_TK) - alpha_T[:, None] * p_TK
        ratio_T = logp_T - given.logq_T
        weight_T = ratio_T.exp() * within(ratio_T)
    return -given.advantage_T * (weight_T * logp_T - (coefficient_TK * logp_TK).sum(1))


def within(log_ratio: Tensor) -> Tensor:
    return (log_ratio >= math.log(LOW)) & (log_ratio <= math.log(HIGH))


def miles(case: Case, given: Inputs, *, chunk: int) -> Tensor:
    package = miles_package(pathlib.Path(os.environ["MILES_PATH"]))
    ids_TK = torch.cat([given.sampled_T[:, None], given.ids_TK], 1)
    options: dict[str, Any] = {"chunk_size": chunk, "sampling_support": case.complete}
    if given.weight_VH is None:
        logp_TK, _ = package.selected_log_probs_and_entropy(given.leaf, ids_TK, **options)
    else:
        module = importlib.import_module(f"{package.__name__}.selected_log_probs")
        logp_TK, _ = module.output_selected_log_probs_and_entropy(given.leaf, given.weight_VH, ids_TK, **options)
    inputs = package.ScoreCenteringInputs(
        logp_TK[:, 0],
        logp_TK[:, 1:],
        given.logq_T,
        given.logq_TK,
        given.ids_TK >= 0,
        given.advantage_T,
        mode="mis",
        mis_low=LOW,
        mis_high=HIGH,
    )
    loss_T: Tensor = package.score_centering_loss(inputs)[0]
    return loss_T


def miles_package(root: pathlib.Path) -> types.ModuleType:
    """Its loss package alone: the parents' own modules, which import the whole framework, are stood in for by their folders."""
    for hub in HUBS:
        name = PACKAGE.format(hub=hub)
        if (root / name.replace(".", "/")).is_dir():
            parts = name.split(".")
            for depth in range(1, len(parts)):
                parent = types.ModuleType(".".join(parts[:depth]))
                parent.__path__ = [str(root.joinpath(*parts[:depth]))]
                sys.modules.setdefault(parent.__name__, parent)
            return importlib.import_module(name)
    raise SystemExit(f"MILES_PATH={root} holds no {' nor '.join(PACKAGE.format(hub=hub) for hub in HUBS)}")


def contenders(case: Case) -> dict[str, Callable[[Case, Inputs], Tensor]]:
    found: dict[str, Callable[[Case, Inputs], Tensor]] = {"motley": ours, "torch": dense}
    if not case.hidden:
        found["motley, logits kept"] = lambda c, given: ours(c, given, overwrite=False)
    if os.environ.get("MILES_PATH"):
        for chunk in MILES_CHUNKS:
            name = f"miles, {'whole' if chunk < 0 else f'chunks of {chunk}'}"
            found[name] = lambda c, given, chunk=chunk: miles(c, given, chunk=chunk)
    return found


# ------------------------------------------------------------------------------------------------ one process
def resident_bytes(field: str) -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def child(case: Case, name: str, tokens: int, repeats: int, answer: pathlib.Path) -> None:
    """Measures one contender; writes its numbers, losses and a digest of its gradients."""
    torch.set_num_threads(1)
    contender = contenders(case)[name]
    warm_up(case, contender)
    times, peak = [], 0
    for _ in range(repeats):
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        before = resident_bytes("VmRSS")
        given = make_inputs(case, tokens)
        started = time.process_time()
        loss_T = contender(case, given)
        loss_T.sum().backward()
        times.append(time.process_time() - started)
        layer = 0 if given.weight_VH is None else 2 * given.weight_VH.nbytes  # the weight and its gradient
        peak = max(peak, resident_bytes("VmHWM") - before - layer)
        gradient = given.leaf.grad
        assert gradient is not None
        signs = torch.where(torch.arange(gradient.shape[1]) % 2 == 0, 1.0, -1.0)
        rows = [(row.float() @ signs, row.float().norm()) for row in gradient]
        result = {"loss": loss_T.detach().tolist(), "gradient": [[a.item(), b.item()] for a, b in rows]}
        del given, loss_T, gradient
    answer.write_text(json.dumps({"peak_bytes": peak, "seconds": min(times), **result}))


def warm_up(case: Case, contender: Callable[[Case, Inputs], Tensor]) -> None:
    """Imports, thread pools and kernels are loaded once, by a few tokens."""
    contender(case, make_inputs(case, 2)).sum().backward()


def measure(case: Case, name: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        answer = pathlib.Path(folder) / "answer.json"
        command = [sys.executable, __file__, "--tokens", str(options.tokens), "--repeats", str(options.repeats)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1048576"}
        subprocess.run([*command, "--child", case.name, name, str(answer)], check=True, env=environment)
        result: dict[str, Any] = json.loads(answer.read_text())
        return result


def assert_equal(case: Case, results: dict[str, dict[str, Any]]) -> None:
    """Same losses; same gradients up to the rounding of the dtype they are stored in. With the output layer inside, the others round
    their logits to BF16 and we do not: a ratio at a bound may then fall on its other side, of a token in a hundred at most."""
    tolerance = 2e-2 if case.dtype is torch.bfloat16 else 1e-3
    strays = 0.01 if case.hidden else 0.0
    want = results["torch"]
    for name, got in results.items():
        # Over a complete support Miles takes the floor of both tails for a tail, which adds A sum p log p with p held: a value
        # without a gradient.
        if not (case.complete and name.startswith("miles")):
            loose = tolerance if case.hidden else 1e-4
            assert_close(f"{case.name}: loss of {name}", got["loss"], want["loss"], loose, loose, strays)
        for column, words in enumerate(("gradient", "gradient norm")):
            pair = (np.array(result["gradient"])[:, column] for result in (got, want))
            assert_close(f"{case.name}: {words} of {name}", *pair, tolerance, 4 * tolerance, strays)


def assert_close(what: str, got: Any, want: Any, rtol: float, atol: float, strays: float) -> None:
    apart = ~np.isclose(np.asarray(got), np.asarray(want), rtol=rtol, atol=atol)
    if apart.mean() > strays:
        worst = np.abs(np.asarray(got) - np.asarray(want)).max()
        raise AssertionError(f"{what}: {apart.sum()} of {apart.size} tokens differ, by up to {worst}")


# ------------------------------------------------------------------------------------------------ report
def report(case: Case, results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Prints the rows; ratios of ours to the others, to Miles' better setting each."""
    print(f"\n{case.name}\n  {'':24} {'peak MiB':>9} {'seconds':>8}")
    for name, result in results.items():
        print(f"  {name:24} {result['peak_bytes'] / 2**20:9.0f} {result['seconds']:8.2f}")
    own = results["motley"]
    ratios = {
        "peakMemoryRatioVsDense": own["peak_bytes"] / results["torch"]["peak_bytes"],
        "timeRatioVsDense": own["seconds"] / results["torch"]["seconds"],
    }
    theirs = [result for name, result in results.items() if name.startswith("miles")]
    if theirs:
        ratios["peakMemoryRatioVsMiles"] = own["peak_bytes"] / min(result["peak_bytes"] for result in theirs)
        ratios["timeRatioVsMiles"] = own["seconds"] / min(result["seconds"] for result in theirs)
    return {name: round(value, 3) for name, value in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--miles-path", default=os.environ.get("MILES_PATH", ""))
    parser.add_argument("--child", nargs=3, metavar=("CASE", "NAME", "ANSWER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.miles_path:
        os.environ["MILES_PATH"] = str(pathlib.Path(options.miles_path).resolve())
    if options.child:
        case, name, answer = options.child
        child(CASES[case], name, options.tokens, options.repeats, pathlib.Path(answer))
        return
    print(f"{options.tokens} tokens, vocabulary {VOCABULARY}, torch {torch.__version__}, one thread")
    found: dict[str, dict[str, float]] = {}
    for case in (CASES[name] for name in options.cases):
        results = {name: measure(case, name, options) for name in contenders(case)}
        assert_equal(case, results)
        found[case.name] = report(case, results)
    # The headline is the worst of the cases: what holds for all of them.
    keys = sorted({key for ratios in found.values() for key in ratios})
    worst = {key: max(ratios[key] for ratios in found.values() if key in ratios) for key in keys}
    print(json.dumps({**worst, "cases": found}))


if __name__ == "__main__":
    main()
