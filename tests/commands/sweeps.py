"""What the tests of sweeps share: the words that start one, and what it has come to."""

import subprocess
import time
from pathlib import Path
from typing import Any

from mezo_cli import runs
from mezo_cli.runs import Run
from tests.command_line import small


def sweep(model: Any, data: Path, folder: Path, *more: str) -> list[str]:
    """The words of a sweep of two steps per job."""
    words = [word for word in small(model, data, folder, "steps=2", *more) if not word.startswith("hydra.run.dir")]
    return ["-m", *words, f"hydra.sweep.dir={folder}"]


def statuses(folder: Path) -> dict[str, str]:
    """The status of each job by the name of its directory, in the order of names: two at once start in any order."""
    return dict(sorted((run.path.name, run.status()) for run in runs.find_runs(folder)))


def wait_until_it_trains(folder: Path, running: "subprocess.Popen[str]") -> Run:
    """Return the first run of a sweep that makes steps."""
    while True:
        assert running.poll() is None, running.communicate()
        for path in sorted(folder.glob("*/metrics.jsonl")):
            if '"train"' in path.read_text():
                return Run(path.parent)
        time.sleep(0.1)
