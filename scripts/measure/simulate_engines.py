#!/usr/bin/env python3
"""Simulate the steps of a population on 1 to 1,000 engines, from measured times.

    python scripts/measure/simulate_engines.py --seconds 1:0.6 4:2.1 16:1.0 --members 1000

`--seconds M:S` are measured times of a call for M members (measure_engine_generation.py); between them the time is
interpolated, beyond the last one calls follow each other. Each engine draws its time around that, log-normal with the
given spread; a step ends with the slowest one, then the exchange of the rewards (a latency per rank), the shaping and
the update, which every rank computes. Nothing else is simulated: no failures, and no engine slower than the others.
"""

import argparse
import math

import numpy as np


def call_seconds(measured: dict[int, float], members: int) -> float:
    """Return the time of the calls for some members of a step on one engine."""
    most = max(measured)
    whole, rest = divmod(members, most)
    return whole * measured[most] + (float(np.interp(rest, [0, *measured], [0.0, *measured.values()])) if rest else 0.0)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", nargs="+", required=True, metavar="M:S")
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument(
        "--spread", type=float, default=0.1, help="standard deviation of the logarithm of a call's time"
    )
    parser.add_argument("--exchange", type=float, default=2e-4, help="seconds per rank")
    parser.add_argument("--update", type=float, default=1e-4, help="seconds per member, of the update")
    parser.add_argument("--steps", type=int, default=2000)
    given = parser.parse_args()
    pairs = (text.split(":") for text in given.seconds)
    measured = dict(sorted((int(m), float(s)) for m, s in pairs))
    draw = np.random.default_rng(0)
    print(f"{'engines':>8}{'members each':>14}{'step, s':>10}{'faster':>9}{'efficiency':>12}")
    alone = 0.0
    for engines in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000):
        each = math.ceil(given.members / engines)
        busy = math.ceil(given.members / each)
        times = call_seconds(measured, each) * draw.lognormal(0.0, given.spread, (given.steps, busy))
        step = float(times.max(axis=1).mean()) + given.exchange * engines + given.update * given.members
        alone = alone or step
        print(f"{engines:8}{each:14}{step:10.3f}{alone / step:9.1f}{alone / step / engines:12.2f}")


if __name__ == "__main__":
    main()
