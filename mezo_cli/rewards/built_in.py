"""The built-in rewards: a function, or a class of settings whose instance is the function.

It is called with completions [n], rows [n] (columns by name) and golds [n] (texts, any of which is right). It returns n
numbers. White space at the ends of completions and golds does not count, because decoding keeps a leading space.
"""

import ast
import operator
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from mezo_cli.config.base import Number, SettingError, Settings, Text

Texts = Sequence[str]
Rows = Sequence[Mapping[str, Any]]
Golds = Sequence[Sequence[str]]

NO_ANSWER = ("CANNOTANSWER", "no answer")  # a first gold that says that there is none: words in common count nothing


def exact(completions: Texts, rows: Rows, golds: Golds) -> list[float]:
    """Return 1 where the completion is a gold answer, else 0."""
    return _best(lambda text, gold: text == gold, completions, golds)


def em(completions: Texts, rows: Rows, golds: Golds) -> list[float]:
    """Return 1 where the completion is a gold answer after SQuAD's normalization, else 0 (exact match)."""
    return _best(_matches, completions, golds)


def f1(completions: Texts, rows: Rows, golds: Golds) -> list[float]:
    """Return the F1 of the words of completion and gold answer after SQuAD's normalization.

    What MeZO trains SQuAD on without a gradient (Malladi et al. 2023, section 3.3).
    """
    both = zip(golds, _best(word_f1, completions, golds), _best(_matches, completions, golds), strict=True)
    return [whole if answers and answers[0].strip() in NO_ANSWER else by_words for answers, by_words, whole in both]


def contains(completions: Texts, rows: Rows, golds: Golds) -> list[float]:
    """Return 1 where a gold answer stands in the completion, else 0."""
    return _best(lambda text, gold: gold in text, completions, golds)


def number(completions: Texts, rows: Rows, golds: Golds) -> list[float]:
    """Return 1 where the completion's number (`answer_number`) equals that of a gold answer, else 0."""

    def equal(text: str, gold: str) -> bool:
        answer = answer_number(text)
        return answer is not None and answer == answer_number(gold)

    return _best(equal, completions, golds)


class Format(Settings):
    """1 where a regular expression is found in the completion as it was decoded, else 0.

    Attributes:
        pattern: of Python's `re`; `^` and `$` are the ends of the completion, `(?s)` lets a dot match a line break.
    """

    pattern: Text

    def model_post_init(self, context: Any) -> None:
        """Check the expression."""
        try:
            re.compile(self.pattern)
        except re.error as error:
            key = "objective.reward.format.pattern"
            raise SettingError(key, f"{key}={self.pattern}: not a regular expression: {error}") from error

    def __call__(self, completions: Texts, rows: Rows, golds: Golds) -> list[float]:
        """Return one number per completion."""
        return [float(re.search(self.pattern, text) is not None) for text in completions]


class Length(Settings):
    """Minus the difference in characters between the completion and a reference (Qiu et al. 2025, conciseness).

    Attributes:
        column: the column of the reference, a text, or a whole number that is the length itself; null: the first gold.
    """

    column: Text | None = None

    def __call__(self, completions: Texts, rows: Rows, golds: Golds) -> list[float]:
        """Return one number per completion."""
        scores = []
        for text, row, answers in zip(completions, rows, golds, strict=True):
            if self.column is None and not answers:
                raise ValueError("the row has no gold answer: give length a column")
            value = answers[0] if self.column is None else _column(row, self.column)
            length = value if isinstance(value, int) else len(str(value).strip())
            scores.append(-float(abs(len(text.strip()) - length)))
        return scores


