"""The runs under some folders, read once: what each was, how it ended, what it came to."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mezo_cli import config as configs
from mezo_cli import runs
from mezo_cli.errors import UserError
from mezo_cli.runs import Run
from mezo_cli.schema import Config

PREPARED = re.compile(r"(\d+)-(\d+)")  # LM-BFF's name of a few-shot folder: shots and data seed


@dataclass(frozen=True)
class Scores:
    """What an evaluation said: the task's own metric (as a fraction), accuracy, loss."""

    score: float
    accuracy: float
    loss: float


@dataclass(frozen=True)
class Entry:
    """One run. `dev`, `train` and `test` are those of the best checkpoint, None where the run has none (yet)."""

    run: Run
    config: Config
    status: str
    error: str | None
    start: str
    fingerprint: str | None  # of its data
    reached: int  # steps done
    summary: Mapping[str, Any]  # summary.json; empty until the run is finished
    dev: Scores | None
    train: Scores | None
    test: Scores | None

    @property
    def where(self) -> str:
        """The run's directory, as seen from here."""
        return shown(self.run.path)

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return self.status == "finished"

    @property
    def shots(self) -> int | None:
        """Training rows a label, None for all rows."""
        return split_of(self.config)[0]

    @property
    def data_seed(self) -> int:
        """The seed that the rows were drawn with."""
        return split_of(self.config)[1]

    def trouble(self) -> str:
        """Say why the run has no result: `failed (why)`, `interrupted at step 3 of 10`."""
        if self.status == "failed":
            return f"failed ({' '.join(str(self.error).split())})"
        return f"{self.status} at step {self.reached} of {self.config.steps}"


def split_of(config: Config) -> tuple[int | None, int]:
    """Return shots and data seed: of a prepared folder its name's (`16-42`), else the config's own."""
    folder = prepared_folder(config)
    if folder is not None:
        return int(folder[1]), int(folder[2])
    return config.data.shots, config.seed if config.data.seed is None else config.data.seed


def prepared_folder(config: Config) -> re.Match[str] | None:
    """Return the match of shots and seed where the run's rows came from a prepared few-shot folder."""
    data = config.data
    if data.name != "files" or data.dir is None or data.shots is not None:
        return None
    return PREPARED.fullmatch(Path(data.dir).name)


def collect(folders: Iterable[Path]) -> tuple[list[Entry], list[str]]:
    """Return the runs under `folders`, each once, and a line for each directory that cannot be read as a run.

    Raises:
        UserError: for a folder that is not there.
    """
    found = {run.path.resolve(): run for folder in folders for run in runs.find(folder)}
    entries, warnings = [], []
    for run in found.values():
        try:
            entries.append(_read(run.path))
        except UserError as error:
            warnings.append(f"{shown(run.path)} is left out: {' '.join(str(error).split())}")
        except OSError as error:
            warnings.append(f"{shown(run.path)} is left out: {error}")
    return entries, warnings


def shown(path: Path) -> str:
    """Return a path relative to here where it lies below."""
    inside = path.absolute().is_relative_to(Path.cwd())
    return os.path.relpath(path) if inside else str(path)


def _read(path: Path) -> Entry:
    run = Run.open(path)
    config, info, status = configs.read(path / "config.yaml"), run.info(), run.status()
    summary = run.results() if status == "finished" else {}
    steps = [line["step"] for line in run.metrics()] if status != "finished" else [config.steps]
    seen = {split: _scores(path, summary, split, config.task.metric) for split in ("dev", "train", "test")}
    if summary and seen["dev"] is None:
        raise UserError(f"{path / 'summary.json'} is damaged: it lacks dev")
    start, error, fingerprint = (info.get(name) for name in ("start", "error", "data_fingerprint"))
    return Entry(run, config, status, error, str(start), fingerprint, max(steps, default=0), summary, **seen)


def _scores(path: Path, summary: Mapping[str, Any], split: str, metric: str) -> Scores | None:
    given = summary.get(split)
    if given is None:
        return None
    try:
        values: Sequence[float] = [float(given[name]) for name in (metric, "accuracy", "loss")]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path / 'summary.json'} is damaged: {split} lacks {metric}, accuracy or loss") from error
    return Scores(*values)
