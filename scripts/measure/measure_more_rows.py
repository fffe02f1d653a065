#!/usr/bin/env python3
"""Compare runs with a threshold on the untrained scores, on rows of train that neither their training nor dev used.

    python scripts/measure/measure_more_rows.py SWEEP --rows 10000

SWEEP has one run per seed, of a task with two labels. A test set of 872 rows resolves some two points of accuracy; the
rest of train has more rows. The thresholds are those of summary.json's `baselines`: on the untrained scores of each
run's own train rows, `label_shares` and `best_threshold`. The rows are the same for all runs: none has the text of a
row that one of them trained on or had in dev. Printed: per run the accuracies, and over the runs the mean difference to
each baseline with its 95% t interval. The differences of a run are paired: both are measured on the same rows.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from scipy import stats

from mezo_cli.config.schema import Config, Example
from mezo_cli.data import load_splits
from mezo_cli.data.sources import open_source
from mezo_cli.objectives.scoring import remove_bias
from mezo_cli.report.frame import Entry, read_runs
from mezo_cli.training.restore import find_step, load_step


def unused_rows(configs: Sequence[Config], count: int) -> list[Example]:
    """Return `count` rows of train, drawn at random, none of which a run has trained on or evaluated on dev.

    Raises:
        SystemExit: when so many are not left.
    """
    used: set[tuple[str, ...]] = set()
    for config in configs:
        splits = load_splits(config)
        used |= {row.texts for row in (*splits.train, *splits.dev, *(splits.test or []))}
    source = open_source(configs[0].data_task, configs[0].data).train
    rows = [row for row in source.examples() if row.texts not in used]
    if len(rows) < count:
        raise SystemExit(f"error: --rows {count}: {len(rows)} rows of {source.table.path} are left")
    return [rows[i] for i in np.random.default_rng(0).permutation(len(rows))[:count]]


def accuracies(entry: Entry, rows: Sequence[Example]) -> dict[str, float]:
    """Return the accuracies of a run's best checkpoint and of the untrained model, without and with its thresholds."""
    config, labels = entry.config, np.array([row.label for row in rows])
    trained = load_step(config, entry.run, find_step(config, entry.run, "best"))
    result = {"trained": trained.objective.evaluate(trained.encoder.encode_all(rows)).values}
    session, train = load_step(config, entry.run, 0), load_splits(config).train
    untrained = session.objective.evaluate(session.encoder.encode_all(rows)).values
    before = session.objective.evaluate(session.encoder.encode_all(train)).values
    result["untrained"] = untrained
    for name, bias in remove_bias(before.numpy(), np.array([row.label for row in train])).items():
        result[name] = untrained.double() + torch.from_numpy(bias)
    return {name: 100 * float((scores.argmax(1).numpy() == labels).mean()) for name, scores in result.items()}


def main() -> None:
    """Read the runs, evaluate, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sweeps", type=Path, nargs="+", help="folders with runs")
    parser.add_argument("--rows", type=int, default=10000)
    args = parser.parse_args()
    entries = read_runs(args.sweeps)[0]
    rows = unused_rows([entry.config for entry in entries], args.rows)
    print(f"{len(rows)} rows of train")
    table: list[dict[str, float]] = []
    with torch.no_grad():
        for entry in entries:
            table.append(accuracies(entry, rows))
            print(f"{entry.run.path}:", *(f"{name} {value:.2f}" for name, value in table[-1].items()), flush=True)
    half = stats.t.ppf(0.975, len(table) - 1) / len(table) ** 0.5 if len(table) > 1 else float("nan")
    for name in table[0]:
        if name != "trained":
            differences = [row["trained"] - row[name] for row in table]
            spread = np.std(differences, ddof=1) if len(table) > 1 else float("nan")
            print(f"trained - {name}: {np.mean(differences):+.2f} +- {half * spread:.2f}")


if __name__ == "__main__":
    main()
