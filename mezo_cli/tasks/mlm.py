"""Encode prompts with a mask (objective mlm), as LM-BFF does (Gao, Fisch and Chen, ACL 2021).

Each part of the template is tokenized alone, a sentence is cut at its own limit, and then the row at the maximum
length. There is one deliberate difference: a special token spelled out in the data (`<mask>`, `[SEP]`) is plain text.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Self

from mezo_cli.config.schema import Example, TaskConfig, TokenizedExample
from mezo_cli.errors import UserError, join
from mezo_cli.tasks import encoder, snippet
from mezo_cli.tasks.encoder import ClassificationEncoder, Tokenizer, describe_row, describe_tokenizer, tokenize
from mezo_cli.tasks.template import Literal, Part, Sentence, Special, Template

_BARE = tuple("<[.,")  # a label word that starts with one of them takes no space
_PROBES = ("A text of your own.", "so good", "Not bad, is it?")
_BERT_SEGMENTS = 2  # a BERT has embeddings for segment ids 0 and 1


@dataclass(frozen=True, slots=True)
class _Fixed:
    """The tokens of special tokens and literals, the same in every row."""

    ids: list[int]
    segment: int


@dataclass(frozen=True, slots=True)
class _Slot:
    """The place of one sentence, cut at `limit` tokens."""

    sentence: Sentence
    limit: int | None
    segment: int


class MlmEncoder(ClassificationEncoder):
    """A task's template and label words for a masked LM.

    `label_ids` holds one token id per label, in label order. `position` of a row is its mask.
    """

    scored_by = "label words at the mask"

    def __init__(self, task: TaskConfig, tokenizer: Tokenizer) -> None:
        super().__init__(task, tokenizer)
        self.template = Template.parse(task.template or "", list(task.columns), task.name)
        mask_id = tokenizer.mask_token_id
        if mask_id is None:
            raise UserError(
                f"task '{task.name}': {describe_tokenizer(tokenizer)} has no mask token; a prompt needs one"
                " (or use objective=cls)"
            )
        self.label_ids = label_word_ids(task, tokenizer)
        self._pieces = _pieces(self.template, task, tokenizer)
        masks = (
            (i, p.ids.index(mask_id)) for i, p in enumerate(self._pieces) if isinstance(p, _Fixed) and mask_id in p.ids
        )
        self._mask_piece, self._mask_offset = next(masks)
        self._keeps_mask = False

    @staticmethod
    def task_label_words(task: TaskConfig) -> list[str]:
        """Return `task.label_words`."""
        return list(task.label_words)

    def encode_chunk(self, examples: Sequence[Example]) -> Iterable[TokenizedExample]:
        """Tokenize column by column, which is fast, then join the parts of each row."""
        columns: list[Iterable[list[int]]] = []
        for piece in self._pieces:
            if isinstance(piece, _Fixed):
                columns.append(repeat(piece.ids, len(examples)))
            else:
                texts = [piece.sentence.render(example.texts) for example in examples]
                columns.append([ids[: piece.limit] for ids in tokenize(texts, self.tokenizer)])
        for example, parts in zip(examples, zip(*columns, strict=True), strict=True):
            yield self._join(example, parts)

    def _keeping_mask(self) -> Self:
        other = copy.copy(self)
        other._keeps_mask = True
        return other

    def without_limits(self) -> Self:
        """Return an encoder that cuts nothing off."""
        other = super().without_limits()
        other._pieces = [piece if isinstance(piece, _Fixed) else replace(piece, limit=None) for piece in self._pieces]
        return other

    def write_snippet(self, variables: Sequence[str]) -> str:
        """Return code that joins the token ids of the template's parts, and reads the logits at the mask."""
        parts, segments = [], [piece.segment for piece in self._pieces]
        for piece in self._pieces:
            if isinstance(piece, _Slot):
                cut = "" if piece.limit is None else f"[:{piece.limit}]"
                parts.append(f"ids({snippet.sentence_code(piece.sentence, variables)}){cut}")
            else:
                parts.append(str(piece.ids))
        mask, limit, words = self.tokenizer.mask_token_id, self.max_length, snippet.words_in_line(self)
        lines = [f"parts = [{', '.join(parts)}]", f"input_ids = [i for part in parts for i in part][:{limit}]"]
        lines.append(
            'inputs = {"input_ids": torch.tensor([input_ids]), "attention_mask": torch.ones(1, len(input_ids))}'
        )
        if any(segments):
            lines.append(f"segments = [s for part, s in zip(parts, {segments}) for _ in part][:{limit}]")
            lines.append('inputs["token_type_ids"] = torch.tensor([segments])')
        lines += [
            "with torch.no_grad():",
            "    logits = model(**inputs).logits",
            f"scores = logits[0, input_ids.index({mask}), {self.label_ids}]  # at the mask: {words}",
            snippet.print_probabilities(self),
        ]
        return snippet.IDS + "\n".join(lines)

    def write_pipeline(self, variables: Sequence[str]) -> str | None:
        """Return code that lets the pipeline fill the mask with the label words.

        None where the tokens of the prompt as one text are not those of its parts: in templates with segments, with
        limits of sentences, and for tokenizers that add other special tokens than the template.
        """
        parts = list(self.template.parts)
        first, last = parts[0] == Special("cls"), parts[-1] in (Special("sep"), Special("sep+"))
        parts = parts[first : len(parts) - last]
        if not all(self._is_read_alike(parts, text) for text in _PROBES):
            return None
        code = " + ".join(
            snippet.sentence_code(part, variables)
            if isinstance(part, Sentence)
            else snippet.quote(self._part_text(part, ""))
            for part in parts
        )
        words = (word if word[:1] in _BARE else f" {word}" for word in self.label_words)
        targets, names = ", ".join(map(snippet.quote, words)), map(snippet.quote, self.task.labels)
        labels = ", ".join(f"{token}: {name}" for token, name in zip(self.label_ids, names, strict=True))
        lines = [
            f"labels = {{{labels}}}  # by the token of the label word",
            f"found = pipe({code}, targets=[{targets}], top_k={len(self.label_ids)})",
            'total = sum(one["score"] for one in found)',
            'print({labels[one["token"]]: one["score"] / total for one in found})\n',
        ]
        return "\n".join(lines)

    def _is_read_alike(self, parts: Sequence[Part], text: str) -> bool:
        """Return whether the tokenizer's own call on the prompt of a text gives the tokens and segments of its row."""
        row = self.encode(Example((text,) * len(self.task.columns), 0))
        with encoder.restored_options(self.tokenizer):
            whole = self.tokenizer("".join(self._part_text(part, text) for part in parts))
        segments = whole.get("token_type_ids", list(row.token_type_ids))
        return (whole["input_ids"], segments) == (list(row.input_ids), list(row.token_type_ids))

    def _part_text(self, part: Part, text: str) -> str:
        if isinstance(part, Sentence):
            return part.render([text] * len(self.task.columns))
        if isinstance(part, Literal):
            return part.text
        return str(getattr(self.tokenizer, f"{part.name.rstrip('+')}_token"))

    def _join(self, example: Example, parts: tuple[list[int], ...]) -> TokenizedExample:
        if self._keeps_mask:
            parts = self._fit(parts)
        ids = list(chain.from_iterable(parts))
        mask = sum(len(part) for part in parts[: self._mask_piece]) + self._mask_offset
        if mask >= self.max_length:
            raise UserError(self._mask_cut_off(example, mask, len(ids)))
        if self._pieces[-1].segment:
            segments = [p.segment for p, part in zip(self._pieces, parts, strict=True) for _ in part][: self.max_length]
        else:
            segments = [0] * min(len(ids), self.max_length)
        return TokenizedExample(ids[: self.max_length], segments, mask, example.label)

    def _fit(self, parts: tuple[list[int], ...]) -> tuple[list[int], ...]:
        """Where the mask is past the limit, cut the ends of the sentences, the longest first, until the row fits."""
        lengths = [len(part) for part in parts]
        if sum(lengths[: self._mask_piece]) + self._mask_offset < self.max_length:
            return parts
        slots = [i for i, piece in enumerate(self._pieces) if isinstance(piece, _Slot)]
        for _ in range(sum(lengths) - self.max_length):
            longest = max(slots, key=lengths.__getitem__)
            lengths[longest] = max(0, lengths[longest] - 1)
        return tuple(part[:length] for part, length in zip(parts, lengths, strict=True))

    def _mask_cut_off(self, example: Example, mask: int, length: int) -> str:
        """Return the error line for a row whose mask is after the last token that is kept."""
        ours = self.max_length == self.task.max_length
        source = "task.max_length" if ours else "the model takes no more"
        return (
            f"{describe_row(self.task, example)}: the prompt has {length} tokens and its mask is token {mask + 1}, cut"
            f" off by the limit of {self.max_length} ({source}); shorten sentences with task.first_limit or"
            " task.other_limit" + (", or raise task.max_length" if ours else "")
        )


