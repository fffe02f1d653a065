"""Plan a sweep: expand its overrides into jobs, and compose and validate every job before the first one starts.

The plan is recorded as `SWEEP/sweep.json` before a job starts. What a job came to is in its own run.json.
"""

import itertools
import json
import math
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mezo_cli.config import compose
from mezo_cli.config.choices import Choices, find_choices
from mezo_cli.config.compose import Job
from mezo_cli.config.overrides import MAX_JOBS, Override, parse, quote
from mezo_cli.config.registry import CHOICES
from mezo_cli.config.schema import to_dict
from mezo_cli.config.stored import OwnCode, own_in, split_own_code
from mezo_cli.config.validation import UNREAD, reads
from mezo_cli.errors import UserError, without_credentials
from mezo_cli.runs.atomic import is_below, read_json, write_file
from mezo_cli.runs.run import SWEEP

CONFIG_DIR = "--config-dir"
RECORD_FORMAT = 1


@dataclass(frozen=True)
class SweepPlan:
    """A sweep whose every job is valid."""

    directory: Path
    launcher: str  # Hydra's
    common: list[str]  # the overrides of Hydra's own keys
    jobs: list[Job]  # with the overrides of mezo's own keys that may be stored
    code: OwnCode  # what the jobs use of the user's own code, which is stored nowhere
    config_dir: str | None
    user_code: list[str]  # what of the user's own is given again to go on: `--config-dir`, keys of own_code


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


def plan_sweep(overrides: Sequence[str], config_dir: str | None = None) -> SweepPlan:
    """Return the plan of a command line; an experiment file may add a grid of its own (`hydra.sweeper.params`)."""
    parsed = parse(overrides, find_choices(config_dir))
    for override in parsed:
        if override.name.startswith("hydra.run."):
            raise UserError(f"'{override.text}' is about a single run: a sweep has hydra.sweep.dir")
    parsed, launcher = _with_experiment_grid(parsed, config_dir)
    common = [override.text for override in parsed if override.name.startswith("hydra")]
    directory, jobs = _compose_jobs(expand(parsed), common, config_dir)
    return _plan(directory, launcher, common, jobs, config_dir)


def plan_again(folder: Path, record: SweepRecord, overrides: Sequence[str], config_dir: str | None = None) -> SweepPlan:
    """Return the plan of the sweep in a folder, by its record.

    `overrides`: what the record does not keep: the launcher, and what is the user's own code.
    """
    launched, code = split_own_code(overrides)
    parsed = parse(launched, find_choices(config_dir))
    common = [*launched, f"hydra.sweep.dir={quote(folder)}"]
    more = [f"{key}={quote(value)}" for key, value in code.items()]
    _, jobs = _compose_jobs([(*job.overrides, *more) for job in record.jobs], common, config_dir)
    jobs = [replace(job, directory=folder / of.directory) for job, of in zip(jobs, record.jobs, strict=True)]
    chosen = [override.value for override in parsed if override.name == "hydra/launcher"]
    return _plan(folder, chosen[-1] if chosen else "basic", common, jobs, config_dir)


def _plan(directory: Path, launcher: str, common: list[str], jobs: list[Job], config_dir: str | None) -> SweepPlan:
    code, of_commands, kept = OwnCode(), OwnCode(), []
    for job in jobs:
        code |= own_in(to_dict(job.config, whole=True))
        overrides, of_command = split_own_code(job.overrides)
        of_commands |= of_command
        kept.append(replace(job, overrides=tuple(overrides)))
    user_code = [*[CONFIG_DIR] * (config_dir is not None), *of_commands]
    return SweepPlan(directory, launcher, common, kept, code, config_dir, user_code)


def _with_experiment_grid(parsed: list[Override], config_dir: str | None) -> tuple[list[Override], str]:
    """Return the overrides behind those of the experiment file's grid, and the launcher that the files choose.

    What the command line names itself, a value or a choice, is not swept over by the file.
    """
    names = {override.name for override in parsed}
    with_grids = ("experiment", "task") if "experiment" in names else ()  # an experiment's grid may depend on the task
    plain = [override.text for override in parsed if not override.sweeps and override.name not in with_grids]
    chosen = expand(override for override in parsed if override.name in with_grids)
    experiments = dict.fromkeys(text for words in chosen for text in words if text.startswith("experiment="))
    with compose.hydra_session():
        sweepers = [compose.sweeper_of(compose.compose_node([*plain, *words], config_dir)) for words in chosen]
    launcher, grid = sweepers[0]
    for words, other in zip(chosen, sweepers, strict=True):
        if other != sweepers[0]:
            both = f"{' '.join(chosen[0])} and {' '.join(words)}"
            raise UserError(f"{both}: their files sweep over unlike grids; run one at a time")
    try:
        added = parse([f"{key}={values}" for key, values in grid.items() if key not in names], find_choices(config_dir))
        for override in added:
            if override.name.startswith("hydra"):
                raise UserError(f"'{override.text}': Hydra's own keys cannot be swept over")
    except UserError as error:
        raise UserError(f"{error} (hydra.sweeper.params of {', '.join(experiments) or 'a file'})") from error
    return [*added, *parsed], launcher


