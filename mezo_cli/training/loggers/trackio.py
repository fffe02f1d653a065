"""Keep scalars in Trackio's local database under RUN/trackio. Nothing is sent anywhere."""

import inspect
import os
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

from mezo_cli.training.loggers.base import LoggedRun, RunEnd

REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_BUCKET_ID", "TRACKIO_DATASET_ID", "TRACKIO_WEBHOOK_URL")


class TrackioLogger:
    """A Trackio run. `TRACKIO_DIR=RUN/trackio trackio show` shows it."""

    package: ClassVar[str] = "trackio"
    own_process: ClassVar[bool] = True

    def __init__(self, run: LoggedRun) -> None:
        for name in REMOTE:
            os.environ.pop(name, None)
        os.environ["TRACKIO_DIR"] = run.folder  # read when trackio is imported
        os.environ["HF_HUB_OFFLINE"] = "1"  # trackio would ask the hub for the user's name
        self._problem: str | None = None
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = self._note_problem  # type: ignore[assignment]  # it takes the rest as *args
        import trackio

        self._trackio: Any = trackio
        # The newest run of this name is resumed. The id keeps apart runs whose directories have the same name.
        name = f"{run.name}-{run.id[:6]}"
        config = {**run.config, "tags": run.tags}
        known = inspect.signature(trackio.init).parameters  # auto_log_cpu came with version 0.27
        off: Any = {one: False for one in ("embed", "auto_log_gpu", "auto_log_cpu") if one in known}
        self._run: Any = trackio.init(project=run.project, name=name, config=config, resume="allow", **off)
        self.note = f"show it by: TRACKIO_DIR={run.folder} trackio show"
        self._check()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Give the scalars to trackio, whose thread writes them.

        Raises:
            RuntimeError: when it could not write the earlier ones.
        """
        self._check()
        self._run.log(dict(scalars), step=step)

    def close(self, end: RunEnd) -> None:
        """Log the summary, or an alert when the run did not finish, and wait until all is written."""
        if end.summary:
            self._run.log(dict(end.summary), step=end.step)
        if end.status != "finished":
            level = self._trackio.AlertLevel.ERROR if end.status == "failed" else self._trackio.AlertLevel.WARN
            self._run.alert(f"run {end.status}", text=end.error or "", level=level, step=end.step)
        self._run.finish()
        self._check()

    def _note_problem(self, message: Warning | str, category: type[Warning], *_: Any) -> None:
        """Keep the first warning: trackio never raises, it warns when it has lost something."""
        if issubclass(category, UserWarning):
            self._problem = self._problem or str(message)

    def _check(self) -> None:
        if self._problem is not None:
            raise RuntimeError(self._problem)
