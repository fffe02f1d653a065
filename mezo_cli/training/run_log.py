"""What a run writes as it goes: lines of metrics, the trajectory, checkpoints; and what its loggers get."""

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mezo_cli import models
from mezo_cli.config.schema import Config
from mezo_cli.errors import RunStopped, one_line
from mezo_cli.objectives.scoring import Evaluation
from mezo_cli.optim import StepResult
from mezo_cli.runs import Run, trajectory
from mezo_cli.training.loggers.base import RunEnd, RunLoggers, Status, final_scalars
from mezo_cli.training.restore import OPTIMIZER_STATE
from mezo_cli.training.session import Session

SYNC_SECONDS = 30.0  # the most that a power cut can cost between two evaluations


class RunLog:
    """The open files and the loggers of a run, and its clock. `run` writes on rank 0 alone."""

    def __init__(self, config: Config, run: Run) -> None:
        self._config, self._run, self._loggers = config, run, RunLoggers(config, run)
        self._trajectory: trajectory.Writer | None = None
        self._start_time = self._last_sync = time.perf_counter()
        self._seconds_before = 0.0  # training time before the run was interrupted

    def seconds(self) -> float:
        """Return the training time so far, without the time between an interruption and the resumption."""
        return self._seconds_before + time.perf_counter() - self._start_time

    def begin(self, header: trajectory.Header | None) -> None:
        """Begin the files of a new run; None: of a method without a trajectory."""
        if header is not None:
            self._trajectory = trajectory.Writer(self._run.open_trajectory(), header)
            self._trajectory.sync()
        self._loggers.open()
        self._start_time = time.perf_counter()

    def resume(self, step: int, seconds: float, logged: Mapping[str, int], *, replayable: bool) -> None:
        """Open the files at a step. `seconds`: of training before it; `logged`: the last steps that loggers had."""
        if replayable:
            past = trajectory.read(self._run.trajectory)
            file = self._run.open_trajectory(past.bytes_until(step))
            self._trajectory = trajectory.Writer(file, past.header, past.crc)
        self._loggers.open(step, logged)
        self._seconds_before, self._start_time = seconds, time.perf_counter()

    def train(self, step: int, values: Mapping[str, float]) -> None:
        """Write the line of a step."""
        values = {**values, "seconds": round(self.seconds(), 3)}
        self._run.log_metrics("train", step, **values)
        self._loggers.log(step, {f"train/{key}": value for key, value in values.items()})

    def record(self, step: int, result: StepResult) -> None:
        """Write the trajectory record of a step, from 0; at times wait until the steps so far are on the disk."""
        if self._trajectory is not None:
            self._trajectory.append(step, result.recorded, result.lr)
        if time.perf_counter() - self._last_sync >= SYNC_SECONDS:
            self.sync()

    def evaluation(self, split: str, step: int, evaluation: Evaluation) -> None:
        """Write the line of an evaluation."""
        line = evaluation.line()
        self._run.log_metrics("eval", step, split=split, **line, seconds=round(self.seconds(), 3))
        if split == "dev":
            numbers = {f"dev/{key}": value for key, value in line.items() if isinstance(value, (int, float))}
            self._run.lines.sync()
            self._loggers.log(step, numbers)

    def checkpoint(self, session: Session, name: str, step: int) -> None:
        """Write the checkpoint `best` or `last`."""

        def write(folder: Path) -> None:
            models.save(session.loaded, folder)
            if name == "last":
                session.optimizer.save_state(folder / OPTIMIZER_STATE)

        if self._config.checkpoint == "full" and self._run.writes and self._run.checkpoint_step(name) != step:
            self._run.save_checkpoint(name, step, write)

    def sync(self) -> None:
        """Wait until the steps so far are on the disk: they survive a power cut."""
        if self._trajectory is not None:
            self._trajectory.sync()
        self._run.lines.sync()
        self._last_sync = time.perf_counter()

    def close(self, step: int, summary: Mapping[str, Any], error: BaseException | None) -> None:
        """Close the files, and tell the loggers how the run ended: by `error`, or finished with a summary."""
        with contextlib.suppress(OSError):  # every record was flushed
            if self._trajectory is not None:
                self._trajectory.close()
        if error is None:
            end = RunEnd("finished", step, summary=final_scalars(summary))
        else:
            interrupted = isinstance(error, KeyboardInterrupt)
            status: Status = "interrupted" if interrupted or isinstance(error, RunStopped) else "failed"
            end = RunEnd(status, step, "interrupted" if interrupted else one_line(error))
        self._loggers.close(end)
