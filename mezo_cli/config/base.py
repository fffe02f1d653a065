"""What every class of settings is made of: pydantic's model, and types without conversions that hide mistakes.

A text is no number, `Yes` without quotes is no text, 1.5 is no whole number, and nan and inf are outside every range.
A number may be given as a text, because `${oc.env:...}` gives texts.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, ValidatorFunctionWrapHandler
from pydantic_core import PydanticCustomError

from mezo_cli.errors import SHOWN_CHARACTERS, UserError, shorten

AUTO = "auto"  # chosen when a run begins
MISSING = "???"  # as in OmegaConf: a value has to be given
Conflicts = Iterator[tuple[str, str]]  # a key, and why its value does not go with other settings
SHUFFLED = "shuffled:"  # before the name of a reward: the null control
SHOWN = "shown"  # the type of an error whose text needs only the key before it
NO_WORD = " holds the boolean {}: YAML reads Yes, No, on and off as booleans, so quote the word"


class Settings(BaseModel):
    """The base of every class of settings: frozen, and without keys that the class does not have."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    @cache
    def own_fields(cls) -> "dict[str, Own]":
        """Return the fields that are marked as the user's own."""
        fields = cls.model_fields.items()
        return {name: mark for name, field in fields for mark in field.metadata if isinstance(mark, Own)}

    def replace(self, **values: Any) -> Self:
        """Return a copy with other values, which are not checked."""
        return self.model_copy(update=values)


class SettingError(UserError):
    """A setting that is not valid; `key` is its dotted name."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key


def show(value: Any) -> str:
    """Return a value for an error line, as it is written on the command line, without its middle if it is long."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, list):
        text = f"[{', '.join(map(show, value))}]"
    if isinstance(value, dict):
        text = f"{{{', '.join(f'{key}: {show(each)}' for key, each in value.items())}}}"
    return shorten(text, SHOWN_CHARACTERS)


def refused(why: str) -> PydanticCustomError:
    """Return the error of a validator whose text follows the key in the error line: `=5: allowed is ...`."""
    return PydanticCustomError(SHOWN, "{why}", {"why": why})


def _entry(value: Any) -> str:
    if value == MISSING:
        raise PydanticCustomError("missing", "not set")
    if isinstance(value, bool):
        raise refused(NO_WORD.format(value))
    if isinstance(value, float):  # the spelling is lost: 1e3 would come back as 1000.0
        raise refused(f" holds the number {value}: expected a text, so quote it")
    if not isinstance(value, (str, int)):
        raise refused(f" holds {show(value)}: expected a text{', so quote it' if isinstance(value, dict) else ''}")
    return str(value)


def _number(value: Any) -> Any:
    """Return what pydantic makes a number of: 1e3 is 1000 where it is a whole one."""
    if isinstance(value, bool) or not isinstance(value, (Real, str)):
        raise PydanticCustomError("number", "not a number")
    return value


@dataclass(frozen=True)
class Own:
    """Marks a field that may hold the user's own code, or an address, which no run, sweep or export stores.

    Args:
        variable: the environment variable that says what KEY=VALUE does, for this process and those that it starts.
        find: a value -> the own code or address in it, with an absolute path; None for any other value.
    """

    variable: str
    find: Callable[[Any], Any]

    def or_variable(self, value: Any) -> Any:
        """Return a value; in place of null that of the environment, or None."""
        return os.environ.get(self.variable) or None if value is None else value


def own_path(value: Any) -> str | None:
    """Return a path as an absolute one: jobs may run in another working directory."""
    return None if value is None else str(Path(value).expanduser().absolute())


def own_function(value: Any) -> Any:
    """Return a callable, `package.module:function`, or `FILE.py:function` with an absolute path."""
    if not isinstance(value, str) or ":" not in value.removeprefix(SHUFFLED) or value.lstrip().startswith("{"):
        return value if callable(value) else None
    shuffled = SHUFFLED if value.startswith(SHUFFLED) else ""
    place, _, function = value.removeprefix(SHUFFLED).rpartition(":")
    return f"{shuffled}{own_path(place)}:{function}" if place.endswith(".py") else value


def without_folder(reward: str) -> str:
    """Return a reward's name, of a file of the user's own without the folder, as others may read it."""
    shuffled = SHUFFLED if reward.startswith(SHUFFLED) else ""
    return f"{shuffled}{Path(reward.removeprefix(SHUFFLED)).name}"


def number_or_auto(value: Any, number: ValidatorFunctionWrapHandler) -> Any:
    """Return `auto`, or what a number becomes."""
    return value if value == AUTO else number(value)


Entry = Annotated[str, BeforeValidator(_entry)]  # of a list or of pairs: it may be empty
Text = Annotated[Entry, Field(min_length=1)]
Flag = Annotated[bool, Strict()]
Whole = Annotated[int, BeforeValidator(_number)]
Positive = Annotated[Whole, Field(ge=1)]
NotNegative = Annotated[Whole, Field(ge=0)]
Seed = Annotated[Whole, Field(ge=0, le=2**32 - 1)]
Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
PositiveNumber = Annotated[Number, Field(gt=0.0)]
NotNegativeNumber = Annotated[Number, Field(ge=0.0)]
