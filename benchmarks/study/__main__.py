"""`python -m benchmarks.study`: runs what is not there yet, one arm and seed after the other, then writes table and plots.

The last line of the output is JSON. See the package's docstring.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [
    str(ROOT / part)
    for part in (".", "api", "weights", "operator", "sampler", "trainer", "local", "examples/demo")
    if str(ROOT / part) not in sys.path
]
os.environ.setdefault("OMP_NUM_THREADS", "1")

from motley_api.records import StepRecord  # noqa: E402

from benchmarks.study import ledger, report  # noqa: E402
from benchmarks.study.plan import Arm, Settings, arms  # noqa: E402
from benchmarks.study.summary import mean, to_csv  # noqa: E402

MODEL = ROOT / "examples/demo/model"
PROGRESS_EVERY_STEPS = 12


def main() -> None:
    names = list(arms(Settings()))
    parser = argparse.ArgumentParser(prog="python -m benchmarks.study", description=__doc__)
    parser.add_argument("--arm", default="", help=f"comma-separated, of {', '.join(names)}; default: all")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated (default: 0,1,2)")
    usual = Settings()
    parser.add_argument("--steps", type=int, default=usual.steps, help=f"of every arm (default: {usual.steps})")
    parser.add_argument("--learning-rate", default=usual.learning_rate, help=f"(default: {usual.learning_rate})")
    parser.add_argument("--out", help="ledgers (default: build/study, or build/study-STEPS-RATE for other settings)")
    parser.add_argument("--docs", help="where study.md, plots and CSVs go; '': nowhere (default: report, under --out)")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps: must be >= 1, got {args.steps}")
    settings = Settings(steps=args.steps, learning_rate=args.learning_rate)
    known = arms(settings)
    chosen = [name for name in args.arm.split(",") if name] or names
    if unknown := [name for name in chosen if name not in known]:
        parser.error(f"--arm: must be among {', '.join(known)}, got {', '.join(unknown)}")
    if not all(seed.isdecimal() for seed in args.seeds.split(",")):
        parser.error(f"--seeds: must be whole numbers with commas between them, got {args.seeds!r}")
    seeds = [int(seed) for seed in args.seeds.split(",")]
    suffix = "" if settings == usual else f"-{settings.steps}-{settings.learning_rate}"
    out = Path(args.out) if args.out else ROOT / f"build/study{suffix}"
    out.mkdir(parents=True, exist_ok=True)
    for seed in seeds:  # seed by seed, so that an interrupted study has whole rows to compare
        for name in chosen:
            run_once(known[name], seed, settings, out)
    runs = report.load(out, known, seeds)
    if args.docs != "":
        report.write(runs, Path(args.docs) if args.docs else out / "report")
    print(json.dumps(report.result(runs)), flush=True)


def run_once(arm: Arm, seed: int, settings: Settings, out: Path) -> None:
    """Skips what is there: a ledger gets its name when its last step is done."""
    path = out / f"{arm.name}-s{seed}.jsonl"
    if path.exists():
        return
    from benchmarks.study.loop import run  # heavy: a report alone needs neither torch nor Megatron

    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    started = time.process_time()

    def on_step(record: StepRecord) -> None:
        ledger.append(partial, record)
        if record.step % PROGRESS_EVERY_STEPS == 0 or record.step == settings.steps:
            print(
                f"arm={arm.name} seed={seed} step={record.step}/{settings.steps} reward={mean(record.reward):.2f}"
                f" kl={mean(record.kl):.4f} gradNorm={record.grad_norm:.2f} cpuSeconds={time.process_time() - started:.0f}",
                flush=True,
            )

    run(arm, seed, settings, MODEL, on_step=on_step)
    partial.rename(path)
    path.with_suffix(".csv").write_text(to_csv(ledger.read(path)))


if __name__ == "__main__":
    main()
