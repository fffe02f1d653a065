"""`mezo tune`: search for settings with Optuna's ask and tell. A trial is a `mezo train` in a directory of the search.

The record is SEARCH/study.journal, Optuna's journal: what is searched, in the study's attributes, and every trial. The
sampler's seed follows from the run's `seed` and the trial's number, and what a trial came to is read from its run
directory, so a search that was interrupted continues as if it had not been.
"""

import hashlib
import logging
import math
import os
import shlex
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mezo_cli.commands.new_run import check_new_runs
from mezo_cli.commands.sweep import check_given_again, print_failed, show_comparison, why_not_finished
from mezo_cli.config import compose
from mezo_cli.config.choices import find_choices
from mezo_cli.config.compose import Job
from mezo_cli.config.overrides import quote
from mezo_cli.config.own_code import check_stored, for_workers, split_own_code
from mezo_cli.config.schema import Config
from mezo_cli.console import print_line, relative_path, training_output
from mezo_cli.errors import UserError, install, without_credentials
from mezo_cli.runs import Run, sweep_record
from mezo_cli.runs.scores import MARK, picked_start
from mezo_cli.runs.sweep_record import STUDY
from mezo_cli.sweep import jobs
from mezo_cli.sweep.plan import CONFIG_DIR, SweepPlan, plan_sweep
from mezo_cli.sweep.ranges import Range, parse_ranges
from mezo_cli.training import verdict as trial_results
from mezo_cli.training.verdict import DIVERGED

if TYPE_CHECKING:
    import optuna

log = logging.getLogger("mezo")

NAME = "mezo"  # of the study, and of the attribute that has what is searched
GOALS = ("score", "loss")
POLL_SECONDS = 0.5  # between two looks at the evaluations of a trial


@dataclass(frozen=True)
class Search:
    """A search.

    Attributes:
        folder: of the search.
        asked: what the journal keeps of the command: overrides, ranges, goal, working directory, user code.
        trials: their number in the end.
        base: the config that the trials share.
        ranges: what is searched.
        config_dir: the user's config folder.
        quiet: whether only the directory, the best trial, warnings and errors are printed.
    """

    folder: Path
    asked: Mapping[str, Any]
    trials: int
    base: Config
    ranges: Sequence[Range]
    config_dir: str | None
    quiet: bool

    @property
    def goal(self) -> str:
        """`score` or `loss`."""
        return str(self.asked["goal"])

    @property
    def order(self) -> int:
        """1 where the highest value is the best, -1 where the lowest is."""
        return self.base.order_of(trial_results.goal_metric(self.base, self.goal))

    def overrides(self, params: Mapping[str, float]) -> tuple[str, ...]:
        """Return those of a trial: test before training would be the same in each, so it is left out."""
        kept = self.asked["overrides"]
        more = [] if any("test_at_start=" in text for text in kept) else ["test_at_start=false"]
        return (*more, *kept, *(f"{key}={value!r}" for key, value in params.items()))


def tune(
    overrides: Sequence[str],
    config_dir: str | None,
    ranges: Sequence[str] = (),
    trials: int = 20,
    goal: str = "score",
    quiet: bool = False,
) -> int:
    """Search for the settings with the best result on dev, or continue a search; return the exit status."""
    if trials < 1:
        raise UserError(f"--trials {trials}: give 1 or more")
    if goal not in GOALS:
        raise UserError(f"--goal {goal}: allowed are {', '.join(GOALS)}")
    base, plan = _compose_base(overrides, config_dir)
    if base.optimizer.picks_rate:
        raise UserError("optimizer.lr=auto: a search tries rates itself; give a number")
    searched = parse_ranges(ranges, base)
    kept = [text for text in split_own_code(overrides)[0] if not text.lstrip("+").startswith("hydra")]
    for end in ("low", "high"):
        values = [f"{item.key}={item.value_type(getattr(item, end))!r}" for item in searched]
        config = compose.build_config([*kept, *values], config_dir)
        if not config.steps and config.init == "none":
            raise UserError("steps=0: every trial would be the model before training, which is no result of a trial")
    asked = {
        "format": 1,
        "argv": [without_credentials(word) for word in sys.argv],
        "cwd": os.getcwd(),
        "user_code": plan.user_code,
        "overrides": kept,
        "ranges": [str(item) for item in searched],
        "goal": goal,
    }
    search = Search(plan.directory, asked, trials, base, searched, config_dir, quiet)
    with for_workers(plan.own), training_output(quiet):
        check_new_runs([base])
        return _Study(search).run()


