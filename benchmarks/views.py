"""What a version of the weights costs, from the trainer's tensors to the tensors that an engine loads: bytes, seconds, memory.

    python benchmarks/views.py [--layers 2] [--experts 8] [--learning-rate 5e-7]

The model has Qwen3-30B-A3B's layers with fewer experts, fewer layers and a small vocabulary (293 MB of BF16 by default). A step
moves float32 master weights as Adam does at a learning rate of RL, and rounds them to BF16: what share of the elements changes
is measured, not chosen. Every view is published, pulled and loaded twice over, whole and as deltas. Throughputs are per core, in
CPU time and GB (10^9 bytes) of BF16 read, beside the memcpy of the same run. Peak memory is that of a process which only
publishes, for this model and for one with half its layers.

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from motley_api.keys import STANDARD_VIEWS
from motley_weights import codecs, delta, safetensors_io
from motley_weights.names import ModelShape, expected_shapes
from motley_weights.store import DeltaPolicy, WeightStore

STEPS = 2  # versions published as deltas
INITIAL_STD = 0.02
PEAK_SHARD_BYTES = 64 << 20
MB, GB, MIB = 1e6, 1e9, 1 << 20


def config_of(layers: int, experts: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": experts,
        "num_experts_per_tok": min(8, experts),
        "norm_topk_prob": True,
        "vocab_size": 8192,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    }


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return expected_shapes(ModelShape.from_hf_config(config))


class Masters:
    """The trainer's float32 weights."""

    def __init__(self, config: dict[str, Any], learning_rate: float) -> None:
        self._random = torch.Generator().manual_seed(0)
        self._learning_rate = learning_rate
        self.masters = {
            name: torch.randn(size, generator=self._random).mul_(INITIAL_STD)
            for name, size in shapes_of(config).items()
        }
        self.bf16 = {name: master.to(torch.bfloat16) for name, master in self.masters.items()}

    def step(self) -> float:
        """One step of normalised size. Returns the share of BF16 elements that changed."""
        changed = total = 0
        for name, master in self.masters.items():
            step = torch.randn(master.shape, generator=self._random)
            after = master.add_(step, alpha=self._learning_rate).to(torch.bfloat16)
            changed += int((after.view(torch.int16) != self.bf16[name].view(torch.int16)).sum())
            total += after.numel()
            self.bf16[name] = after
        return changed / total


