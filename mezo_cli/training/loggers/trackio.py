"""Keep scalars in Trackio's local database under RUN/trackio. Nothing is sent anywhere."""

import contextlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from mezo_cli.training.loggers.base import LoggedRun, RunEnd

REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_BUCKET_ID", "TRACKIO_DATASET_ID", "TRACKIO_WEBHOOK_URL")


class TrackioLogger:
    """A Trackio run. `TRACKIO_DIR=RUN/trackio trackio show` shows it.

    Trackio never raises: what it loses it reports as Python warnings.
    """

    package: ClassVar[str] = "trackio"

    def __init__(self, run: LoggedRun) -> None:
        self._logged = run
        for name in REMOTE:
            os.environ.pop(name, None)
        os.environ["TRACKIO_DIR"] = run.folder
        import trackio

        # Its modules keep the folder of the run that was the first in this process.
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "trackio" and hasattr(module, "TRACKIO_DIR"):
                setattr(module, "TRACKIO_DIR", Path(run.folder))  # noqa: B010 (no module declares it)
        self._trackio: Any = trackio
        # The newest run of this name is resumed. The id keeps apart runs whose directories have the same name.
        name = f"{run.name}-{run.id[:6]}"
        config = {**run.config, "tags": run.tags}
        known = inspect.signature(trackio.init).parameters  # auto_log_cpu came with version 0.27
        off: Any = {option: False for option in ("embed", "auto_log_gpu", "auto_log_cpu") if option in known}
        with _quiet_and_offline():
            self._run: Any = trackio.init(project=run.project, name=name, config=config, resume="allow", **off)
        self.note = f"show it by: TRACKIO_DIR={run.folder} trackio show"

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Give the scalars to trackio, whose thread writes them, unless they were logged before a resumption."""
        if not self._logged.was_logged(step, scalars):
            self._run.log(dict(scalars), step=step)

    def close(self, end: RunEnd) -> None:
        """Log the summary, or an alert when the run did not finish, and wait until all is written (at most 30 s)."""
        with _quiet_and_offline():
            if end.summary:
                self._run.log(dict(end.summary), step=end.step)
            if end.status != "finished":
                level = self._trackio.AlertLevel.ERROR if end.status == "failed" else self._trackio.AlertLevel.WARN
                self._run.alert(f"run {end.status}", text=end.error or "", level=level, step=end.step)
            self._run.finish()


@contextlib.contextmanager
def _quiet_and_offline() -> Iterator[None]:
    """Let trackio print nothing inside the block, and not ask the hub for the user's name."""
    from huggingface_hub import constants

    online = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield
    finally:
        constants.HF_HUB_OFFLINE = online
