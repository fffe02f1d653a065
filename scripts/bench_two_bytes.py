"""Time the update of a step of one term with theta in two bytes, against float32.

    OMP_NUM_THREADS=1 python scripts/bench_two_bytes.py
    OMP_NUM_THREADS=1 python scripts/bench_two_bytes.py --apart     rounding in a pass of its own, as before 0.2.0

Prints a Markdown table. The dtypes take turns. The times are the least of the rounds, in processor time: other work on
the machine changes it little.
"""

import argparse
import time

import torch
from torch import nn

from mezo_cli.perturb.noise import Direction, make_noise
from mezo_cli.perturb.params import Params


def main() -> None:
    """Time the updates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--layers", type=int, default=6, help="linear layers of a million elements")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="the first is what others are compared with")
    parser.add_argument("--apart", action="store_true", help="round in a pass of its own")
    args = parser.parse_args()
    print("| noise | dtype | ns per element | / the first |\n|---|---|---|---|", flush=True)
    for kind in ("gaussian", "rademacher"):
        works = {}
        for name in args.dtypes.split(","):
            model = nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(args.layers))).to(getattr(torch, name))
            works[name] = Params(model, make_noise(kind))
            works[name].fuses = not args.apart
        times: dict[str, list[float]] = {name: [] for name in works}
        for step in range(args.rounds + 1):  # the first compiles
            for name, params in works.items():
                start = time.process_time()
                params.update([(Direction(1, step), 1e-3)], [1.0])
                times[name] += [time.process_time() - start] if step else []
        first = min(next(iter(times.values())))
        for name, seconds in times.items():
            nanoseconds = min(seconds) / works[name].count * 1e9
            print(f"| {kind} | {name} | {nanoseconds:.2f} | {min(seconds) / first:.2f} |", flush=True)


if __name__ == "__main__":
    main()
