"""A model, what judges it and what moves it: the scores that they are told by, and the tables that name them."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, matthews_corrcoef

from mezo_cli import config, session
from mezo_cli.errors import UserError
from mezo_cli.models.adapters import METHODS
from mezo_cli.objectives import LOSSES, OBJECTIVES
from mezo_cli.optim import OPTIMIZERS
from mezo_cli.schema import Encoded
from mezo_cli.scores import score


def test_the_pieces_fit(roberta: Path) -> None:
    made = session.prepare(config.build([f"model.path={roberta}", "data=demo"]))
    rows = [Encoded([0, 7, 8, 4, 2], [0] * 5, 3, 1), Encoded([0, 4, 2], [0] * 3, 1, 0)]
    batch = made.batch(rows)
    assert batch.ids.tolist() == [[0, 7, 8, 4, 2], [0, 4, 2, 1, 1]]
    assert batch.attention.tolist() == [[1] * 5, [1, 1, 1, 0, 0]]
    assert batch.segments is None
    with torch.no_grad():
        scores = made.objective.logits(batch)
        assert float(made.loss(batch)) == pytest.approx(float(torch.nn.functional.cross_entropy(scores, batch.labels)))
    assert not made.loaded.model.training


@pytest.mark.parametrize(
    ("key", "table"),
    [
        ("objective.name", OBJECTIVES),
        ("objective.loss", LOSSES),
        ("optimizer.name", OPTIMIZERS),
        ("peft.name", {"none": None, **METHODS}),
    ],
)
def test_every_name_of_the_schema_is_in_its_table_and_has_its_file(key: str, table: dict[str, object]) -> None:
    group, name = key.split(".")
    with pytest.raises(UserError) as error:
        config.build([f"{key}=nosuch"])
    allowed = str(error.value).split("not one of ")[1].split(" (did")[0].split(", ")
    assert set(allowed) == set(table)
    if name == "name":
        assert set(config.choices()[group]) == set(table)


def test_the_metrics() -> None:
    rng = np.random.default_rng(0)
    labels, predicted = (rng.integers(0, 2, size=50).tolist() for _ in range(2))
    three, guessed = (rng.integers(0, 3, size=50).tolist() for _ in range(2))
    assert score("accuracy", labels, predicted) == np.mean(np.array(labels) == np.array(predicted))
    assert score("f1", labels, predicted) == pytest.approx(f1_score(labels, predicted))
    assert score("f1", three, guessed) == pytest.approx(f1_score(three, guessed, average="macro"))
    assert score("matthews", labels, predicted) == pytest.approx(matthews_corrcoef(labels, predicted))
    assert score("f1", [1, 1, 0], [0, 0, 0]) == 0.0
    assert not math.isnan(score("matthews", [1, 1, 0], [0, 0, 0]))
