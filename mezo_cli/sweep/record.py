"""The record of a sweep, `SWEEP/sweep.json`: every job with its overrides and its directory.

It is written before the first job starts. What a job came to is in its own run.json.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mezo_cli.errors import UserError, without_credentials
from mezo_cli.runs.atomic import is_below, read_json, write_file
from mezo_cli.runs.run import SWEEP

FORMAT = 1


class SweepJob(BaseModel):
    """One job: its number (from 0), its overrides, and its run directory, relative to the sweep's."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    number: int
    overrides: list[str]
    directory: str


class SweepRecord(BaseModel):
    """A sweep: what a process of another day needs to run the rest of it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: int
    argv: list[str]  # of the process that started it
    cwd: str  # its working directory: relative paths in the overrides start here
    user_code: list[str]  # what the jobs need of the user's own, which is not stored: `--config-dir`, keys of own_code
    jobs: list[SweepJob] = Field(min_length=1)

    def write(self, folder: Path) -> None:
        """Write the record into the sweep's directory."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_file(folder / SWEEP, json.dumps(self.model_dump(), indent=2) + "\n")
        except OSError as error:
            raise UserError(f"{folder}: the sweep's directory cannot be written: {error.strerror}") from error


def new(jobs: Mapping[Path, list[str]], folder: Path, user_code: list[str]) -> SweepRecord:
    """Return the record of a sweep that this process starts: its jobs by their directories; nothing is written."""
    numbered = [
        SweepJob(number=number, overrides=overrides, directory=os.path.relpath(path, folder))
        for number, (path, overrides) in enumerate(jobs.items())
    ]
    argv = [without_credentials(word) for word in sys.argv]
    return SweepRecord(format=FORMAT, argv=argv, cwd=os.getcwd(), user_code=user_code, jobs=numbered)


def read(folder: Path) -> SweepRecord:
    """Read the record of a sweep."""
    path = folder / SWEEP
    content = read_json(path)
    if content.get("format") != FORMAT:
        raise UserError(f"{path}: of a version of mezo before 1.0, or of a format that this one does not know")
    try:
        record = SweepRecord.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path} is damaged: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    for job in record.jobs:
        if not is_below(folder / job.directory, folder):
            raise UserError(f"{path}: job {job.number + 1} is in {job.directory}, which is not in {folder}")
    return record
