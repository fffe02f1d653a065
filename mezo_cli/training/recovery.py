"""Find the step that an interrupted run resumes at: the least that all of its files have.

A crash leaves an incomplete last line or record; what is incomplete at the end of a file is cut off. Damage before the
end is refused. Training syncs the files at each evaluation and at least every 30 s, in this order: trajectory and
lines, checkpoints, the evaluation's line. So a power cut can lose only what follows the last evaluation.
"""

import hashlib
import logging
from pathlib import Path
from typing import Any

from mezo_cli.config.schema import Config, Splits
from mezo_cli.errors import UserError, join
from mezo_cli.runs import Run, trajectory

log = logging.getLogger("mezo")


def find_resume_step(config: Config, run: Run) -> int | None:
    """Return the step that an interrupted run resumes at; None if training never began.

    It is the last step up to which the trajectory (without one: the checkpoint `last`) and metrics.jsonl are complete.
    If a crash has lost what followed it, the log says so.
    """
    lines, bad_line = run.read_valid_metrics()
    run.completions()  # refuses damage
    has_trajectory = config.optimizer.replayable
    begun = bool(lines) or bad_line is not None
    lost = [] if bad_line is None else [bad_line]
    steps = _recorded_steps(run, begun, lost) if has_trajectory else run.checkpoint_step("last")
    if steps is None:
        if begun:
            missing = run.trajectory if has_trajectory else run.checkpoints / "last"
            raise UserError(f"{missing} is missing: the run cannot be resumed without it")
        return None
    step, missing_line = _complete_until(config, lines, steps)
    if missing_line:
        lost.append(f"{run.path / 'metrics.jsonl'} lacks {missing_line}")
        if not has_trajectory:  # there are no other weights to go back to
            raise UserError(f"{run.path / 'metrics.jsonl'} is damaged: it lacks {missing_line}")
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


def check_data_unchanged(config: Config, run: Run, splits: Splits) -> None:
    """Refuse to resume a run with other rows than it began with, or another file as `data.keep`."""
    before, keep, why = run.info(), config.data.keep, "changed since this run began, so it cannot be resumed"
    if before.get("data_fingerprint") not in (None, splits.fingerprint):
        raise UserError(f"{run.path}: the data have {why}")
    if before.get("keep_sha256") not in (None, file_sha256(keep)):
        raise UserError(f"{run.path}: data.keep={keep} has {why}")


def file_sha256(file: str | None) -> str | None:
    """Return the sha256 of a file's content; None for no file."""
    try:
        return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"data.keep={file}: {error.strerror}") from error
