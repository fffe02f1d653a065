"""Write scalars to Weights & Biases, whose files are in RUN/wandb."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from mezo_cli.training.loggers.base import LoggedRun, RunEnd

SECONDS = 60  # that W&B may take to start, and to send at the end what is left
EXIT_CODES = {"finished": 0, "failed": 1, "interrupted": 255}  # W&B shows 255 as killed


class WandbLogger:
    """A Weights & Biases run. WANDB_MODE chooses between online, offline and disabled.

    Without it, and without an API key, the run is offline: W&B would otherwise ask for the key.
    """

    package: ClassVar[str] = "wandb"

    def __init__(self, run: LoggedRun) -> None:
        self._logged = run.logged
        if not os.access(run.folder, os.W_OK):  # W&B would write to a temporary folder
            raise PermissionError(f"{run.folder} cannot be written")
        for name in ("CACHE", "DATA", "ARTIFACT"):  # else they are in the home directory
            os.environ[f"WANDB_{name}_DIR"] = str(Path(run.folder, name.lower()))
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # of errors in W&B itself, to its makers
        import wandb

        options = {"console": "off", "silent": True, "save_code": False, "disable_git": True, "init_timeout": SECONDS}
        options |= {"reinit": "create_new", "finish_timeout": SECONDS}  # another run of this process stays as it is
        known = {name: value for name, value in options.items() if name in wandb.Settings.model_fields}
        about: dict[str, Any] = {"project": run.project, "id": run.id, "name": run.name, "tags": run.tags}
        about |= {"config": run.config, "resume": "allow", "settings": wandb.Settings(**known)}
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

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record the scalars, unless they were before a resumption."""
        if any(step > self._logged.get(name.split("/")[0], -1) for name in scalars):
            self._run.log(dict(scalars), step=step)

    def close(self, end: RunEnd) -> None:
        """Set the summary and finish the run; one that did not finish is shown as failed or killed."""
        self._run.summary.update({**end.summary, "status": end.status, "error": end.error})
        self._run.finish(exit_code=EXIT_CODES[end.status])
