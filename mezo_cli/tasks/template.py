"""Parse templates of prompts, in either of two spellings, and render them.

The LM-BFF spelling (Gao, Fisch and Chen, ACL 2021; used in the MeZO paper's RoBERTa runs) has every part between two
stars: `*cls**sent_0*_It_was*mask*.*sep+*`. The readable spelling names the columns:
`"{sentence} It was {mask}."`. The rules of the readable spelling:

- the start token comes first and `sep+` last, unless a `{sep}` is already there;
- a space before `{column}` becomes that sentence's own leading space, LM-BFF's `+`;
- spaces before `{mask}` and `{sep}` are dropped: the mask token is a word together with its space;
- `{mask}`, `[MASK]` and `<mask>` mean the same, and so do `{sep}`, `[SEP]` and `</s>`; `{{` and `}}` are braces, and
  `\\n` is a line end, which decoders' prompts have and which a command line cannot contain;
- spaces and line ends after the last part are dropped;
- `{column|filter}` is a changed text (`FILTERS`). What a filter takes stands in its parentheses: texts in quotes, and
  columns, as in `{query|replace('@placeholder', candidate)}`.

A text for a decoder has no special tokens, and its row all of its columns. Then a part of one that holds a record or a
list may stand in the braces: `{answers.text[0]}`. A text stands for itself, a number or a list of numbers is written as
in JSON; nothing else can be in a template.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mezo_cli.errors import UserError, did_you_mean, join


@dataclass(frozen=True)
class Filter:
    """A map from a text to a text.

    Attributes:
        apply: takes the text and the arguments.
        code: its Python code, with {0} for the text and {1}, {2} for the arguments; None: it has none for the model
            card of label words, so it is refused in their templates.
        usage: what it takes, for error lines.
        counts: the numbers of arguments that it takes.
    """

    apply: Callable[..., str]
    code: str | None
    usage: str = ""
    counts: range = range(1)


def _lower_first_word(text: str) -> str:
    word, *rest = text.split(" ")
    return " ".join([word if word == "I" else word.lower(), *rest])


def _choose(text: str, *pairs: str) -> str:
    words = dict(zip(pairs[::2], pairs[1::2], strict=True))
    if text not in words:
        raise UserError(f"filter 'choose' has no word for {text[:40]!r}, only for {join(words)}")
    return words[text]


FILTERS = {
    # LM-BFF's `-`, `l` and `u`
    "drop_last": Filter(lambda text: text[:-1], "{0}[:-1]"),
    "lower_first": Filter(lambda text: text[:1].lower() + text[1:], "({0}[:1].lower() + {0}[1:])"),
    "upper_first": Filter(lambda text: text[:1].upper() + text[1:], "({0}[:1].upper() + {0}[1:])"),
    # what MeZO's prompts for OPT do
    "strip": Filter(str.strip, "{0}.strip()"),
    "lower": Filter(str.lower, "{0}.lower()"),
    "lower_first_word": Filter(  # unless it is I
        _lower_first_word,
        """" ".join(w if i or w == "I" else w.lower() for i, w in enumerate({0}.split(" ")))""",
    ),
    "end_with": Filter(
        lambda text, end: text if text.endswith(end) else text + end,
        "({0}.removesuffix({1}) + {1})",
        "('END')",
        range(1, 2),
    ),
    "drop_end": Filter(str.removesuffix, "{0}.removesuffix({1})", "('END')", range(1, 2)),
    "replace": Filter(str.replace, "{0}.replace({1}, {2})", "('OLD', 'NEW')", range(2, 3)),
    "choose": Filter(_choose, None, "('VALUE', 'WORD', 'VALUE', 'WORD')", range(2, 1000, 2)),
}
SPECIALS = ("cls", "sep", "sep+", "mask")
SPELLINGS = {"[MASK]": "{mask}", "<mask>": "{mask}", "[SEP]": "{sep}", "</s>": "{sep}"}
START_SPELLINGS = ("{cls}", "[CLS]", "<s>")

_SENTENCE = re.compile(r"(\+?)sent([lu]?)(-?)_(\d+)")
_LM_BFF = re.compile(r"\*(cls|sep\+?|mask|\+?sent[lu]?-?_\d+)\*")
_QUOTED = r"""'[^']*'|"[^"]*\""""
_READABLE = re.compile(r"\{\{|\}\}|\{[^{}]*\}|\[(?:MASK|SEP|CLS)\]|<mask>|</s>|<s>|[{}]")


