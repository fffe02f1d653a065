"""Make texts of a row with all of its columns: templates without a mask, and parts of records and lists.

What stands in a template's braces is a column, or a part of one that holds a record or a list: `{answers.text[0]}`.
A text stands for itself, a number or a list of numbers is written as in JSON; nothing else can be in a template.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mezo_cli.config.schema import TaskConfig
from mezo_cli.errors import UserError, did_you_mean, join
from mezo_cli.tasks.template import Sentence, parse_text

_PATH = re.compile(r"([^.\[\]]+)((?:\.[^.\[\]]+|\[-?\d+\])*)")
CANDIDATE = "candidate"  # in a template of `task.choice.candidates`: a text of `task.choice.each`
_STEP = re.compile(r"\.([^.\[\]]+)|\[(-?\d+)\]")


@dataclass(frozen=True)
class ColumnPath:
    """A column of a row, or a part of it: `answers.text[0]` is column `answers` and the steps `text` and 0."""

    text: str
    column: str
    steps: tuple[str | int, ...]

    @classmethod
    def parse(cls, text: str, where: str) -> "ColumnPath":
        """Parse a column with any number of `.KEY` and `[NUMBER]` after it."""
        match = _PATH.fullmatch(text)
        if match is None:
            raise UserError(f"{where}: '{text}' is no column; a part of one is COLUMN.KEY or COLUMN[NUMBER]")
        steps = (int(number) if number else key for key, number in _STEP.findall(match[2]))
        return cls(text, match[1], tuple(steps))

    def find(self, columns: Mapping[str, Any], where: str) -> Any:
        """Return the value in a row."""
        if self.column not in columns:
            known = f"the columns are: {join(columns)}{did_you_mean(self.column, columns)}"
            raise UserError(f"{where}: no column '{self.column}'; {known}")
        value = columns[self.column]
        for step in self.steps:
            try:
                if isinstance(value, str):  # [0] of a text is no part of a list
                    raise TypeError
                value = value[step]
            except (KeyError, IndexError, TypeError):
                raise UserError(
                    f"{where}: no '{self.text}': column '{self.column}' {describe(columns[self.column])}"
                ) from None
        return value


class RowTemplate:
    """A text with columns in its braces.

    Args:
        text: the template; its white space counts.
        where: the task and the setting, for error lines.
    """

    def __init__(self, text: str, where: str) -> None:
        self._parts, names = parse_text(text, where)
        self.paths = [ColumnPath.parse(name, where) for name in names]

    @property
    def only_path(self) -> ColumnPath | None:
        """What stands in the braces of a template that is nothing else; None for every other."""
        return self.paths[0] if self._parts == [Sentence(0)] else None

    def render(self, columns: Mapping[str, Any], where: str) -> str:
        """Return the text of a row."""
        texts = [_as_text(path, columns, where) for path in self.paths]
        try:
            return "".join(p.render(texts) if isinstance(p, Sentence) else p.text for p in self._parts)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error


class RowTexts:
    """The templates of a task's `generate`, parsed.

    Attributes:
        prompt: the prompt's; with `chat` a name without braces is a column.
        answer: the answer's; None: none.
        gold: the right text or texts; None: the answer.
        prompt_columns, answer_columns: the columns that the prompt reads, and those of the answer and the gold texts.
    """

    def __init__(self, task: TaskConfig) -> None:
        settings, where = task.generate, f"task '{task.name}', task.generate"
        if settings.prompt is None:
            raise UserError(f"{where} has no prompt: set task.generate.prompt (docs/how-to/own-task.md)")
        is_name = settings.chat and settings.prompt != "" and "{" not in settings.prompt
        self.prompt = RowTemplate(f"{{{settings.prompt}}}" if is_name else settings.prompt, f"{where}.prompt")
        self.answer = None if settings.answer is None else RowTemplate(settings.answer, f"{where}.answer")
        self.gold = None if settings.gold is None else ColumnPath.parse(settings.gold, f"{where}.gold")
        answers = [*(self.answer.paths if self.answer else ()), *([self.gold] if self.gold else ())]
        self.prompt_columns = list(dict.fromkeys(path.column for path in self.prompt.paths))
        self.answer_columns = list(dict.fromkeys(path.column for path in answers))


class ChoiceTexts:
    """The templates of a task's `choice`, parsed.

    Attributes:
        prompt: the prompt's.
        candidates: one per candidate; with `each` one, which is rendered for each text of that list.
        each: the list of texts; None: a row has all of `candidates`.
        right: the right one of them, or several; None without `each`.
        prompt_columns, answer_columns: the columns that the prompt and the candidates read, and that of the right one.
    """

    def __init__(self, task: TaskConfig) -> None:
        settings, where = task.choice, f"task '{task.name}', task.choice"
        self.prompt = RowTemplate(settings.prompt or "", f"{where}.prompt")
        self.candidates = [RowTemplate(text, f"{where}.candidates {text!r}") for text in settings.candidates]
        self.each = None if settings.each is None else ColumnPath.parse(settings.each, f"{where}.each")
        self.right = None if settings.right is None else ColumnPath.parse(settings.right, f"{where}.right")
        columns = [path.column for template in (self.prompt, *self.candidates) for path in template.paths]
        if self.each is not None:
            columns = [*(name for name in columns if name != CANDIDATE), self.each.column]
        self.prompt_columns = list(dict.fromkeys(columns))
        self.answer_columns = [] if self.right is None else [self.right.column]
        unknown = [name for name in self.prompt_columns if self.each is None and name not in task.columns]
        if unknown:
            near = did_you_mean(unknown[0], task.columns)
            raise UserError(f"{where}: unknown column '{unknown[0]}'{near}; task.columns are {join(task.columns)}")
        if self.each is not None and not any(path.column == CANDIDATE for path in self.candidates[0].paths):
            raise UserError(f"{where}.candidates {settings.candidates[0]!r}: no {{{CANDIDATE}}}: all would be the same")


def row_texts(task: TaskConfig) -> RowTexts | ChoiceTexts:
    """Return the templates of a task whose rows are read without labels (`Config.data_task`)."""
    return RowTexts(task) if task.choice.prompt is None else ChoiceTexts(task)


def gold_texts(path: ColumnPath, columns: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Return a row's gold texts: a text, or a list of texts."""
    value = path.find(columns, where)
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise UserError(
            f"{where}: task.generate.gold={path.text} {describe(value)}; it must be a text or a list of texts"
        )
    return tuple(texts)


def describe(value: Any) -> str:
    """Say what a value of a row is, for error lines."""
    if value is None:
        return "is null"
    if isinstance(value, Mapping):
        return f"is a record with {join(map(str, value)) or 'nothing'}"
    if isinstance(value, list):
        kinds = join(sorted({type(one).__name__ for one in value}))
        return f"is a list of {len(value)} ({kinds})" if value else "is an empty list"
    return f"is the {type(value).__name__} {str(value)[:40]!r}"


def _as_text(path: ColumnPath, columns: Mapping[str, Any], where: str) -> str:
    value = path.find(columns, where)
    if isinstance(value, str):
        return value
    numbers = value if isinstance(value, list) and value else [value]
    if not all(isinstance(one, int | float) and not isinstance(one, bool) for one in numbers):
        what = "a template takes a text, a number or a list of numbers"
        raise UserError(f"{where}: '{path.text}' {describe(value)}; {what}, and {{{path.text}.KEY}} or [0] for a part")
    return json.dumps(value)
