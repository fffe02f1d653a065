"""`mezo train -m`: run the jobs of a sweep, each in its own directory, and continue a sweep that was interrupted."""

import contextlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mezo_cli.commands.execute import check_new_run
from mezo_cli.config.stored import OwnCode, check_stored, for_workers, is_same_run, own_keys, split_own_code
from mezo_cli.console import announce, json_at_end, log, print_line, relative_path, training_output
from mezo_cli.errors import UserError
from mezo_cli.runs.run import STUDY, SWEEP, Run, describe_run
from mezo_cli.sweep import jobs
from mezo_cli.sweep.jobs import job_status
from mezo_cli.sweep.plan import (
    CONFIG_DIR,
    SweepPlan,
    SweepRecord,
    describe_job,
    new_record,
    plan_again,
    plan_sweep,
    read_record,
)

PRELOADED = "mezo_cli.commands.preload"  # by the process that jobs are forked from


def sweep(
    overrides: Sequence[str],
    config_dir: str | None,
    at_once: int = 1,
    prints: bool = False,
    quiet: bool = False,
    as_json: bool = False,
) -> int:
    """Run the jobs of a sweep, or those that are left of it, or print their commands; return the exit status.

    `quiet`: only the directory, warnings and errors are printed; `as_json`: they go to standard error, and a document
    about all jobs is printed at the end.
    """
    quiet = quiet or as_json
    with json_at_end(as_json) as told, training_output(quiet or prints):
        plan = plan_sweep(overrides, config_dir)
        record = _make_record(plan)

        def describe() -> dict[str, Any]:
            done = [{"overrides": list(job.overrides), **describe_run(job.directory)} for job in plan.jobs]
            return {"sweep": str(plan.directory.absolute()), "jobs": done}

        told[plan.directory] = describe
        return _run(plan, record, at_once, prints, quiet)


def resume(
    folder: Path, overrides: Sequence[str] = (), config_dir: str | None = None, at_once: int = 1, quiet: bool = False
) -> int:
    """Continue the sweep in `folder`; return the exit status.

    `overrides`: what its record does not keep: the launcher, and what is the user's own code.
    """
    folder, record = folder.absolute(), read_record(folder)
    for text in split_own_code(overrides)[0]:
        if not text.startswith(("hydra/launcher=", "hydra.launcher.", "+hydra.launcher.", "++hydra.launcher.")):
            launcher = "the launcher (hydra/launcher=..., hydra.launcher.KEY=...)"
            kept = f"keeps its settings, except {launcher} and what is the user's own code"
            raise UserError(f"'{text}': {folder} {kept}; when a run ends is changed run by run")
    check_stored([text for job in record.jobs for text in job.overrides], folder / SWEEP)
    config_dir = check_given_again(folder, record.user_code, split_own_code(overrides)[1], config_dir)
    with training_output(quiet):
        with contextlib.chdir(record.cwd):  # relative paths in the overrides start there
            plan = plan_again(folder, record, overrides, config_dir)
            _check_same_runs(plan)
        return _run(plan, record, at_once, False, quiet)


def _make_record(plan: SweepPlan) -> SweepRecord:
    folder, jobs_by_path = plan.directory, {job.directory: list(job.overrides) for job in plan.jobs}
    if (folder / STUDY).is_file():
        raise UserError(f"{folder} contains a search of `mezo tune`; continue with: mezo resume {folder}")
    if not (folder / SWEEP).is_file():
        record = new_record(jobs_by_path, folder, plan.user_code)
    else:
        record = read_record(folder)
        before, now = [job.overrides for job in record.jobs], [*jobs_by_path.values()]
        if before != now:
            added = next((" ".join(texts) for texts in now if texts not in before), None)
            what = f"its {len(before)} jobs do not include {added}" if added else f"it has {len(before)} jobs"
            how = "repeat its command, or name another hydra.sweep.dir"
            raise UserError(f"{folder} contains a sweep over another grid: {what}; {how}")
    _check_same_runs(plan)
    return record


def _check_same_runs(plan: SweepPlan) -> None:
    """Check that the runs that are there have the settings of the jobs: a file in conf/ may have changed since."""
    for job in plan.jobs:
        if not jobs.is_begun(job.directory) or job_status(job.directory) == "damaged":  # the end names what is damaged
            continue
        if not is_same_run(Run.open(job.directory).contents().config, job.config):
            what = "contains a run with other settings than this job's; name another hydra.sweep.dir"
            raise UserError(f"{job.directory} {what}")


