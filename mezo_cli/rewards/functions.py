"""Load the functions of rewards, call them, and check what they return: in the worker, or in mezo for a callable.

Every reward is a function of completions [n] and rows [n] that returns n numbers, or n dicts with the key `reward`. It
gets `golds` [n] (lists of texts) and `seed` [n] (whole numbers) where it has parameters of these names.
"""

import hashlib
import importlib
import importlib.util
import inspect
import math
import os
import reprlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

REWARD = "reward"  # the key of a dict that is optimized
RESERVED = ("std", "min", "max", "errors")  # reward_std and the like are mezo's own figures of a step
Scores = dict[str, float] | str  # of one row: numbers by name, REWARD among them; or what is wrong with them
Function = Callable[..., Any]  # of completions, rows, golds and seeds


class RewardError(Exception):
    """A reward cannot be loaded, or fails on a batch. The text is one line."""


def load(target: str, settings: Mapping[str, Any] | None, sha256: str | None) -> Function:
    """Import what a reward stands for.

    Args:
        target: `FILE.py:function` or `package.module:attribute`.
        settings: what makes an instance of the attribute, a class; None: it is the function itself.
        sha256: what the file has to have; None: any.

    Raises:
        RewardError: when it cannot be imported, has changed since, or takes other arguments.
    """
    place, _, attribute = target.rpartition(":")
    try:
        module = _run_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise RewardError(f"cannot be imported: {describe(error)}") from error
    file = module.__file__ or ""
    if sha256 is not None and hashlib.sha256(Path(file).read_bytes()).hexdigest() != sha256:
        raise RewardError(f"{file} has changed since the start of this run")
    function = getattr(module, attribute, None)
    if function is None:
        raise RewardError(f"{file} has no function '{attribute}'")
    return prepare(function if settings is None else function(**settings))


def prepare(function: Any) -> Function:
    """Return a function of completions, rows, golds and seeds that gives another one those that it has parameters for.

    Raises:
        RewardError: when it cannot be called with completions and rows.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise RewardError("is not a function, or one whose parameters cannot be read") from error
    extras = {"golds", "seed"} & signature.parameters.keys()
    try:
        signature.bind([], [], **dict.fromkeys(extras))
    except TypeError as error:
        expected = "expected (completions, rows), and if wanted the parameters seed and golds"
        raise RewardError(f"takes {signature}: {expected} ({error})") from error

    def call(completions: Any, rows: Any, golds: Any, seeds: Any) -> Any:
        values = {"golds": golds, "seed": seeds}
        return function(completions, rows, **{name: values[name] for name in extras})

    return call


def score(functions: Sequence[Function], *batch: Sequence[Any]) -> list[list[Scores]]:
    """Return the scores of each function for each row of a batch: completions, rows, golds, seeds.

    Raises:
        RewardError: when a function raises, or returns something else than a list with one entry per row.
    """
    scores: list[list[Scores]] = []
    for function in functions:
        try:
            values = function(*batch)
        except (Exception, SystemExit) as error:
            raise RewardError(f"raised {describe(error)}") from error
        expected = f"for {len(batch[0])} completions: expected a list with one number or dict for each"
        if isinstance(values, (str, Mapping)) or not hasattr(values, "__len__"):
            raise RewardError(f"returned a {type(values).__name__} {expected}")
        if len(values) != len(batch[0]):
            raise RewardError(f"returned {len(values)} values {expected}")
        scores.append([_numbers(entry) for entry in values])
    return scores


def describe(error: BaseException) -> str:
    """Return an error as one line, with the file and line where the user's code raised it."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    own = os.path.dirname(__file__)
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith((own, "<frozen"))]
    lines = [one.lineno for one in frames if one.filename == frames[0].filename]  # not those of a library that it calls
    place = f" ({frames[0].filename}:{lines[-1]})" if frames else ""
    return f"{text[:500]}{place}"


def _run_file(file: Path) -> ModuleType:
    """Run a file as a module that can import its neighbours. Compiled here, it never comes from an old __pycache__."""
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)  # which dataclasses and pickle look up
    exec(compile(file.read_bytes(), str(file), "exec"), module.__dict__)
    return module


def _numbers(entry: Any) -> Scores:
    """Return what a function gave for one row as numbers by name, or what is wrong with it."""
    values = entry if isinstance(entry, Mapping) else {REWARD: entry}
    if REWARD not in values:
        return f"returned a dict without '{REWARD}': {sorted(map(str, values))}"
    if reserved := [name for name in RESERVED if name in values]:
        return f"returned a part named '{reserved[0]}': the names {', '.join(RESERVED)} are mezo's own"
    numbers = {}
    for name, value in values.items():
        try:
            number = math.nan if isinstance(value, str) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            return f"returned {_shown(value)} as {name}: expected a finite number"
        numbers[str(name)] = number
    return numbers


def _shown(value: Any) -> str:
    """Return a value in a few characters: its repr, unless that is refused (a number of 5,000 digits) or too deep."""
    try:
        return reprlib.repr(value)[:80]
    except (ValueError, RecursionError):
        return f"a value of type {type(value).__name__}"
