"""What a run ran on: versions, commit, device, memory."""

import contextlib
import ctypes
import functools
import platform
import resource
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any


def versions() -> dict[str, str]:
    """Return the versions that a run depends on."""
    found = {"python": platform.python_version()}
    for name in ("mezo-runner", "torch", "transformers", "datasets", "hydra-core", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def git_commit() -> str | None:
    """Return the commit of the checkout that the package runs from, None when it is installed otherwise."""
    here = Path(__file__).resolve().parent
    if not (here.parent / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(here), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def device_name(device: Any) -> str:
    """Return a torch device with its model, e.g. `cuda (NVIDIA H100)`."""
    import torch

    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({torch.get_num_threads()} threads)" if device.type == "cpu" else str(device)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    found = sys.platform == "linux" and platform.libc_ver()[0] == "glibc"
    return ctypes.CDLL(None).malloc_trim if found else None


def give_back_freed_memory() -> None:
    """Give the memory that was freed back to the system: glibc's malloc keeps it, and in pieces that no tensor fits.

    Without it a run holds up to a fifth more than it uses, and ever more as batches change their lengths
    (docs/step.md). It takes 2 to 4 ms for a model of 355M parameters. Other C libraries are left alone.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


def forget_peak_memory(device: Any) -> None:
    """Start anew the count of `peak_memory`, where the machine allows it (on a GPU): a sweep's jobs share a process."""
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: Any) -> int:
    """Return the peak in bytes: of the allocator on a GPU, of the whole process otherwise."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
