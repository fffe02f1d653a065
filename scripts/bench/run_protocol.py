#!/usr/bin/env python3
"""Run the protocol of docs/measurements/bench.md: every method tuned on its seeds, tested on others.

    python scripts/bench/run_protocol.py demo-reward --out bench_runs/demo-reward
    python scripts/bench/run_protocol.py sst2 --out bench_runs/sst2 data.dir=GLUE/SST-2

Each method is a folder of sweeps of `mezo train -m`; the command may be stopped at any time and repeated, and goes on.
Each method is tuned, then tested. Where the best lr of one is at an end of its grid, all get one more value at each
end, once, and are tested again where another lr is the best. What a bench runs at `every` lr of MeZO's grid is in
`OUT-every`. A method whose optimizer this version does not have is named, and left out.
"""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from mezo_cli.optim import OPTIMIZERS

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
    tune_seeds: Sequence[int]
    trials: int
    seeds: Sequence[int]

    def sweep(self, folder: Path, words: Sequence[str], rates: Sequence[float], seeds: Sequence[int]) -> bool:
        """Run what is left of the runs with these learning rates and seeds; return whether all have ended."""
        if not _ended(folder, len(rates) * len(seeds)):
            grid = [f"optimizer.lr={','.join(f'{rate:.3g}' for rate in rates)}", f"seed={','.join(map(str, seeds))}"]
            command = [f"experiment={self.experiment}", *self.words, *words, *grid, f"hydra.sweep.dir={folder}"]
            print(folder, *command[1:-1], flush=True)
            subprocess.run([sys.executable, "-m", "mezo_cli", "train", "-m", "-q", *command], check=False)
        return _ended(folder, len(rates) * len(seeds))

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


def _ended(folder: Path, number: int) -> bool:
    records = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*/run.json")]
    return sum(record["status"] in ("finished", "failed") for record in records) >= number


def best_rate(folder: Path) -> tuple[float, bool] | None:
    """Return the lr with the best mean score on dev over a method's tuning runs, and whether it is at an end.

    Of equal scores the lower dev loss counts, then the smaller lr. A lr of which a run failed is not chosen. Where no
    run picked a step after the first there is no end to go beyond.
    """
    results, failed, gains = defaultdict(list), set(), False
    for path in folder.glob("tune*/*/run.json"):
        rate = yaml.safe_load(path.with_name("config.yaml").read_text(encoding="utf-8"))["optimizer"]["lr"]
        if not path.with_name("summary.json").is_file():
            failed.add(rate)
            continue
        summary = json.loads(path.with_name("summary.json").read_text(encoding="utf-8"))
        metric = next(name for name in summary["best"] if name not in ("step", "loss"))
        results[rate].append((-summary["dev"][metric], summary["dev"]["loss"]))
        gains = gains or summary["best"]["step"] > 0
    means = {
        rate: tuple(sum(column) / len(column) for column in zip(*rows, strict=True))
        for rate, rows in results.items()
        if rate not in failed
    }
    if not means:
        return None
    best = min(means, key=lambda rate: (*means[rate], rate))
    return best, gains and best in (min({*results, *failed}), max({*results, *failed}))


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
    parser = argparse.ArgumentParser(description="Run the protocol of docs/measurements/bench.md.")
    parser.add_argument("bench", choices=yaml.safe_load(PROTOCOL.read_text(encoding="utf-8")))
    parser.add_argument("--out", type=Path, required=True, help="A folder for all runs.")
    parser.add_argument("--methods", default="", help="Only these, separated by commas.")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="Overrides for every run.")
    args = parser.parse_intermixed_args()
    plan = yaml.safe_load(PROTOCOL.read_text(encoding="utf-8"))[args.bench]
    runs = plan["tune_seeds"], plan["trials"], plan["seeds"]
    bench = Bench(args.out.absolute(), plan["experiment"], args.words, *runs)
    chosen = list(methods(plan, args.methods.split(",") if args.methods else ()))
    every = plan.get("every", {"methods": [], "seeds": []})
    for number, (name, middle, words) in enumerate(chosen):
        if bench.sweep(bench.out / name / "tune", words, grid(middle, bench.trials), bench.tune_seeds):
            bench.test(name, words)
        for optimizer in every["methods"] if number == 0 else ():  # beside MeZO, the first
            folder = bench.out.with_name(f"{bench.out.name}-every") / optimizer
            bench.sweep(folder / "grid", [f"optimizer={optimizer}"], grid(middle, bench.trials), every["seeds"])
    if any(bench.is_at_end(name) for name, _, _ in chosen) or any(bench.out.glob("*/tune-wider")):
        for name, middle, words in chosen:
            wider = grid(middle, bench.trials + 2)
            if bench.sweep(bench.out / name / "tune-wider", words, [wider[0], wider[-1]], bench.tune_seeds):
                bench.test(name, words, even_at_end=True)


if __name__ == "__main__":
    main()
