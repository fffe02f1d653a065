"""Expressions of whole numbers, + - * / and parentheses: found in a text, and computed exactly without `eval`."""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

MAX_CHARACTERS = 200  # of an expression: longer ones are no answer, and could nest deeper than Python does
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
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


def value(expression: str) -> Fraction | None:
    """Return the exact value of an expression; None for one that is malformed or divides by zero."""
    try:
        # One line, and numbers without leading zeros: Python reads neither otherwise.
        tree = ast.parse(re.sub(r"\b0+(?=[0-9])", "", " ".join(expression.split())), mode="eval")
        return _evaluate(tree.body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _evaluate(node: ast.expr) -> Fraction:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    if isinstance(node, ast.UnaryOp):
        return -_evaluate(node.operand) if isinstance(node.op, ast.USub) else _evaluate(node.operand)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Fraction(node.value)
    raise ValueError("a call, a power or the like")
