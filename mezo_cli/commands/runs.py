"""`mezo runs`: list the runs under a folder."""

import os
from pathlib import Path
from typing import Any

from mezo_cli.config.stored import read_config
from mezo_cli.console import make_console, make_table, print_line
from mezo_cli.errors import UserError
from mezo_cli.runs import Run, completeness, find_runs

NUMBERS = ("seed", "step", "dev", "test")


def runs(folder: Path) -> None:
    """Print a table of the runs under `folder`: status, settings, scores; below it why runs failed or are damaged."""
    found = find_runs(folder)
    if not found:
        print_line(f"no runs under {folder}")
        return
    table, problems = make_table("run", "status", "task", "objective", "method", "model", "metric", *NUMBERS), []
    for column in table.columns[1 : -len(NUMBERS)]:
        column.justify = "left"
    for run in found:
        name = os.path.relpath(run.path, folder)
        try:
            cells, problem = _row(run.path)
        except UserError as error:
            cells, problem = ["damaged"], str(error)
        table.add_row(name, *cells)
        if problem is not None:
            problems.append(f"{name}: {problem}")
    make_console().print(table)
    for line in problems:
        print_line(" ".join(line.split()))


def _row(path: Path) -> tuple[list[str], str | None]:
    """Return the cells of a run, and why it failed or what it lacks.

    `dev` and `test` are percentages of the task's metric at the best checkpoint, which that metric has chosen.

    Raises:
        UserError: when the run is damaged.
    """
    run, config = Run.open(path), read_config(path / "config.yaml")
    status, metric = run.status(), config.task.metric
    step, dev, test, problem = config.steps, None, None, None
    if status == "finished":
        summary = run.read_summary()
        completeness.check_finished(run, config, summary)
        step = summary.get("steps", config.steps)  # patience may have stopped it before
        dev, test = (_score(run, summary.get(split), metric) for split in ("dev", "test"))
    else:
        problem = f"{run.info().get('error')}" if status == "failed" else completeness.missing_lines(run, config)
        step = max((line["step"] for line in run.metrics()), default=0)
        dev = max((line[metric] for line in run.evaluations("dev") if metric in line), default=None)
    percent = ["-" if value is None else f"{100 * value:.1f}" for value in (dev, test)]
    loss = config.objective.loss
    objective = config.objective.name if loss == "cross_entropy" else f"{config.objective.name} {loss}"
    method = " ".join(name for name in (config.optimizer.name, config.peft.name) if name != "none")
    names = [config.task.name, objective, method, Path(config.model.path).name, metric]
    return [status, *names, str(config.seed), f"{step}/{config.steps}", *percent], problem


def _score(run: Run, scores: Any, metric: str) -> float | None:
    if scores is None:
        return None
    try:
        return float(scores[metric])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{run.path / 'summary.json'} is damaged: it lacks {metric}") from error
