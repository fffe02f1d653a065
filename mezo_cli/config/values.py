"""The types of single values: pydantic's, without the conversions that would hide a mistake; and what a type allows.

A text is no number, `Yes` without quotes is no text, 1.0 is no whole number, and nan and inf are outside every range.
A number may be given as a text, because `${oc.env:...}` gives texts.
"""

import math
import types
import typing
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator, Strict
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

SHOWN = "shown"  # the type of an error whose text needs only the key before it


def _text(value: Any) -> str:
    if value == "":
        raise PydanticCustomError(SHOWN, "{why}", {"why": " is empty: give a value, or leave it out"})
    return _entry(value)


def _entry(value: Any) -> str:
    """Return a text of a list or of pairs; what may not be empty there is checked where it is used."""
    if value == "???":  # OmegaConf's sign of a value that has to be given
        why = " is not set: give it a value"
    elif isinstance(value, bool):
        why = f" holds the boolean {value}: YAML reads Yes, No, on and off as booleans, so quote the word"
    elif isinstance(value, float):  # the spelling is lost: 1e3 would come back as 1000.0
        why = f" holds the number {value}: expected a text, so quote it"
    elif not isinstance(value, (str, int)):
        why = f" holds {show(value)}: expected a text"
    else:
        return str(value)
    raise PydanticCustomError(SHOWN, "{why}", {"why": why})


def _whole(value: Any) -> Any:
    """Return a whole number. One that is not finite is left to the check of the range."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass
    infinite = isinstance(value, Real) and not math.isfinite(value)
    raise PydanticCustomError("range" if infinite else "number", "not a whole number")


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (Real, str)):
        raise PydanticCustomError("number", "not a number")
    try:
        number = float(value)
    except (ValueError, OverflowError) as error:
        raise PydanticCustomError("number", "not a number") from error
    if not math.isfinite(number):
        raise PydanticCustomError("range", "not finite")
    return number


Text = Annotated[str, BeforeValidator(_text)]
Entry = Annotated[str, BeforeValidator(_entry)]
Whole = Annotated[int, BeforeValidator(_whole)]
Number = Annotated[float, BeforeValidator(_number)]
Flag = Annotated[bool, Strict()]


@dataclass(frozen=True)
class Allowed:
    """What a field takes.

    Attributes:
        value_type: int, float, str, bool, list or dict.
        optional: whether null is allowed.
        low, high: bounds, inclusive.
        above: a lower bound, exclusive.
        choices: the texts allowed; empty: any.
    """

    value_type: type
    optional: bool = False
    low: float | None = None
    above: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return a number's range in words: `a whole number at least 1`."""
        bounds = [("at least", self.low), ("above", self.above)]
        words = [f"{word} {bound:g}" for word, bound in bounds if bound is not None]
        words += [] if self.high is None else [f"at most {self.high}"]
        return f"a {'whole' if self.value_type is int else 'finite'} number {' and '.join(words)}".rstrip()


def allowed(hint: Any) -> Allowed:
    """Return what the annotation of a field allows; of a class of settings, that class as `value_type`."""
    optional = is_optional(hint)
    hint, limits = plain_type(hint), dict[str, Any]()
    while typing.get_origin(hint) is Annotated:
        for mark in typing.get_args(hint)[1:]:
            for limit in mark.metadata if isinstance(mark, FieldInfo) else [mark]:
                limits |= {"low": limit.ge} if isinstance(limit, Ge) else {}
                limits |= {"above": limit.gt} if isinstance(limit, Gt) else {}
                limits |= {"high": limit.le} if isinstance(limit, Le) else {}
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) is Literal:
        return Allowed(str, optional, choices=typing.get_args(hint))
    return Allowed(typing.get_origin(hint) or hint, optional, **limits)


def is_optional(hint: Any) -> bool:
    """Return whether null is allowed."""
    return isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union


def plain_type(hint: Any) -> Any:
    """Return an annotation without `| None`."""
    if is_optional(hint):
        return next(member for member in typing.get_args(hint) if member is not type(None))
    return hint


def show(value: Any) -> str:
    """Return a value for an error line."""
    return "null" if value is None else str(value)
