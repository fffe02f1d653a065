"""How a set of rows is judged: loss, accuracy, the task's own metric."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from mezo_cli.objectives import LOSSES
from mezo_cli.schema import Encoded
from mezo_cli.scores import score
from mezo_cli.session import Session


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation saw. `predicted` counts the rows given each label: a model that says one thing shows."""

    loss: float
    accuracy: float
    predicted: dict[str, int]
    score: float  # the task's own metric: accuracy unless the task says otherwise
    metric: str

    @property
    def finite(self) -> bool:
        """Whether the loss is a number: diverged weights give none."""
        return math.isfinite(self.loss)

    def scores(self) -> dict[str, float]:
        """Return accuracy, loss and, where the task has another, its own metric."""
        return {"accuracy": self.accuracy, "loss": self.loss, self.metric: self.score}

    def line(self) -> dict[str, Any]:
        """Return it as the fields of a metrics.jsonl line."""
        return {"loss": self.loss, **self.scores(), "predicted": self.predicted}

    def told(self) -> str:
        """Return it in words for the log."""
        total = sum(self.predicted.values())
        shares = ", ".join(f"{name} {100 * n / total:.0f}%" for name, n in self.predicted.items())
        own = "" if self.metric == "accuracy" else f"  {self.metric} {self.score:.3f}"
        return f"accuracy {100 * self.accuracy:5.1f}%  loss {self.loss:.4f}{own}  predicted {shares}"


@torch.no_grad()
def evaluate(session: Session, rows: list[Encoded]) -> Evaluation:
    """Judge all rows. Batches go by length, so that little padding is computed; the result does not depend on it."""
    config = session.config
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].ids))
    logits = torch.empty(len(rows), len(config.task.labels))
    size = config.eval_batch_size
    for start in range(0, len(rows), size):
        chosen = order[start : start + size]
        logits[chosen] = session.objective.logits(session.batch([rows[i] for i in chosen])).cpu()
    labels = torch.tensor([row.label for row in rows])
    predicted = logits.argmax(dim=-1)
    counts = Counter(predicted.tolist())
    # With a loss that counts hits, scores that are not numbers would pass for a miss.
    loss = float(LOSSES[config.objective.loss](logits, labels)) if bool(logits.isfinite().all()) else math.nan
    return Evaluation(
        loss=loss,
        accuracy=float((predicted == labels).double().mean()),
        predicted={name: counts.get(i, 0) for i, name in enumerate(config.task.labels)},
        score=score(config.task.metric, labels.tolist(), predicted.tolist()),
        metric=config.task.metric,
    )
