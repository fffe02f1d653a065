#!/usr/bin/env python3
"""Time a step of each method of a bench in turns, on batches of train: how many steps each takes in equal seconds.

    export OMP_NUM_THREADS=1
    python scripts/bench/time_methods.py directions-sst2 data.dir=GLUE/SST-2 model.compute_dtype=bfloat16

CPU seconds of the process, with one thread. The last column: the forwards of the method in the seconds of MeZO's.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import yaml
from run_protocol import PROTOCOL, methods

from mezo_cli.config.compose import build_config
from mezo_cli.data import load_splits
from mezo_cli.data.batch_sampler import make_sampler
from mezo_cli.training.prepare import load_session


def steps_of(words: list[str]) -> tuple[int, Callable[[int], float]]:
    """Return a run's number of forwards, and a function that takes a step and returns its seconds."""
    config = build_config(words)
    session, train = load_session(config), load_splits(config).train
    rows = session.encoder.encode_all(train)
    session.exclude_unreachable(rows[0])
    sampler = make_sampler(config, train)

    def step(number: int) -> float:
        batch = [rows[i] for i in sampler.batch(number)]
        start = time.process_time()
        with torch.no_grad():
            session.step(batch, number)
        return time.process_time() - start

    return int(config.forwards or 0), step


def main() -> None:
    """Print a line per method."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bench", choices=yaml.safe_load(PROTOCOL.read_text(encoding="utf-8")))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="Overrides for every run.")
    args = parser.parse_intermixed_args()
    plan = yaml.safe_load(PROTOCOL.read_text(encoding="utf-8"))[args.bench]
    common = [f"experiment={plan['experiment']}", *plan.get("words", ()), *args.words]
    works = {}
    for name, lr, words in methods(plan, ()):
        timed = [word for word in words if not word.startswith("peft.basis=")]  # a random A takes the same time
        works[name] = steps_of([*common, *timed, f"optimizer.lr={lr}"])
    times = [{name: step(number) for name, (_, step) in works.items()} for number in range(args.rounds + 5)][5:]
    print("| method | seconds per step | of MeZO's | forwards in equal seconds |\n|---|---|---|---|")
    for name, (forwards, _) in works.items():
        ratio = statistics.median(of_round[name] / of_round["mezo"] for of_round in times)
        seconds = statistics.median(of_round[name] for of_round in times)
        print(f"| {name} | {seconds:.4f} | {ratio:.3f} | {2 * round(forwards / ratio / 2)} |")


if __name__ == "__main__":
    main()
