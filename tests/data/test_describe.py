"""The counts that `mezo data` prints."""

import pytest

from mezo_cli.config.schema import Example, Splits
from mezo_cli.data import describe
from tests.data.sample_data import RTE


def test_describe_counts_rows_and_words() -> None:
    rows = [Example(("one two", "three"), 0), Example(("a b c d", ""), 1), Example(("x", "y z a b c d e f g"), 1)]
    facts = describe(Splits(rows, [], None), RTE)
    assert facts["train"]["rows"] == 3
    assert facts["train"]["labels"] == {"entailment": 1, "not_entailment": 2}
    assert facts["train"]["words"] == {"min": 3, "median": 4.0, "p95": pytest.approx(9.4), "max": 10}
    assert facts["dev"]["rows"] == 0
    assert facts["test"] is None
