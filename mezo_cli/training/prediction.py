"""Predict the labels of texts with a loaded model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


def predict(
    session: Session, examples: Sequence[Example], report: Callable[[int], None] = lambda done: None
) -> list[Prediction]:
    """Predict rows, in order, in batches of `eval_batch_size`. `report` is called with the number of rows done.

    The rows of a split, in their order, give scores bitwise identical to those of its evaluation.

    Raises:
        UserError: for a row that cannot be encoded, and for scores that are not finite.
    """
    task = session.config.task
    rows, cut = session.encoder.encode_to_fit(examples)
    records = session.objective.predict(rows, report, session.ranks)
    return [
        Prediction(dict(zip(task.columns, example.texts, strict=True)), cut=was_cut, **record)
        for example, was_cut, record in zip(examples, cut, records, strict=True)
    ]
