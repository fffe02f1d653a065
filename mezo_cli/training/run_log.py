"""What a run writes as it goes: lines of metrics, the trajectory, checkpoints; and what its loggers get."""

import contextlib
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from mezo_cli import models
from mezo_cli.config.optimizers import CLIP_SETTINGS, zeroth_order
from mezo_cli.config.schema import Config
from mezo_cli.distributed.ranks import Ranks
from mezo_cli.errors import RunStopped, one_line
from mezo_cli.objectives.scoring import Evaluation
from mezo_cli.optim import StepResult
from mezo_cli.runs import Run, trajectory
from mezo_cli.runs.jsonl import read_object, write_object
from mezo_cli.session.restore import OPTIMIZER_STATE
from mezo_cli.session.session import Session
from mezo_cli.training.loggers.base import RunEnd, RunLoggers, Status, final_scalars

SYNC_SECONDS = 30.0  # the most that a power cut can cost between two evaluations


class RunLog(contextlib.AbstractContextManager["RunLog"]):
    """The open files and the loggers of a run, its step and its clock. As a context manager it closes them.

    Each of the ranks that share a run has one; `run` writes on rank 0 alone. The model is not part of it: the methods
    that need one take the `Session`.

    Attributes:
        step: steps done, all of which are written.
        started: when the first step of this process ended, less the seconds `before` it that count; None before.
    """

    def __init__(self, config: Config, run: Run, ranks: Ranks, before: float = 0.0) -> None:
        self.config, self.run, self.ranks, self._before = config, run, ranks, before
        self.step = self._first_step = 0
        self.started: float | None = None
        self._loggers = RunLoggers(config, run)
        self._trajectory: trajectory.Writer | None = None
        self._start_time = self._last_sync = time.perf_counter()
        self._seconds_before = 0.0  # training time before the run was interrupted
        self._exchanged_before = ranks.exchanged["step"]
        self._summary: Mapping[str, Any] = {}

    def seconds(self) -> float:
        """Return the training time so far, without the time between an interruption and the resumption."""
        return self._seconds_before + time.perf_counter() - self._start_time

    def exchanged_bytes_per_step(self) -> float:
        """Return how many bytes all ranks together have exchanged per step of this process; 0 in a process alone."""
        exchanged = self.ranks.exchanged["step"] - self._exchanged_before
        return round(exchanged / max(self.step - self._first_step, 1), 3)

    # --- begin and end ---

    def begin(self, session: Session) -> None:
        """Begin a new run: save the initial weights that the base model does not have, and begin the trajectory."""
        loaded, optimizer = session.loaded, session.optimizer
        self.run.save_initial_state(
            partial(models.save_initial_state, loaded.model, loaded.fresh, rows=loaded.fresh_rows)
        )
        fingerprint = models.fingerprint(loaded.model)
        self.run.update(weights_fingerprint=fingerprint)
        if optimizer.replayable:
            optimizer.keep_start(session.params)
            chosen, drawn, dtype = self.config.optimizer, zeroth_order(self.config.optimizer), self.config.model.dtype
            names = [name for name in type(chosen).model_fields if name not in ("name", *CLIP_SETTINGS)]
            clipped = getattr(drawn, "clip_g", None) is not None
            header = trajectory.Header(
                fingerprint=fingerprint,
                optimizer=chosen.name,
                noise=drawn.noise,
                seed=self.config.seed,
                samples=drawn.record_width,
                weight_decay=drawn.weight_decay,
                tensors=[(name, list(p.shape)) for name, p in session.params.tensors.items()],
                settings={name: getattr(chosen, name) for name in names},
                dtype=dtype,
                rounding=trajectory.ROUNDINGS[dtype],
                decay="float64" if drawn.weight_decay else None,
                scalars=optimizer.scalar,
                clip={name: getattr(drawn, name) for name in CLIP_SETTINGS} if clipped else None,
                nonnegative=[*session.params.nonnegative] or None,
            )
            self._trajectory = trajectory.Writer(self.run.open_trajectory(), header)
            self._trajectory.sync()
        self._loggers.open()
        self._start_time = time.perf_counter()

    def resume(self, step: int, *, replayable: bool) -> list[dict[str, Any]]:
        """Continue the files at `step`. What was written after it is dropped, to be written again.

        Returns:
            The lines of metrics.jsonl that are kept.
        """
        had = self.run.lines.read_valid()[0]
        logged = {"train": [m["step"] for m in had if m["kind"] == "train"]}
        logged["dev"] = [m["step"] for m in had if m["kind"] == "eval" and m["split"] == "dev"]
        self.run.truncate_metrics(step)
        self.ranks.from_first("truncated")
        lines = self.run.metrics()
        if replayable:
            past = trajectory.read(self.run.trajectory)
            file = self.run.open_trajectory(past.bytes_until(step))
            self._trajectory = trajectory.Writer(file, past.header, past.crc)
        self._loggers.open(step, {kind: steps[-1] for kind, steps in logged.items() if steps})
        self.step = self._first_step = step
        self._seconds_before = max((float(line["seconds"]) for line in lines), default=0.0)
        self._start_time = time.perf_counter()
        return lines

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files, and tell the loggers how the run ended: by `error`, or finished with a summary."""
        with contextlib.suppress(OSError):  # every record was flushed
            if self._trajectory is not None:
                self._trajectory.close()
        if error is None:
            end = RunEnd("finished", self.step, summary=final_scalars(self._summary))
        else:
            interrupted = isinstance(error, KeyboardInterrupt)
            status: Status = "interrupted" if interrupted or isinstance(error, RunStopped) else "failed"
            end = RunEnd(status, self.step, "interrupted" if interrupted else one_line(error))
        self._loggers.close(end)

    # --- what is written ---

    def record(self, session: Session, result: StepResult, figures: Mapping[str, float]) -> None:
        """Write the line and the trajectory record of the next step; at times wait until they are on the disk.

        Args:
            session: that has taken the step.
            result: of the step.
            figures: the objective's of it, for metrics.jsonl.
        """
        step = self.step + 1
        # The metrics line is written first: after a crash between the two, the step is repeated and its line dropped.
        if self.config.logs_at(step):
            values = {**result.scalars(), **figures, "seconds": round(self.seconds(), 3)}
            self.run.log_metrics("train", step, **values)
            self._loggers.log(step, {f"train/{key}": value for key, value in values.items()})
        if self._trajectory is not None:
            self._trajectory.append(self.step, result.recorded, result.lr)
        if time.perf_counter() - self._last_sync >= SYNC_SECONDS:
            self.sync()
        self.step = step
        if self.started is None:
            self.started = time.perf_counter() - self._before
            if session.optimizer.replayable:  # how its kernels run is known after a step
                self.run.update(noise_kernels=session.params.noise.describe_kernels()[0])

    def evaluation(self, split: str, step: int, evaluation: Evaluation) -> None:
        """Write the line of an evaluation."""
        line = evaluation.line()
        self.run.log_metrics("eval", step, split=split, **line, seconds=round(self.seconds(), 3))
        if split == "dev":
            numbers = {f"dev/{key}": value for key, value in line.items() if isinstance(value, (int, float))}
            self.run.lines.sync()
            self._loggers.log(step, numbers)

    def checkpoint(self, session: Session, name: str) -> None:
        """Write the checkpoint `best` or `last` of this step."""

        def write(folder: Path) -> None:
            models.save(session.loaded, folder)
            if name == "last":
                session.optimizer.save_state(folder / OPTIMIZER_STATE)

        if self.config.checkpoint == "full" and self.run.writes and self.run.checkpoint_step(name) != self.step:
            self.run.save_checkpoint(name, self.step, write)

    def sync(self) -> None:
        """Wait until the steps so far are on the disk: they survive a power cut."""
        if self._trajectory is not None:
            self._trajectory.sync()
        self.run.lines.sync()
        self._last_sync = time.perf_counter()

    def summary(self, values: dict[str, Any]) -> None:
        """Write summary.json; loggers get its numbers at the end."""
        self._summary = values
        self.run.write_summary(values)

    # --- what evaluations follow from, for a resumed run ---

    def save_values(self, name: str, values: Mapping[str, Tensor]) -> None:
        """Write split -> values of an evaluation, of their dtype, so that they come back as they were.

        `untrained.json` is of all splits before the first step; `last_dev.json`, in a run without a test split, of dev
        at the last evaluation.
        """
        dtype = str(next(iter(values.values())).dtype).removeprefix("torch.")
        rows = {split: of.tolist() for split, of in values.items()}
        if self.run.writes:
            write_object(self.run.path / name, {"step": self.step, "dtype": dtype, "rows": rows}, indent=None)

    def load_values(self, name: str) -> tuple[int, dict[str, Tensor]]:
        """Return the step and the values of `save_values`; none where there is no file."""
        path, hint = self.run.path / name, "; without this file the run continues, compared with no untrained model"
        if not path.exists():
            return 0, {}
        stored = read_object(path, hint)
        dtype = getattr(torch, stored["dtype"])
        return stored["step"], {split: torch.tensor(rows, dtype=dtype) for split, rows in stored["rows"].items()}
