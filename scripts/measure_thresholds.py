"""Measure what a threshold on the zero-shot scores gives, without training: a baseline for a task of two labels.

    python scripts/measure_thresholds.py experiment=demo
    python scripts/measure_thresholds.py experiment=demo-fewshot data.dir=GLUE/SST-2 seed=13
    python scripts/measure_thresholds.py experiment=demo-sst2 data.dir=GLUE/SST-2 data.shots=null --train 1000

The score of a row is the logit of the second label minus that of the first. For dev and test it prints the accuracy
at threshold 0 (zero-shot), at the median of the split's own scores (no labels, but the whole split and its balance),
and at the threshold that is best on `--train` rows of train (all by default, else drawn by the seed), and the AUC.
"""

import argparse

import numpy as np
import torch
from numpy.typing import NDArray

from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import Example
from mezo_cli.data import load_splits
from mezo_cli.diagnosis.separation import auc
from mezo_cli.training.baselines import best_threshold
from mezo_cli.training.setup import Session, prepare


@torch.inference_mode()
def scores(session: Session, rows: list[Example]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the scores and the labels of rows, each of shape [rows]."""
    encoded = session.encoder.encode_all(rows)
    size = session.config.eval_batch_size
    found = []
    for start in range(0, len(encoded), size):
        logits = session.objective.logits(session.batch(encoded[start : start + size]))
        found.append((logits[:, 1] - logits[:, 0]).double().numpy())
    return np.concatenate(found), np.array([row.label for row in rows])


def accuracy(found: NDArray[np.float64], labels: NDArray[np.int64], threshold: float) -> float:
    """Return the share of rows whose label is 1 where the score is above the threshold, and 0 elsewhere."""
    return float(np.mean((found > threshold) == labels))


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--train", type=int, help="rows of train that the threshold is chosen on (default: all)")
    parser.add_argument("overrides", nargs="*", help="settings as for `mezo train`")
    args = parser.parse_intermixed_args()
    config = build_config([*args.overrides, "model.device=cpu"])
    if len(config.task.labels) != 2:
        parser.error(f"task '{config.task.name}' has {len(config.task.labels)} labels; a threshold needs two")
    session, splits = prepare(config), load_splits(config)
    chosen = np.random.default_rng(config.seed).permutation(len(splits.train))[: args.train]
    threshold = best_threshold(*scores(session, [splits.train[i] for i in chosen]))
    print(
        f"{config.model.path}, {config.task.template}; the best threshold on {len(chosen)} train rows: {threshold:.2f}"
    )
    print(
        "| split | rows | zero-shot | at the median | at the best threshold on train | AUC |\n|---|---|---|---|---|---|"
    )
    for name, rows in (("dev", splits.dev), ("test", splits.test)):
        if rows:
            found, labels = scores(session, list(rows))
            points = (accuracy(found, labels, at) for at in (0.0, float(np.median(found)), threshold))
            cells = " | ".join(f"{100 * point:.1f}" for point in points)
            print(f"| {name} | {len(rows)} | {cells} | {auc(found, labels == 1):.3f} |", flush=True)


if __name__ == "__main__":
    main()
