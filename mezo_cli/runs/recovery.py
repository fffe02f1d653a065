"""Continue a run: the step that it resumes at, the least that all of its files have, and a new end.

A crash leaves an incomplete last line or record; what is incomplete at the end of a file is cut off. Damage before the
end is refused. Training syncs the files at each evaluation and at least every 30 s, in this order: trajectory and
lines, checkpoints, the evaluation's line. So a power cut can lose only what follows the last evaluation.
"""

import hashlib
import os
from typing import Any

from mezo_cli.config.schema import Config
from mezo_cli.config.stored import to_yaml
from mezo_cli.console import log
from mezo_cli.errors import UserError, join
from mezo_cli.runs import trajectory
from mezo_cli.runs.atomic import write_atomically
from mezo_cli.runs.run import Run, utc_now


def find_resume_step(config: Config, run: Run) -> int | None:
    """Return the step that an interrupted run resumes at; None if training never began.

    It is the last step up to which the trajectory (without one: the checkpoint `last`) and metrics.jsonl are complete.
    If a crash has lost what followed it, the log says so. What it reads is repaired.
    """
    if not any(path.exists() for path in (run.lines.path, run.trajectory, run.checkpoints)):
        return None  # a new run
    lines, bad_line = run.lines.read_valid()
    run.completions()  # refuses damage
    has_trajectory = config.optimizer.replayable
    lost = [] if bad_line is None else [bad_line]
    begun = bool(lines or lost)
    steps = _recorded_steps(run, begun, lost) if has_trajectory else run.checkpoint_step("last")
    if steps is None:
        if begun:
            missing = run.trajectory if has_trajectory else run.checkpoints / "last"
            raise UserError(f"{missing} is missing: the run cannot be resumed without it")
        return None
    step, missing_line = _complete_until(config, lines, steps)
    if missing_line:
        if not has_trajectory:  # there are no other weights to go back to
            raise UserError(f"{run.lines.path} is damaged: it lacks {missing_line}")
        lost.append(f"{run.lines.path} lacks {missing_line}")
    if lost:
        log.warning("going back to step %d, the last that is stored whole: %s", step, join(lost))
    return step


def _recorded_steps(run: Run, begun: bool, lost: list[str]) -> int | None:
    """Return the steps of the trajectory; None if there is none, or a torn header with which nothing else has begun."""
    path = run.trajectory
    if not path.exists() or not path.stat().st_size:
        return None
    try:
        past = trajectory.read(path)
    except UserError as error:
        if begun or (run.checkpoint_step("last") or 0) > 0:
            raise
        log.warning("beginning anew, because nothing was trained: %s", error)
        return None
    if past.cut_bytes:
        lost.append(f"{path}: its last {past.cut_bytes} bytes hold no valid record")
    return len(past)


def _complete_until(config: Config, lines: list[dict[str, Any]], steps: int) -> tuple[int, str]:
    """Return the last step, at most `steps`, up to which metrics.jsonl lacks nothing, and the first thing it lacks.

    The evaluation of that step itself may be missing: it is repeated.
    """
    evaluated = {line["step"] for line in lines if line["kind"] == "eval" and line["split"] == "dev"}
    logged = {line["step"] for line in lines if line["kind"] == "train"}
    for step in range(steps + 1):
        if step > 0 and config.logs_at(step) and step not in logged:
            return step - 1, f"the line of step {step}"
        if step < steps and config.evaluates_at(step) and step not in evaluated:
            return step, f"the evaluation of step {step}"
    return steps, ""


def change_config(run: Run, config: Config, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Replace config.yaml of a run that the caller has claimed, and record in run.json which settings change.

    The summary and predictions of a finished run are kept as `summary-STEPS.json` and `predictions-STEPS.jsonl`. A
    crash at any moment leaves a run that can be opened. On a rank other than 0 nothing is written.
    """
    if not run.writes:
        return
    config_yaml = to_yaml(config)
    checksum = hashlib.sha256(config_yaml.encode()).hexdigest()
    summary, predicted = run.path / "summary.json", run.path / "predictions.jsonl"
    if summary.exists():
        steps = run.read_summary()["steps"]
        if predicted.exists():  # first: after a crash in between, the summary says that both are to be renamed
            os.replace(predicted, run.path / f"predictions-{steps}.jsonl")
        os.replace(summary, run.path / f"summary-{steps}.json")
    # `Run.read` takes the checksum of the last change, too: config.yaml and run.json cannot be replaced at once.
    change = {"time": utc_now(), "before": before, "after": after, "config_sha256": checksum}
    run.update(changes=[*(run.info().get("changes") or []), change])
    write_atomically(run.path / "config.yaml", config_yaml)
    run.update(config_sha256=checksum)
