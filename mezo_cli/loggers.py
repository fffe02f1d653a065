"""Where a run's scalars go besides its own files: the terminal always, TensorBoard or Weights & Biases by choice."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mezo_cli.errors import UserError
from mezo_cli.schema import LoggerConfig

log = logging.getLogger("mezo")


class Logger(Protocol):
    """A sink for scalars."""

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Take the scalars of a step."""

    def close(self) -> None:
        """Flush and end."""


class NoLogger:
    """The run directory's own files are enough."""

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Drop them."""

    def close(self) -> None:
        """Nothing to end."""


class TensorBoardLogger:
    """Event files under RUN/tensorboard."""

    def __init__(self, config: LoggerConfig, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError("logger=tensorboard needs a package: pip install tensorboard") from error
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Add each scalar under its name."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush the event file."""
        self._writer.close()


class WandbLogger:
    """A Weights & Biases run whose files lie under RUN/wandb."""

    def __init__(self, config: LoggerConfig, folder: Path) -> None:
        try:
            import wandb  # type: ignore[import-not-found]
        except ImportError as error:
            raise UserError("logger=wandb needs a package: pip install wandb") from error
        self._run: Any = wandb.init(project=config.project, dir=str(folder), name=folder.name)

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Send the scalars."""
        self._run.log(scalars, step=step)

    def close(self) -> None:
        """End the W&B run."""
        self._run.finish()


LOGGERS: dict[str, Any] = {"tensorboard": TensorBoardLogger, "wandb": WandbLogger}


def make(config: LoggerConfig, folder: Path) -> Logger:
    """Return the logger of that name.

    Raises:
        UserError: when its package is not installed.
    """
    return NoLogger() if config.name == "none" else LOGGERS[config.name](config, folder)


class Meter:
    """What the user sees while a run goes: a live bar on a terminal, plain lines at the evaluations otherwise."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total = progress, total
        self._fields: dict[str, Any] = {"loss": "-", "dev": "-", "rate": "-"}
        self._task = progress.add_task("train", total=total, **self._fields) if progress else None

    def step(self, done: int, loss: float, rate: float) -> None:
        """Show the loss of step number `done` and the steps/s so far; a plain line every twentieth of the way."""
        self._fields.update(loss=f"{loss:.4f}", rate=f"{rate:.2f}" if rate < 10 else f"{rate:.1f}")
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, **self._fields)
        elif done % max(1, self._total // 20) == 0:
            left = (self._total - done) / rate if rate else 0.0
            log.info("step %d/%d  loss %.4f  %.2f steps/s  %.0f s left", done, self._total, loss, rate, left)

    def dev(self, accuracy: float) -> None:
        """Show the newest dev accuracy in the bar."""
        self._fields["dev"] = f"{100 * accuracy:.1f}%"


@contextmanager
def meter(console: Console, total: int, done: int) -> Iterator[Meter]:
    """Open the meter of a run of `total` steps of which `done` are done."""
    if not console.is_terminal or total == 0:
        yield Meter(None, total)
        return
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("loss [cyan]{task.fields[loss]}[/] dev [green]{task.fields[dev]}[/] {task.fields[rate]} steps/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        shown = Meter(progress, total)
        progress.update(progress.task_ids[0], completed=done)
        yield shown
