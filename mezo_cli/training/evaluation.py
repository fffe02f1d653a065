"""Evaluate a model on rows (loss, accuracy, the task's own metric), and choose the best evaluation of a run."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mezo_cli.config.schema import Config, TokenizedExample
from mezo_cli.errors import UserError
from mezo_cli.objectives.losses import find_loss
from mezo_cli.objectives.metrics import find_metric
from mezo_cli.runs import Run
from mezo_cli.training.session import Session


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        loss: the objective's loss over all rows; nan when a logit is not finite.
        accuracy: a fraction.
        predicted: label -> number of rows predicted as it. A model that always predicts one label shows here.
        score: the task's own metric, which the best checkpoint is chosen by.
        metric: the name of that metric (`registry.METRICS`).
        logits: the label scores of each row, [rows, labels]. See `label_predictions`.
    """

    loss: float
    accuracy: float
    predicted: dict[str, int]
    score: float
    metric: str
    logits: Tensor = field(repr=False, compare=False)

    @property
    def is_finite(self) -> bool:
        """Whether the loss is finite; it is not for diverged weights."""
        return math.isfinite(self.loss)

    def scores(self) -> dict[str, float]:
        """Return accuracy, loss and, if the task has another one, its own metric."""
        return {"accuracy": self.accuracy, "loss": self.loss, self.metric: self.score}

    def metrics(self) -> dict[str, Any]:
        """Return the fields of its line in metrics.jsonl."""
        return {"loss": self.loss, **self.scores(), "predicted": self.predicted}

    def summary(self) -> str:
        """Return one line of text for the log."""
        total = sum(self.predicted.values())
        fractions = ", ".join(f"{name} {100 * n / total:.0f}%" for name, n in self.predicted.items())
        metric = "" if self.metric == "accuracy" else f"  {self.metric} {self.score:.3f}"
        return f"accuracy {100 * self.accuracy:5.1f}%  loss {self.loss:.4f}{metric}  predicted {fractions}"


@torch.no_grad()
def compute_logits(
    session: Session, rows: Sequence[TokenizedExample], report: Callable[[int], None] = lambda done: None
) -> Tensor:
    """Return the label scores of rows, in their order: [rows, labels], float32 on the CPU.

    Batches of `eval_batch_size` rows are formed by length, to pad little. They go through the model in micro-batches.
    The same rows in the same order get bitwise identical scores; a row in another batch gets the same scores up to
    rounding. Ranks share the batches, so they change no bit.
    `report` is called with the number of rows done.
    """
    config, ranks = session.config, session.ranks
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].input_ids))
    logits = torch.empty(len(rows), len(config.task.labels))
    size = config.eval_batch_size
    batches = [order[start : start + size] for start in range(0, len(rows), size)]
    step, first = (1, 0) if ranks is None else (ranks.size, ranks.rank)
    for number in range(first, len(batches), step):
        chosen = batches[number]
        logits[chosen] = session.label_scores(*session.micro_batches([rows[i] for i in chosen])).cpu()
        report(number * size + len(chosen))
    if ranks is not None:
        parts = [[i for batch in batches[rank::step] for i in batch] for rank in range(step)]
        gathered = ranks.gather_parts(logits[parts[first]], [len(part) for part in parts], "evaluation")
        logits[[i for part in parts for i in part]] = gathered
    return logits


def label_predictions(logits: Tensor, labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return `{"predicted": label, "probabilities": {label: float}}` for each row of label scores [rows, labels].

    Probabilities are the softmax of the scores over the labels, in float64.
    """
    return [
        {"predicted": labels[index], "probabilities": dict(zip(labels, row, strict=True))}
        for index, row in zip(logits.argmax(dim=-1).tolist(), logits.double().softmax(dim=-1).tolist(), strict=True)
    ]


def evaluate(
    session: Session,
    rows: list[TokenizedExample],
    report: Callable[[int], None] = lambda done: None,
) -> Evaluation:
    """Evaluate all rows. `report` is called with the number of rows done."""
    return assess(session.config, compute_logits(session, rows, report), label_tensor(rows))


def label_tensor(rows: Sequence[TokenizedExample]) -> Tensor:
    """Return the labels of rows, [rows]."""
    return torch.tensor([row.label for row in rows])


def assess(config: Config, logits: Tensor, labels: Tensor) -> Evaluation:
    """Return the evaluation that label scores, [rows, labels], are for the labels of the rows, [rows]."""
    predicted = logits.argmax(dim=-1)
    counts = Counter(predicted.tolist())
    # The accuracy and f1 losses would count a logit that is not finite as a wrong prediction.
    loss = float(find_loss(config.objective.loss)(logits, labels)) if bool(logits.isfinite().all()) else math.nan
    return Evaluation(
        loss=loss,
        accuracy=float((predicted == labels).double().mean()),
        predicted={name: counts.get(i, 0) for i, name in enumerate(config.task.labels)},
        score=find_metric(config.task.metric).compute(logits.numpy(), labels.numpy()),
        metric=config.task.metric,
        logits=logits,
    )


def dev_evaluations(
    config: Config, run: Run, lines: Sequence[Mapping[str, Any]], stop: int
) -> dict[int, Mapping[str, Any]]:
    """Return step -> line of every evaluation on dev among the lines of metrics.jsonl.

    Raises:
        UserError: when an evaluation that was due before step `stop` is missing.
    """
    evaluations = {line["step"]: line for line in lines if line["kind"] == "eval" and line["split"] == "dev"}
    for step in range(stop):
        if config.evaluates_at(step) and step not in evaluations:
            raise UserError(f"{run.path / 'metrics.jsonl'} is damaged: it lacks the evaluation of step {step}")
    return evaluations


def best_step(config: Config, evaluations: Mapping[int, Mapping[str, Any]]) -> int:
    """Return the step with the highest value of the task's metric; of equal ones the earliest."""
    return max(evaluations, key=lambda step: (evaluations[step][config.task.metric], -step))
