"""What is predicted of one row, as the API returns it and `mezo predict` writes it: each objective names its kind."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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

    @classmethod
    def of(cls, columns: dict[str, Any], record: Mapping[str, Any], cut: bool) -> "Prediction":
        """Return it from a row's record."""
        return cls(columns, cut=cut, **record)

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

    @classmethod
    def of(cls, columns: dict[str, Any], record: Mapping[str, Any], cut: bool) -> "CompletedPrompt":
        """Return it from a row's record."""
        prompt, completion = record["prompt"], record["completion"]
        return cls(columns, prompt, completion, record.get("completions", [completion]), cut)

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

    @classmethod
    def of(cls, columns: dict[str, Any], record: Mapping[str, Any], cut: bool) -> "ChosenCandidate":
        """Return it from a row's record."""
        return cls(columns, cut=cut, **record)

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
    """What an objective without a kind of its own says of one row.

    Attributes:
        columns: the row's columns.
        record: what it says, by name.
        cut: whether the row was longer than the model takes, so that some of it was cut off.
    """

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
