"""A prompt with a mask (objective mlm), encoded as LM-BFF does (Gao, Fisch and Chen, ACL 2021).

Each part is tokenised alone, sentence limits cut a sentence's tokens, then the tail is cut at the maximum length. One
deliberate difference: a special token spelled out in the data (`<mask>`, `[SEP]`) is plain text here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import TYPE_CHECKING

from mezo_cli.errors import UserError, listed
from mezo_cli.schema import Encoded, Example, TaskConfig
from mezo_cli.tasks.inputs import Inputs, named, tokenize
from mezo_cli.templates import Literal, Sentence, Special, Template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast as Tokenizer

_BERT_SEGMENTS = 2  # a BERT has embeddings for segment ids 0 and 1


@dataclass(frozen=True, slots=True)
class _Fixed:
    """Tokens that every row has: special tokens and literals."""

    ids: list[int]
    segment: int


@dataclass(frozen=True, slots=True)
class _Slot:
    """A row's own tokens: one sentence, cut at `limit` tokens."""

    sentence: Sentence
    limit: int | None
    segment: int


class Prompt(Inputs):
    """A task's template and label words seen through a tokenizer (objective mlm).

    `label_ids` holds one token id per label, in label order; `limit` is the length that rows are cut at. Raises
    UserError for a template or a label word that does not fit the task or the tokenizer.
    """

    def __init__(self, task: TaskConfig, tokenizer: "Tokenizer") -> None:
        super().__init__(task, tokenizer)
        self.template = Template.parse(task.template, list(task.columns), task.name)
        mask_id = tokenizer.mask_token_id
        if mask_id is None:
            raise UserError(
                f"task '{task.name}': {named(tokenizer)} has no mask token; a prompt needs one (or objective=cls)"
            )
        self.words, self.label_ids = list(task.label_words), label_word_ids(task, tokenizer)
        self._pieces = _pieces(self.template, task, tokenizer)
        held = (
            (i, p.ids.index(mask_id)) for i, p in enumerate(self._pieces) if isinstance(p, _Fixed) and mask_id in p.ids
        )
        self._mask_piece, self._mask_offset = next(held)

    def _encode_chunk(self, examples: Sequence[Example]) -> Iterable[Encoded]:
        """Tokenise column by column (the fast way), then join row by row."""
        columns: list[Iterable[list[int]]] = []
        for piece in self._pieces:
            if isinstance(piece, _Fixed):
                columns.append(repeat(piece.ids, len(examples)))
            else:
                texts = [piece.sentence.render(example.texts[piece.sentence.column]) for example in examples]
                columns.append([ids[: piece.limit] for ids in tokenize(texts, self.tokenizer)])
        for example, parts in zip(examples, zip(*columns, strict=True), strict=True):
            yield self._join(example, parts)

    def _join(self, example: Example, parts: tuple[list[int], ...]) -> Encoded:
        ids = list(chain.from_iterable(parts))
        mask = sum(len(part) for part in parts[: self._mask_piece]) + self._mask_offset
        if mask >= self.limit:
            raise UserError(self._mask_lost(example, mask, len(ids)))
        if self._pieces[-1].segment:
            segments = [p.segment for p, part in zip(self._pieces, parts, strict=True) for _ in part][: self.limit]
        else:
            segments = [0] * min(len(ids), self.limit)
        return Encoded(ids[: self.limit], segments, mask, example.label)

    def _mask_lost(self, example: Example, mask: int, length: int) -> str:
        row = example.where or f"the row {example.texts[0][:40]!r}"
        ours = self.limit == self.task.max_length
        source = "task.max_length" if ours else "the model takes no more"
        return (
            f"task '{self.task.name}', {row}: the prompt has {length} tokens and its mask is token {mask + 1}, cut off"
            f" by the limit of {self.limit} ({source}); shorten sentences with task.first_limit or task.other_limit"
            + (", or raise task.max_length" if ours else "")
        )