def expand(parsed: Iterable[Override]) -> list[tuple[str, ...]]:
    """Return the overrides of each job, in the order in which Hydra's basic sweeper runs them.

    Of several overrides of one key the last counts, in the place of the first. Those of Hydra's own keys are left out.
    """
    values: dict[Any, tuple[str, ...]] = {}
    for override in parsed:
        if override.values is None:
            raise UserError(f"'{override.text}' cannot be swept over: its values cannot be enumerated")
        if not override.jobs:
            raise UserError(f"'{override.text}' names no value to sweep over")
        if not override.name.startswith("hydra"):
            values[override.name, override.package, override.form] = override.jobs
    if (count := math.prod(len(texts) for texts in values.values())) > MAX_JOBS:
        raise UserError(f"the sweep has {count:,} jobs; at most {MAX_JOBS:,} are allowed")
    return list(itertools.product(*values.values()))


def describe_job(jobs: Sequence[Sequence[str]], number: int) -> str:
    """Return the overrides by which a job differs from the others: `seed=42 optimizer.lr=0.001`."""
    return " ".join(text for i, text in enumerate(jobs[number]) if any(i >= len(job) or job[i] != text for job in jobs))


def _read_by_some_job(parsed: Collection[Override]) -> set[str]:
    """Return the keys that one of the choices of a sweep reads: jobs of the others leave them out."""
    read, names = set[str](), [override.name for override in parsed]
    for group, table in CHOICES.items():
        chosen = {str(override.value) for override in parsed if override.name == group} & {*table.names}
        if len(chosen) > 1:
            read |= {f"{group}.{key}" for name in chosen for key in table.load(name).model_fields}
    return {*read, *(key for key, (other, *_) in UNREAD.items() if names.count(other) > 1)} & {*names}


def _compose_jobs(
    jobs: Sequence[tuple[str, ...]], common: Sequence[str], config_dir: str | None
) -> tuple[Path, list[Job]]:
    """Compose and validate every job; return the directory of the sweep, and the jobs with theirs.

    Jobs of the same choices share one composition of files, and differ in the plain values that are set in a copy of
    it. That takes a fifth of the time of a composition for each.
    """
    choices = find_choices(config_dir)
    texts = list(dict.fromkeys(text for job in jobs for text in job))
    parsed = dict(zip(texts, parse(texts, choices), strict=True))
    plain, tolerated = plain_values(parsed.values(), choices), _read_by_some_job(parsed.values())
    composed: dict[tuple[str, ...], Any] = {}
    first: tuple[Any, Path] | None = None  # the node and the sweep's directory of the first job
    planned: dict[Path, Job] = {}
    with compose.hydra_session():
        for number, job in enumerate(jobs):
            try:
                files = tuple(text for text in job if text not in plain)
                if files not in composed:
                    composed[files] = compose.compose_node([*common, *files], config_dir)
                if "override" in str(OmegaConf.to_container(composed[files].hydra.sweep, resolve=False)):
                    node = compose.compose_node([*common, *job], config_dir)
                else:
                    node = compose.with_values(composed[files], [parsed[text] for text in job if text in plain])
                if first is not None:
                    OmegaConf.copy_cache(first[0], node)  # of ${now:...} and ${mezo_unique:}
                overrides = [parsed[text] for text in job]
                compose.begin(node, overrides)
                with compose.locating(node, overrides, choices):
                    config = compose.config_of(node, overrides, tolerated)
                    folder, directory = compose.sweep_directories(node, number)
                first = first or (node, folder)
                if folder != first[1]:
                    raise UserError(f"hydra.sweep.dir={folder}, and {first[1]} for job 1: a sweep has one directory")
                if not is_below(directory, folder):
                    raise UserError(f"hydra.sweep.subdir gives it the directory {directory}, which is not in {folder}")
                if directory in planned:
                    raise UserError(f"hydra.sweep.subdir gives it the directory of another job, {directory}")
                names = {text: parsed[text].name for text in job}  # the command of a job refuses what it does not read
                kept = [text for text in job if names[text] not in tolerated or reads(config, names[text])]
                planned[directory] = Job(config, directory, tuple(kept))
            except UserError as error:
                label = describe_job(jobs, number)
                name = f"job {number + 1} of {len(jobs)} ({label}): " if label else ""
                raise UserError(f"{name}{error}") from error
    assert first is not None
    return first[1], list(planned.values())


def plain_values(parsed: Collection[Override], choices: Choices) -> set[str]:
    """Return the overrides that set a value, and so change neither which files are merged nor how.

    None where another form of override (`+KEY=`, `~KEY`) is about the same key: then their order matters.
    """
    values = [override for override in parsed if override.name not in choices]
    plain = {override.text: override.name for override in values if override.form == "CHANGE"}
    others = [override.name for override in values if override.text not in plain]
    related = any(f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.") for a in plain.values() for b in others)
    return set() if related else set(plain)


# --- its record, `SWEEP/sweep.json` ---


def new_record(jobs: Mapping[Path, list[str]], folder: Path, user_code: list[str]) -> SweepRecord:
    """Return the record of a sweep that this process starts: its jobs by their directories; nothing is written."""
    numbered = [
        SweepJob(number=number, overrides=overrides, directory=os.path.relpath(path, folder))
        for number, (path, overrides) in enumerate(jobs.items())
    ]
    argv = [without_credentials(word) for word in sys.argv]
    return SweepRecord(format=RECORD_FORMAT, argv=argv, cwd=os.getcwd(), user_code=user_code, jobs=numbered)


def read_record(folder: Path) -> SweepRecord:
    """Read the record of a sweep."""
    path = folder / SWEEP
    content = read_json(path)
    if content.get("format") != RECORD_FORMAT:
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
