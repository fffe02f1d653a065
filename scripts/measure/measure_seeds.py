#!/usr/bin/env python3
"""Print the mean and the 95% t interval over the seeds of a sweep, in percent: best dev, and test at that checkpoint.

    python scripts/measure/measure_seeds.py SWEEP ... [--metric reward]

The runs of all folders are taken together. A folder is one that `mezo train -m ... seed=...` wrote.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from scipy import stats


def interval(values: list[float]) -> str:
    """Return the mean and half the width of the interval of Student's t."""
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    return f"{np.mean(values):.1f} +- {half:.1f}"


def main() -> None:
    """Read the summaries and print one line per split."""
    parser = argparse.ArgumentParser(description="Print mean and t interval over the seeds of a sweep.")
    parser.add_argument("sweeps", type=Path, nargs="+")
    parser.add_argument("--metric", default="reward")
    args = parser.parse_args()
    paths = sorted(path for folder in args.sweeps for path in folder.glob("*/summary.json"))
    summaries = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    if len(summaries) < 2:
        parser.error("two finished runs or more are needed")
    for split in ("dev", "test"):
        values = [100 * summary[split][args.metric] for summary in summaries]
        print(f"{split:4}  {interval(values)}  of {len(values)}:", " ".join(f"{value:.1f}" for value in values))


if __name__ == "__main__":
    main()
