"""Predict rows with a loaded model: labels of texts, completions of prompts, or what else an objective says."""

from collections.abc import Callable, Sequence

from mezo_cli.config.schema import Example
from mezo_cli.objectives.prediction import Predicted
from mezo_cli.training.session import Session


def predict(
    session: Session, examples: Sequence[Example], report: Callable[[int], None] = lambda done: None
) -> list[Predicted]:
    """Predict rows, in order, in batches of `eval_batch_size`. `report` is called with the number of rows done.

    The rows of a split, in their order, give scores bitwise identical to those of its evaluation.

    Raises:
        UserError: for a row that cannot be encoded, and for scores that are not finite.
    """
    if not examples:
        return []
    objective, names = session.objective, session.config.data_task.columns
    rows, cut = session.encoder.encode_to_fit(examples)
    records = objective.predict(rows, report, session.ranks)
    columns = [
        dict(zip(names, example.texts, strict=True)) if example.columns is None else dict(example.columns)
        for example in examples
    ]
    return [objective.prediction.of(*of_row) for of_row in zip(columns, records, cut, strict=True)]
