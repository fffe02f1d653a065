#!/usr/bin/env python3
"""Run the protocol of docs/bench.md: every method tuned on one seed, then tested on five others at its best lr.

    python scripts/bench/run_protocol.py demo-reward --out bench_runs/demo-reward
    python scripts/bench/run_protocol.py sst2 --out bench_runs/sst2 data.dir=GLUE/SST-2

Each method is a folder of sweeps of `mezo train -m`; the command may be stopped at any time and repeated, and goes on.
Each method is tuned, then tested. Where the best lr of one is at an end of its grid, all get one more value at each
end, once, and are tested again where another lr is the best. A method whose optimizer this version does not have is
named, and left out.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from compare_methods import Method

from mezo_cli.optim import OPTIMIZERS
from mezo_cli.report.aggregate import group_runs
from mezo_cli.report.read import read_runs
from mezo_cli.runs import find_runs

PROTOCOL = Path(__file__).with_name("protocol.yaml")
FACTOR = 3.0  # between neighbours of a grid


@dataclass(frozen=True)
class Bench:
    """What is run: the overrides of all runs, their seeds, and where.

    Attributes:
        trials: values of lr in a grid.
    """

    out: Path
    experiment: str
    words: Sequence[str]
    tune_seed: int
    trials: int
    seeds: Sequence[int]

    def sweep(self, folder: Path, words: Sequence[str], rates: Sequence[float], seeds: Sequence[int]) -> bool:
        """Run what is left of the runs with these learning rates and seeds; return whether all have ended."""
        if not self._ended(folder, len(rates) * len(seeds)):
            grid = [f"optimizer.lr={','.join(f'{rate:.3g}' for rate in rates)}", f"seed={','.join(map(str, seeds))}"]
            command = [f"experiment={self.experiment}", *words, *self.words, *grid, f"hydra.sweep.dir={folder}"]
            print(folder, *command[1:-1], flush=True)
            subprocess.run([sys.executable, "-m", "mezo_cli", "train", "-m", "-q", *command], check=False)
        return self._ended(folder, len(rates) * len(seeds))

    def _ended(self, folder: Path, number: int) -> bool:
        runs = find_runs(folder) if folder.is_dir() else []
        return sum(run.status() in ("finished", "failed") for run in runs) >= number

    def is_at_end(self, name: str) -> bool:
        """Return whether a method's best lr is at an end of its grid."""
        best = best_rate(self.out / name)
        return best is not None and best[1]

    def test(self, name: str, words: Sequence[str], even_at_end: bool = False) -> None:
        """Run what is left of a method's tests at its best lr, unless its grid is to be extended first."""
        best = best_rate(self.out / name)
        if best is not None and (even_at_end or not best[1]):
            self.sweep(self.out / name / f"test-{best[0]:.3g}", words, [best[0]], self.seeds)


def grid(middle: float, trials: int) -> list[float]:
    """Return the learning rates of a grid around its middle."""
    return [middle * FACTOR ** (number - trials // 2) for number in range(trials)]


def best_rate(folder: Path) -> tuple[float, bool] | None:
    """Return the lr that compare_methods.py chooses of a method's tuning runs, and whether it is at an end."""
    tuned = sorted(path for path in folder.glob("tune*") if path.is_dir())
    groups = group_runs(read_runs(tuned)[0]) if tuned else []
    method = Method(groups[0]) if groups else None
    return None if method is None or method.lr is None else (method.lr, method.at_end)


def methods(bench: Mapping[str, object], only: Sequence[str]) -> Iterator[tuple[str, float, list[str]]]:
    """Yield name, middle lr and overrides of each method that this version has."""
    table = bench["methods"]
    assert isinstance(table, dict)
    for name, method in table.items():
        optimizer = method["with"][0].removeprefix("optimizer=")
        if only and name not in only:
            continue
        if optimizer in OPTIMIZERS.names:
            yield name, float(method["lr"]), method["with"]
        else:
            print(f"{name}: not run: this version has no optimizer={optimizer}", flush=True)


def main() -> None:
    """Tune, extend, test."""
    parser = argparse.ArgumentParser(description="Run the protocol of docs/bench.md.")
    parser.add_argument("bench", choices=yaml.safe_load(PROTOCOL.read_text(encoding="utf-8")))
    parser.add_argument("--out", type=Path, required=True, help="A folder for all runs.")
    parser.add_argument("--methods", default="", help="Only these, separated by commas.")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="Overrides for every run.")
    args = parser.parse_intermixed_args()
    plan = yaml.safe_load(PROTOCOL.read_text(encoding="utf-8"))[args.bench]
    bench = Bench(args.out.absolute(), plan["experiment"], args.words, plan["tune_seed"], plan["trials"], plan["seeds"])
    chosen = list(methods(plan, args.methods.split(",") if args.methods else ()))
    for name, middle, words in chosen:
        if bench.sweep(bench.out / name / "tune", words, grid(middle, bench.trials), [bench.tune_seed]):
            bench.test(name, words)
    if any(bench.is_at_end(name) for name, _, _ in chosen) or any(bench.out.glob("*/tune-wider")):
        for name, middle, words in chosen:
            wider = grid(middle, bench.trials + 2)
            if bench.sweep(bench.out / name / "tune-wider", words, [wider[0], wider[-1]], [bench.tune_seed]):
                bench.test(name, words, even_at_end=True)


if __name__ == "__main__":
    main()
