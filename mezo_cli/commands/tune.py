"""`mezo tune`: search for settings with Optuna's ask and tell. A trial is a training in a directory of the sweep.

The study is SWEEP/study.journal, Optuna's journal: one JSON object per line. `sweep.json` has each trial's job before
it starts. A trial's number seeds the sampler, so a search that was interrupted continues as if it had not been.
Evaluations are reported to the study from a trial's metrics.jsonl, so that what a kill kept from it is reported later.
"""

import dataclasses
import logging
import math
import shlex
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mezo_cli.commands.execute import announce, execute
from mezo_cli.commands.new_run import check_new_runs
from mezo_cli.commands.sweep_jobs import (
    check_record,
    job_status,
    job_statuses,
    open_or_create,
    print_unfinished,
    why_not_finished,
    with_own_code_noted,
)
from mezo_cli.config import compose
from mezo_cli.config.choices import find_choices
from mezo_cli.config.own_code import for_workers, split_own_code
from mezo_cli.config.schema import Config
from mezo_cli.config.search_ranges import Range, parse_ranges
from mezo_cli.config.sweep_plan import SweepPlan, plan_sweep
from mezo_cli.console import print_line, relative_path, training_output
from mezo_cli.errors import RunFailed, UserError, install, one_line
from mezo_cli.runs import Run, sweep_record
from mezo_cli.runs.picked import MARK, picked_start
from mezo_cli.runs.sweep_record import Search, SweepJob, SweepRecord
from mezo_cli.training import verdict as trial_results
from mezo_cli.training.verdict import DIVERGED, Evaluations

if TYPE_CHECKING:
    import optuna

log = logging.getLogger("mezo")

STUDY = "study.journal"
GOALS = ("score", "loss")


def tune(
    overrides: Sequence[str],
    config_dir: str | None,
    ranges: Sequence[str] = (),
    trials: int = 20,
    goal: str = "score",
    quiet: bool = False,
) -> int:
    """Search for the settings with the best result on dev, or continue a search; return the exit status."""
    try:
        import optuna  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(f"mezo tune needs Optuna: {install('tune')}") from error
    if trials < 1:
        raise UserError(f"--trials {trials}: give 1 or more")
    if goal not in GOALS:
        raise UserError(f"--goal {goal}: allowed are {', '.join(GOALS)}")
    base, plan = _compose_base(overrides, config_dir)
    folder, searched = plan.directory, parse_ranges(ranges, base)
    overrides, _ = split_own_code(overrides)
    for end in ("low", "high"):
        values = [f"{item.key}={item.value_type(getattr(item, end))!r}" for item in searched]
        config = compose.build_config([*_settings(overrides), *values], config_dir)
        if not config.steps and config.init == "none":
            raise UserError("steps=0: every trial would be the model before training, which is no result of a trial")
    search = Search([str(item) for item in searched], trials, goal)
    record = sweep_record.new(overrides, config_dir, [], search)
    if sweep_record.exists(folder):
        record = _continue(folder, record, search)
    record = with_own_code_noted(folder, record, plan)
    with for_workers(plan.own):
        check_new_runs(job.config for job in plan.jobs or ())
        return _run(folder, dataclasses.replace(record, quiet=quiet), search, searched, base, config_dir)


# --- what is searched for ---


def _compose_base(overrides: Sequence[str], config_dir: str | None) -> tuple[Config, SweepPlan]:
    """Return the config that all trials share, and the plan of a sweep with that one job."""
    for override in compose.parse(overrides, find_choices(config_dir)):
        if override.sweeps:
            raise UserError(f"'{override.text}': mezo tune takes one value per key; --range {override.name}=LOW:HIGH")
        if override.name.startswith(("hydra/", "hydra.launcher", "hydra.sweeper", "hydra.run", "hydra.sweep.subdir")):
            raise UserError(f"'{override.text}': mezo tune runs one trial after the other, each in hydra.sweep.dir")
    plan = plan_sweep(overrides, config_dir)
    if plan.jobs is None or len(plan.jobs) > 1:
        raise UserError("the experiment is a grid of several jobs: mezo tune takes one value per key")
    base = plan.jobs[0].config
    if base.max_seconds is not None and base.at_limit == "stop":
        raise UserError("max_seconds: a training that it stops has no result; give at_limit=finish")
    return base, plan


def _settings(overrides: Sequence[str]) -> list[str]:
    """Return the overrides of every trial: test before training would be the same in each, so it is left out."""
    kept = [text for text in overrides if not text.startswith("hydra.")]
    return kept if any("test_at_start=" in text for text in kept) else ["test_at_start=false", *kept]


