"""The noise of gradients: batches of each kind, G and N of given squares, and the table of a run's settings."""

import sys
from types import ModuleType

import pytest
import torch

from mezo_cli.config.schema import TokenizedExample
from tests.scripts.load import load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("measure_gradient_noise")


def test_batches_at_random_and_balanced(script: ModuleType) -> None:
    rows = [TokenizedExample([number], [0], 0, label) for number, label in enumerate([0, 0, 0, 1, 0, 1, 1, 0, 1])]
    assert [[row.label for row in batch] for batch in script.random_batches(rows, 4)] == [[0, 0, 0, 1], [0, 1, 1, 0]]
    assert [[row.label for row in batch] for batch in script.balanced_batches(rows, 4)] == [[0, 0, 1, 1]] * 2


def test_the_noise_of_known_gradients(script: ModuleType) -> None:
    """Batches of 8 rows with the gradients (3.5, 4) and (2.5, 4): unbiased, a batch's noise is 0.5, so a row's is 4."""
    gain, per_row = script.noise([3.5**2 + 4**2, 2.5**2 + 4**2], 3**2 + 4**2, 8)
    assert (gain, per_row) == pytest.approx((25 - 0.5 / 2, 0.5 * 8))


def test_the_shift_makes_the_mean_probability_the_mean_label(script: ModuleType) -> None:
    scores, labels = torch.tensor([3.0, 1.0, 2.5, 6.0]), torch.tensor([0, 0, 1, 1])
    shifted = scores - script.best_shift(scores, labels)
    assert float(shifted.sigmoid().mean()) == pytest.approx(0.5)


def test_the_table(script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["experiment=demo", "peft=bias", "--rows", "48", "--batch", "8"]
    monkeypatch.setattr(sys, "argv", ["measure_gradient_noise.py", *words])
    script.main()
    line = capsys.readouterr().out.splitlines()[-1]
    template, trained, _, per_row, balanced, trace, *_ = line.strip("| ").split(" | ")
    assert (template, trained) == ("`{sentence} It was {mask}.`", "bias")
    assert float(per_row) > float(balanced) > 0
    assert float(trace) > 0
