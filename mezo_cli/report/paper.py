"""Read the paper's tables, and how their runs were set up, from paper.yaml."""

import re
from collections.abc import Iterator, Mapping
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


class Row(NamedTuple):
    """A row of a table."""

    model: str
    shots: int | None  # 0: zero-shot; None: all rows
    method: str
    loss: str  # that was minimised; "-": that of each task
    numbers: Mapping[str, Number]

    @property
    def label(self) -> str:
        """The method, and the loss if it is not the usual one."""
        return self.method if self.loss in ("-", "cross_entropy") else f"{self.method} ({self.loss})"


class Paper:
    """One of the paper's tables, and the settings of its runs, as paper.yaml has them."""

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        self.source, self.about, self.notes = source, str(values["about"]), values.get("notes", [])
        self.seeds = frozenset(values["seeds"])
        # How each is scored and trained: `objectives` that give the same scores, `loss`, `metric`.
        self.tasks: dict[str, Any] = {name: one for one in values["tasks"] for name in one["names"].split()}
        self.rows = [self._row(cells) for cells in _cells(values["table"])]
        self.has_shots = len({row.model for row in self.rows}) == 1  # rows differ in shots, not in the model
        self._settings, self._grid = values["settings"], list(_cells(values["grid"]))

    def _row(self, cells: Mapping[str, str]) -> Row:
        shots = int(cells["k"]) if "k" in cells else 0 if cells["method"] == "zero-shot" else None
        numbers = {}
        for task in self.tasks:
            if match := CELL.fullmatch(cells[task]):  # not "-"
                mean, std, mark = match.groups()
                numbers[task] = Number(cells[task], float(mean), float(std) if std else None, bool(mark))
        return Row(cells["model"], shots, cells["method"], cells["loss"], numbers)

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

    def settings(self, method: str, loss: str = "") -> Mapping[str, Any]:
        """Return the settings of a method's runs, with a loss if it has its own; empty for one not in the paper."""
        return self._settings.get(f"{method} ({loss})") or self._settings.get(method, {})

    def usual_settings(self, method: str) -> Mapping[str, Any]:
        """Return the settings that a label need not mention: the method's own, else those of plain MeZO."""
        return self.settings(method) or (self.settings("MeZO") if "MeZO" in method else {})

    def grid(self, method: str, loss: str = "", task: str = "") -> Mapping[str, list[float]]:
        """Return the lowest and highest value of each key of a method's grid, on a task if it has its own."""
        label = f"{method} ({loss})" if f"{method} ({loss})" in self._settings else method
        rows = [one for one in self._grid if one["method"] == label]
        found = [one for one in rows if one["tasks"] == "-" or task in one["tasks"].split()][-1:]
        ends = {key: text for row in found for key, text in row.items() if key not in ("method", "tasks")}
        return {key: [float(end) for end in text.split()] for key, text in ends.items() if text != "-"}


def find_table(table: str = TABLE) -> Paper:
    """Return a table."""
    tables = _tables()
    if table not in tables:
        raise UserError(f"--table {table}: allowed are {join(tables)}{did_you_mean(table, tables)}")
    return tables[table]


def paper_of(model: str) -> Paper:
    """Return the table that has a model; the first for a model that none has."""
    return next((table for table in _tables().values() if any(row.model == model for row in table.rows)), find_table())


@cache
def _tables() -> Mapping[str, Paper]:
    content = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return {name: Paper(content["source"], values) for name, values in content["tables"].items()}


def _cells(table: str) -> Iterator[dict[str, str]]:
    """Yield the cells of each line of a table, by the titles in its first."""
    head, *lines = (re.split(r" {2,}", line.strip()) for line in table.splitlines())
    yield from (dict(zip(head, line, strict=True)) for line in lines)