def _continue(folder: Path, new: SweepRecord, search: Search) -> SweepRecord:
    """Return the stored record of a search, with the number of trials asked for now."""
    stored = sweep_record.read(folder)
    if stored.tune is None:
        raise UserError(f"{folder} contains a sweep of `mezo train -m`; name another hydra.sweep.dir")
    same = dataclasses.replace(stored.tune, trials=search.trials) == search
    if not same or sorted(stored.overrides) != sorted(new.overrides):
        raise UserError(f"{folder} contains a search with other settings or ranges; name another hydra.sweep.dir")
    check_record(folder, stored)
    return dataclasses.replace(stored, tune=search, own_config_dir=new.own_config_dir)


# --- the trials ---


def _run(
    folder: Path, record: SweepRecord, search: Search, ranges: Sequence[Range], base: Config, config_dir: str | None
) -> int:
    with training_output(record.quiet) as console:
        record.write(folder)
        study = _open_study(folder, _order(base, search.goal), len(record.jobs or ()))
        announce(folder, record.quiet)
        try:
            while len(record.jobs or ()) < search.trials or _open_trial(study) is not None:
                record, number = _next_trial(folder, record, study, ranges)
                _run_trial(folder, record, search, study, number, console, config_dir)
        except KeyboardInterrupt:
            log.warning("continue with: mezo resume %s", shlex.quote(relative_path(folder)))
            raise
        return _conclude(folder, record, study, console)


def _order(config: Config, goal: str) -> int:
    """Return 1 for a goal of which the highest value is the best, -1 for one of which the lowest is."""
    return config.order_of(trial_results.goal_metric(config, goal))