def resume(folder: Path, given: Sequence[str] = (), config_dir: str | None = None, quiet: bool = False) -> int:
    """Continue a search; `given` is what of the user's own code is needed again."""
    stored = dict(_open(folder)[0].user_attrs.get(NAME, {}))
    if stored.get("format") != 1:
        raise UserError(f"{folder / STUDY} is damaged, or of a version of mezo that this one does not know")
    rest, own = split_own_code(given)
    if rest:
        raise UserError(f"'{rest[0]}': {folder} is a search of `mezo tune`, which keeps its settings")
    check_stored(stored["overrides"], folder / STUDY)
    check_given_again(folder, stored["user_code"], [*own, *([] if config_dir is None else [CONFIG_DIR])])
    config_dir = None if config_dir is None else str(Path(config_dir).expanduser().absolute())
    more = [f"{key}={quote(value)}" for key, value in own.items()]
    overrides = [*stored["overrides"], *more, f"hydra.sweep.dir={quote(folder.absolute())}"]
    with chdir(stored["cwd"]):  # relative paths in the overrides start there
        return tune(overrides, config_dir, stored["ranges"], stored["trials"], stored["goal"], quiet)


def _compose_base(overrides: Sequence[str], config_dir: str | None) -> tuple[Config, SweepPlan]:
    """Return the config that all trials share, and the plan of a sweep with that one job."""
    for override in compose.parse(overrides, find_choices(config_dir)):
        if override.sweeps:
            raise UserError(f"'{override.text}': mezo tune takes one value per key; --range {override.name}=LOW:HIGH")
        if override.name.startswith(("hydra/", "hydra.launcher", "hydra.run", "hydra.sweep.subdir")):
            raise UserError(f"'{override.text}': mezo tune runs one trial after the other, each in hydra.sweep.dir")
    plan = plan_sweep(overrides, config_dir)
    if len(plan.jobs) > 1:
        raise UserError("the experiment is a grid of several jobs: mezo tune takes one value per key")
    base = plan.jobs[0].config
    if base.max_seconds is not None and base.at_limit == "stop":
        raise UserError("max_seconds: a training that it stops has no result; give at_limit=finish")
    return base, plan


def _open(folder: Path, order: int | None = None) -> "tuple[optuna.Study, optuna.storages.JournalStorage]":
    """Open the study of a search, or, where its order is given, create it."""
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
                study = optuna.load_study(storage=storage, study_name=NAME)
            else:
                direction: Literal["maximize", "minimize"] = "maximize" if order > 0 else "minimize"
                study = optuna.create_study(storage=storage, study_name=NAME, direction=direction, load_if_exists=True)
    except Exception as error:  # whatever it finds in a file that is damaged
        raise UserError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    return study, storage


