"""Compare the trained model with the untrained one on the same rows: intervals, paired differences, baselines.

What `summary.json` says about a result besides the result (docs/compare.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mezo_cli.config.schema import Config
from mezo_cli.objectives import LOSSES
from mezo_cli.training.baselines import remove_bias
from mezo_cli.training.evaluation import Evaluation, assess
from mezo_cli.training.intervals import Interval, Score, paired_difference, percentile, resample, wilson


@dataclass(frozen=True)
class ScoredRows:
    """The label scores of a split.

    Attributes:
        labels: [rows].
        after: by the model of the best step, [rows, labels].
        before: by the untrained model, [rows, labels]; None if they were not computed.
    """

    labels: Tensor
    after: Tensor
    before: Tensor | None = None


def compare(config: Config, splits: Mapping[str, ScoredRows]) -> dict[str, Any]:
    """Return `intervals` (of dev and test), `difference`, `test_before` and `baselines`, for summary.json.

    A run without steps has nothing to compare: its result is that of the untrained model, and gives the baselines.

    Args:
        config: of the run.
        splits: `train`, whose rows the bias is fitted on, `dev`, and `test` if there is one.
    """
    evaluated = {name: rows for name, rows in splits.items() if name != "train"}
    described = {name: _describe(config, rows) for name, rows in evaluated.items()}
    found: dict[str, Any] = {"intervals": {name: fields["after"] for name, fields in described.items()}}
    if splits["train"].before is None:
        return found
    if config.steps:
        found["difference"] = {name: fields["difference"] for name, fields in described.items()}
        if "test" in evaluated:
            found["test_before"] = described["test"]["before"]
    found["baselines"] = _baselines(config, splits["train"], evaluated)
    return found


# --- intervals and differences ---


def _describe(config: Config, rows: ScoredRows) -> dict[str, Any]:
    """Return the intervals `after`; and, with scores before training, the scores `before` and the `difference`."""
    scores = {"after": rows.after} | ({} if rows.before is None else {"before": rows.before})
    results = {when: assess(config, logits, rows.labels) for when, logits in scores.items()}
    right = {when: (logits.argmax(dim=-1) == rows.labels).numpy() for when, logits in scores.items()}
    drawn = {when: resample(_scores(config, logits, rows.labels), len(rows.labels)) for when, logits in scores.items()}
    intervals = {when: _intervals(right[when], drawn[when]) for when in scores}
    if rows.before is None:
        return {"after": intervals["after"]}
    after, before = results["after"].scores(), results["before"].scores()
    both: dict[str, Interval] = {"accuracy": paired_difference(right["before"], right["after"])}
    both |= {name: percentile(drawn["after"][name] - drawn["before"][name]) for name in drawn["after"]}
    difference = {name: value - before[name] for name, value in after.items()}
    return {
        "after": intervals["after"],
        "before": {**before, "intervals": intervals["before"]},
        "difference": {**difference, "intervals": both},
    }


def _intervals(right: np.ndarray, drawn: Mapping[str, np.ndarray]) -> dict[str, Interval]:
    return {"accuracy": wilson(int(right.sum()), len(right)), **{name: percentile(drawn[name]) for name in drawn}}


def _scores(config: Config, logits: Tensor, labels: Tensor, *, with_loss: bool = True) -> dict[str, Score]:
    """Return the loss and, if it is not accuracy, the task's metric, each as a function of row numbers."""
    found = {"loss": _loss_score(config.objective.loss, logits, labels)} if with_loss else {}
    if config.task.metric != "accuracy":
        found[config.task.metric] = _metric_score(config.task.metric, logits, labels)
    return found


def _loss_score(name: str, logits: Tensor, labels: Tensor) -> Score:
    loss = LOSSES.load(name)
    by_row = np.array([float(loss(logits[i : i + 1], labels[i : i + 1])) for i in range(len(labels))])
    if np.isclose(by_row.mean(), float(loss(logits, labels)), rtol=1e-9):
        return lambda drawn: by_row[drawn].mean(axis=1)
    return lambda drawn: np.array([float(loss(logits[rows], labels[rows])) for rows in torch.from_numpy(drawn)])


def _metric_score(metric: str, logits: Tensor, labels: Tensor) -> Score:
    count = logits.shape[1]
    cells = (labels * count + logits.argmax(dim=-1)).numpy()

    def score(drawn: np.ndarray) -> np.ndarray:
        offsets = count**2 * np.arange(len(drawn))[:, None]
        counts = np.bincount((cells[drawn] + offsets).ravel(), minlength=len(drawn) * count**2)
        return METRICS[metric](counts.reshape(-1, count, count).astype(float))

    return score


def f1(counts: np.ndarray) -> np.ndarray:
    """Return F1 of label 1, macro-averaged with more than two labels; 0/0 counts as 0.

    Args:
        counts: rows by label and prediction, [resamples, labels, labels].
    """
    hits = np.diagonal(counts, axis1=1, axis2=2)
    of_each = 2 * hits / np.maximum(counts.sum(axis=1) + counts.sum(axis=2), 1)
    return np.asarray(of_each[:, 1] if counts.shape[1] == 2 else of_each.mean(axis=1))


def matthews(counts: np.ndarray) -> np.ndarray:
    """Return the Matthews correlation of label and prediction, 0 where one of them is constant; see `f1`."""
    labels, predicted, rows = counts.sum(axis=2), counts.sum(axis=1), counts.sum(axis=(1, 2))
    agreement = np.trace(counts, axis1=1, axis2=2) * rows - (labels * predicted).sum(axis=1)
    spread = (rows**2 - (labels**2).sum(axis=1)) * (rows**2 - (predicted**2).sum(axis=1))
    return np.asarray(np.where(spread > 0, agreement / np.sqrt(np.maximum(spread, 1)), 0.0))


METRICS = {"f1": f1, "matthews": matthews}


# --- baselines ---


def _baselines(config: Config, train: ScoredRows, evaluated: Mapping[str, ScoredRows]) -> dict[str, Any]:
    """Return name -> `train_rows`, `bias`, and the accuracy and metric of dev and test with this bias removed."""
    assert train.before is not None
    found = {}
    for name, bias in remove_bias(train.before.numpy(), train.labels.numpy()).items():
        scores = {split: _with_bias(config, rows, torch.from_numpy(bias)) for split, rows in evaluated.items()}
        found[name] = {"train_rows": len(train.labels), "bias": bias.tolist(), **scores}
    return found


def _with_bias(config: Config, rows: ScoredRows, bias: Tensor) -> dict[str, Any]:
    assert rows.before is not None
    logits = rows.before.double() + bias
    result: Evaluation = assess(config, logits, rows.labels)
    right = (logits.argmax(dim=-1) == rows.labels).numpy()
    drawn = resample(_scores(config, logits, rows.labels, with_loss=False), len(right))
    return {"accuracy": result.accuracy, result.metric: result.score, "intervals": _intervals(right, drawn)}
