#!/usr/bin/env python3
"""Time a step with a direction per row (mezo_rows) in turns with two plain forwards of the model without a LoRA.

    pip install -e scripts/bench/directions
    python scripts/measure/measure_rows.py --shape roberta-large --ranks 1,8 --compute float32,bfloat16

The step is the whole one: draw, both signs, update. Its rival is two forwards of the same rows, with nothing perturbed.
"""

import argparse
import time
from pathlib import Path

import torch
from measure_storage import SHAPES, Steps, compare_seconds, config_of, make_folder

from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import Config


def rows_config(plain: Config, rank: int, rows: int) -> Config:
    """Return the config of a run with directions per row of the model of another."""
    words = ["task=sst2", "data=demo", "objective=mlm", "model=demo", "peft=fixed_lora", f"peft.r={rank}", "steps=100"]
    chosen = build_config([*words, "optimizer=mezo_rows", "optimizer.lr=1e-6", f"batch_size={rows}"])
    return plain.replace(peft=chosen.peft, optimizer=chosen.optimizer)


@torch.no_grad()
def two_forwards(work: Steps) -> float:
    """Return the seconds of two plain forwards, with the losses of the rows."""
    start = time.perf_counter()
    for _ in range(2):
        work.session.loss_of(work.rows)()
    return time.perf_counter() - start


def main() -> None:
    """Print a line per dtype and rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="roberta-large", choices=SHAPES)
    parser.add_argument("--ranks", default="1,8")
    parser.add_argument("--compute", default="float32,bfloat16")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--folder", type=Path, default=Path("outputs/storage"))
    args = parser.parse_args()
    folder = make_folder(args.folder, args.shape, "float32")
    for compute in args.compute.split(","):
        plain = Steps(config_of(folder, args.shape, "float32", compute, "none"), args.rows, args.tokens)
        ranks = list(map(int, args.ranks.split(",")))
        works = [Steps(rows_config(plain.session.config, rank, args.rows), args.rows, args.tokens) for rank in ranks]
        times = [[two_forwards(plain), *(work.step() for work in works)] for _ in range(args.rounds + 1)][1:]
        for number, rank in enumerate(ranks, 1):
            taken = [(of_round[0], of_round[number]) for of_round in times]
            what = f"{args.shape}, {args.rows} x {args.tokens}, {compute}, rank {rank}"
            print(f"{what}, {compare_seconds(('two forwards', 'step'), taken)}", flush=True)


if __name__ == "__main__":
    main()
