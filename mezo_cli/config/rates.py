"""Learning rates of MeZO to begin with, by size of the model and what is trained (docs/how-to/choose-a-rate.md)."""

import math
from typing import NamedTuple

FACTORS = (1 / 3, 1.0, 3.0, 9.0)  # of a row's rate: the rates that `optimizer.lr=auto` tries


class Rate(NamedTuple):
    """A row of the table: for models of fewer than `below` parameters, trained by `peft`."""

    below: float
    peft: str
    lr: float
    source: str


PAPER = "the paper's grid"
ROWS = (
    Rate(3e7, "none", 2e-4, "demo.md"),
    Rate(3e7, "head", 1e-3, "choose-a-rate.md"),
    Rate(3e7, "lora", 1e-2, "choose-a-rate.md"),
    Rate(2e8, "none", 1.5e-5, "learns.md"),
    Rate(2e8, "lora", 1e-3, "learns.md"),
    Rate(6e8, "none", 1e-6, PAPER),
    Rate(6e8, "lora", 5e-5, PAPER),
    Rate(6e8, "prefix", 5e-3, PAPER),
    Rate(math.inf, "none", 3e-7, PAPER),
    Rate(math.inf, "lora", 7e-5, PAPER),
    Rate(math.inf, "prefix", 3e-3, PAPER),
)


def find_rate(parameters: int, peft: str) -> Rate | None:
    """Return the row for a model with so many parameters; None if there is none for what is trained."""
    return next((row for row in ROWS if parameters < row.below and row.peft == peft), None)


def advise(parameters: int, peft: str, above: float = 0.0, below: float = math.inf) -> str:
    """Return which rate runs like this one begin with, for an error or a finding.

    Empty if the table has no row, or none with a rate above and below the given ones: advice has a direction.
    """
    row = find_rate(parameters, peft)
    if row is None or not above < row.lr < below:
        return ""
    return f"; runs of peft={peft} on models of this size begin with {row.lr:g} ({row.source})"
