"""Find the last step up to which an interrupted run is stored whole, after a crash, a power cut or damage.

Training syncs the files at each evaluation and at least every 30 s, in this order: trajectory and lines before the
checkpoints, checkpoints before the evaluation's line. So a power cut can lose only what follows the last evaluation;
more than that is damage.
"""

import logging
from dataclasses import dataclass
from typing import Any

from mezo_cli.config.schema import Config
from mezo_cli.errors import UserError
from mezo_cli.optim import optimizer_class
from mezo_cli.runs import Run, trajectory
from mezo_cli.runs.trajectory import Trajectory

log = logging.getLogger("mezo")


@dataclass(frozen=True)
class SoundStep:
    """Where a run can go on.

    Attributes:
        step: the last step up to which the trajectory (or the checkpoint `last`) and metrics.jsonl are sound.
        lost: what a crash damaged at the end of the files.
        damage: what no crash explains; None if there is no such thing.
    """

    step: int
    lost: list[str]
    damage: str | None


def find_sound_step(config: Config, run: Run) -> SoundStep | None:
    """Return where an interrupted run can go on; None if training never began.

    Raises:
        UserError: when the trajectory or the checkpoint `last` is missing, or damaged at its begin.
    """
    lines, bad_line, in_middle = run.metrics_prefix()
    lost = [bad_line] if bad_line is not None else []
    if not optimizer_class(config.optimizer).replayable:
        return _at_last_checkpoint(config, run, lines, bad_line)
    past = _read_trajectory(run, begun=bool(lines) or bad_line is not None)
    if past is None:
        return None
    step, lacking = _complete_until(config, lines, len(past))
    if past.cut_bytes:
        is_damaged = " is damaged" if past.lost_records else ""
        lost.append(f"{run.trajectory}{is_damaged}: its last {past.cut_bytes} bytes hold no sound record")
    if lacking:
        lost.append(f"{run.path / 'metrics.jsonl'} lacks {lacking}")
    damage = past.damage or (bad_line if in_middle else None) or _unexplained(config, run, lines, past, step)
    return SoundStep(step, lost, damage)


def _at_last_checkpoint(
    config: Config, run: Run, lines: list[dict[str, Any]], bad_line: str | None
) -> SoundStep | None:
    step = run.checkpoint_step("last")
    if step is None:
        if lines or bad_line is not None:
            raise UserError(f"{run.checkpoints / 'last'} is missing: the run cannot be resumed without it")
        return None
    complete, lacking = _complete_until(config, lines, step)
    if complete == step:
        return SoundStep(step, [bad_line] if bad_line is not None else [], None)
    return SoundStep(step, [], bad_line or f"{run.path / 'metrics.jsonl'} is damaged: it lacks {lacking}")


def _read_trajectory(run: Run, begun: bool) -> Trajectory | None:
    """Read the trajectory; None if there is none, or one with a torn header, and nothing else has begun."""
    path = run.trajectory
    if not path.exists() or not path.stat().st_size:
        if begun:
            raise UserError(f"{path} is missing: the run cannot be resumed without it")
        return None
    try:
        return trajectory.read_prefix(path)
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


def _unexplained(config: Config, run: Run, lines: list[dict[str, Any]], past: Trajectory, step: int) -> str | None:
    """Return what is lost that was on the disk before the last evaluation, so that no crash explains it."""
    evaluated = {line["step"] for line in lines if line.get("split") == "dev"}
    if max(evaluated, default=0) > len(past):
        found = f"it holds {len(past)} steps, but metrics.jsonl the evaluation of step {max(evaluated)}"
        return f"{run.trajectory} is damaged: {found}"
    missing = [at for at in range(step, len(past)) if config.evaluates_at(at) and at not in evaluated]
    if len(missing) > 1:
        return f"{run.path / 'metrics.jsonl'} is damaged: it lacks the evaluation of step {missing[0]}"
    return None
