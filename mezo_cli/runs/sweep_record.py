"""The record of a sweep, `SWEEP/sweep.json`: what was asked for, and every job with its directory.

It is written before the first job starts, so that a sweep that was interrupted can continue.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from mezo_cli.errors import UserError, without_credentials
from mezo_cli.runs.files import is_below, read_json
from mezo_cli.runs.output import write_file

NAME = "sweep.json"


@dataclasses.dataclass(frozen=True)
class SweepJob:
    """One job: its number (from 0), its overrides, and its run directory, relative to the sweep's."""

    number: int
    overrides: list[str]
    directory: str


@dataclasses.dataclass(frozen=True)
class Search:
    """What `mezo tune` searches: `KEY=LOW:HIGH` each, the number of trials in the end, and `score` or `loss`."""

    ranges: list[str]
    trials: int
    goal: str


@dataclasses.dataclass(frozen=True)
class SweepRecord:
    """A sweep. `jobs` is None for an adaptive sweeper, which proposes jobs as it goes."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    overrides: list[str]  # of the whole sweep, the experiment's grid included: mezo's own keys
    argv: list[str]  # of the process that started it
    cwd: str  # its working directory: relative paths in the overrides start here
    jobs: list[SweepJob] | None
    own_config_dir: bool = False  # a `--config-dir` was used; which one is not stored
    own_engine_python: bool = False  # the user's own program runs the engine; which one is not stored
    own_reward: bool = False  # the reward is a function of the user's own; which one is not stored
    tune: Search | None = None  # of `mezo tune`; jobs are added as it goes
    retry_failed: bool = False  # of the process that runs it now, as is:
    quiet: bool = False
    gpus_per_job: int | None = None
    gpus: list[str] | None = None  # what CUDA_VISIBLE_DEVICES may be in a job; None: as in this process, which is:
    visible_gpus: str | None = None
    stopped: bool = False  # jobs that would start now end at once: Ctrl-C in a sweep on several processes

    def write(self, folder: Path) -> None:
        """Write the record into the sweep's directory."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_file(folder / NAME, json.dumps(dataclasses.asdict(self), indent=2) + "\n")
        except OSError as error:
            raise UserError(f"{folder}: the sweep's directory cannot be written: {error.strerror}") from error

    def directories(self, folder: Path) -> dict[int, Path]:
        """Return the run directory of every known job by its number."""
        return {job.number: folder / job.directory for job in self.jobs or ()}


def new(
    overrides: Sequence[str], config_dir: str | None, jobs: list[SweepJob] | None, tune: Search | None = None
) -> SweepRecord:
    """Return the record of a sweep that this process starts in its working directory; nothing is written.

    Args:
        overrides: of the command line, those of mezo's own keys alone: launchers and directories are given again.
        config_dir: the user's config folder, which is given again too.
        jobs, tune: as in the record.
    """
    return SweepRecord(
        overrides=[text for text in overrides if not text.lstrip("+").startswith("hydra")],
        argv=[without_credentials(word) for word in sys.argv],
        cwd=os.getcwd(),
        jobs=jobs,
        own_config_dir=config_dir is not None,
        tune=tune,
    )


def exists(folder: Path) -> bool:
    """Whether a directory is a sweep's."""
    return (folder / NAME).is_file()


def read(folder: Path) -> SweepRecord:
    """Read the record of a sweep."""
    try:
        record = TypeAdapter(SweepRecord).validate_json(json.dumps(read_json(folder / NAME)), strict=True)
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        raise UserError(f"{folder / NAME} is damaged: {key}: {error.errors()[0]['msg']}") from error
    for job in record.jobs or ():
        if not is_below(folder / job.directory, folder):
            raise UserError(f"{folder / NAME}: job {job.number + 1} is in {job.directory}, which is not in {folder}")
    return record
