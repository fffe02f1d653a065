"""What runs a program comes from the user alone: the command line, the Python API or the environment, never a file.

`engine.python` names a program. It is taken out of the overrides before anything is composed, so that a value among the
composed settings is a file's, which is refused. It is stored nowhere: whoever continues a run gives it again.
"""

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mezo_cli.config.rules import check_rules
from mezo_cli.config.schema import Config, SettingError, VllmConfig
from mezo_cli.errors import UserError

PYTHON = "engine.python"
VARIABLE = "MEZO_ENGINE_PYTHON"  # what engine.python=PATH says, for this process and those that it starts
FROM_USER = f"it names a program, which only the command line, the Python API or {VARIABLE} can give"
NOT_STORED = f"which is not stored: give it again, {PYTHON}=PATH or {VARIABLE}"

_PYTHON = re.compile(r"(?:\+\+)?engine\.python\s*=(.*)", re.DOTALL)
# What a stored sweep may say of its launcher and sweeper: any number, and the words of settings that name no program,
# no module and no file. A word has no space, no line break and no slash: some go into a batch script.
_WORDS = (
    "backend|prefer|require|pre_dispatch|batch_size|max_nbytes|mmap_mode|name|partition|qos|account|constraint|exclude|"
    "gres|mem_per_gpu|mem_per_cpu|direction|study_name"
)
_HARMLESS = re.compile(
    r"\+{0,2}(hydra/(launcher|sweeper)=\w+"
    r"|hydra\.(launcher|sweeper)\.[\w.]+=([-+]?[\d.]+(e[-+]?\d+)?|true|false|null)"
    rf"|hydra\.(launcher|sweeper)\.({_WORDS})=[\w.:*+-]+)",
    re.ASCII | re.IGNORECASE,
)


def split_python(overrides: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the overrides without `engine.python=PATH`, and the absolute path; None if it is not given, or is null.

    Raises:
        UserError: for several values, and for a value that refers to other settings, which may be a file's.
    """
    python, rest = None, []
    for text in overrides:
        match = _PYTHON.fullmatch(text)
        if match is None:
            rest.append(text)
            continue
        value = re.sub(r"""^(["'])(.*)\1$""", r"\2", match[1].strip())
        if not value or "," in value or "${" in value:
            raise UserError(f"'{text}': expected one path, without a comma or ${{...}}; or give it as {VARIABLE}")
        python = None if value == "null" else str(Path(value).expanduser().absolute())
    return rest, python


def with_python(config: Config, python: str | None) -> Config:
    """Return the config with the `engine.python` that the user has given.

    Raises:
        SettingError: when the config has no engine.
    """
    if python is None:
        return config
    if not isinstance(config.engine, VllmConfig):
        raise SettingError(PYTHON, f"{PYTHON}={python}: engine={config.engine.name} does not read it, only engine=vllm")
    changed = dataclasses.replace(config, engine=dataclasses.replace(config.engine, python=python))
    check_rules(changed)
    return changed


def has_own_python(config: Config) -> bool:
    """Return whether the engine of a run is started by a program that the user has given to this process."""
    return isinstance(config.engine, VllmConfig) and bool(config.engine.python or os.environ.get(VARIABLE))


@contextlib.contextmanager
def for_workers(python: str | None) -> Iterator[None]:
    """Give `engine.python` to the jobs of a sweep inside the block, in this process and in those that it starts.

    They start in a working directory that `sweep.json` names: PYTHONSAFEPATH keeps modules there from being imported.
    """
    variables = {"PYTHONSAFEPATH": "1"} | ({} if python is None else {VARIABLE: python})
    before = {key: os.environ.get(key) for key in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def check_stored(overrides: Iterable[str], source: Path) -> None:
    """Check overrides that a file has kept, a sweep's record: none of them may run code.

    Raises:
        UserError: for `engine.python`, and for a setting of Hydra's launcher or sweeper that may name a program.
    """
    for text in overrides:
        name = text.lstrip("+~")
        if name.startswith(PYTHON):
            raise UserError(f"{source}: '{text}': {FROM_USER}; take it out of the file, and give it again")
        if name.startswith(("hydra/", "hydra.launcher", "hydra.sweeper")) and not _HARMLESS.fullmatch(text):
            raise UserError(
                f"{source}: '{text}' may run a program, and is not taken from a file: give the launcher with its "
                f"settings again, mezo resume {source.parent} hydra/launcher=... hydra.launcher.KEY=..."
            )