def seconds(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def cpu_seconds(work: Callable[[], object], repeats: int = 2) -> float:
    """The least CPU time of this thread."""
    best = float("inf")
    for _ in range(repeats):
        started_s = time.thread_time()
        work()
        best = min(best, time.thread_time() - started_s)
    return best


def load(store: WeightStore, folder: Path) -> int:
    """Reads every byte, as an engine does that copies the tensors to its device."""
    return sum(safetensors_io.nbytes(tensor.clone()) for tensor in store.load(folder).values())


# ---------------------------------------------------------------- bytes and seconds


def versions(
    config: dict[str, Any], weights: list[dict[str, torch.Tensor]], view: str, root: Path, deltas: bool
) -> dict[str, Any]:
    """Publishes `weights` in turn, pulls and loads each. Medians over all versions but the first, which is always whole."""
    files = {"config.json": json.dumps(config).encode()}
    publisher = WeightStore(str(root / "store"), "run", deltas=DeltaPolicy(root / "cache") if deltas else None)
    reader = WeightStore(str(root / "store"), "run")
    stored, publish_s, pull_s, load_s = [], [], [], []
    for version, tensors in enumerate(weights):

        def publish(version: int = version, tensors: dict[str, torch.Tensor] = tensors) -> None:
            report = publisher.publish(version, tensors.items(), model_dir_files=files, views=[view])
            report.raise_for_failures()
            stored.append(report.views[view].stored_bytes)

        publish_s.append(seconds(publish))
        pull_s.append(seconds(lambda version=version: reader.pull(view, version, root / "pulled")))
        folder = root / "pulled" / view / f"v{version:06d}"
        load_s.append(seconds(lambda folder=folder: load(reader, folder)))
        reader.drop_pulled(view, root / "pulled", keep=[version])
        publisher.prune(1)
    last = STEPS if deltas else 1
    return {
        "bytes": int(statistics.median(stored[-last:])),
        "publishSeconds": round(statistics.median(publish_s[-last:]), 2),
        "pullSeconds": round(statistics.median(pull_s[-last:]), 2),
        "loadSeconds": round(statistics.median(load_s[-last:]), 2),
    }


def plain_checkpoint(weights: dict[str, torch.Tensor], root: Path) -> tuple[int, float]:
    """(bytes, seconds) of the full BF16 checkpoint written by safetensors itself and loaded again; no checksums, no fsync."""
    path = root / "plain.safetensors"

    def write_and_load() -> None:
        safetensors.torch.save_file(weights, path)
        for tensor in safetensors.torch.load_file(path).values():
            tensor.clone()

    took_s = seconds(write_and_load)
    size = path.stat().st_size
    path.unlink()
    return size, took_s


# ---------------------------------------------------------------- throughput


def encode_all(view: str, tensors: dict[str, torch.Tensor]) -> None:
    """As a publisher does: what an engine folds together at a time."""
    for group in codecs.fusion_groups(tensors.items()):
        codecs.encode_group(view, group)


def throughput(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> dict[str, float]:
    """GB of BF16 per second and core: encoding each view, the delta, the checksum, and memcpy."""
    names = [name for name in after if ".layers.0." in name]
    group = {name: after[name] for name in names}
    size = sum(safetensors_io.nbytes(tensor) for tensor in group.values())
    rates: dict[str, float] = {}
    for view in STANDARD_VIEWS:
        rates[view] = size / GB / cpu_seconds(lambda view=view: encode_all(view, group))
    old = b"".join(safetensors_io.chunks({name: before[name] for name in names}))
    new = b"".join(safetensors_io.chunks(group))
    rates["delta"] = size / GB / cpu_seconds(lambda: delta.encode(old, new))
    source, target = np.frombuffer(new, np.uint8), np.empty(len(new), np.uint8)
    rates["memcpy"] = size / GB / cpu_seconds(lambda: np.copyto(target, source))
    return {name: round(rate, 2) for name, rate in rates.items()}


# ---------------------------------------------------------------- memory


def made_on_the_way(config: dict[str, Any], learning_rate: float, version: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a version, one at a time."""
    for index, (name, size) in enumerate(shapes_of(config).items()):
        master = torch.randn(size, generator=torch.Generator().manual_seed(index)).mul_(INITIAL_STD)
        if version:
            master.add_(
                torch.randn(size, generator=torch.Generator().manual_seed(1 << 20 | index)), alpha=learning_rate
            )
        yield name, master.to(torch.bfloat16)


def memory_mib(field: str) -> float:
    """VmHWM (the most so far) or VmRSS (now) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"{field}: not in /proc/self/status")


def peak_child(arguments: argparse.Namespace) -> None:
    """Prints by how many MiB publishing an anchor and a delta in every view raised this process's memory."""
    config = config_of(arguments.layers, arguments.experts)
    files = {"config.json": json.dumps(config).encode()}
    for _ in made_on_the_way(config, arguments.learning_rate, 1):
        pass  # what making the tensors takes is there before
    before_mib = memory_mib("VmHWM")
    with tempfile.TemporaryDirectory(prefix="motley-views-") as folder:
        policy = DeltaPolicy(Path(folder) / "cache")
        store = WeightStore(f"{folder}/store", "run", shard_bytes=PEAK_SHARD_BYTES, deltas=policy)
        for version in (0, 1):
            tensors = made_on_the_way(config, arguments.learning_rate, version)
            store.publish(version, tensors, model_dir_files=files, views=STANDARD_VIEWS).raise_for_failures()
    print(memory_mib("VmHWM") - before_mib)


def peak_mib(arguments: argparse.Namespace, layers: int) -> float:
    command = [sys.executable, __file__, "--child", "--layers", str(layers), "--experts", str(arguments.experts)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return round(float(done.stdout), 1)


# ---------------------------------------------------------------- the run


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    config = config_of(arguments.layers, arguments.experts)
    masters = Masters(config, arguments.learning_rate)
    weights, shares = [dict(masters.bf16)], []
    for _ in range(STEPS):
        shares.append(masters.step())
        weights.append(dict(masters.bf16))
    masters.masters.clear()
    rates = throughput(weights[0], weights[1])
    print("| view | whole MB | delta MB | ratio | publish whole / delta s | pull whole / delta s | load s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    views = {}
    with tempfile.TemporaryDirectory(prefix="motley-views-") as folder:
        root = Path(folder)
        plain_bytes, plain_s = plain_checkpoint(weights[0], root)
        for view in STANDARD_VIEWS:
            whole = versions(config, weights[:2], view, root / view / "whole", deltas=False)
            changes = versions(config, weights, view, root / view / "deltas", deltas=True)
            ratio = whole["bytes"] / changes["bytes"]
            views[view] = {"whole": whole, "delta": changes, "ratio": round(ratio, 1)}
            print(
                f"| {view} | {whole['bytes'] / MB:.1f} | {changes['bytes'] / MB:.2f} | {ratio:.0f} "
                f"| {whole['publishSeconds']} / {changes['publishSeconds']} "
                f"| {whole['pullSeconds']} / {changes['pullSeconds']} | {changes['loadSeconds']} |",
                flush=True,
            )
    memcpy = rates["memcpy"]
    print("\n| per core, CPU time | GB/s of BF16 | of memcpy |\n| --- | --- | --- |")
    for name, rate in rates.items():
        print(f"| {name} | {rate} | {rate / memcpy:.0%} |")
    return {
        "deltaBytesRatio": views["bf16"]["ratio"],
        "encodeGBPerSecond": {view: rates[view] for view in STANDARD_VIEWS},
        "peakMiB": peak_mib(arguments, arguments.layers),
        "peakMiBOfHalfTheLayers": peak_mib(arguments, max(1, arguments.layers // 2)),
        "shardMiB": PEAK_SHARD_BYTES // MIB,
        "deltaGBPerSecond": rates["delta"],
        "memcpyGBPerSecond": memcpy,
        "changedShare": round(statistics.mean(shares), 5),
        "bf16Bytes": plain_bytes,
        "plainCheckpointSeconds": round(plain_s, 2),
        "views": views,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=5e-7)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.child:
        peak_child(arguments)
        return
    print(json.dumps(run(arguments)))


if __name__ == "__main__":
    main()
