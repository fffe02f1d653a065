"""Simulate 8 to 1,000 workers that share one run, from what two ranks have been measured to take.

    python scripts/measure_ranks.py --out docs/ranks.json
    python scripts/simulate_workers.py docs/ranks.json

Every worker computes its share of the forwards of a step, waits for the slowest, exchanges, and updates its weights.
The time of a whole step is drawn from the measured ones, for each worker and step anew, and divided into forwards and
the rest, which every worker does in full. An exchange costs the measured time per other worker: each worker sends its
scalars to every other (`--latency` sets another time, e.g. of a network).

Printed is how many times as fast as one worker the workers are, and the part of their time that is not lost. What it
leaves out: hosts that differ, a network that is shared, evaluations, checkpoints.
"""

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

WORKERS = (1, 8, 16, 64, 256, 1000)
STEPS = 200


def update_part(alone: Sequence[float], shared: Sequence[float], ranks: int = 2) -> float:
    """Return the part of a step that ranks do not share, from `shared = alone (part + (1 - part) / ranks)`."""
    ratio = statistics.median(shared) / statistics.median(alone)
    return min(max((ratio - 1 / ranks) / (1 - 1 / ranks), 0.0), 1.0)


def simulate(
    alone: Sequence[float], part: float, latency: float, workers: int, things: int, steps: int, seed: int = 0
) -> float:
    """Return the mean seconds of a step of `workers` that share `things` (rows or directions) of the same cost.

    Args:
        alone: measured seconds of a step that one process does by itself.
        part: the part of it that is not shared.
        latency: seconds that an exchange takes per other worker.
        workers: their number; those above `things` have none to compute.
        things: how many rows or directions a step has.
        steps: how many steps are simulated.
        seed: of the draws.
    """
    draw, total = random.Random(seed), 0.0
    most = -(-things // workers)  # of one worker: the slowest has at least so many
    for _ in range(steps):
        slowest = max(draw.choice(alone) for _ in range(workers))
        total += slowest * ((1 - part) * most / things + part) + latency * (workers - 1)
    return total / steps


def table(measured: dict[str, object], latency: float, steps: int) -> list[str]:
    """Return the lines of a Markdown table: workers, and for each way of sharing the speed and the efficiency."""
    lines = [
        "| workers | 64 rows | 1,024 rows | 1,000 directions |",
        "|---|---|---|---|",
    ]
    cases = [("rows", 64, 1), ("rows", 1024, 16), ("directions", 1000, 500)]
    for workers in WORKERS:
        cells = []
        for split, things, times in cases:
            one = measured[split]
            assert isinstance(one, dict)
            part = update_part(one["alone"], one["shared"])
            # With `times` as many, the forwards take as many times longer; so does the update of directions.
            alone = [
                seconds * ((1 - part) * times + part * (times if split == "directions" else 1))
                for seconds in one["alone"]
            ]
            rest = part if split == "directions" else part / ((1 - part) * times + part)
            took = simulate(alone, rest, latency, workers, things, steps)
            speed = statistics.mean(alone) / took
            cells.append(f"{speed:.1f} times ({speed / workers:.0%})")
        lines.append(f"| {workers:,} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("measured", type=Path, help="the file of measure_ranks.py --out")
    parser.add_argument(
        "--latency", type=float, help="seconds of an exchange per other worker, in place of the measured"
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    measured = json.loads(args.measured.read_text())
    latency = measured["exchange"] if args.latency is None else args.latency
    print("\n".join(table(measured, latency, args.steps)))


if __name__ == "__main__":
    main()
