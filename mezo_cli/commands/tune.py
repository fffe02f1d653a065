"""`mezo tune`: search for settings with Optuna's ask and tell. A trial is a `mezo train` in a directory of the search.

The record is SEARCH/study.journal, Optuna's journal: what is searched, in the study's attributes, and every trial. The
sampler's seed follows from the run's `seed` and the trial's number, and what a trial came to is read from its run
directory, so a search that was interrupted continues as if it had not been.
"""

import hashlib
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import chdir, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mezo_cli.commands.execute import check_new_run
from mezo_cli.commands.sweep import PRELOADED, check_given_again, print_failed, why_not_finished
from mezo_cli.config import compose
from mezo_cli.config.overrides import quote
from mezo_cli.config.schema import Config
from mezo_cli.config.stored import check_stored, for_workers, split_own_code
from mezo_cli.console import announce, json_at_end, log, print_line, relative_path, training_output
from mezo_cli.errors import UserError
from mezo_cli.runs.contents import MARK, picked_start
from mezo_cli.runs.run import STUDY, SWEEP, Run, describe_run
from mezo_cli.sweep import jobs
from mezo_cli.sweep.plan import SweepPlan, plan_sweep
from mezo_cli.sweep.search import NAME, Range, open_study, parse_ranges, trained_evaluations, value_of
from mezo_cli.training.divergence import DIVERGED

if TYPE_CHECKING:
    import optuna

SAME = ("overrides", "ranges")  # of that attribute: what a search keeps
POLL_SECONDS = 0.5  # between two looks at the evaluations of a trial


def tune(
    overrides: Sequence[str],
    config_dir: str | None,
    ranges: Sequence[str] = (),
    trials: int = 20,
    quiet: bool = False,
    as_json: bool = False,
) -> int:
    """Search for the settings with the best result on dev, or continue a search; return the exit status."""
    quiet = quiet or as_json
    base, plan = _compose_base(overrides, config_dir)
    searched = parse_ranges(ranges, base)
    kept = [text for text in split_own_code(overrides)[0] if not text.lstrip("+").startswith("hydra")]
    if not any("test_at_start=" in text for text in kept):
        kept = ["test_at_start=false", *kept]  # it would be the same in each trial
    for end in ("low", "high"):
        values = [f"{item.key}={item.value_type(getattr(item, end))!r}" for item in searched]
        compose.build_config([*kept, *values], config_dir)  # before the first trial
    asked = {
        "format": 1,
        "cwd": os.getcwd(),
        "user_code": plan.user_code,
        "overrides": kept,
        "ranges": [str(item) for item in searched],
        "trials": trials,
    }
    with for_workers(plan.code), json_at_end(as_json) as told, training_output(quiet):
        check_new_run(base)
        search = _Search(plan.directory, asked, base, searched, config_dir, quiet)
        told[plan.directory] = search.describe
        return search.run()


def resume(folder: Path, words: Sequence[str] = (), config_dir: str | None = None, quiet: bool = False) -> int:
    """Continue a search; `words` is what of the user's own code is needed again."""
    stored = dict(open_study(folder).user_attrs.get(NAME, {}))
    if stored.get("format") != 1:
        raise UserError(f"{folder / STUDY} is damaged, or of a version of mezo that this one does not know")
    rest, user_code = split_own_code(words)
    if rest:
        raise UserError(f"'{rest[0]}': {folder} is a search of `mezo tune`, which keeps its settings")
    check_stored(stored["overrides"], folder / STUDY)
    config_dir = check_given_again(folder, stored["user_code"], user_code, config_dir)
    user_code["hydra.sweep.dir"] = str(folder.absolute())
    overrides = [*stored["overrides"], *(f"{key}={quote(value)}" for key, value in user_code.items())]
    with chdir(stored["cwd"]):  # relative paths in the overrides start there
        return tune(overrides, config_dir, stored["ranges"], stored["trials"], quiet)


