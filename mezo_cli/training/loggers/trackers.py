"""Weights & Biases and Trackio: two services with the same calls, whose files are in RUN/wandb and RUN/trackio."""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from mezo_cli.training.loggers.base import LoggedRun, RunEnd

SECONDS = 60  # that W&B may take to start, and to send at the end what is left
EXIT_CODES = {"finished": 0, "failed": 1, "interrupted": 255}  # W&B shows 255 as killed
# Trackio sends nothing anywhere.
REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_BUCKET_ID", "TRACKIO_DATASET_ID", "TRACKIO_WEBHOOK_URL")


class Tracker:
    """What both have in common: `_run` is theirs."""

    _run: Any

    def __init__(self, run: LoggedRun) -> None:
        self._logged = run.logged

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record the scalars, unless they were before a resumption."""
        if any(step > self._logged.get(name.split("/")[0], -1) for name in scalars):
            self._run.log(dict(scalars), step=step)


class WandbLogger(Tracker):
    """A Weights & Biases run. WANDB_MODE chooses between online, offline and disabled.

    Without it, and without an API key, the run is offline: W&B would otherwise ask for the key.
    """

    package: ClassVar[str] = "wandb"

    def __init__(self, run: LoggedRun) -> None:
        super().__init__(run)
        if not os.access(run.folder, os.W_OK):  # W&B would write to a temporary folder
            raise PermissionError(f"{run.folder} cannot be written")
        for name in ("CACHE", "DATA", "ARTIFACT"):  # else they are in the home directory
            os.environ[f"WANDB_{name}_DIR"] = str(Path(run.folder, name.lower()))
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # of errors in W&B itself, to its makers
        import wandb

        options = {"console": "off", "silent": True, "save_code": False, "disable_git": True, "init_timeout": SECONDS}
        options |= {"reinit": "create_new", "finish_timeout": SECONDS}  # another run of this process stays as it is
        options = {name: value for name, value in options.items() if name in wandb.Settings.model_fields}
        about: dict[str, Any] = {"project": run.project, "id": run.id, "name": run.name, "tags": run.tags}
        about |= {"config": run.config, "resume": "allow", "settings": wandb.Settings(**options)}
        about |= {"dir": str(Path(run.folder).parent)}  # W&B adds wandb/
        try:
            self._run = wandb.init(**about, mode=os.environ.get("WANDB_MODE"))  # type: ignore[arg-type]
        except wandb.errors.UsageError as error:
            if "WANDB_MODE" in os.environ or "API key" not in str(error):
                raise
            self._run = wandb.init(**about, mode="offline")
        self.note = f"offline; send it by: wandb sync {self._run.settings.sync_dir}"
        if not self._run.offline:
            self.note = str(self._run.url or "")

    def close(self, end: RunEnd) -> None:
        """Set the summary and finish the run; one that did not finish is shown as failed or killed."""
        self._run.summary.update({**end.summary, "status": end.status, "error": end.error})
        self._run.finish(exit_code=EXIT_CODES[end.status])


class TrackioLogger(Tracker):
    """A run in Trackio's local database. `TRACKIO_DIR=RUN/trackio trackio show` shows it.

    Trackio never raises: what it loses it reports as Python warnings. A thread of its own writes.
    """

    package: ClassVar[str] = "trackio"

    def __init__(self, run: LoggedRun) -> None:
        super().__init__(run)
        for name in REMOTE:
            os.environ.pop(name, None)
        os.environ["TRACKIO_DIR"] = run.folder
        import trackio

        # Its modules keep the folder of the run that was the first in this process.
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "trackio" and hasattr(module, "TRACKIO_DIR"):
                setattr(module, "TRACKIO_DIR", Path(run.folder))  # noqa: B010 (no module declares it)
        self._levels = {"failed": trackio.AlertLevel.ERROR, "interrupted": trackio.AlertLevel.WARN}
        # The newest run of this name is resumed. The id keeps apart runs whose directories have the same name.
        about: dict[str, Any] = {"project": run.project, "name": f"{run.name}-{run.id[:6]}", "resume": "allow"}
        about |= {"config": {**run.config, "tags": run.tags}}
        with _quiet_and_offline():
            self._run = trackio.init(**about, embed=False, auto_log_gpu=False, auto_log_cpu=False)
        self.note = f"show it by: TRACKIO_DIR={run.folder} trackio show"

    def close(self, end: RunEnd) -> None:
        """Log the summary, or an alert when the run did not finish, and wait until all is written (at most 30 s)."""
        with _quiet_and_offline():
            if end.summary:
                self._run.log(dict(end.summary), step=end.step)
            if end.status != "finished":
                level = self._levels[end.status]
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
