"""Versions, git commit, device: what a record says that it was computed with."""

import contextlib
import hashlib
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]


def package_version() -> str:
    """Return the version of this package."""
    return installed().get("mezo-runner", "(not installed)")


def installed() -> dict[str, str]:
    """Return the versions of Python and of the packages that a run depends on."""
    versions_by_name = {"python": platform.python_version()}
    for name in ("mezo-runner", "torch", "transformers", "datasets", "hydra-core", "numpy", "peft", "optuna"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions_by_name[name] = metadata.version(name)
    return versions_by_name


def source_digest() -> str:
    """Return the sha256 over the names and the content of this package's source files."""
    total = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        total.update(f"{path.relative_to(PACKAGE)}\n".encode() + path.read_bytes())
    return total.hexdigest()


def git_state() -> tuple[str | None, bool | None]:
    """Return the commit of the checkout that the package runs from, and whether its tracked files differ from it.

    Both are None if it is not in a checkout.
    """
    if not (PACKAGE.parent / ".git").exists():
        return None, None
    command = ["git", "-C", str(PACKAGE), "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None, None
    commit, *lines = done.stdout.splitlines()
    return commit.removeprefix("# branch.oid "), any(not line.startswith("#") for line in lines)


def device_name(device: Any) -> str:
    """Return a description of a torch device: `cuda (NVIDIA H100)`, `cpu (2 threads)`."""
    import torch

    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    if device.type == "cpu":
        count = torch.get_num_threads()
        return f"{device} ({count} thread{'' if count == 1 else 's'})"
    return str(device)


def describe_arithmetic(device: Any, dtype: str) -> dict[str, str]:
    """Return what the bits of a forward depend on besides weights and rows: device, threads, CPU, torch and dtype."""
    import torch

    cpu = torch.backends.cpu.get_cpu_capability()
    return {"device": device_name(device), "CPU capability": cpu, "torch": torch.__version__, "dtype": dtype}
