#!/usr/bin/env python3
"""Compare methods by the dev loss after the last step and by test, each to MeZO and to a LoRA (docs/bench.md).

    python scripts/bench/compare_last.py bench_runs/directions-sst2

Of a folder of run_protocol.py whose bench has `by_last_loss`. Differences are paired by seed, with 95% t intervals. A
run of 0 steps in its folder `untrained` has a row too.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from compare_methods import half_width
from run_protocol import best_rate
from sklearn.metrics import roc_auc_score

from mezo_cli.report.frame import Entry, read_runs

RIVALS = ("mezo", "lora")
Scores = Mapping[int, Mapping[str, float]]  # of each seed


def scores_of(entry: Entry) -> dict[str, float]:
    """Return the dev loss after the last step, the test loss, and of labels the area under the ROC curve on test."""
    scores = {"dev loss, last": float(entry.dev[-1]["loss"]), "test loss": float(entry.score("test", "loss") or "nan")}
    rows = entry.run.predictions() or []
    if rows and "probabilities" in rows[0]:
        name = list(rows[0]["probabilities"])[1]
        labels = [row["label"] == name for row in rows]
        scores["test AUC"] = float(roc_auc_score(labels, [row["probabilities"][name] for row in rows]))
    return scores


def tests(folder: Path, in_seconds: bool) -> dict[int, dict[str, float]]:
    """Return the scores of each test seed of a method at its best lr: in MeZO's forwards, or in MeZO's seconds."""
    best = best_rate(folder, by_last_loss=True)
    if best is None:
        return {}
    scaled = folder / f"seconds-{best[0]:.3g}"
    return scores_in(scaled if in_seconds and scaled.is_dir() else folder / f"test-{best[0]:.3g}")


def scores_in(folder: Path) -> dict[int, dict[str, float]]:
    """Return the scores of the finished runs in a folder, by seed."""
    entries, left_out = read_runs([folder])
    for line in left_out:
        print(line, file=sys.stderr)
    return {entry.data_seed: scores_of(entry) for entry in entries if entry.finished}


def mean(values: list[float], sign: str = "") -> str:
    """Return the mean of values, with half of its 95% interval."""
    half = half_width(values)
    return f"{np.mean(values):{sign}.4f}" + (f" ± {half:.4f}" if half is not None else "")


def main() -> None:
    """Print a table per score."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", action="store_true", help="Compare in equal seconds, not in equal forwards.")
    args = parser.parse_args()
    folder = args.folder
    known = {path.parent.name: tests(path.parent, args.seconds) for path in sorted(folder.glob("*/tune"))}
    if (folder / "untrained").is_dir():
        known["untrained"] = scores_in(folder / "untrained")
    for name in dict.fromkeys(name for runs in known.values() for scores in runs.values() for name in scores):
        print(f"\n| method | lr | seeds | {name} |" + "".join(f" vs {rival} |" for rival in RIVALS))
        print("|---|---|---|---|" + "---|" * len(RIVALS))
        for method, runs in known.items():
            rate, at_end = best_rate(folder / method, by_last_loss=True) or (float("nan"), False)
            cells = [method, f"{rate:.3g}" + " (at an end)" * at_end, str(len(runs))]
            cells.append(mean([scores[name] for scores in runs.values()]) if runs else "")
            cells += [_difference(runs, known.get(rival, {}), name) if rival != method else "" for rival in RIVALS]
            print(f"| {' | '.join(cells)} |")


def _difference(runs: Scores, others: Scores, name: str) -> str:
    seeds = [seed for seed in runs if seed in others]
    return mean([runs[seed][name] - others[seed][name] for seed in seeds], "+") if seeds else ""


if __name__ == "__main__":
    main()