def label_word_ids(task: TaskConfig, tokenizer: Tokenizer) -> list[int]:
    """Return the token id of each label word, in label order.

    A label word is the single token of `" " + word`. A word that starts with one of `<[.,` takes no space and is looked
    up in the vocabulary first.
    """
    words, labels = list(task.label_words), list(task.labels)
    encoder.check_one_per_label(task, words, "task.label_words")
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


def _label_word_id(word: str, label: str, task: TaskConfig, tokenizer: Tokenizer) -> int:
    bare = word[:1] in _BARE
    ids = _lookup(word, tokenizer) if bare else tokenize([" " + word], tokenizer)[0]
    which = f"task '{task.name}': the label word '{word}' (label '{label}')"
    if len(ids) != 1 or not word.strip():
        tokens = join(repr(token) for token in tokenizer.convert_ids_to_tokens(ids)) or "none"
        raise UserError(
            f"{which} is not one token of {describe_tokenizer(tokenizer)} but {len(ids)}: {tokens}; choose another word"
        )
    special = {tokenizer.unk_token_id, tokenizer.mask_token_id, tokenizer.pad_token_id}
    if ids[0] in special:
        raise UserError(
            f"{which} becomes {tokenizer.convert_ids_to_tokens(ids[0])!r} in {describe_tokenizer(tokenizer)}, which is"
            " not a word; choose another"
        )
    return ids[0]


def _pieces(template: Template, task: TaskConfig, tokenizer: Tokenizer) -> list[_Fixed | _Slot]:
    """Tokenize the fixed parts once, and join adjacent ones of the same segment."""
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
            f" {describe_tokenizer(tokenizer)} knows segments 0 and 1 only; use at most one {{sep}} between sentences"
        )
    return pieces


def _fixed_ids(part: Literal | Special, task: TaskConfig, tokenizer: Tokenizer) -> list[int]:
    if isinstance(part, Literal):
        # LM-BFF looks up a single character as it is: "." is a token of its own, whatever a tokenizer would add to it.
        return _lookup(part.text, tokenizer) if len(part.text) == 1 else tokenize([part.text], tokenizer)[0]
    name = part.name.rstrip("+")
    token: int | None = getattr(tokenizer, f"{name}_token_id")
    if token is None:
        raise UserError(
            f"task '{task.name}': the template needs a {name} token, but {describe_tokenizer(tokenizer)} has none"
        )
    return [token]


def _lookup(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the token spelled `text`, or the tokens of the text where the vocabulary has no such token."""
    token = tokenizer.backend_tokenizer.token_to_id(text)
    return tokenize([text], tokenizer)[0] if token is None else [token]