class Countdown(Settings):
    """1 where the answer is an expression that uses each number of the row once and has the target as its value.

    Qiu et al. 2025, arXiv 2509.24372: the task of its table 1. Allowed are whole numbers, + - * / and parentheses.

    Attributes:
        numbers: the column of the numbers, a list of whole numbers.
        target: the column of the value to reach.
        tag: the answer is the text in the last pair of these tags (theirs: answer); null: the last expression in the
            completion.
        numbers_used: added where the expression uses each number once, whatever its value.
    """

    numbers: Text = "numbers"
    target: Text = "target"
    tag: Text | None = None
    numbers_used: Number = 0.0

    def __call__(self, completions: Texts, rows: Rows, golds: Golds) -> list[float]:
        """Return one number per completion."""
        scores = []
        for text, row in zip(completions, rows, strict=True):
            numbers = sorted(int(entry) for entry in _column(row, self.numbers))
            target = Fraction(str(_column(row, self.target)))
            expression = find_expression(text, self.tag) or ""
            uses_each = sorted(map(int, re.findall("[0-9]+", expression))) == numbers
            value = value_of(expression) if uses_each else None
            reached = value is not None and abs(value - target) <= Fraction(1, 100_000)
            scores.append(0.0 if value is None else self.numbers_used + float(reached))
        return scores


# --- what they share ---


def _column(row: Mapping[str, Any], column: str) -> Any:
    if column not in row:
        raise ValueError(f"the row has no column '{column}'; it has {', '.join(map(str, row))}")
    return row[column]


def normalize(text: str) -> str:
    """Return a text in lower case, without punctuation, without a, an, the, and with single spaces (SQuAD)."""
    kept = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def word_f1(text: str, gold: str) -> float:
    """Return the F1 of the words that two normalized texts have in common, counted with repetition."""
    words, gold_words = normalize(text).split(), normalize(gold).split()
    common = sum((Counter(words) & Counter(gold_words)).values())
    if not common:
        return 0.0
    precision, recall = common / len(words), common / len(gold_words)
    return 2 * precision * recall / (precision + recall)


# A minus sign belongs to a number unless it stands after a word, a number or a closing parenthesis: 5-3 ends in 3.
_NUMBER = re.compile(r"(?:(?<![\w)])[-\u2212])?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)")


def answer_number(text: str) -> Fraction | None:
    r"""Return the number that a text gives as its answer; None without one.

    It is the content of the last `\boxed{}` if there is one, which has to be a single number; else the first number
    after the last `####`; else the last number. Commas between thousands, $ and % are left out.
    """
    _, boxed, content = text.rpartition("\\boxed")
    if boxed:
        inside = re.match(r"\s*\{([^{}]*)\}", content)
        answer = re.sub(r"[\s$%\\,!]", "", inside[1]) if inside else ""
        numbers = [answer] if _NUMBER.fullmatch(answer) else []
    else:
        _, marker, after = text.rpartition("####")
        numbers = _NUMBER.findall(after)
        numbers = numbers[:1] if marker else numbers[-1:]
    # A number that is longer is no answer, and Python may refuse to read it.
    return Fraction(numbers[0].replace(",", "").replace("\u2212", "-")) if numbers and len(numbers[0]) <= 1000 else None


def _best(score: Callable[[str, str], float], completions: Texts, golds: Golds) -> list[float]:
    pairs = zip(completions, golds, strict=True)
    return [float(max((score(text.strip(), gold.strip()) for gold in answers), default=0.0)) for text, answers in pairs]


def _matches(text: str, gold: str) -> bool:
    return normalize(text) == normalize(gold)


# --- expressions of whole numbers, + - * / and parentheses: computed exactly, without `eval` ---

MAX_CHARACTERS = 200  # of an expression: longer ones are no answer, and could nest deeper than Python does
_OPERATORS: dict[Any, Any] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_OPERATORS |= {ast.Div: operator.truediv, ast.USub: operator.neg, ast.UAdd: operator.pos}
_EXPRESSION = re.compile(r"[0-9+\-*/()\s]+")


def find_expression(text: str, tag: str | None) -> str | None:
    """Return the expression that a completion gives as its answer, or None.

    It is what stands in the last pair of these tags; with None the last run of its characters that has a digit.
    """
    if tag is None:
        found = [run for run in _EXPRESSION.findall(text) if re.search("[0-9]", run)]
    else:
        found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL)
    expression = found[-1].strip() if found else ""
    return expression if len(expression) <= MAX_CHARACTERS and _EXPRESSION.fullmatch(expression) else None


def value_of(expression: str) -> Fraction | None:
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
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.operand))
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Fraction(node.value)
    raise ValueError("a call, a power or the like")
