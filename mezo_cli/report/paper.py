"""Read the paper's tables, and how their runs were set up, from paper.yaml."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from mezo_cli.errors import UserError, did_you_mean, join

FILE = Path(__file__).with_name("paper.yaml")
TABLE = "roberta"  # the table that a run belongs to whose model is in none
CELL = re.compile(r"([\d.]+)(?: \(([\d.]+)\))?(\??)")


class Number(NamedTuple):
    """One number of the paper, in percent, and as it is printed. Where there is one run it has no std."""

    text: str
    mean: float
    std: float | None
    uncertain: bool

    def record(self) -> dict[str, float | bool | None]:
        """Return the number as fields of a CSV or JSON record."""
        return {"paper_mean": self.mean, "paper_std": self.std, "paper_uncertain": self.uncertain}


class Row(NamedTuple):
    """A row of a table: model, shots (0: zero-shot; None: all rows), method, the loss that was minimised, the numbers.

    The loss "-" is that of each task.
    """

    model: str
    shots: int | None
    method: str
    loss: str
    numbers: Mapping[str, Number]

    @property
    def label(self) -> str:
        """The method, and the loss if it is not the usual one."""
        return self.method if self.loss in ("-", "cross_entropy") else f"{self.method} ({self.loss})"


@dataclass(frozen=True)
class Paper:
    """One of the paper's tables, and the settings of its runs.

    Attributes:
        seeds: data seeds.
        tasks: how each is scored and trained: `objectives` that give the same scores, `loss`, `metric`.
        setups: label of a row, or method -> `grid` (key -> its ends), `settings`, `tasks` (whose grid is another).
    """

    source: str
    about: str
    notes: tuple[str, ...]
    seeds: frozenset[int]
    tasks: Mapping[str, Mapping[str, Any]]
    rows: tuple[Row, ...]
    setups: Mapping[str, Mapping[str, Any]]

    @property
    def has_shots(self) -> bool:
        """Whether the rows differ in shots, not in the model."""
        return len({row.model for row in self.rows}) == 1

    def section(self, model: str, shots: int | None) -> str:
        """Return what the first column says of a row or a group of runs: shots, or the model."""
        return str(shots) if self.has_shots else model

    def row(self, model: str, shots: int | None, method: str, loss: str, task: str) -> Row | None:
        """Return a row of the table; None if the paper has none."""
        wanted = (model, shots, method, loss)
        return next((row for row in self.rows if (*row[:3], self.loss(row, task)) == wanted), None)

    def loss(self, row: Row, task: str) -> str:
        """Return the loss of a row's runs on a task."""
        return str(self.tasks[task]["loss"]) if row.loss == "-" else row.loss

    def setup(self, method: str, loss: str = "") -> Mapping[str, Any]:
        """Return how a method was run, by that loss if it has a setup of its own; empty for one not in the paper."""
        return self.setups.get(f"{method} ({loss})") or self.setups.get(method, {})

    def settings(self, method: str, loss: str = "") -> Mapping[str, Any]:
        """Return the settings that a method was run with; empty for a method that is not in the paper."""
        return dict(self.setup(method, loss).get("settings", {}))

    def usual_settings(self, method: str) -> Mapping[str, Any]:
        """Return the settings that a label need not mention: the method's own, else those of plain MeZO."""
        return self.settings(method) or (self.settings("MeZO") if "MeZO" in method else {})

    def grid(self, method: str, loss: str = "", task: str = "") -> Mapping[str, list[float]]:
        """Return the lowest and highest value of each key of a method's grid, on a task if it has its own."""
        setup = self.setup(method, loss)
        return {**setup.get("grid", {}), **setup.get("tasks", {}).get(task, {})}


def paper(table: str = TABLE) -> Paper:
    """Return a table."""
    if table not in _tables():
        names = list(_tables())
        raise UserError(f"--table {table}: allowed are {join(names)}{did_you_mean(table, names)}")
    return _tables()[table]


def paper_of(model: str) -> Paper:
    """Return the table that has a model; the first for a model that none has."""
    return next((table for table in _tables().values() if any(row.model == model for row in table.rows)), paper())


@cache
def _tables() -> Mapping[str, Paper]:
    """Read paper.yaml."""
    content = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    tables = {}
    for name, values in content["tables"].items():
        head, *lines = (re.split(r" {2,}", line.strip()) for line in values.pop("table").splitlines())
        rows = tuple(_row(dict(zip(head, line, strict=True)), values["tasks"]) for line in lines)
        values |= {"notes": tuple(values.get("notes", ())), "seeds": frozenset(values["seeds"])}
        tables[name] = Paper(source=content["source"], rows=rows, **values)
    return tables


def _row(cells: Mapping[str, str], tasks: Mapping[str, Any]) -> Row:
    shots = int(cells["k"]) if "k" in cells else 0 if cells["method"] == "zero-shot" else None
    numbers = {task: _number(cells[task]) for task in tasks if cells[task] != "-"}
    return Row(cells["model"], shots, cells["method"], cells["loss"], numbers)


def _number(text: str) -> Number:
    match = CELL.fullmatch(text)
    assert match is not None, f"{FILE}: {text}"
    mean, std, mark = match.groups()
    return Number(text, float(mean), float(std) if std else None, bool(mark))
