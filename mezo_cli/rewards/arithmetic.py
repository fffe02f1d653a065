"""Expressions of whole numbers, + - * / and parentheses: found in a text, and computed exactly without `eval`."""

import re
from fractions import Fraction

MAX_CHARACTERS = 200  # of an expression: longer ones are no answer, and could nest deeper than Python does
_EXPRESSION = re.compile(r"[0-9+\-*/()\s]+")


def find_expression(text: str, tag: str | None) -> str | None:
    """Return the expression that a text gives as its answer, or None.

    Args:
        text: the completion.
        tag: the answer is what stands in the last pair of these tags; None: the last run of an expression's characters
            that has a digit.
    """
    if tag is None:
        found = [run for run in _EXPRESSION.findall(text) if re.search("[0-9]", run)]
    else:
        found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL)
    expression = found[-1].strip() if found else ""
    return expression if len(expression) <= MAX_CHARACTERS and _EXPRESSION.fullmatch(expression) else None


def numbers_in(expression: str) -> list[int]:
    """Return the numbers of an expression in ascending order."""
    return sorted(int(digits) for digits in re.findall("[0-9]+", expression))


def value(expression: str) -> Fraction | None:
    """Return the exact value of an expression; None for one that is malformed or divides by zero.

    By precedence: sum = product (+|- product)*, product = factor (*|/ factor)*, factor = number | ( sum ) | -|+ factor.
    """
    tokens = [*re.findall(r"[0-9]+|\S", expression), ""]
    place = 0

    def take() -> str:
        nonlocal place
        place += 1
        return tokens[place - 1]

    def total() -> Fraction:
        result = product()
        while tokens[place] in ("+", "-"):
            result = result + product() if take() == "+" else result - product()
        return result

    def product() -> Fraction:
        result = factor()
        while tokens[place] in ("*", "/"):
            result = result * factor() if take() == "*" else result / factor()
        return result

    def factor() -> Fraction:
        token = take()
        if token == "(":
            inner = total()
            if take() != ")":
                raise ValueError("a parenthesis is not closed")
            return inner
        if token in ("+", "-"):
            return factor() if token == "+" else -factor()
        return Fraction(int(token))  # ValueError for whatever else stands here

    try:
        result = total()
    except (ValueError, ZeroDivisionError):
        return None
    return result if place == len(tokens) - 1 else None
