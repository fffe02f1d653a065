"""The evaluation of rows: its metrics, the records of its rows, and what their intervals are computed from."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mezo_cli.distributed.ranks import Ranks
from mezo_cli.objectives.comparison import Score

if TYPE_CHECKING:
    from mezo_cli.objectives.base import Objective


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        loss: the objective's loss over all rows; nan when an output of the model is not finite.
        metrics: name -> value, without the loss; the first is the one that a log line leads with.
        values: what the evaluation follows from (`Objective.assess`), [rows, values].
        records: one per row; empty where they were not kept.
        details: further fields of its line in metrics.jsonl.
        samples: name -> its value for samples of the rows, for intervals; a score that has none is not there.
        right: name -> whether each row is right, bool [rows], of metrics that are fractions of right rows.
        text: one line for the log.
    """

    loss: float
    metrics: Mapping[str, float]
    values: Tensor = field(repr=False, compare=False)
    records: Sequence[Mapping[str, Any]] = field(default=(), repr=False, compare=False)
    details: Mapping[str, Any] = field(default_factory=dict)
    samples: Mapping[str, Score] = field(default_factory=dict, repr=False, compare=False)
    right: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)
    text: str = ""

    @property
    def is_finite(self) -> bool:
        """Whether the loss is finite; it is not for diverged weights."""
        return math.isfinite(self.loss)

    def scores(self) -> dict[str, float]:
        """Return the metrics and the loss by name."""
        return {**self.metrics, "loss": self.loss}

    def with_details(self, figures: Mapping[str, float]) -> "Evaluation":
        """Return it with further fields in its line and its text."""
        shown = "".join(f"  {name} {value:.4g}" for name, value in figures.items())
        return replace(self, details={**self.details, **figures}, text=self.text + shown)

    def line(self) -> dict[str, Any]:
        """Return the fields of its line in metrics.jsonl."""
        return {"loss": self.loss, **self.metrics, **self.details}


def measure_rows(
    objective: "Objective", rows: Sequence[Any], report: Callable[[int], None], ranks: Ranks
) -> tuple[Tensor, Sequence[Any], list[dict[str, Any]]]:
    """Return the values of rows, [rows, values] on the CPU, the rows, and their records, all in the order of the rows.

    Batches of `eval_batch_size` rows are formed by length, to pad little. They go through the model in micro-batches.
    The same rows in the same order get bitwise identical values; a row in another batch gets the same values up to
    rounding. Ranks share the batches, so they change no bit.
    """
    batches, size = batches_by_length(objective, rows), objective.config.eval_batch_size
    parts: list[Tensor] = []
    records: list[dict[str, Any]] = []
    for number in range(ranks.rank, len(batches), ranks.size):
        collated = (objective.collate([rows[i] for i in part]) for part in micro_batches(objective, batches[number]))
        measured = [objective.measure(batch) for batch in collated]
        parts.append(torch.cat([values for values, _ in measured]).cpu())
        records += [record for _, of_rows in measured for record in of_rows]
        report(number * size + len(batches[number]))
    numbers = [i for batch in batches[ranks.rank :: ranks.size] for i in batch]
    if ranks.size > 1:
        parts, records, numbers = _gather(ranks, batches, parts, records)
    places = np.argsort(numbers)
    return torch.cat(parts)[torch.from_numpy(places)], rows, [records[i] for i in places] if records else []


def batches_by_length(objective: "Objective", rows: Sequence[Any]) -> list[list[int]]:
    """Return the numbers of the rows of each batch of an evaluation."""
    order, size = sorted(range(len(rows)), key=lambda i: len(rows[i].input_ids)), objective.config.eval_batch_size
    return [order[start : start + size] for start in range(0, len(rows), size)]


def micro_batches(objective: "Objective", batch: Sequence[int]) -> list[Sequence[int]]:
    """Return the numbers of the rows of a batch by micro-batch."""
    size = objective.config.micro_batch_size or len(batch)
    return [batch[start : start + size] for start in range(0, len(batch), size)]


def _gather(
    ranks: Ranks, batches: list[list[int]], parts: list[Tensor], records: list[dict[str, Any]]
) -> tuple[list[Tensor], list[dict[str, Any]], list[int]]:
    """Return the values and records of all ranks, and the numbers of their rows."""
    dtype, shape = (str(parts[0].dtype).removeprefix("torch."), list(parts[0].shape[1:])) if parts else (None, None)
    texts = ranks.exchange(json.dumps([dtype, shape, records]))
    described = [json.loads(text) for text in texts]
    dtype, shape, _ = next(rank for rank in described if rank[0] is not None)  # a rank may have had no batch
    own = torch.cat(parts) if parts else torch.empty(0, *shape, dtype=getattr(torch, dtype))
    numbers = [[i for batch in batches[rank :: ranks.size] for i in batch] for rank in range(ranks.size)]
    values = ranks.gather_parts(own, [len(part) for part in numbers], "evaluation")
    return [values], [record for rank in described for record in rank[2]], [i for part in numbers for i in part]
