"""Predict rows with a loaded model: labels of texts, or completions of prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mezo_cli.config.schema import Example
from mezo_cli.training.session import Session


@dataclass(frozen=True)
class Prediction:
    """What the model predicts for one row.

    Attributes:
        columns: the row's texts.
        predicted: the label with the highest score.
        probabilities: label -> its probability, the softmax of the scores over the labels.
        cut: whether the row was longer than the model takes, so that some of it was cut off.
    """

    columns: dict[str, str]
    predicted: str
    probabilities: dict[str, float]
    cut: bool

    @property
    def answer(self) -> str:
        """The label."""
        return self.predicted

    def figures(self) -> dict[str, Any]:
        """Return what is predicted, by the names of the columns of a .csv file."""
        return {"predicted": self.predicted, **{f"probability_{label}": p for label, p in self.probabilities.items()}}

    def line(self) -> str:
        """Return the label, the probability of each label and the texts in one line."""
        longest = max(map(len, self.probabilities))
        scores = "  ".join(f"{label} {probability:.4f}" for label, probability in self.probabilities.items())
        return f"{self.predicted:{longest}}  {scores}  {' | '.join(' '.join(t.split()) for t in self.columns.values())}"


@dataclass(frozen=True)
class CompletedPrompt:
    """What the model says after the prompt of one row.

    Attributes:
        columns: the row's columns.
        prompt: the prompt as the model saw it.
        completion: the first completion.
        completions: all of them (`objective.eval_samples`).
        cut: whether the prompt was longer than the model takes, so that its start was cut off.
    """

    columns: dict[str, Any]
    prompt: str
    completion: str
    completions: list[str]
    cut: bool

    @property
    def answer(self) -> str:
        """The completion, in one line."""
        return " ".join(self.completion.split())

    def figures(self) -> dict[str, Any]:
        """Return what is said, by the names of the columns of a .csv file."""
        return {"prompt": self.prompt, "completion": self.completion}

    def line(self) -> str:
        """Return the prompt and the completion in one line."""
        return f"{self.prompt} -> {self.completion!r}".replace("\n", "\\n")


def predict(
    session: Session, examples: Sequence[Example], report: Callable[[int], None] = lambda done: None
) -> list[Prediction] | list[CompletedPrompt]:
    """Predict rows, in order, in batches of `eval_batch_size`. `report` is called with the number of rows done.

    The rows of a split, in their order, give scores bitwise identical to those of its evaluation.

    Raises:
        UserError: for a row that cannot be encoded, and for scores that are not finite.
    """
    if not examples:
        return []
    task = session.config.data_task
    rows, cut = session.encoder.encode_to_fit(examples)
    records = session.objective.predict(rows, report, session.ranks)
    if not task.labels:
        return [
            CompletedPrompt(
                dict(example.columns or {}),
                record["prompt"],
                record["completion"],
                record.get("completions", [record["completion"]]),
                was_cut,
            )
            for example, was_cut, record in zip(examples, cut, records, strict=True)
        ]
    return [
        Prediction(dict(zip(task.columns, example.texts, strict=True)), cut=was_cut, **record)
        for example, was_cut, record in zip(examples, cut, records, strict=True)
    ]
