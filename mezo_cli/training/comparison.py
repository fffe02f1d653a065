"""Compare the trained model with the untrained one on the same rows: intervals, paired differences, baselines.

What `summary.json` says about a result besides the result (docs/reference/compare.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mezo_cli.config.schema import Config
from mezo_cli.objectives.losses import find_loss
from mezo_cli.objectives.metrics import find_metric
from mezo_cli.training.baselines import remove_bias
from mezo_cli.training.evaluation import assess
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


@dataclass(frozen=True)
class Judged:
    """What label scores come to on some rows.

    Attributes:
        values: name -> score: accuracy, the task's metric, and the loss.
        right: whether each row is right, bool [rows].
        drawn: name -> score of each bootstrap sample of the rows, of all scores but the accuracy.
    """

    values: Mapping[str, float]
    right: np.ndarray
    drawn: Mapping[str, np.ndarray]

    def intervals(self) -> dict[str, list[float]]:
        """Return name -> 95% interval."""
        rows = {"accuracy": wilson(int(self.right.sum()), len(self.right))}
        return _as_lists(rows | {name: percentile(drawn) for name, drawn in self.drawn.items()})

    def minus(self, other: "Judged") -> dict[str, Any]:
        """Return the differences to other scores of the same rows, with `intervals`."""
        intervals = {"accuracy": paired_difference(other.right, self.right)}
        intervals |= {name: percentile(self.drawn[name] - drawn) for name, drawn in other.drawn.items()}
        values = {name: self.values[name] - value for name, value in other.values.items()}
        return {**values, "intervals": _as_lists(intervals)}


def _as_lists(intervals: Mapping[str, Interval]) -> dict[str, list[float]]:
    """Return intervals as JSON gives them back."""
    return {name: list(interval) for name, interval in intervals.items()}


def compare(config: Config, splits: Mapping[str, ScoredRows]) -> dict[str, Any]:
    """Return `intervals` (of dev and test), `difference`, `test_before` and `baselines`, for summary.json.

    A run without steps has no difference: its result is that of the untrained model, and gives the baselines.

    Args:
        config: of the run.
        splits: `train`, whose rows the bias is fitted on, `dev`, and `test` if there is one.
    """
    train, evaluated = splits["train"], {name: rows for name, rows in splits.items() if name != "train"}
    after = {name: judge(config, rows.after, rows.labels) for name, rows in evaluated.items()}
    summary: dict[str, Any] = {"intervals": {name: one.intervals() for name, one in after.items()}}
    if train.before is None:
        return summary
    trained = after if config.steps else {}
    before = {name: judge(config, _before(evaluated[name]), evaluated[name].labels) for name in trained}
    if before:
        summary["difference"] = {name: trained[name].minus(one) for name, one in before.items()}
    if "test" in before:
        summary["test_before"] = {**before["test"].values, "intervals": before["test"].intervals()}
    summary["baselines"] = _baselines(config, train, evaluated, trained)
    return summary


def _baselines(
    config: Config, train: ScoredRows, evaluated: Mapping[str, ScoredRows], trained: Mapping[str, Judged]
) -> dict[str, Any]:
    """Return name -> `train_rows`, `bias`, and the scores of dev and test with this bias removed.

    `difference` is what training has beyond that, on the same rows.
    """
    baselines: dict[str, Any] = {}
    for name, bias in remove_bias(_before(train).numpy(), train.labels.numpy()).items():
        baselines[name] = {"train_rows": len(train.labels), "bias": bias.tolist()}
        for split, rows in evaluated.items():
            judged = judge(config, _before(rows).double() + torch.from_numpy(bias), rows.labels, with_loss=False)
            baselines[name][split] = {**judged.values, "intervals": judged.intervals()}
            if split in trained:
                baselines[name][split]["difference"] = trained[split].minus(judged)
    return baselines


def _before(rows: ScoredRows) -> Tensor:
    assert rows.before is not None
    return rows.before


# --- scores and their bootstrap samples ---


def judge(config: Config, logits: Tensor, labels: Tensor, *, with_loss: bool = True) -> Judged:
    """Return what label scores, [rows, labels], come to. Scores moved by a bias have no loss worth comparing."""
    values, metric = assess(config, logits, labels).scores(), config.task.metric
    scores = {"loss": _loss_score(config.objective.loss, logits, labels)} if with_loss else {}
    if metric != "accuracy":
        scores[metric] = partial(find_metric(metric).compute_samples, logits.numpy(), labels.numpy())
    right = (logits.argmax(dim=-1) == labels).numpy()
    kept = {name: value for name, value in values.items() if name == "accuracy" or name in scores}
    return Judged(kept, right, resample(scores, len(right)))


def _loss_score(name: str, logits: Tensor, labels: Tensor) -> Score:
    loss = find_loss(name)
    by_row = np.array([float(loss(logits[i : i + 1], labels[i : i + 1])) for i in range(len(labels))])
    if np.isclose(by_row.mean(), float(loss(logits, labels)), rtol=1e-9):
        return lambda drawn: by_row[drawn].mean(axis=1)
    return lambda drawn: np.array([float(loss(logits[rows], labels[rows])) for rows in torch.from_numpy(drawn)])
