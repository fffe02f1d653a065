"""Predict rows with a loaded model: labels of texts, or completions of prompts."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mezo_cli.config.schema import Example
from mezo_cli.objectives.choice import Choice
from mezo_cli.objectives.classification import Classification
from mezo_cli.objectives.generation import Generation
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


@dataclass(frozen=True)
class ChosenCandidate:
    """Which candidate most likely continues the prompt of one row.

    Attributes:
        columns: the row's columns.
        prompt: the prompt as the model saw it.
        prediction: the candidate with the highest score.
        candidates: all of them.
        scores: their scores, in the same order.
        probabilities: the softmax of the scores.
        cut: whether the prompt was longer than the model takes, so that its start was cut off.
    """

    columns: dict[str, Any]
    prompt: str
    prediction: str
    candidates: list[str]
    scores: list[float]
    probabilities: list[float]
    cut: bool

    @property
    def answer(self) -> str:
        """The candidate, in one line."""
        return " ".join(self.prediction.split())

    def figures(self) -> dict[str, Any]:
        """Return what is predicted, by the names of the columns of a .csv file."""
        return {name: getattr(self, name) for name in ("prediction", "candidates", "scores", "probabilities")}

    def line(self) -> str:
        """Return the candidate, the probability of each, and the prompt in one line."""
        scored = zip(self.candidates, self.probabilities, strict=True)
        shown = "  ".join(f"{' '.join(text.split())} {probability:.4f}" for text, probability in scored)
        return f"{self.answer}  |  {shown}  |  {' '.join(self.prompt.split())}"


@dataclass(frozen=True)
class PredictedRecord:
    """What an objective of another package's own family says of one row.

    Attributes:
        columns: the row's columns.
        record: what it says, by name.
        cut: whether the row was longer than the model takes, so that some of it was cut off.
    """

    columns: dict[str, Any]
    record: dict[str, Any]
    cut: bool

    @property
    def answer(self) -> str:
        """The record in one line."""
        return "  ".join(f"{name} {json.dumps(value, ensure_ascii=False)}" for name, value in self.record.items())

    def figures(self) -> dict[str, Any]:
        """Return what is said, by the names of the columns of a .csv file."""
        return self.record

    def line(self) -> str:
        """Return the record and the columns in one line."""
        return f"{self.answer}  {json.dumps(self.columns, ensure_ascii=False, default=str)}"


def predict(
    session: Session, examples: Sequence[Example], report: Callable[[int], None] = lambda done: None
) -> list[Prediction] | list[CompletedPrompt] | list[ChosenCandidate] | list[PredictedRecord]:
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
    if not isinstance(session.objective, Classification | Generation):
        described = [session.objective.describe_row(example)["columns"] for example in examples]
        if isinstance(session.objective, Choice):
            said = zip(described, records, cut, strict=True)
            return [ChosenCandidate(columns, **record, cut=was_cut) for columns, record, was_cut in said]
        return [
            PredictedRecord(columns, dict(record), was_cut)
            for columns, record, was_cut in zip(described, records, cut, strict=True)
        ]
    if isinstance(session.objective, Generation):
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
