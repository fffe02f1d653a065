"""Parse templates of prompts, in either of two spellings.

The LM-BFF spelling (Gao, Fisch and Chen, ACL 2021; used in the MeZO paper's RoBERTa runs) has every part between two
stars: `*cls**sent_0*_It_was*mask*.*sep+*`. The readable spelling names the columns:
`"{sentence} It was {mask}."`. The rules of the readable spelling:

- the start token comes first and `sep+` last, unless a `{sep}` is already there;
- a space before `{column}` becomes that sentence's own leading space, LM-BFF's `+`;
- spaces before `{mask}` and `{sep}` are dropped: the mask token is a word together with its space;
- `{mask}`, `[MASK]` and `<mask>` mean the same, and so do `{sep}`, `[SEP]` and `</s>`; `{{` and `}}` are braces, and
  `\\n` is a line end, which decoders' prompts have and which a command line cannot contain;
- spaces and line ends after the last part are dropped.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from mezo_cli.errors import UserError, did_you_mean, join


@dataclass(frozen=True)
class Filter:
    """A map from a sentence to a sentence: `apply`, and its Python code with {0} for the sentence."""

    apply: Callable[[str], str]
    code: str


FILTERS = {  # LM-BFF's `-`, `l` and `u`, and `strip`
    "drop_last": Filter(lambda text: text[:-1], "{0}[:-1]"),
    "lower_first": Filter(lambda text: text[:1].lower() + text[1:], "({0}[:1].lower() + {0}[1:])"),
    "upper_first": Filter(lambda text: text[:1].upper() + text[1:], "({0}[:1].upper() + {0}[1:])"),
    "strip": Filter(str.strip, "{0}.strip()"),
}
SPECIALS = ("cls", "sep", "sep+", "mask")
MASK_SPELLINGS = ("{mask}", "[MASK]", "<mask>")
SEP_SPELLINGS = ("{sep}", "[SEP]", "</s>")
START_SPELLINGS = ("{cls}", "[CLS]", "<s>")

_SENTENCE = re.compile(r"(\+?)sent([lu]?)(-?)_(\d+)")
_LM_BFF = re.compile(r"\*(cls|sep\+?|mask|\+?sent[lu]?-?_\d+)\*")
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
class Sentence:
    """The text of column number `column`, changed by `filters` in order, after a space if `space`."""

    column: int
    filters: tuple[str, ...] = ()
    space: bool = False

    def render(self, text: str) -> str:
        """Return the text that is tokenized for a row whose column has `text`."""
        for name in self.filters:
            text = FILTERS[name].apply(text)
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

        Raises:
            UserError: for unbalanced braces or stars, an unknown part, column or filter, no column at all, and any
                number of masks other than one.
        """
        where = f"task '{task}', template {text!r}"
        if not columns:
            raise UserError(f"task '{task}' names no columns; task.columns lists its texts, e.g. [sentence]")
        parse = _parse_lm_bff if _LM_BFF.search(text) else _parse_readable
        parts = parse(text, columns, where)
        masks = parts.count(Special("mask"))
        if masks != 1:
            raise UserError(f"{where}: has {masks or 'no'} masks; exactly one {{mask}} is needed")
        if not any(isinstance(part, Sentence) for part in parts):
            raise UserError(f"{where}: uses no column; write {{column}} for one of {join(columns)}")
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
    filters = {"l": ("lower_first",), "u": ("upper_first",), "": ()}[case] + (("drop_last",) if drop else ())
    return Sentence(column, filters, bool(space))


def _parse_readable(text: str, columns: list[str], where: str) -> list[Part]:
    reserved = [name for name in columns if name in ("mask", "sep", "cls")]
    if reserved:
        raise UserError(
            f"{where}: a column cannot be called '{reserved[0]}', the name of a special token; use task.rename"
        )
    parts = [Special("cls"), *_readable_parts(text.replace("\\n", "\n").rstrip(), columns, where)]
    return parts if parts[-1] == Special("sep+") else [*parts, Special("sep+")]


def parse_text(text: str, where: str) -> tuple[list[Literal | Sentence], list[str]]:
    """Parse a text without special tokens, in the readable spelling; white space at its end counts.

    Returns:
        Its parts, and what stands in their braces, in the order of `Sentence.column`.

    Raises:
        UserError: for unbalanced braces, an unknown filter, a mask and a separator.
    """
    names = (t[1:-1].split("|")[0].strip() for t in _READABLE.findall(text) if re.fullmatch(r"\{[^{}]+\}", t))
    columns = list(dict.fromkeys(name for name in names if name not in SPECIALS))
    parts = _readable_parts(text.replace("\\n", "\n"), columns, where)
    texts = [part for part in parts if not isinstance(part, Special)]
    if len(texts) < len(parts):
        raise UserError(f"{where}: has no place for {{mask}} or {{sep}}; write the text itself, or \\n for a line end")
    return texts, columns


def _readable_parts(text: str, columns: list[str], where: str) -> list[Part]:
    parts: list[Part] = []
    literal, end = "", 0
    for match in _READABLE.finditer(text):
        literal += text[end : match.start()]
        end = match.end()
        token = match.group()
        if token in ("{{", "}}"):
            literal += token[0]
            continue
        part = _readable_part(token, columns, where, match.start())
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


def _readable_part(token: str, columns: list[str], where: str, position: int) -> Special | Sentence:
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
    name, *filters = (word.strip() for word in token[1:-1].split("|"))
    if name in ("mask", "sep"):
        return _bare(name, filters, where)
    if name not in columns:
        near = did_you_mean(name, [*columns, "mask", "sep"])
        raise UserError(f"{where}: unknown column '{name}'{near}; the columns are {join(columns)}")
    for word in filters:
        if word not in FILTERS:
            raise UserError(
                f"{where}: unknown filter '{word}'{did_you_mean(word, FILTERS)}; allowed are {join(FILTERS)}"
            )
    return Sentence(columns.index(name), tuple(filters))


def _bare(name: str, filters: list[str], where: str) -> Special:
    if filters:
        raise UserError(f"{where}: {{{name}}} takes no filter, '{filters[0]}' was given")
    return Special("mask" if name == "mask" else "sep+")
