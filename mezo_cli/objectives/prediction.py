"""What is predicted of one row, as the API returns it and `mezo predict` writes it: each objective names its kind.

Of every kind, `columns` are the row's, and `cut` is whether it was longer than the model takes: some of it was cut off.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self


class _FromRecord:
    """A kind of prediction whose fields are those of a row's record. `shown` answers, `in_csv` are a file's columns."""

    shown: ClassVar[str]
    in_csv: ClassVar[tuple[str, ...]]

    @classmethod
    def of(cls, columns: dict[str, Any], record: Mapping[str, Any], cut: bool) -> Self:
        return cls(columns=columns, cut=cut, **record)  # type: ignore[call-arg]

    @property
    def answer(self) -> str:
        return _one_line(getattr(self, self.shown))

    def figures(self) -> dict[str, Any]:
        """Return what is predicted, by the names of the columns of a .csv file."""
        return {name: getattr(self, name) for name in self.in_csv}


def _one_line(text: str) -> str:
    return " ".join(text.split())


@dataclass(frozen=True)
class Prediction(_FromRecord):
    """The label with the highest score, and the probability of each: the softmax of the scores over the labels."""

    columns: dict[str, str]
    predicted: str
    probabilities: dict[str, float]
    cut: bool
    shown = "predicted"

    def figures(self) -> dict[str, Any]:
        """Return what is predicted, by the names of the columns of a .csv file."""
        return {"predicted": self.predicted, **{f"probability_{label}": p for label, p in self.probabilities.items()}}

    def line(self) -> str:
        """Return the label, the probability of each label and the texts in one line."""
        longest = max(map(len, self.probabilities))
        scores = "  ".join(f"{label} {probability:.4f}" for label, probability in self.probabilities.items())
        return f"{self.predicted:{longest}}  {scores}  {' | '.join(map(_one_line, self.columns.values()))}"


@dataclass(frozen=True)
class CompletedPrompt(_FromRecord):
    """The prompt as the model saw it, the first completion, and all of them (`objective.eval_samples`)."""

    columns: dict[str, Any]
    prompt: str
    completion: str
    completions: list[str]
    cut: bool
    shown, in_csv = "completion", ("prompt", "completion")

    def line(self) -> str:
        """Return the prompt and the completion in one line."""
        return f"{self.prompt} -> {self.completion!r}".replace("\n", "\\n")


@dataclass(frozen=True)
class ChosenCandidate(_FromRecord):
    """The prompt as the model saw it, the candidate with the highest score, all candidates, and of each its score.

    The probabilities are the softmax of the scores.
    """

    columns: dict[str, Any]
    prompt: str
    prediction: str
    candidates: list[str]
    scores: list[float]
    probabilities: list[float]
    cut: bool
    shown, in_csv = "prediction", ("prediction", "candidates", "scores", "probabilities")

    def line(self) -> str:
        """Return the candidate, the probability of each, and the prompt in one line."""
        scored = zip(self.candidates, self.probabilities, strict=True)
        shown = "  ".join(f"{_one_line(text)} {probability:.4f}" for text, probability in scored)
        return f"{self.answer}  |  {shown}  |  {_one_line(self.prompt)}"


@dataclass(frozen=True)
class PredictedRecord:
    """What an objective without a kind of its own says of one row, by name."""

    columns: dict[str, Any]
    record: dict[str, Any]
    cut: bool

    @classmethod
    def of(cls, columns: dict[str, Any], record: Mapping[str, Any], cut: bool) -> "PredictedRecord":
        """Return it from a row's record."""
        return cls(columns, dict(record), cut)

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


Predicted = Prediction | CompletedPrompt | ChosenCandidate | PredictedRecord