class _Study:
    """The trials of a search, one after the other."""

    def __init__(self, search: Search) -> None:
        import optuna

        if sweep_record.exists(search.folder):
            raise UserError(f"{search.folder} contains a sweep of `mezo train -m`; name another hydra.sweep.dir")
        self._search = search
        self._study, self._storage = _open(search.folder, search.order)
        stored = self._study.user_attrs.get(NAME)
        same = ("overrides", "ranges", "goal")
        if stored is not None and any(stored[name] != search.asked[name] for name in same):
            raise UserError(
                f"{search.folder} contains a search with other settings or ranges; name another hydra.sweep.dir"
            )
        asked = {**(stored or search.asked), "trials": search.trials}
        if asked != stored:
            self._study.set_user_attr(NAME, asked)
        self._pruner = optuna.pruners.MedianPruner()
        self._workers = jobs.Workers(1, os.getcwd(), shown=not search.quiet)

    def run(self) -> int:
        """Run the trials that are left; return the exit status."""
        search = self._search
        if search.quiet:
            print_line(relative_path(search.folder))
            sys.stdout.flush()
        try:
            while (trial := self._next()) is not None:
                self._run_trial(*trial)
        except KeyboardInterrupt:
            log.warning("continue with: mezo resume %s", shlex.quote(relative_path(search.folder)))
            raise
        return self._conclude()

    def _trials(self) -> "list[optuna.trial.FrozenTrial]":
        """Return the trials that have all their values: a process may be killed while it asks for one."""
        keys = {item.key for item in self._search.ranges}
        return [trial for trial in self._study.get_trials(deepcopy=False) if keys == set(trial.params)]

    def _next(self) -> tuple[int, dict[str, float]] | None:
        """Return the trial to run: the one that was interrupted, or a new one; None when there are enough."""
        import optuna

        trials = self._trials()
        begun = next((trial for trial in trials if not trial.state.is_finished()), None)
        if begun is not None:
            return begun.number, begun.params
        if len(trials) >= self._search.trials:
            return None
        number = len(self._study.get_trials(deepcopy=False))
        seed = hashlib.sha256(f"{self._search.base.seed} {number}".encode()).digest()
        self._study.sampler = optuna.samplers.TPESampler(seed=int.from_bytes(seed[:4], "little"))
        asked = self._study.ask({item.key: item.distribution() for item in self._search.ranges})
        return asked.number, asked.params

    def _run_trial(self, number: int, params: Mapping[str, float]) -> None:
        """Train a trial, or continue it, and tell the study its result; a trial that fails has none."""
        import optuna

        search, path = self._search, self._search.folder / str(number)
        log.info("trial %d of %d  %s", number + 1, search.trials, _format(params))
        if jobs.job_status(path) == "running":
            raise UserError(f"{path} is running: another process is at this search")
        overrides, run = search.overrides(params), Run(path)
        job = Job(compose.build_config(overrides, search.config_dir), path, overrides)
        if jobs.job_status(path) in ("missing", "interrupted") and not self._prunes(run, job.config, number):
            self._train(job, run, number)
        if jobs.job_status(path) == "interrupted" and self._prunes(run, job.config, number):
            run.update(status="pruned", stopped={"by": "pruned", "step": max(self._reported(number))})
        try:
            state, value, text = self._result(run, job.config)
        except UserError as error:
            log.error("trial %d failed: %s", number + 1, error)
            self._study.tell(number, state=optuna.trial.TrialState.FAIL)
            return
        self._study.tell(number, value, state=optuna.trial.TrialState[state])
        best = self._best()
        so_far = "" if best is None else f"; best so far {best.values[0]:.4f}, trial {best.number + 1}"
        log.info("trial %d: %s%s", number + 1, text, so_far)
        log.info("")

    def _train(self, job: Job, run: Run, number: int) -> None:
        """Run the command of a trial, and end it by SIGTERM when the pruner says so."""
        process = self._workers.start(jobs.words_of(job, self._search.config_dir), {})
        try:
            while process.is_alive():
                process.join(POLL_SECONDS)
                if process.is_alive() and self._prunes(run, job.config, number):
                    break
        finally:
            jobs.stop([process])
        if run.path.exists():
            self._prunes(run, job.config, number)

    def _reported(self, number: int) -> dict[int, float]:
        return self._study.trials[number].intermediate_values

    def _prunes(self, run: Run, config: Config, number: int) -> bool:
        """Report the evaluations that the study does not have yet; return whether the training ends at the last one."""
        known, trial = self._reported(number), self._trial_id(number)
        lines = trial_results.trained_evaluations(run, config.steps) if jobs.job_status(run.path) != "missing" else {}
        for step, evaluation in lines.items():
            if step not in known:
                value = trial_results.value_of(evaluation, config, self._search.goal)
                self._storage.set_trial_intermediate_value(trial, step, value)
        return bool(lines) and self._pruner.prune(self._study, self._study.trials[number])

    def _trial_id(self, number: int) -> int:
        study = self._storage.get_study_id_from_name(NAME)
        return self._storage.get_trial_id_from_study_id_trial_number(study, number)

    def _result(self, run: Run, config: Config) -> tuple[str, float | None, str]:
        """Return the state of a trial that has ended, its value for the study, and both in words."""
        goal, status = self._search.goal, jobs.job_status(run.path)
        end = trial_results.end_of(run) if status != "missing" else status
        metric = trial_results.goal_metric(config, goal)
        if end == DIVERGED:
            return "COMPLETE", -self._search.order * math.inf, "diverged, which counts as the worst result"
        best = trial_results.best_evaluation(run, config, goal) if end in ("finished", "pruned") else None
        if best is None:
            raise UserError(why_not_finished(run.path, end))
        if end == "pruned":
            return "PRUNED", None, f"pruned at step {run.steps_at_end(config.steps)} of {config.steps}"
        mark = f" {MARK}" if picked_start(run.read_summary()) else ""
        return "COMPLETE", trial_results.value_of(best, config, goal), f"{goal} {best[metric]:.4f}{mark}"

    def _best(self) -> "optuna.trial.FrozenTrial | None":
        """Return the best trial, None if each has failed or diverged or was pruned."""
        try:
            best = self._study.best_trial
        except ValueError:  # none is complete
            return None
        return best if math.isfinite(best.values[0]) else None

    def _conclude(self) -> int:
        """Show the comparison of the runs and the best trial; return the exit status: 1 when a trial failed."""
        search = self._search
        paths = [search.folder / str(trial.number) for trial in self._trials()]
        statuses = [jobs.job_status(path) for path in paths]
        ended = [path for path, status in zip(paths, statuses, strict=True) if status in ("finished", "pruned")]
        ends = [trial_results.end_of(Run(path)) for path in ended]
        counts = "".join(f", {ends.count(end)} of them {end}" for end in ("pruned", DIVERGED) if end in ends)
        log.info("%d of %d trials finished%s", len(ended), len(paths), counts)
        if "finished" in statuses and not search.quiet:
            show_comparison(search.folder)
        best = self._best()
        if best is None:
            text = "best: none, no trial has ended with a result"
        else:
            where = relative_path(search.folder / str(best.number))
            text = f"best: trial {best.number + 1}  {_format(best.params)}  {best.values[0]:.4f}  {where}"
        (print_line if search.quiet else log.info)(text)
        failed = [trial for trial, path in zip(self._trials(), paths, strict=True) if path not in ended]
        for trial in failed:
            path = search.folder / str(trial.number)
            print_failed(f"trial {trial.number + 1}", path)
        return 1 if failed else 0


def _format(params: Mapping[str, float]) -> str:
    return " ".join(f"{key}={value:.4g}" for key, value in params.items())
