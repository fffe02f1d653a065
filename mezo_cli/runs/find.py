"""Find the runs under a folder."""

import os
from pathlib import Path

from mezo_cli.errors import UserError, did_you_mean
from mezo_cli.runs.run import Run


def find_runs(root: Path) -> list[Run]:
    """Return the runs under `root`, oldest first. Those whose run.json cannot be read come first."""
    if not root.is_dir():
        siblings = [path.name for path in root.parent.iterdir() if path.is_dir()] if root.parent.is_dir() else []
        raise UserError(f"{root}: no such folder{did_you_mean(root.name, siblings)}")
    try:
        os.scandir(root).close()
    except OSError as error:  # `os.walk` finds nothing then
        raise UserError(f"{root}: cannot be read: {error.strerror}") from error
    paths = []
    for folder, folders, files in os.walk(root):
        # A run, which may be damaged: a config.yaml alone is none.
        if "run.json" in files or "trajectory.bin" in files or {"config.yaml", "metrics.jsonl"} <= set(files):
            paths.append(Path(folder))
            folders[:] = [name for name in folders if name != "checkpoints"]
    return sorted((Run(path) for path in paths), key=lambda run: (_start_time(run), str(run.path)))


def _start_time(run: Run) -> str:
    try:
        return str(run.info().get("start") or "")
    except UserError:
        return ""
