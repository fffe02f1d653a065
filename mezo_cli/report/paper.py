"""Read the paper's numbers and how its runs were set up from paper.yaml."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_name("paper.yaml")
CELL = re.compile(r"(?P<mean>[\d.]+)(?: \((?P<std>[\d.]+)\))?(?P<uncertain>\?)?")


@dataclass(frozen=True)
class Number:
    """One number of the paper, in percent. Zero-shot and the accuracy objective have no std."""

    mean: float
    std: float | None
    uncertain: bool

    def __str__(self) -> str:
        std = "" if self.std is None else f" ({self.std:.1f})"
        return f"{self.mean:.1f}{std}{'?' if self.uncertain else ''}"

    def record(self) -> dict[str, float | bool | None]:
        """Return the number as fields of a CSV or JSON record."""
        return {"paper_mean": self.mean, "paper_std": self.std, "paper_uncertain": self.uncertain}


@dataclass(frozen=True)
class Row:
    """A row of the paper's table: shots (0: zero-shot), method, the loss that was minimised, task -> number."""

    shots: int
    method: str
    loss: str
    numbers: Mapping[str, Number]

    @property
    def label(self) -> str:
        """The method, and the loss if it is not cross-entropy."""
        return self.method if self.loss == "cross_entropy" else f"{self.method} ({self.loss})"


@dataclass(frozen=True)
class Paper:
    """The paper's table and the settings of its runs."""

    source: str
    model: str
    objective: str
    seeds: frozenset[int]  # data seeds
    tasks: tuple[str, ...]
    rows: tuple[Row, ...]
    setups: Mapping[str, Mapping[str, Any]]  # method -> grid (key -> its ends), settings (key -> value)
    decoder_grids: Mapping[str, Mapping[str, list[float]]]  # method -> grid of the decoders, OPT

    def row(self, shots: int | None, method: str, loss: str) -> Row | None:
        """Return a row of the table; None if the paper has none."""
        rows = [row for row in self.rows if (row.shots, row.method, row.loss) == (shots, method, loss)]
        return rows[0] if rows else None

    def settings(self, method: str) -> Mapping[str, Any]:
        """Return the settings that a method was run with; empty for a method that is not in the paper."""
        return dict(self.setups[method]["settings"]) if method in self.setups else {}

    def usual_settings(self, method: str) -> Mapping[str, Any]:
        """Return the settings that a label need not mention: the method's own, else those of plain MeZO."""
        return self.settings(method) or (self.settings("MeZO") if "MeZO" in method else {})

    def grid(self, method: str, decoder: bool = False) -> Mapping[str, list[float]]:
        """Return the lowest and highest value of each key of a method's grid, of RoBERTa-large or of the decoders."""
        if decoder:
            return self.decoder_grids.get(method, {})
        return dict(self.setups[method]["grid"]) if method in self.setups else {}

    def order(self, method: str) -> int:
        """Return the position of a method in the table; a method that is not in the paper comes last."""
        names = list(dict.fromkeys(row.method for row in self.rows))
        return names.index(method) if method in names else len(names)


@cache
def paper() -> Paper:
    """Read paper.yaml."""
    values = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    head, *lines = (re.split(r" {2,}", line.strip()) for line in values["table"].splitlines())
    rows = [_row(dict(zip(head, line, strict=True)), values["tasks"]) for line in lines]
    return Paper(
        source=values["source"],
        model=values["model"],
        objective=values["objective"],
        seeds=frozenset(values["seeds"]),
        tasks=tuple(values["tasks"]),
        rows=tuple(rows),
        setups=values["setups"],
        decoder_grids=values["decoder_grids"],
    )


def _row(cells: Mapping[str, str], tasks: list[str]) -> Row:
    numbers = {task: _number(cells[task]) for task in tasks if cells[task] != "-"}
    return Row(int(cells["k"]), cells["method"], cells["loss"], numbers)


def _number(text: str) -> Number:
    match = CELL.fullmatch(text)
    assert match is not None, f"{FILE}: {text}"
    return Number(float(match["mean"]), float(match["std"]) if match["std"] else None, bool(match["uncertain"]))
