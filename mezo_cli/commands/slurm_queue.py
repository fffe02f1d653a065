"""Ask Slurm's queue which jobs are left. submitit asks the accounting (sacct), which a small cluster does not have.

Without accounting submitit waits for ever for a job that was killed or cancelled.
"""

import subprocess
import time
from typing import Any

ASK_EVERY = 5.0  # seconds


class SlurmQueue:
    """The jobs in Slurm's queue: pending, running or completing."""

    def __init__(self) -> None:
        self._ids: set[str] | None = None
        self._asked = 0.0

    def has(self, job_id: str) -> bool:
        """Return whether a job is in the queue; True if the queue cannot be read now."""
        if time.monotonic() - self._asked > ASK_EVERY:
            self._asked = time.monotonic()
            self._ids = _read_queue()
        return self._ids is None or job_id in self._ids

    def watch(self, job: Any) -> None:
        """Let a job of submitit count as done when it has a result or has left the queue."""
        job.done = lambda force_check=False: job.paths.result_pickle.exists() or not self.has(job.job_id)


def _read_queue() -> set[str] | None:
    command = ["squeue", "--noheader", "--array", "--format=%i"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return set(done.stdout.split())
