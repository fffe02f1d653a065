"""`--gpus-per-job N`: which GPUs the jobs of a sweep see (CUDA_VISIBLE_DEVICES).

Jobs in processes of their own share them by `SWEEP/.gpus`: a slot is some of the GPUs and a lock file. The process that
holds the lock uses them until it ends.
"""

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mezo_cli.errors import UserError
from mezo_cli.runs.files import lock_file
from mezo_cli.runs.sweep_record import SweepRecord
from mezo_cli.system import import_torch, set_variable, visible_gpus

VISIBLE = "CUDA_VISIBLE_DEVICES"
SCHEDULERS = {  # launchers that hand out GPUs themselves, and the setting that asks for them
    "submitit_slurm": "hydra.launcher.gpus_per_node",
    "ray": "hydra.launcher.ray.remote.num_gpus",
}
FOLDER = ".gpus"
POLL_SECONDS = 0.5

_held: dict[Path, tuple[Any, str]] = {}  # folder -> the lock of this process and its GPUs


def plan_gpus(per_job: int | None, launcher: str, overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a value of CUDA_VISIBLE_DEVICES for each job that runs at a time, and overrides for the launcher.

    The GPUs are those that this process may use. Slurm and ray hand out their own.

    Args:
        per_job: the number of GPUs per job; None: every job sees all.
        launcher: the name of the launcher.
        overrides: of the sweep.
    """
    if per_job is None:
        return [], []
    option = f"--gpus-per-job {per_job}"
    if per_job < 1:
        raise UserError(f"{option}: give 1 or more")
    settings = {text.lstrip("+").partition("=")[0]: text for text in overrides}
    for key in ("hydra.launcher.gpus_per_node", *SCHEDULERS.values()):
        if key in settings:
            raise UserError(f"{option} and '{settings[key]}' say the same: leave one out")
    if launcher in SCHEDULERS:
        return [], [f"++{SCHEDULERS[launcher]}={per_job}"]
    if VISIBLE not in os.environ:
        import_torch()
    pool = visible_gpus()
    slots = gpu_slots(pool, per_job)
    if not slots:
        source = f"{VISIBLE}={os.environ[VISIBLE]}" if VISIBLE in os.environ else "this machine"
        raise UserError(f"{option}: {source} has {len(pool)} GPUs")
    if launcher != "joblib":
        return slots, []
    text = settings.get("hydra.launcher.n_jobs", f"hydra.launcher.n_jobs={len(slots)}")
    jobs = text.partition("=")[2]
    if jobs not in map(str, range(1, len(slots) + 1)):
        raise UserError(f"'{text}': with {option} and {len(pool)} GPUs give 1 to {len(slots)}")
    return slots, [f"hydra.launcher.n_jobs={jobs}"]


def show_gpus_to_worker(folder: Path, record: SweepRecord) -> None:
    """Set CUDA_VISIBLE_DEVICES in a process that a launcher has started, for as long as it lives.

    submitit's local jobs would see no GPU: it sets the variable to the GPUs that it was asked for, which are none.
    """
    if record.gpus:
        os.environ[VISIBLE] = claim(folder, record.gpus)
    elif os.environ.get("SUBMITIT_EXECUTOR") == "local" and os.environ.get(VISIBLE) == "":
        set_variable(VISIBLE, record.visible_gpus)


def gpu_slots(gpus: Sequence[str], per_job: int) -> list[str]:
    """Return the values of CUDA_VISIBLE_DEVICES for jobs of `per_job` GPUs each; GPUs that are left over are unused."""
    return [",".join(gpus[i : i + per_job]) for i in range(0, len(gpus) - per_job + 1, per_job)]


def claim(folder: Path, values: Sequence[str]) -> str:
    """Claim one of the slots for this process until it ends; wait while all are taken.

    Args:
        folder: of the sweep.
        values: of `gpu_slots`.

    Returns:
        The value of CUDA_VISIBLE_DEVICES; the same one whenever this process asks for the same folder.
    """
    if folder in _held:
        return _held[folder][1]
    locks = folder / FOLDER
    try:
        locks.mkdir(exist_ok=True)
        while True:
            for number, value in enumerate(values):
                with contextlib.suppress(BlockingIOError):
                    _held[folder] = lock_file(locks / f"{number}.lock"), value  # as long as the process lives
                    return value
            time.sleep(POLL_SECONDS)
    except OSError as error:
        raise UserError(f"{locks}: GPUs cannot be shared between jobs: {error.strerror}") from error
