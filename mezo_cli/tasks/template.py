"""Parse templates of prompts, in either of two spellings.

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
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
MASK_SPELLINGS = ("{mask}", "[MASK]", "<mask>")
SEP_SPELLINGS = ("{sep}", "[SEP]", "</s>")
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


Part = Literal | Special | Sentence


@dataclass(frozen=True)
class Template:
    """A parsed template: parts in order, with exactly one mask and at least one sentence.

    Two templates are equal when their parts are, whatever their spelling.
    """

    parts: tuple[Part, ...]
    text: str = field(default="", compare=False)

    @classmethod
    def parse(cls, text: str, columns: list[str], task: str) -> "Template":
        """Parse a template in either spelling.

        Args:
            text: the template.
            columns: the task's text columns, in order: sent_0, sent_1.
            task: its name, for error lines.
        """
        where = f"task '{task}', template {text!r}"
        if not columns:
            raise UserError(f"task '{task}' names no columns; task.columns lists its texts, e.g. [sentence]")
        parse = _parse_lm_bff if _LM_BFF.search(text) else _parse_readable
        parts = parse(text, columns, where)
        masks = parts.count(Special("mask"))
        if masks != 1:
            raise UserError(f"{where}: has {masks or 'no'} masks; exactly one {{mask}} is needed")
        sentences = [part for part in parts if isinstance(part, Sentence)]
        if not sentences:
            raise UserError(f"{where}: uses no column; write {{column}} for one of {join(columns)}")
        for name in (call.name for sentence in sentences for call in sentence.filters):
            if FILTERS[name].code is None:
                raise UserError(f"{where}: filter '{name}' is only for task.choice and task.generate")
        return cls(tuple(parts), text)


def _parse_lm_bff(text: str, columns: list[str], where: str) -> list[Part]:
    """Parse the LM-BFF spelling: split at the stars, odd pieces are parts, even ones literals with `_` for a space."""
    pieces = text.split("*")
    if len(pieces) % 2 == 0:
        raise UserError(f"{where}: unbalanced stars; every part is between two stars of its own, as in *cls**sent_0*")
    parts: list[Part] = []
    for number, piece in enumerate(pieces):
        if number % 2:
            parts.append(_lm_bff_part(piece, columns, where))
        elif piece in SPECIALS or _SENTENCE.fullmatch(piece):
            raise UserError(f"{where}: '{piece}' is outside its stars; write *{piece}*")
        elif piece:
            parts.append(Literal(piece.replace("_", " ")))
    return parts


def _lm_bff_part(piece: str, columns: list[str], where: str) -> Part:
    if piece in SPECIALS:
        return Special(piece)
    match = _SENTENCE.fullmatch(piece)
    if match is None:
        near = did_you_mean(piece, [*SPECIALS, *(f"sent_{i}" for i in range(len(columns)))])
        raise UserError(f"{where}: unknown part '{piece}'{near}; allowed are {join(SPECIALS)} and [+]sent[l|u][-]_N")
    space, case, drop, digits = match.groups()
    column = int(digits)
    if column >= len(columns):
        raise UserError(f"{where}: '{piece}' asks for text {column}, but the columns are only {join(columns)} (from 0)")
    names = {"l": ["lower_first"], "u": ["upper_first"], "": []}[case] + ["drop_last"] * bool(drop)
    return Sentence(column, tuple(map(Call, names)), bool(space))


def _parse_readable(text: str, columns: list[str], where: str) -> list[Part]:
    reserved = [name for name in columns if name in ("mask", "sep", "cls")]
    if reserved:
        raise UserError(
            f"{where}: a column cannot be called '{reserved[0]}', the name of a special token; use task.rename"
        )

    def number(name: str) -> int:
        if name not in columns:
            near = did_you_mean(name, [*columns, "mask", "sep"])
            raise UserError(f"{where}: unknown column '{name}'{near}; the columns are {join(columns)}")
        return columns.index(name)

    parts = [Special("cls"), *_readable_parts(text.replace("\\n", "\n").rstrip(), number, where)]
    return parts if parts[-1] == Special("sep+") else [*parts, Special("sep+")]


def parse_text(text: str, where: str) -> tuple[list[Literal | Sentence], list[str]]:
    """Parse a text without special tokens, in the readable spelling; white space at its end counts.

    Returns:
        Its parts, and the columns in their braces, in the order of `Sentence.column`.
    """
    columns: list[str] = []

    def number(name: str) -> int:
        if name not in columns:
            columns.append(name)
        return columns.index(name)

    parts = _readable_parts(text.replace("\\n", "\n"), number, where)
    texts = [part for part in parts if not isinstance(part, Special)]
    if len(texts) < len(parts):
        raise UserError(f"{where}: has no place for {{mask}} or {{sep}}; write the text itself, or \\n for a line end")
    return texts, columns


def _readable_parts(text: str, number: Callable[[str], int], where: str) -> list[Part]:
    """Parse the readable spelling; `number` returns the number of a column, or refuses it."""
    parts: list[Part] = []
    literal, end = "", 0
    for match in _READABLE.finditer(text):
        literal += text[end : match.start()]
        end = match.end()
        token = match.group()
        if token in ("{{", "}}"):
            literal += token[0]
            continue
        part = _readable_part(token, number, where, match.start())
        if isinstance(part, Special):
            literal = literal.rstrip(" ")
        elif literal.endswith(" "):
            literal, part = literal[:-1], Sentence(part.column, part.filters, space=True)
        if literal:
            parts.append(Literal(literal))
        parts.append(part)
        literal = ""
    literal += text[end:]
    return [*parts, Literal(literal)] if literal else parts


def _readable_part(token: str, number: Callable[[str], int], where: str, position: int) -> Special | Sentence:
    if token in ("{", "}"):
        raise UserError(
            f"{where}: unbalanced brace at character {position + 1}; a literal brace is written {token * 2}"
        )
    if token in START_SPELLINGS:
        raise UserError(f"{where}: leave out {token}, the start token comes by itself")
    if token in MASK_SPELLINGS:
        return Special("mask")
    if token in SEP_SPELLINGS:
        return Special("sep+")
    name, *filters = _split(token[1:-1], "|")
    if name in ("mask", "sep"):
        if filters:
            raise UserError(f"{where}: {{{name}}} takes no filter, '{filters[0]}' was given")
        return Special("mask" if name == "mask" else "sep+")
    return Sentence(number(name), tuple(_call(text, number, where) for text in filters))


def _split(text: str, mark: str) -> list[str]:
    """Split at a mark that is not in quotes, and drop the spaces at the ends of the pieces."""
    return [piece.strip() for piece in re.split(rf"[{mark}](?=(?:{_QUOTED}|[^'\"])*$)", text)]


def _call(text: str, number: Callable[[str], int], where: str) -> Call:
    """Parse a filter: its name, and in parentheses what it takes."""
    name, parenthesis, rest = text.partition("(")
    name = name.rstrip()
    if name not in FILTERS:
        raise UserError(f"{where}: unknown filter '{name}'{did_you_mean(name, FILTERS)}; allowed are {join(FILTERS)}")
    words = _split(rest[:-1], ",") if rest[:-1].strip() else []
    if len(words) not in FILTERS[name].counts or (parenthesis and not rest.endswith(")")) or "" in words:
        raise UserError(f"{where}: filter '{text}' is written {name}{FILTERS[name].usage}")
    return Call(name, tuple(word[1:-1] if re.fullmatch(_QUOTED, word) else number(word) for word in words))
