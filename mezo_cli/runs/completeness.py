"""Whether a run has the summary and the trajectory that it must have."""

from collections.abc import Callable

from mezo_cli.errors import UserError
from mezo_cli.runs import trajectory
from mezo_cli.runs.run import Run
from mezo_cli.runs.trajectory import Trajectory


def check_finished(run: Run, steps: int, is_replayable: bool) -> None:
    """Check that a finished run has its summary, and a trajectory of all its steps; any other run passes.

    It is quick: of the trajectory only header and size are looked at.

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
        raise UserError(f"{run.trajectory} is damaged: its last {past.cut_bytes} bytes hold no valid record")
    if past.lost_records:
        what = f"the records of the steps from {len(past)} on" if past.lost_records > 1 else "its last record"
        warn(f"{run.trajectory} is damaged: {what} (byte {past.valid_bytes}) cannot be read and will be left out")
    return past
