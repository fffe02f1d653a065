"""What a run's own files say of how it went: its projected gradients, its losses, the labels it gives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mezo_cli.compare.collect import Entry
from mezo_cli.runs import Run, trajectory

ONE_ANSWER = 0.95  # share of the rows from which on a label is as good as the only answer

Ends = tuple[float, float]  # first and last


@dataclass(frozen=True)
class Facts:
    """One run. None stands for what it has not: no steps, no trajectory, no test split, no end yet."""

    entry: Entry
    zero: float | None  # share of the projected gradients of all steps that are exactly 0
    size: tuple[float, float, float] | None  # mean, least and greatest |g| over all steps
    losses: Ends | None  # of the first and the last logged step
    dev_losses: Ends  # before the first step, and of the last evaluation
    answers: Mapping[str, int]  # label -> rows that were given it,
    answered: str  # on this split
    forwards: int | None
    backwards: int | None
    seconds: float

    @property
    def favourite(self) -> tuple[str, float]:
        """The label given most often, and its share of the rows."""
        label = max(self.answers, key=lambda name: self.answers[name])
        return label, self.answers[label] / sum(self.answers.values())

    @property
    def one_answer(self) -> bool:
        """Whether it gives (nearly) every row the same label."""
        return self.favourite[1] >= ONE_ANSWER


def facts_of(entry: Entry) -> Facts | None:
    """Read a run's facts; None for a run that has not been evaluated yet.

    Raises:
        UserError: when its metrics or its trajectory are damaged.
    """
    lines = entry.run.metrics()
    evals = [line for line in lines if line["kind"] == "eval"]
    dev = [line for line in evals if line["split"] == "dev"]
    if not dev:
        return None
    judged = ([line for line in evals if line["split"] == "test"] or dev)[-1]
    zero, size = _gradients(entry.run)
    return Facts(
        entry=entry,
        zero=zero,
        size=size,
        losses=_ends([line for line in lines if line["kind"] == "train"]),
        dev_losses=(dev[0]["loss"], dev[-1]["loss"]),
        answers=judged["predicted"],
        answered=judged["split"],
        forwards=entry.summary.get("forwards"),
        backwards=entry.summary.get("backwards"),
        seconds=float(entry.summary.get("seconds", lines[-1]["seconds"])),
    )


def _ends(lines: Sequence[Mapping[str, Any]]) -> Ends | None:
    return (lines[0]["loss"], lines[-1]["loss"]) if lines else None


def _gradients(run: Run) -> tuple[float | None, tuple[float, float, float] | None]:
    """Return the share of exact zeros and the size of g over all steps, not only the logged ones."""
    if not run.trajectory.exists() or not run.trajectory.stat().st_size:
        return None, None
    grads = trajectory.read(run.trajectory).grads
    if grads.size == 0:
        return None, None
    size = np.abs(grads.astype(np.float64))
    return float((size == 0).mean()), (float(size.mean()), float(size.min()), float(size.max()))
