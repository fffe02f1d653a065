"""Measure the memory that `micro_batch_size` saves, in a step and in an evaluation.

    python scripts/measure_micro_batches.py
    python scripts/measure_micro_batches.py --rows 128x64 --sizes 128 32 8

Training steps and an evaluation of the same rows are measured in processes of their own, on a CPU, with random weights
of roberta-base's shape. Printed is by how much a process's memory grows at most (VmHWM less VmRSS before), after a step
of two short rows; the time; and the loss of the first step, or of the evaluation.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from process_memory import memory, reset_peak

STEPS = 2
KINDS = ("step", "evaluation")


def peak_of(work: Callable[[], object]) -> int:
    """Return by how many bytes the process's memory grows at most while it works."""
    reset_peak()
    before = memory("VmRSS")
    work()
    return memory("VmHWM") - before


def measure(model: str, spec: str, size: int, kind: str) -> None:
    """Measure one size, and print its line of the table."""
    import torch
    from measure_ranks import random_rows

    from mezo_cli.config.compose import build_config
    from mezo_cli.training.evaluation import evaluate
    from mezo_cli.training.setup import prepare

    rows, warm_up = (random_rows(one, 50_265) for one in (spec, "2x8"))
    words = [
        "data=demo",
        f"model.path={model}",
        "model.device=cpu",
        "optimizer.lr=1e-9",
        f"eval_batch_size={len(rows)}",
    ]
    smaller = [f"micro_batch_size={size}"] if size < len(rows) else []  # the whole batch as runs have it
    session = prepare(build_config([*words, *smaller]))
    losses = []

    def work() -> None:
        for number in range(STEPS):
            done = session.step(rows, number) if kind == "step" else evaluate(session, rows)
            losses.append(done.loss)

    with torch.no_grad():
        session.exclude_unreachable(warm_up[0])
        session.step(warm_up, 0)
        began = time.perf_counter()
        peak = peak_of(work)
    seconds = (time.perf_counter() - began) / STEPS
    print(f"{kind:10}  {size:4}  {peak / 1e6:7.0f} MB  {seconds:6.1f} s  {losses[0]:.7f}", flush=True)


def main() -> None:
    """Measure each size in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", default="64x128", help="rows of a batch and tokens of a row")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 16, 4], help="rows per forward")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        measure(args.one[0], args.rows, int(args.one[1]), args.one[2])
        return
    from measure_fsync import save_roberta_base

    with tempfile.TemporaryDirectory(prefix="measure_micro_batches") as folder:
        model = str(save_roberta_base(Path(folder) / "model"))
        print("            rows per forward", flush=True)
        for kind in args.kinds:
            for size in args.sizes:
                one = ["--one", model, str(size), kind]
                subprocess.run([sys.executable, __file__, "--rows", args.rows, *one], check=True)


if __name__ == "__main__":
    main()
