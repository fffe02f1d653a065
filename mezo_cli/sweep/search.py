"""A search of `mezo tune`: ranges of keys (`KEY=LOW:HIGH` or those around the defaults), study, values of trials."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mezo_cli.config.explain import key_schema
from mezo_cli.config.schema import Config
from mezo_cli.errors import UserError, install
from mezo_cli.report.settings import OF_STEPS, matches
from mezo_cli.runs.run import STUDY, Run

if TYPE_CHECKING:
    import optuna

NAME = "mezo"  # of the study, and of its attribute that has what is searched
DEFAULTS = ("lr", "eps")  # settings of the optimizer, searched from a tenth of their value to ten times it
TIE = 1e-7  # of equal scores the one with the lower loss is better by less than two of these
LOG_FROM = 10.0  # a range whose ends differ by this factor is searched by the logarithm


@dataclass(frozen=True)
class Range:
    """A key and where its value is searched for, both ends included."""

    key: str
    low: float
    high: float
    value_type: type  # int or float

    def distribution(self) -> "optuna.distributions.BaseDistribution":
        """Return Optuna's."""
        from optuna.distributions import FloatDistribution, IntDistribution

        of_type: Any = IntDistribution if self.value_type is int else FloatDistribution
        by_logarithm = self.low > 0 and self.high / self.low >= LOG_FROM
        return of_type(self.value_type(self.low), self.value_type(self.high), log=by_logarithm)

    def __str__(self) -> str:
        return f"{self.key}={self.value_type(self.low)!r}:{self.value_type(self.high)!r}"


def parse_ranges(texts: Sequence[str], base: Config) -> list[Range]:
    """Return the ranges of `--range`, `KEY=LOW:HIGH` each, or of the default keys around their values in `base`."""
    ranges = [_parse_range(text) for text in texts]
    for name in () if texts else (name for name in DEFAULTS if hasattr(base.optimizer, name)):
        key, value = f"optimizer.{name}", getattr(base.optimizer, name)
        if not value:
            raise UserError(f"{key}={value}: there is no range around it; give --range KEY=LOW:HIGH")
        ranges.append(Range(key, value / 10, value * 10, float))
    for number, item in enumerate(ranges):
        if item.key in [before.key for before in ranges[:number]]:
            raise UserError(f"--range {item.key}: it is given twice; give one range per key")
        if not base.steps and matches(item.key, OF_STEPS):
            raise UserError(f"--range {item.key}: the run takes no step, which would read it (steps=0)")
    return ranges


def _parse_range(text: str) -> Range:
    key, _, ends = text.partition("=")
    shape = f"--range '{text}': expected KEY=LOW:HIGH, e.g. optimizer.lr=1e-6:1e-4"
    parts = ends.split(":")
    if not key or len(parts) != 2:
        raise UserError(shape)
    value_type: Any = {"integer": int, "number": float}.get(key_schema(key)["type"])
    if value_type is None or key == "max_seconds":
        raise UserError(f"--range {key}: this key cannot be searched over; give one that takes a number")
    try:
        low, high = (value_type(part) for part in parts)
    except ValueError as error:
        raise UserError(f"{shape}; {key} takes {'whole numbers' if value_type is int else 'numbers'}") from error
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UserError(f"{shape}, LOW below HIGH")
    return Range(key, low, high, value_type)


def open_study(folder: Path, order: int | None = None) -> "optuna.Study":
    """Open the study of a search, or, where its order is given, create it: 1 where the highest value is the best."""
    try:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
    except ModuleNotFoundError as error:
        raise UserError(f"mezo tune needs Optuna: {install('tune')}") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path = folder / STUDY
    if order is not None:
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of parts that Optuna calls experimental
            storage = JournalStorage(JournalFileBackend(str(path)))
            if order is None:
                return optuna.load_study(storage=storage, study_name=NAME)
            direction: Literal["maximize", "minimize"] = "maximize" if order > 0 else "minimize"
            return optuna.create_study(storage=storage, study_name=NAME, direction=direction, load_if_exists=True)
    except Exception as error:  # whatever it finds in a file that is damaged
        raise UserError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def trained_evaluations(run: Run, steps: int) -> dict[int, dict[str, Any]]:
    """Return step -> the line of an evaluation on dev of weights that the trial has trained: those after step 0.

    Args:
        run: the trial's run.
        steps: of its config; 0 for a linear probe alone, which is trained at step 0.
    """
    return {line["step"]: line for line in run.evaluations("dev") if line["step"] or not steps}


def value_of(line: Mapping[str, Any], config: Config) -> float:
    """Return the one number by which evaluations are ordered; the loss decides between equal scores.

    TIE is below the step of any score that is a fraction of fewer than 5 million rows: the loss decides only ties.
    """
    metric, loss = config.chosen_metric, float(line["loss"])
    tie = 0.0 if metric == "loss" else TIE * loss / (1 + abs(loss))
    return float(line[metric]) - config.order_of(metric) * tie