def _compose_base(overrides: Sequence[str], config_dir: str | None) -> tuple[Config, SweepPlan]:
    for text in overrides:
        if text.lstrip("+").startswith(("hydra/", "hydra.launcher", "hydra.run", "hydra.sweep.subdir")):
            raise UserError(f"'{text}': mezo tune runs one trial after the other, each in hydra.sweep.dir")
    plan = plan_sweep(overrides, config_dir)
    base = plan.jobs[0].config
    if len(plan.jobs) > 1:
        raise UserError(f"a grid of {len(plan.jobs)} jobs: mezo tune takes one value per key, and --range KEY=LOW:HIGH")
    if base.optimizer.picks_rate:
        raise UserError("optimizer.lr=auto: a search tries rates itself; give a number")
    if base.max_seconds is not None and base.at_limit == "stop":
        raise UserError("max_seconds: a training that it stops has no result; give at_limit=finish")
    return base, plan


@dataclass
class _Search:
    folder: Path
    # what the journal keeps of the command: overrides, ranges, number of trials, working directory, user code
    asked: Mapping[str, Any]
    base: Config  # the config that the trials share
    ranges: Sequence[Range]
    config_dir: str | None
    quiet: bool  # whether only the directory, the best trial, warnings and errors are printed

    def __post_init__(self) -> None:
        if (self.folder / SWEEP).is_file():
            raise UserError(f"{self.folder} contains a sweep of `mezo train -m`; name another hydra.sweep.dir")
        self._order = self.base.order_of(self.base.chosen_metric)
        self._study = open_study(self.folder, self._order)
        stored = self._study.user_attrs.get(NAME)
        if stored is not None and any(stored[name] != self.asked[name] for name in SAME):
            what = "contains a search with other settings or ranges; name another hydra.sweep.dir"
            raise UserError(f"{self.folder} {what}")
        if stored != self.asked:
            self._study.set_user_attr(NAME, self.asked)
        self._workers = jobs.Workers(1, os.getcwd(), not self.quiet, PRELOADED)

    def run(self) -> int:
        """Run the trials that are left; return the exit status."""
        if self.quiet:
            announce(self.folder)
        try:
            while (trial := self._next()) is not None:
                self._run_trial(trial)
        except KeyboardInterrupt:
            log.warning("continue with: mezo resume %s", shlex.quote(relative_path(self.folder)))
            raise
        return self._conclude()

    def describe(self) -> dict[str, Any]:
        """Return the document of the search: its trials, and the one that is best if it has not diverged."""
        done: list[dict[str, Any]] = [
            {"trial": trial.number + 1, "state": trial.state.name.lower()}
            | {"value": trial.value if trial.value is not None and math.isfinite(trial.value) else None}
            | {"params": trial.params, **describe_run(self.folder / str(trial.number))}
            for trial in self._trials()
        ]
        ended = [trial for trial in done if trial["state"] == "complete" and trial["value"] is not None]
        best = max(ended, key=lambda trial: self._order * trial["value"], default=None)
        return {"search": str(self.folder.absolute()), "best": best and best["trial"], "trials": done}

    def _trials(self) -> "list[optuna.trial.FrozenTrial]":
        """Return the trials that have all their values: a process may be killed while it asks for one."""
        keys = {item.key for item in self.ranges}
        return [trial for trial in self._study.get_trials(deepcopy=False) if keys == set(trial.params)]

    def _next(self) -> "optuna.Trial | None":
        """Return the trial to run: the one that was interrupted, or a new one; None when there are enough."""
        import optuna

        trials = self._trials()
        for begun in trials:
            if not begun.state.is_finished():
                return optuna.Trial(self._study, begun._trial_id)
        if len(trials) >= self.asked["trials"]:
            return None
        seed = hashlib.sha256(f"{self.base.seed} {len(self._study.get_trials(deepcopy=False))}".encode()).digest()
        self._study.sampler = optuna.samplers.TPESampler(seed=int.from_bytes(seed[:4], "little"))
        return self._study.ask({item.key: item.distribution() for item in self.ranges})

    def _run_trial(self, trial: "optuna.Trial") -> None:
        import optuna

        number, path = trial.number, self.folder / str(trial.number)
        log.info("trial %d of %d  %s", number + 1, self.asked["trials"], _format(trial.params))
        if jobs.job_status(path) == "running":
            raise UserError(f"{path} is running: another process is at this search")
        overrides = (*self.asked["overrides"], *(f"{key}={value!r}" for key, value in trial.params.items()))
        job = compose.Job(compose.build_config(overrides, self.config_dir), path, overrides)
        if jobs.job_status(path) in ("missing", "interrupted") and not self._is_pruned(trial, job):
            process = self._workers.start(jobs.words_of(job, self.config_dir), {})
            try:
                while process.is_alive() and not self._is_pruned(trial, job):
                    process.join(POLL_SECONDS)
            finally:
                jobs.stop([process])  # by SIGTERM, if the pruner says so
            self._is_pruned(trial, job)
        if jobs.job_status(path) == "interrupted" and self._is_pruned(trial, job):
            stopped = {"by": "pruned", "step": self._study.trials[number].last_step}
            Run(path).update(status="pruned", stopped=stopped)
        try:
            state, value, text = self._result(job)
        except UserError as error:
            log.error("trial %d failed: %s", number + 1, error)
            self._study.tell(number, state=optuna.trial.TrialState.FAIL)
            return
        self._study.tell(number, value, state=optuna.trial.TrialState[state])
        log.info("trial %d: %s", number + 1, text)
        log.info("")

    def _is_pruned(self, trial: "optuna.Trial", job: compose.Job) -> bool:
        """Report the evaluations that the study does not have yet; return whether the training ends at the last one."""
        if jobs.job_status(job.directory) == "missing":
            return False
        reported = self._study.trials[trial.number].intermediate_values
        for step, evaluation in trained_evaluations(Run(job.directory), job.config.steps).items():
            if step not in reported:
                trial.report(value_of(evaluation, job.config), step)
        return trial.should_prune()

    def _result(self, job: compose.Job) -> tuple[str, float | None, str]:
        """Return the state of a trial that has ended, its value for the study, and both in words."""
        config, run, status = job.config, Run(job.directory), jobs.job_status(job.directory)
        ended = run.read_summary() if status == "finished" else run.info() if status == "failed" else {}
        if ended.get("verdict") == DIVERGED:
            return "COMPLETE", -self._order * math.inf, "diverged, which counts as the worst result"
        lines = trained_evaluations(run, config.steps).values() if status in ("finished", "pruned") else ()
        if not lines:
            raise UserError(why_not_finished(run.path))
        if status == "pruned":
            return "PRUNED", None, f"pruned at step {run.info()['stopped']['step']} of {config.steps}"
        best = min(lines, key=config.rank)
        mark = f" {MARK}" if picked_start(run.read_summary()) else ""
        return "COMPLETE", value_of(best, config), f"score {best[config.chosen_metric]:.4f}{mark}"

    def _conclude(self) -> int:
        ends = {trial.number: jobs.job_status(self.folder / str(trial.number)) for trial in self._trials()}
        failed = [number for number, end in ends.items() if end not in ("finished", "pruned")]
        pruned = [*ends.values()].count("pruned")
        of_them = f", {pruned} of them pruned" if pruned else ""
        log.info("%d of %d trials finished%s", len(ends) - len(failed), len(ends), of_them)
        if "finished" in ends.values() and not self.quiet:
            from mezo_cli.commands.compare import show_folder  # imports pandas

            show_folder(self.folder)
        text = "best: none, no trial has ended with a result"
        with suppress(ValueError):  # each has failed or was pruned
            best = self._study.best_trial
            where = relative_path(self.folder / str(best.number))
            if math.isfinite(best.values[0]):  # it has not diverged
                text = f"best: trial {best.number + 1}  {_format(best.params)}  {best.values[0]:.4f}  {where}"
        (print_line if self.quiet else log.info)(text)
        for number in failed:
            print_failed(f"trial {number + 1}", self.folder / str(number))
        return 1 if failed else 0


def _format(params: Mapping[str, float]) -> str:
    return " ".join(f"{key}={value:.4g}" for key, value in params.items())
