"""Whether metrics.jsonl and trajectory.bin have everything that the other files of a run say they must have.

The checksums of the lines form a chain, so a line lost in the middle shows, and so does a bad record before a sound
one. The loss of the last ones shows only beside what was written after them: summary.json, or the other file.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mezo_cli.errors import UserError
from mezo_cli.runs import trajectory
from mezo_cli.runs.run import Run
from mezo_cli.runs.trajectory import Trajectory


@dataclass(frozen=True)
class Plan:
    """The settings of a run that decide which lines metrics.jsonl has."""

    steps: int
    log_every: int
    eval_every: int


def check_whole(run: Run, steps: int, is_replayable: bool) -> None:
    """Check that a finished run has its summary, and a trajectory of all its steps; it is quick.

    Of the trajectory only header and size are looked at. Any other run passes.

    Args:
        run: the run.
        steps: of its config.
        is_replayable: whether its optimizer writes a trajectory.

    Raises:
        UserError: when one of the files is missing, empty, cut, or not what its checksum says.
    """
    if run.status() != "finished":
        return
    steps = int(run.read_summary().get("steps", run.steps_at_end(steps)))
    if is_replayable:
        trajectory.check_length(run.trajectory, steps)


def check_finished(run: Run, plan: Plan, summary: dict[str, Any]) -> None:
    """Check that metrics.jsonl of a finished run ends with its last evaluation. Only its end is read.

    Raises:
        UserError: when lines are missing or damaged.
    """
    if "best" not in summary:
        raise UserError(f"{run.path / 'summary.json'} is damaged: it lacks best")
    last = run.last_metrics() or {}
    split = next(split for split in ("test", "train", "dev") if summary.get(split) or split == "dev")
    step = summary.get("steps", plan.steps) if split == "dev" else summary["best"]["step"]
    if (last.get("split"), last.get("step")) != (split, step):
        wanted = f"the evaluation on {split} at step {step}"
        raise UserError(f"{run.path / 'metrics.jsonl'} is damaged: it does not end with {wanted}, as summary.json does")


def recorded_steps(run: Run) -> int:
    """Return the number of steps that the trajectory of a run has, 0 if there is none.

    Raises:
        UserError: when its header is damaged.
    """
    path = run.trajectory
    return trajectory.count_steps(path) if path.exists() and path.stat().st_size else 0


def missing_lines(run: Run, plan: Plan, done: int, lines: Sequence[Mapping[str, Any]]) -> str | None:
    """Return what metrics.jsonl of a run that has not finished lacks beside its trajectory; None if it is complete.

    Each step's line is written before its record. A power cut can lose the line and keep the record.

    Args:
        run: the run.
        plan: its settings.
        done: the steps that its trajectory has, read before the lines were.
        lines: its evaluations and its last `train` line at least.
    """
    if done == 0:
        return None
    logged = done if done == plan.steps else done // plan.log_every * plan.log_every
    evaluated = 0 if plan.eval_every == 0 else (done - 1) // plan.eval_every * plan.eval_every
    lacks = f"{run.path / 'metrics.jsonl'} lacks the %s of step %d, and trajectory.bin has {done} steps"
    if logged > max((line["step"] for line in lines if line["kind"] == "train"), default=0):
        return lacks % ("line", logged)
    if evaluated > max((line["step"] for line in lines if line["kind"] == "eval"), default=-1):
        return lacks % ("evaluation", evaluated)
    return None


def read_trajectory(run: Run, warn: Callable[[str], None]) -> Trajectory:
    """Read the trajectory of a run for a reader of its results.

    A part of a record at the end is left out: a kill leaves that. Of whole records that fail their checksums, which a
    power cut or damage leaves, `warn` is told before they are left out. A finished run has neither.

    Raises:
        UserError: when the file is damaged otherwise, or the run has finished.
    """
    past = trajectory.read(run.trajectory)
    if not past.cut_bytes:
        return past
    if run.status() == "finished":
        raise UserError(f"{run.trajectory} is damaged: its last {past.cut_bytes} bytes hold no sound record")
    if past.lost_records:
        what = f"the records of the steps from {len(past)} on" if past.lost_records > 1 else "its last record"
        warn(f"{run.trajectory} is damaged: {what} (byte {past.valid_bytes}) cannot be read and will be left out")
    return past