def label_word_ids(task: TaskConfig, tokenizer: "Tokenizer") -> list[int]:
    """Return the token id of each label word, in label order.

    A label word is the single token of `" " + word`; words that start with one of `<[.,` take no space and are looked
    up first. Raises UserError, naming the word, the task and the tokens, for a word that is not one token of the
    vocabulary, for two labels with one word or one token, and for a count that differs from the labels'.
    """
    words, labels = list(task.label_words), list(task.labels)
    if len(words) != len(labels):
        raise UserError(
            f"task '{task.name}' has {len(labels)} labels ({listed(labels)}) but {len(words)} label words"
            f" ({listed(words)}); task.label_words needs one for each, in the same order"
        )
    taken: dict[int, int] = {}
    for index, word in enumerate(words):
        token = _label_word_id(word, labels[index], task, tokenizer)
        if token in taken:
            first = taken[token]
            raise UserError(
                f"task '{task.name}': labels '{labels[first]}' and '{labels[index]}' share one token,"
                f" {tokenizer.convert_ids_to_tokens(token)!r}, through their words '{words[first]}' and '{word}'"
            )
        taken[token] = index
    return list(taken)


def _label_word_id(word: str, label: str, task: TaskConfig, tokenizer: "Tokenizer") -> int:
    bare = word[:1] in tuple("<[.,")
    ids = _lookup(word, tokenizer) if bare else tokenize([" " + word], tokenizer)[0]
    which = f"task '{task.name}': the label word '{word}' (label '{label}')"
    if len(ids) != 1 or not word.strip():
        tokens = listed(repr(token) for token in tokenizer.convert_ids_to_tokens(ids)) or "none"
        raise UserError(f"{which} is not one token of {named(tokenizer)} but {len(ids)}: {tokens}; choose another word")
    special = {tokenizer.unk_token_id, tokenizer.mask_token_id, tokenizer.pad_token_id}
    if ids[0] in special:
        raise UserError(
            f"{which} becomes {tokenizer.convert_ids_to_tokens(ids[0])!r} in {named(tokenizer)}, no word;"
            " choose another"
        )
    return ids[0]


def _pieces(template: Template, task: TaskConfig, tokenizer: "Tokenizer") -> list[_Fixed | _Slot]:
    """Tokenise what every row has once, and join neighbours of one segment."""
    has_segments = "token_type_ids" in tokenizer.model_input_names
    pieces: list[_Fixed | _Slot] = []
    segment = 0
    for part in template.parts:
        if isinstance(part, Sentence):
            pieces.append(_Slot(part, task.first_limit if part.column == 0 else task.other_limit, segment))
            continue
        ids = _fixed_ids(part, task, tokenizer)
        if pieces and isinstance(pieces[-1], _Fixed) and pieces[-1].segment == segment:
            pieces[-1] = _Fixed(pieces[-1].ids + ids, segment)
        else:
            pieces.append(_Fixed(ids, segment))
        if has_segments and part == Special("sep+"):
            segment += 1
    if pieces[-1].segment >= _BERT_SEGMENTS:
        raise UserError(
            f"task '{task.name}', template {template.text!r}: reaches segment {pieces[-1].segment}, but"
            f" {named(tokenizer)} knows segments 0 and 1 only; use at most one {{sep}} between sentences"
        )
    return pieces


def _fixed_ids(part: Literal | Special, task: TaskConfig, tokenizer: "Tokenizer") -> list[int]:
    if isinstance(part, Literal):
        # LM-BFF looks a single character up as it is: "." is a token of its own, whatever a tokenizer would add to it.
        return _lookup(part.text, tokenizer) if len(part.text) == 1 else tokenize([part.text], tokenizer)[0]
    name = part.name.rstrip("+")
    token: int | None = getattr(tokenizer, f"{name}_token_id")
    if token is None:
        raise UserError(f"task '{task.name}': the template needs a {name} token, but {named(tokenizer)} has none")
    return [token]


def _lookup(text: str, tokenizer: "Tokenizer") -> list[int]:
    """Return the token spelled `text`, or what the text is encoded to where the vocabulary has no such token."""
    token = tokenizer.backend_tokenizer.token_to_id(text)
    return tokenize([text], tokenizer)[0] if token is None else [token]
