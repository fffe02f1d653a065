"""Where files that the engine reads once are written: in memory if they fit there, else in the temporary folder."""

import shutil
import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm")  # a file system in memory, on Linux; often small in a container


def scratch_folder(prefix: str, needed: int) -> "tempfile.TemporaryDirectory[str]":
    """Make a folder for files of `needed` bytes."""
    fits = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 2 * needed
    return tempfile.TemporaryDirectory(prefix=prefix, dir=MEMORY if fits else None)
