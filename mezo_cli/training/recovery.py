"""Find the step that an interrupted run resumes at, after a crash or a power cut; damage and other data are refused.

Training syncs the files at each evaluation and at least every 30 s, in this order: trajectory and lines before the
checkpoints, checkpoints before the evaluation's line. So a power cut can lose only what follows the last evaluation;
more than that is damage.
"""

import hashlib
import logging
from pathlib import Path
from typing import Any

from mezo_cli.config.schema import Config, Splits
from mezo_cli.errors import UserError, join
from mezo_cli.optim import optimizer_class
from mezo_cli.runs import Run, trajectory
from mezo_cli.runs.trajectory import Trajectory

log = logging.getLogger("mezo")


def find_resume_step(config: Config, run: Run) -> int | None:
    """Return the step that an interrupted run resumes at; None if training never began.

    It is the last step up to which the trajectory (or the checkpoint `last`) and metrics.jsonl are complete. If a crash
    has lost what followed it, the log says so.
    """
    lines, bad_line = run.read_valid_metrics()
    begun = bool(lines) or bad_line is not None
    if not optimizer_class(config.optimizer).replayable:
        return _step_of_checkpoint(config, run, lines, bad_line)
    past = _read_trajectory(run, begun)
    if past is None:
        return None
    step, missing = _complete_until(config, lines, len(past))
    _refuse_unexplained(config, run, lines, past, step)
    lost = [bad_line] if bad_line is not None else []
    if past.cut_bytes:
        is_damaged = " is damaged" if past.lost_records else ""
        lost.append(f"{run.trajectory}{is_damaged}: its last {past.cut_bytes} bytes hold no valid record")
    if missing:
        lost.append(f"{run.path / 'metrics.jsonl'} lacks {missing}")
    if lost:
        log.warning("going back to step %d, the last that is stored whole: %s", step, join(lost))
    return step


def _step_of_checkpoint(config: Config, run: Run, lines: list[dict[str, Any]], bad_line: str | None) -> int | None:
    """Return the step of the checkpoint `last`, up to which metrics.jsonl must be complete."""
    step = run.checkpoint_step("last")
    if step is None:
        if lines or bad_line is not None:
            raise UserError(f"{run.checkpoints / 'last'} is missing: the run cannot be resumed without it")
        return None
    complete, missing = _complete_until(config, lines, step)
    if complete != step:
        raise UserError(bad_line or f"{run.path / 'metrics.jsonl'} is damaged: it lacks {missing}")
    if bad_line is not None:
        log.warning("going back to step %d, the last that is stored whole: %s", step, bad_line)
    return step


def _read_trajectory(run: Run, begun: bool) -> Trajectory | None:
    """Read the trajectory; None if there is none, or one with a torn header, and nothing else has begun."""
    path = run.trajectory
    if not path.exists() or not path.stat().st_size:
        if begun:
            raise UserError(f"{path} is missing: the run cannot be resumed without it")
        return None
    try:
        return trajectory.read(path)
    except UserError as error:
        if begun or (run.checkpoint_step("last") or 0) > 0:
            raise
        log.warning("beginning anew, because nothing was trained: %s", error)
        return None


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


def _refuse_unexplained(config: Config, run: Run, lines: list[dict[str, Any]], past: Trajectory, step: int) -> None:
    """Refuse a run that has lost what was on the disk before its last evaluation: no crash explains that."""
    evaluated = {line["step"] for line in lines if line.get("split") == "dev"}
    if max(evaluated, default=0) > len(past):
        steps = f"it holds {len(past)} steps, but metrics.jsonl the evaluation of step {max(evaluated)}"
        raise UserError(f"{run.trajectory} is damaged: {steps}")
    missing = [at for at in range(step, len(past)) if config.evaluates_at(at) and at not in evaluated]
    if len(missing) > 1:
        raise UserError(f"{run.path / 'metrics.jsonl'} is damaged: it lacks the evaluation of step {missing[0]}")


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