def _open_study(folder: Path, order: int, jobs: int) -> "optuna.Study":
    """Open the study of a search, or create it."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path = folder / STUDY
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of parts that Optuna calls experimental
            storage = JournalStorage(JournalFileBackend(str(path)))
            study = optuna.create_study(
                storage=storage,
                study_name="mezo",
                direction="maximize" if order > 0 else "minimize",
                load_if_exists=True,
                pruner=optuna.pruners.MedianPruner(),
            )
        known = len(study.get_trials(deepcopy=False))
    except Exception as error:  # whatever it finds in a file that is damaged
        raise UserError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if known < jobs or known > jobs + 1:  # a trial is asked for before its job is recorded
        raise UserError(f"{path} has {known} trials, sweep.json {jobs}: they do not belong together")
    return study


def _open_trial(study: "optuna.Study") -> "optuna.trial.FrozenTrial | None":
    """Return the trial that has no result yet."""
    return next((trial for trial in study.get_trials(deepcopy=False) if not trial.state.is_finished()), None)


def _next_trial(
    folder: Path, record: SweepRecord, study: "optuna.Study", ranges: Sequence[Range]
) -> tuple[SweepRecord, int]:
    """Return the trial to run: the one that was interrupted, or a new one, which is recorded as a job."""
    import optuna

    begun = _open_trial(study)
    number = len(study.get_trials(deepcopy=False)) if begun is None else begun.number
    study.sampler = optuna.samplers.TPESampler(seed=number)
    trial = study.ask() if begun is None else optuna.trial.Trial(study, begun._trial_id)
    params = {}  # for an open trial those that are stored already
    for item in ranges:
        suggest: Any = trial.suggest_int if item.value_type is int else trial.suggest_float
        params[item.key] = suggest(item.key, item.value_type(item.low), item.value_type(item.high), log=item.is_log)
    jobs = list(record.jobs or ())
    if number == len(jobs):
        values = [f"{key}={value!r}" for key, value in params.items()]
        jobs.append(SweepJob(number, [*_settings(record.overrides), *values], str(number)))
        record = dataclasses.replace(record, jobs=jobs)
        record.write(folder)
    return record, number


def _run_trial(
    folder: Path,
    record: SweepRecord,
    search: Search,
    study: "optuna.Study",
    number: int,
    console: Any,
    config_dir: str | None,
) -> None:
    """Train a trial, or continue it, and tell the study its result; a trial that fails has none."""
    import optuna

    log.info("trial %d of %d  %s", number + 1, search.trials, _format(study.trials[number].params))
    job, goal = (record.jobs or [])[number], search.goal
    path = folder / job.directory
    if job_status(path) == "running":
        raise UserError(f"{path} is running: another process is at this search")
    trial = optuna.trial.Trial(study, study.trials[number]._trial_id)
    try:
        config = compose.build_config(job.overrides, config_dir)
        _train(path, config, record, goal, trial, console)
        _report(trial, trial_results.trained_evaluations(Run(path), config.steps), config, goal)
        state, value, text = _result(Run(path), config, goal)
    except Exception as error:
        log.error("trial %d failed: %s", number + 1, one_line(error))
        study.tell(number, state=optuna.trial.TrialState.FAIL)
        return
    study.tell(number, value, state=optuna.trial.TrialState[state])
    best = _best(study)
    so_far = "" if best is None else f"; best so far {best.values[0]:.4f}, trial {best.number + 1}"
    log.info("trial %d: %s%s", number + 1, text, so_far)
    log.info("")


def _train(path: Path, config: Config, record: SweepRecord, goal: str, trial: "optuna.Trial", console: Any) -> None:
    """Train in the directory of a trial, unless that has ended already.

    Raises:
        UserError, RunFailed: when it cannot be trained, or fails for another reason than a loss that is not finite.
    """
    run = open_or_create(path, config, record)
    if run is None:
        return
    try:
        execute(run, config, console, prunes=lambda dev: _prunes(trial, dev, config, goal), keeps_failed=True)
    except RunFailed as error:
        if trial_results.end_of(run) != DIVERGED:
            raise
        log.error("%s", error)


def _report(trial: "optuna.Trial", evaluations: Evaluations, config: Config, goal: str) -> int | None:
    """Report the evaluations that the study does not have yet; return the step of the last one that it has."""
    known = dict(trial.study.trials[trial.number].intermediate_values)
    for step, evaluation in evaluations.items():
        if step not in known:
            known[step] = trial_results.value_of(evaluation, config, goal)
            trial.report(known[step], step)
    return max(known, default=None)


def _prunes(trial: "optuna.Trial", dev: Evaluations, config: Config, goal: str) -> bool:
    """Report the evaluation that a trial has just done; return whether its training ends.

    An evaluation that is repeated after a crash, because later steps were lost, was not the end then and is not now.
    """
    trained = {step: evaluation for step, evaluation in dev.items() if step}
    return _report(trial, trained, config, goal) == max(dev) and trial.should_prune()


def _format(params: Mapping[str, float]) -> str:
    return " ".join(f"{key}={value:.4g}" for key, value in params.items())


def _result(run: Run, config: Config, goal: str) -> tuple[str, float | None, str]:
    """Return the state of a trial that has ended, its value for the study, and both in words."""
    end, metric = trial_results.end_of(run), trial_results.goal_metric(config, goal)
    if end == DIVERGED:
        return "COMPLETE", -_order(config, goal) * math.inf, "diverged, which counts as the worst result"
    best = trial_results.best_evaluation(run, config, goal)
    if end not in ("finished", "pruned") or best is None:
        raise UserError(why_not_finished(run.path, end))
    mark = f" {MARK}" if picked_start(run.read_summary()) else ""
    text = f"{goal} {best[metric]:.4f}{mark}"
    if end == "pruned":
        return "PRUNED", None, f"pruned at step {run.steps_at_end(config.steps)} of {config.steps}, {text}"
    return "COMPLETE", trial_results.value_of(best, config, goal), text


def _best(study: "optuna.Study") -> "optuna.trial.FrozenTrial | None":
    """Return the best trial, None if each has failed or diverged or was pruned."""
    try:
        best = study.best_trial
    except ValueError:  # none is complete
        return None
    return best if math.isfinite(best.values[0]) else None


def _conclude(folder: Path, record: SweepRecord, study: "optuna.Study", console: Any) -> int:
    """Show the comparison of the runs and the best trial; return the exit status: 1 when a trial failed."""
    statuses = job_statuses(folder, record)
    finished = [Run(path) for path, status in statuses.values() if status == "finished"]
    ends = [trial_results.end_of(run) for run in finished]
    counts = "".join(f", {ends.count(end)} of them {end}" for end in ("pruned", DIVERGED) if end in ends)
    log.info("%d of %d trials finished%s", len(finished), len(statuses), counts)
    if finished and not record.quiet:
        from mezo_cli.commands.compare import show_folder  # imports pandas

        show_folder(folder, console)
    best = _best(study)
    if best is None:
        text = "best: none, no trial has ended with a result"
    else:
        where = relative_path(folder / str(best.number))
        text = f"best: trial {best.number + 1}  {_format(best.params)}  {best.values[0]:.4f}  {where}"
    (print_line if record.quiet else log.info)(text)
    print_unfinished(statuses, record, "trial")
    return 0 if len(finished) == len(statuses) else 1