@dataclass(frozen=True, slots=True)
class Literal:
    """Text of the template itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Special:
    """A special token, one of `SPECIALS`. What follows a `sep+` has the next segment id."""

    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """A filter, and what it takes: texts, and numbers of columns."""

    name: str
    arguments: tuple[str | int, ...] = ()


@dataclass(frozen=True, slots=True)
class Sentence:
    """The text of column number `column`, changed by `filters` in order, after a space if `space`."""

    column: int
    filters: tuple[Call, ...] = ()
    space: bool = False

    def render(self, texts: Sequence[str]) -> str:
        """Return the text that is tokenized for a row with these texts."""
        text = texts[self.column]
        for call in self.filters:
            arguments = (texts[value] if isinstance(value, int) else value for value in call.arguments)
            text = FILTERS[call.name].apply(text, *arguments)
        return " " + text if self.space else text

    def write_code(self, variables: Sequence[str]) -> str:
        """Return the Python code of this text; `variables` hold the text of each column."""
        code = variables[self.column]
        for call in self.filters:
            arguments = (variables[value] if isinstance(value, int) else quote(value) for value in call.arguments)
            code = str(FILTERS[call.name].code).format(code, *arguments)
        return f'" " + {code}' if self.space else code


def quote(text: str) -> str:
    """Return the code of a text, in double quotes."""
    code = repr(text)
    return f'"{code[1:-1]}"' if code[0] == "'" and '"' not in code else code


Part = Literal | Special | Sentence


def parse_template(text: str, columns: list[str], task: str) -> list[Part]:
    """Parse a template of label words in either spelling: parts in order, one mask and one sentence or more.

    Args:
        text: the template.
        columns: the task's text columns, in order: sent_0, sent_1.
        task: its name, for error lines.
    """
    where = f"task '{task}', template {text!r}"
    if not columns:
        raise UserError(f"task '{task}' names no columns; task.columns lists its texts, e.g. [sentence]")
    if _LM_BFF.search(text):
        parts = _parse_lm_bff(text, columns, where)
    else:
        for name in columns:
            if name in ("mask", "sep", "cls"):
                why = f"a column cannot be called '{name}', the name of a special token; use task.rename"
                raise UserError(f"{where}: {why}")
        numbers = {name: number for number, name in enumerate(columns)}
        parts = [Special("cls"), *_readable_parts(text.replace("\\n", "\n").rstrip(), numbers, where)]
        for name in [*numbers][len(columns) :]:
            near = did_you_mean(name, [*columns, "mask", "sep"])
            raise UserError(f"{where}: unknown column '{name}'{near}; the columns are {join(columns)}")
        parts += [Special("sep+")] * (parts[-1] != Special("sep+"))
    masks = parts.count(Special("mask"))
    if masks != 1:
        raise UserError(f"{where}: has {masks or 'no'} masks; exactly one {{mask}} is needed")
    sentences = [part for part in parts if isinstance(part, Sentence)]
    if not sentences:
        raise UserError(f"{where}: uses no column; write {{column}} for one of {join(columns)}")
    for call in (call for sentence in sentences for call in sentence.filters):
        if FILTERS[call.name].code is None:
            raise UserError(f"{where}: filter '{call.name}' is only for task.choice and task.generate")
    return parts


def _parse_lm_bff(text: str, columns: list[str], where: str) -> list[Part]:
    """Parse the LM-BFF spelling: split at the stars, odd pieces are parts, even ones literals with `_` for a space."""
    pieces = text.split("*")
    if len(pieces) % 2 == 0:
        raise UserError(f"{where}: unbalanced stars; every part is between two stars of its own, as in *cls**sent_0*")
    parts: list[Part] = []
    for number, piece in enumerate(pieces):
        match = _SENTENCE.fullmatch(piece)
        if number % 2 == 0:
            if match or piece in SPECIALS:
                raise UserError(f"{where}: '{piece}' is outside its stars; write *{piece}*")
            if piece:
                parts.append(Literal(piece.replace("_", " ")))
        elif piece in SPECIALS:
            parts.append(Special(piece))
        elif match is None:
            near = did_you_mean(piece, [*SPECIALS, *(f"sent_{i}" for i in range(len(columns)))])
            allowed = f"{join(SPECIALS)} and [+]sent[l|u][-]_N"
            raise UserError(f"{where}: unknown part '{piece}'{near}; allowed are {allowed}")
        elif int(match[4]) >= len(columns):
            most = f"the columns are only {join(columns)} (from 0)"
            raise UserError(f"{where}: '{piece}' asks for text {int(match[4])}, but {most}")
        else:
            names = {"l": ["lower_first"], "u": ["upper_first"], "": []}[match[2]] + ["drop_last"] * bool(match[3])
            parts.append(Sentence(int(match[4]), tuple(map(Call, names)), bool(match[1])))
    return parts


def _readable_parts(text: str, columns: dict[str, int], where: str) -> list[Part]:
    """Parse the readable spelling; a column that is not in `columns` gets the next number there."""
    parts, literal, end = list[Part](), "", 0
    for match in _READABLE.finditer(text):
        literal += text[end : match.start()]
        token, end = match.group(), match.end()
        if token in ("{{", "}}"):
            literal += token[0]
            continue
        if token in ("{", "}"):
            brace = f"unbalanced brace at character {match.start() + 1}; a literal brace is written {token * 2}"
            raise UserError(f"{where}: {brace}")
        if token in START_SPELLINGS:
            raise UserError(f"{where}: leave out {token}, the start token comes by itself")
        name, *filters = _split(SPELLINGS.get(token, token)[1:-1], "|")
        part: Part = Special("mask" if name == "mask" else "sep+")
        before = literal.rstrip(" ")
        if name not in ("mask", "sep"):
            column, before = columns.setdefault(name, len(columns)), literal.removesuffix(" ")
            calls = tuple(_call(call, columns, where) for call in filters)
            part = Sentence(column, calls, space=before != literal)
        elif filters:
            raise UserError(f"{where}: {{{name}}} takes no filter, '{filters[0]}' was given")
        if before:
            parts.append(Literal(before))
        parts.append(part)
        literal = ""
    literal += text[end:]
    return [*parts, Literal(literal)] if literal else parts


def _split(text: str, mark: str) -> list[str]:
    """Split at a mark that is not in quotes, and drop the spaces at the ends of the pieces."""
    return [piece.strip() for piece in re.split(rf"[{mark}](?=(?:{_QUOTED}|[^'\"])*$)", text)]


def _call(text: str, columns: dict[str, int], where: str) -> Call:
    name, parenthesis, rest = text.partition("(")
    name = name.rstrip()
    if name not in FILTERS:
        raise UserError(f"{where}: unknown filter '{name}'{did_you_mean(name, FILTERS)}; allowed are {join(FILTERS)}")
    words = _split(rest[:-1], ",") if rest[:-1].strip() else []
    if len(words) not in FILTERS[name].counts or (parenthesis and not rest.endswith(")")) or "" in words:
        raise UserError(f"{where}: filter '{text}' is written {name}{FILTERS[name].usage}")
    arguments = (w[1:-1] if re.fullmatch(_QUOTED, w) else columns.setdefault(w, len(columns)) for w in words)
    return Call(name, tuple(arguments))


# --- rows with all of their columns ---

_PATH = re.compile(r"([^.\[\]]+)((?:\.[^.\[\]]+|\[-?\d+\])*)")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(-?\d+)\]")


class ColumnPath:
    """A column of a row, or a part of it: `answers.text[0]` is column `answers` and the steps `text` and 0."""

    def __init__(self, text: str, where: str) -> None:
        match = _PATH.fullmatch(text)
        if match is None:
            raise UserError(f"{where}: '{text}' is no column; a part of one is COLUMN.KEY or COLUMN[NUMBER]")
        self.text, self.column = text, match[1]
        self.steps = [int(number) if number else key for key, number in _STEP.findall(match[2])]

    def find(self, columns: Mapping[str, Any], where: str) -> Any:
        """Return the value in a row."""
        if self.column not in columns:
            which = f"the columns are: {join(columns)}{did_you_mean(self.column, columns)}"
            raise UserError(f"{where}: no column '{self.column}'; {which}")
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

    def find_texts(self, columns: Mapping[str, Any], where: str, setting: str) -> list[str]:
        """Return a text in a row as a list, or a list of texts; `setting` names the path in the error line."""
        value = self.find(columns, where)
        texts = value if isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in texts):
            why = "it must be a text or a list of texts"
            raise UserError(f"{where}: {setting}={self.text} {describe(value)}; {why}")
        return texts

    def render(self, columns: Mapping[str, Any], where: str) -> str:
        """Return the value in a row as a text."""
        value = self.find(columns, where)
        if isinstance(value, str):
            return value
        numbers = value if isinstance(value, list) and value else [value]
        if not all(isinstance(one, int | float) and not isinstance(one, bool) for one in numbers):
            what = f"a template takes a text, a number or a list of numbers, and {{{self.text}.KEY}} or [0] for a part"
            raise UserError(f"{where}: '{self.text}' {describe(value)}; {what}")
        return json.dumps(value)


class RowTemplate:
    """A text with columns in its braces, without special tokens, in the readable spelling; its white space counts.

    Attributes:
        paths: what stands in the braces, and in the filters.
        only_path: the path of a template that is nothing else; None for every other.

    Args:
        text: the template.
        where: the task and the setting, for error lines.
    """

    def __init__(self, text: str, where: str) -> None:
        names: dict[str, int] = {}
        parts = _readable_parts(text.replace("\\n", "\n"), names, where)
        self.parts = [part for part in parts if not isinstance(part, Special)]
        if len(self.parts) < len(parts):
            why = "has no place for {mask} or {sep}; write the text itself, or \\n for a line end"
            raise UserError(f"{where}: {why}")
        self.paths = [ColumnPath(name, where) for name in names]
        self.only_path = self.paths[0] if parts == [Sentence(0)] else None

    def render(self, columns: Mapping[str, Any], where: str) -> str:
        """Return the text of a row."""
        texts = [path.render(columns, where) for path in self.paths]
        try:
            return "".join(p.render(texts) if isinstance(p, Sentence) else p.text for p in self.parts)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error


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
