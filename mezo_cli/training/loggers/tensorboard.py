"""Write scalars as TensorBoard event files under RUN/tensorboard."""

from collections.abc import Mapping
from typing import Any, ClassVar

from mezo_cli.training.loggers.base import LoggedRun, RunEnd

METRICS = ("dev/accuracy", "dev/loss", "final/test_accuracy")  # beside the hyperparameters


class TensorBoardLogger:
    """TensorBoard event files: scalars, the config as a text and as hyperparameters, and how the run ended.

    A resumed run writes a further file. Its first event tells TensorBoard to drop the steps that are repeated.
    """

    package: ClassVar[str] = "tensorboard"
    note = ""

    def __init__(self, run: LoggedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        again = None if run.resumed_at is None else run.resumed_at + 1
        writer: Any = SummaryWriter(run.folder, purge_step=again)
        self._writer = writer
        if again is None:
            lines = [f"    {key}: {value}" for key, value in _flat(run.config).items()]
            self._writer.add_text("config", "\n".join(lines))  # four spaces: TensorBoard shows Markdown
            self._writer.add_text("tags", ", ".join(run.tags))
            shown = {key: value for key, value in _flat(run.config).items() if isinstance(value, (str, float, int))}
            for summary in hparams(shown, dict.fromkeys(METRICS, 0.0))[:2]:
                self._writer.file_writer.add_summary(summary)
        self._writer.flush()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add each scalar under its name, and flush: a process that is killed has lost nothing."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, end: RunEnd) -> None:
        """Add the summary and the status of the session, and close the event file."""
        for name, value in end.summary.items():
            self._writer.add_scalar(name, value, end.step)
        self._writer.add_text("status", f"{end.status} {end.error or ''}".strip(), end.step)
        self._writer.close()


def _flat(values: Mapping[str, Any], parent: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{parent}{key}.") if isinstance(value, dict) else {f"{parent}{key}": value}
    return flat