def check_given_again(folder: Path, needed: Sequence[str], user_code: OwnCode, config_dir: str | None) -> str | None:
    """Check that what jobs need of the user's own code is given again, on the command line or in the environment.

    Return the user's config folder as an absolute path.
    """
    for name in needed:
        mark = own_keys().get(name)
        if not (config_dir if name == CONFIG_DIR else mark and mark.or_variable(user_code.get(name))):
            shown = f"{name} DIR" if name == CONFIG_DIR else f"{name}=..."
            raise UserError(f"{folder} was started with {name}, which is not stored: give it again, {shown}")
    return None if config_dir is None else str(Path(config_dir).expanduser().absolute())


def _run(plan: SweepPlan, record: SweepRecord, at_once: int, prints: bool, quiet: bool) -> int:
    here = not prints and plan.launcher == "basic"
    if at_once > 1 and not here:
        how = "--print runs nothing" if prints else f"hydra/launcher={plan.launcher} has a setting of its own"
        raise UserError(f"--jobs {at_once}: {how}; leave one of them out")
    with for_workers(plan.code):
        configs = [job.config for job in plan.jobs]  # each objective and engine is checked once
        by_need = {repr((one.objective, one.model, one.task, one.data.keep, one.engine)): one for one in configs}
        for config in by_need.values():
            check_new_run(config)
        workers = jobs.Workers(at_once, record.cwd, not quiet and at_once == 1, PRELOADED) if here else None
        record.write(plan.directory)
        statuses, alone = [job_status(job.directory) for job in plan.jobs], ("finished", "running", "damaged")
        for status in alone[:2]:  # the last is told at the end
            if count := statuses.count(status):
                log.info("%d of %d jobs %s before: skipped", count, len(statuses), status)
        left = {number: job for number, job in enumerate(plan.jobs) if statuses[number] not in alone}
        if prints:
            for job in left.values():
                print_line(shlex.join(["mezo", *jobs.words_of(job, plan.config_dir, plan.code)]))
            return 0
        if quiet:
            announce(plan.directory)
        words = {number: jobs.words_of(job, plan.config_dir) for number, job in left.items()}
        try:
            if workers is not None:
                _run_here(plan, workers, words, at_once)
            elif words:
                jobs.launch(plan, words, record.cwd)
        except KeyboardInterrupt:
            what = f"what hydra/launcher={plan.launcher} has started may go on"
            if workers is not None:
                what = f"{sum(job_status(job.directory) != 'finished' for job in plan.jobs)} jobs are left"
            log.warning("%s; continue with: mezo resume %s", what, shlex.quote(relative_path(plan.directory)))
            raise
    return _conclude(plan, quiet)


def _run_here(plan: SweepPlan, workers: jobs.Workers, words: Mapping[int, list[str]], at_once: int) -> None:
    labels = [job.overrides for job in plan.jobs]

    def say(number: int, what: str) -> None:
        name = f"job {number + 1} of {len(labels)}  {describe_job(labels, number)}".rstrip()
        log.info("%s%s", name, f"  {what}" if what else "")

    def ended(number: int) -> None:
        status = job_status(plan.jobs[number].directory)
        if at_once > 1 or status != "finished":
            say(number, status)
        else:
            log.info("")

    workers.run(words, lambda number: say(number, "started" if at_once > 1 else ""), ended)


def _conclude(plan: SweepPlan, quiet: bool) -> int:
    statuses, labels = [job_status(job.directory) for job in plan.jobs], [job.overrides for job in plan.jobs]
    log.info("%d of %d jobs finished", statuses.count("finished"), len(statuses))
    if {"interrupted", "missing"} & set(statuses):
        log.info("continue with: mezo resume %s", shlex.quote(relative_path(plan.directory)))
    if "finished" in statuses and not quiet:
        from mezo_cli.commands.compare import show_folder  # imports pandas

        show_folder(plan.directory)
    for number, (job, status) in enumerate(zip(plan.jobs, statuses, strict=True)):
        if status not in ("finished", "running"):
            label = describe_job(labels, number)
            print_failed(f"job {number + 1} ({label})" if label else f"job {number + 1}", job.directory)
    return 0 if set(statuses) <= {"finished", "running"} else 1


def print_failed(name: str, path: Path) -> None:
    """Print a line on standard error for a job that has no result, and why."""
    print_line(f"failed: {name}: {why_not_finished(path)}", sys.stderr)


def why_not_finished(path: Path) -> str:
    """Return in one line why a job has no result."""
    found = describe_run(path)
    why = "it did not start" if found["status"] == "missing" else found["error"] or found["status"]
    return " ".join(str(why).split())
