"""The objectives that score labels: a loss of the scores, the metrics of a task, and baselines without training."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mezo_cli.config.registry import LOSSES, METRICS
from mezo_cli.config.schema import Config, Example, TokenizedExample
from mezo_cli.errors import UserError
from mezo_cli.models import LoadedModel
from mezo_cli.objectives.base import Evaluations, Measured, Objective, Records
from mezo_cli.objectives.collate import Batch
from mezo_cli.objectives.prediction import Prediction
from mezo_cli.objectives.scoring import Evaluation, Loss, Metric, count_predictions, remove_bias
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.tasks import ClassificationEncoder


class Classification(Objective):
    """Scores labels. A subclass defines `logits` and `plain_outputs`.

    Its evaluations have the accuracy, and the metric that the run is judged by if that is another one.
    """

    encoder: ClassificationEncoder
    prediction = Prediction

    def __init__(self, config: Config, loaded: LoadedModel, forward: PerturbedForward, encoder: Any) -> None:
        super().__init__(config, loaded, forward, encoder)
        loss = LOSSES.load(config.objective.loss)
        self._loss = loss if isinstance(loss, Loss) else Loss(partial(_checked_losses, config.objective.loss, loss))
        self.loss_from_counts = self._loss.of_rows is None

    def logits(self, batch: Batch) -> Tensor:
        """Return the labels' scores, float32: [rows, labels], or [2, rows, labels] under both signs of a perturbation.

        The second shape is asked for only where `fits_paired_forward` returned True.
        """
        raise NotImplementedError

    def vocabulary_logits(self, batch: Batch) -> Tensor | None:
        """Return the score of every word of the vocabulary at the scored position, float32 [rows, words].

        The label words' columns are their scores, if each is one token. None for an objective that scores no words.
        """
        return None

    def output_layer(self) -> tuple[nn.Linear, Tensor | None]:
        """Return the layer that scores the labels, and its rows that do, in label order (None: all of them).

        A linear probe is written to these rows.
        """
        raise UserError(f"init=linear_probe: {type(self).__name__} has no output layer for a probe")

    def outputs(self, batch: Batch) -> Tensor:
        """Return the label scores."""
        return self.logits(batch)

    def row_losses(self, batch: Batch) -> Tensor:
        """Return the loss of each row: [1, rows] or [2, rows]; nan for a row with a score that is not finite."""
        assert self._loss.of_rows is not None
        scores = self._scores(batch)
        losses = torch.stack([self._loss.of_rows(of_sign, batch.labels) for of_sign in scores])
        return torch.where(scores.isfinite().all(dim=-1), losses, math.nan)

    def counts(self, batch: Batch) -> Tensor:
        """Return the number of rows per label and prediction: [1, labels, labels] or [2, labels, labels]."""
        return torch.stack([count_predictions(scores, batch.labels) for scores in self._scores(batch)])

    def from_counts(self, counts: Tensor) -> Tensor:
        """Return the loss that follows from the predictions: [1] or [2]."""
        return self._loss.from_counts(counts)

    def _scores(self, batch: Batch) -> Tensor:
        logits = self.logits(batch)
        return logits if logits.dim() == 3 else logits.unsqueeze(0)

    def measure(self, batch: Batch) -> Measured:
        """Return the label scores; what is predicted follows from them."""
        return self.logits(batch), []

    def assess(self, values: Tensor, rows: Sequence[TokenizedExample], records: Records | None = None) -> Evaluation:
        """Return the evaluation that label scores, [rows, labels], are.

        A record has the label that is `predicted`, and the `probabilities`: the scores' softmax over the labels, in
        float64.
        """
        metric, names = self.config.chosen_metric, self.config.task.labels
        labels, predicted = torch.tensor([row.label for row in rows]), values.argmax(dim=-1)
        right, counts = (predicted == labels).numpy(), Counter(predicted.tolist())
        shares = zip(predicted.tolist(), values.double().softmax(dim=-1).tolist(), strict=True)
        found = [{"predicted": names[i], "probabilities": dict(zip(names, row, strict=True))} for i, row in shares]
        # The accuracy and f1 losses would count a logit that is not finite as a wrong prediction.
        is_finite = bool(values.isfinite().all())
        loss = float(self._loss(values, labels)) if is_finite else math.nan
        metrics: dict[str, float] = {"accuracy": float(right.mean())}
        samples: dict[str, Any] = {"accuracy": right, "loss": self._loss.samples(values, labels)}
        if metric not in samples:
            function: Metric = METRICS.load(metric)
            metrics[metric] = function(values.numpy(), labels.numpy())
            samples[metric] = function.samples(values.numpy(), labels.numpy())
        by_label = {name: counts.get(i, 0) for i, name in enumerate(names)}
        fractions = ", ".join(f"{name} {100 * n / len(rows):.0f}%" for name, n in by_label.items())
        others = "".join(f"  {name} {value:.3f}" for name, value in metrics.items() if name != "accuracy")
        text = f"accuracy {100 * metrics['accuracy']:5.1f}%  loss {loss:.4f}{others}  predicted {fractions}"
        kept = found if is_finite and records is not None else []
        return Evaluation(loss, metrics, values, kept, {"predicted": by_label}, samples, text)

    def describe(self) -> dict[str, Any]:
        """Return what scores a label, and the label words."""
        return {"scored_by": self.encoder.scored_by, "label_words": self.encoder.label_words}

    def describe_row(self, example: Example) -> dict[str, Any]:
        """Return the texts of a row and its label."""
        return {**super().describe_row(example), "label": self.config.task.labels[example.label]}

    def compare(
        self, before: Evaluations, after: Evaluations, rows: Mapping[str, Sequence[Any]], *, trained: bool
    ) -> dict[str, Any]:
        """Add `baselines`: what the untrained scores give when the bias between the labels is removed.

        Each has `train_rows`, `bias`, and the scores of dev and test with this bias removed; `difference` is what
        training has beyond that, on the same rows.
        """
        summary = super().compare(before, after, rows, trained=trained)
        if not before:
            return summary
        labels, baselines = np.array([row.label for row in rows["train"]]), dict[str, Any]()
        for name, bias in remove_bias(before["train"].values.numpy(), labels).items():
            baselines[name] = {"train_rows": len(labels), "bias": bias.tolist()}
            for split in (split for split in before if split != "train"):
                moved = self.assess(before[split].values.double() + torch.from_numpy(bias), rows[split])
                samples = {score: drawn for score, drawn in moved.samples.items() if score != "loss"}
                moved = replace(moved, samples=samples)  # the loss of scores with an added number says little
                baselines[name][split] = moved.summary()
                if trained:
                    baselines[name][split]["difference"] = after[split].summary(moved)
        return summary | {"baselines": baselines}


def _checked_losses(name: str, loss: Callable[[Tensor, Tensor], Tensor], scores: Tensor, labels: Tensor) -> Tensor:
    """Return the losses of rows by a plain function, which another package has registered."""
    losses = loss(scores, labels)
    if losses.shape != labels.shape:
        found = f"it returned {list(losses.shape)} for {len(labels)} rows"
        raise UserError(f"objective.loss={name}: {found}, not one number per row")
    return losses
