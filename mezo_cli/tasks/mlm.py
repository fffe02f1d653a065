"""Encode rows for encoders: prompts with a mask (objective mlm), or texts for a classification head (objective cls).

Prompts are encoded as LM-BFF does (Gao, Fisch and Chen, ACL 2021): each part of the template is tokenized alone, a
sentence is cut at its own limit, and then the row at the maximum length. There is one deliberate difference: a special
token spelled out in the data (`<mask>`, `[SEP]`) is plain text.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Self

from mezo_cli.config.schema import Example, TaskConfig, TokenizedExample
from mezo_cli.errors import UserError, join
from mezo_cli.tasks import encoder
from mezo_cli.tasks.encoder import ClassificationEncoder, Tokenizer, describe_row, describe_tokenizer, tokenize
from mezo_cli.tasks.template import Sentence, Special, parse_template

_BARE = tuple("<[.,")  # a label word that starts with one of them takes no space
_BERT_SEGMENTS = 2  # a BERT has embeddings for segment ids 0 and 1


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens that every row has (special tokens and literals), or the place of a sentence, cut at `limit` tokens."""

    segment: int
    ids: list[int]
    sentence: Sentence | None = None
    limit: int | None = None


class MlmEncoder(ClassificationEncoder):
    """A task's template and label words for a masked LM.

    `label_ids` holds one token id per label, in label order. `position` of a row is its mask.
    """

    scored_by = "label words at the mask"

    def __init__(self, task: TaskConfig, tokenizer: Tokenizer) -> None:
        super().__init__(task, tokenizer, task.label_words)
        mask_id = tokenizer.mask_token_id
        if mask_id is None:
            why = f"{describe_tokenizer(tokenizer)} has no mask token; a prompt needs one (or use objective=cls)"
            raise UserError(f"task '{task.name}': {why}")
        self.label_ids, self._pieces = label_word_ids(task, tokenizer), _pieces(task, tokenizer)
        self._mask_piece = next(i for i, piece in enumerate(self._pieces) if mask_id in piece.ids)
        self._mask_offset = self._pieces[self._mask_piece].ids.index(mask_id)

    def encode_chunk(self, examples: Sequence[Example]) -> Iterable[TokenizedExample]:
        """Tokenize column by column, which is fast, then join the parts of each row."""
        columns: list[Iterable[list[int]]] = []
        for piece in self._pieces:
            if piece.sentence is None:
                columns.append(repeat(piece.ids, len(examples)))
            else:
                texts = [piece.sentence.render(example.texts) for example in examples]
                columns.append([ids[: piece.limit] for ids in tokenize(texts, self.tokenizer)])
        for example, parts in zip(examples, zip(*columns, strict=True), strict=True):
            yield self._join(example, parts)

    def _join(self, example: Example, parts: tuple[list[int], ...]) -> TokenizedExample:
        limit = self.max_length
        lengths = list(map(len, parts))
        mask = sum(lengths[: self._mask_piece]) + self._mask_offset
        if mask >= limit and self.keeps_mask:
            # cut the ends of the sentences, the longest first, until the row fits
            slots = [i for i, piece in enumerate(self._pieces) if piece.sentence is not None]
            for _ in range(sum(lengths) - limit):
                longest = max(slots, key=lengths.__getitem__)
                lengths[longest] = max(0, lengths[longest] - 1)
            parts = tuple(part[:length] for part, length in zip(parts, lengths, strict=True))
            mask = sum(lengths[: self._mask_piece]) + self._mask_offset
        ids = list(chain.from_iterable(parts))
        if mask >= limit:
            source, more = "the model takes no more", ""
            if limit == self.task.max_length:
                source, more = "task.max_length", ", or raise task.max_length"
            raise UserError(
                f"{describe_row(self.task, example)}: the prompt has {len(ids)} tokens and its mask is token "
                f"{mask + 1}, cut off by the limit of {limit} ({source}); shorten sentences with task.first_limit "
                f"or task.other_limit{more}"
            )
        segments = [0] * len(ids)
        if self._pieces[-1].segment:
            segments = [p.segment for p, part in zip(self._pieces, parts, strict=True) for _ in part]
        return TokenizedExample(ids[:limit], segments[:limit], mask, example.label)

    def without_limits(self) -> Self:
        """Return an encoder that cuts nothing off."""
        other = super().without_limits()
        other._pieces = [replace(piece, limit=None) for piece in self._pieces]
        return other

    def write_snippet(self, variables: Sequence[str]) -> str:
        """Return code that joins the token ids of the template's parts, and reads the logits at the mask."""
        parts, segments = [], [piece.segment for piece in self._pieces]
        for piece in self._pieces:
            cut = "" if piece.limit is None else f"[:{piece.limit}]"
            code = None if piece.sentence is None else f"ids({piece.sentence.write_code(variables)}){cut}"
            parts.append(code or str(piece.ids))
        mask, limit, words = self.tokenizer.mask_token_id, self.max_length, ", ".join(self.label_words)
        lines = [
            f"parts = [{', '.join(parts)}]",
            f"input_ids = [i for part in parts for i in part][:{limit}]",
            'inputs = {"input_ids": torch.tensor([input_ids]), "attention_mask": torch.ones(1, len(input_ids))}',
        ]
        if any(segments):
            lines += [
                f"segments = [s for part, s in zip(parts, {segments}) for _ in part][:{limit}]",
                'inputs["token_type_ids"] = torch.tensor([segments])',
            ]
        lines += [
            "with torch.no_grad():",
            "    logits = model(**inputs).logits",
            f"scores = logits[0, input_ids.index({mask}), {self.label_ids}]  # at the mask: {' '.join(words.split())}",
            encoder.print_probabilities(self.task.labels),
        ]
        return encoder.IDS + "\n".join(lines)


def label_word_ids(task: TaskConfig, tokenizer: Tokenizer) -> list[int]:
    """Return the token id of each label word, in label order.

    A label word is the single token of `" " + word`. A word that starts with one of `<[.,` takes no space and is looked
    up in the vocabulary first.
    """
    found = list[int]()
    for label, word in zip(task.labels, task.label_words, strict=False):
        ids = _lookup(word, tokenizer) if word[:1] in _BARE else tokenize([" " + word], tokenizer)[0]
        which = f"task '{task.name}': the label word '{word}' (label '{label}')"
        tokens = join(map(repr, tokenizer.convert_ids_to_tokens(ids))) or "none"
        if len(ids) != 1 or not word.strip():
            why = f"is not one token of {describe_tokenizer(tokenizer)} but {len(ids)}: {tokens}; choose another word"
            raise UserError(f"{which} {why}: {encoder.PROPOSE}")
        if ids[0] in (tokenizer.unk_token_id, tokenizer.mask_token_id, tokenizer.pad_token_id):
            why = f"becomes {tokens} in {describe_tokenizer(tokenizer)}, which is not a word; choose another"
            raise UserError(f"{which} {why}")
        found += ids
    encoder.check_label_words(task, task.label_words, "task.label_words", found)
    return found


def _pieces(task: TaskConfig, tokenizer: Tokenizer) -> list[_Piece]:
    """Parse the template, tokenize the fixed parts once, and join adjacent ones of the same segment."""
    pieces, segment = list[_Piece](), 0
    for part in parse_template(task.template or "", list(task.columns), task.name):
        if isinstance(part, Sentence):
            pieces.append(_Piece(segment, [], part, task.first_limit if part.column == 0 else task.other_limit))
            continue
        if isinstance(part, Special):
            name = part.name.rstrip("+")
            ids = [getattr(tokenizer, f"{name}_token_id")]
            if ids == [None]:
                why = f"the template needs a {name} token, but {describe_tokenizer(tokenizer)} has none"
                raise UserError(f"task '{task.name}': {why}")
        elif len(part.text) == 1:  # LM-BFF looks it up as it is: "." is a token of its own, whatever a tokenizer adds
            ids = _lookup(part.text, tokenizer)
        else:
            ids = tokenize([part.text], tokenizer)[0]
        if pieces and pieces[-1].sentence is None and pieces[-1].segment == segment:
            pieces[-1] = _Piece(segment, pieces[-1].ids + ids)
        else:
            pieces.append(_Piece(segment, ids))
        if part == Special("sep+") and "token_type_ids" in tokenizer.model_input_names:
            segment += 1
    if pieces[-1].segment >= _BERT_SEGMENTS:
        raise UserError(
            f"task '{task.name}', template {task.template!r}: reaches segment {pieces[-1].segment}, but"
            f" {describe_tokenizer(tokenizer)} knows segments 0 and 1 only; use at most one {{sep}} between sentences"
        )
    return pieces


def _lookup(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the token spelled `text`, or the tokens of the text where the vocabulary has no such token."""
    token = tokenizer.backend_tokenizer.token_to_id(text)
    return tokenize([text], tokenizer)[0] if token is None else [token]


# --- without a prompt ---


class ClsEncoder(ClassificationEncoder):
    """One text, or a pair as the tokenizer itself joins it.

    The tokenizer adds its special tokens, and cuts the longer text first at `max_length`. `position` is -1.
    """

    scored_by = "a classification head"

    def __init__(self, task: TaskConfig, tokenizer: Tokenizer) -> None:
        super().__init__(task, tokenizer)
        if not 1 <= len(task.columns) <= 2:
            count = f"{len(task.columns)} ({join(task.columns) or 'none'})"
            raise UserError(f"task '{task.name}': objective=cls reads one or two texts, task.columns has {count}")
        self._has_segments = "token_type_ids" in tokenizer.model_input_names

    def encode_chunk(self, examples: Sequence[Example]) -> Iterable[TokenizedExample]:
        """Encode rows by one call of the tokenizer."""
        with encoder.plain_backend(self.tokenizer):
            batch = self.tokenizer(
                *(list(column) for column in zip(*(example.texts for example in examples), strict=True)),
                truncation=True,
                max_length=self.max_length,
                return_token_type_ids=self._has_segments,
                return_attention_mask=False,
                split_special_tokens=True,
                verbose=False,
            )
        all_ids = batch["input_ids"]
        all_segments = batch["token_type_ids"] if self._has_segments else ([0] * len(ids) for ids in all_ids)
        for example, ids, segments in zip(examples, all_ids, all_segments, strict=True):
            yield TokenizedExample(ids, segments, -1, example.label)

    def write_snippet(self, variables: Sequence[str]) -> str:
        """Return code that lets the tokenizer join the texts, and reads the head's logits."""
        options = f"truncation=True, max_length={self.max_length}, split_special_tokens=True"
        return (
            f'inputs = tokenizer({", ".join(variables)}, {options}, return_tensors="pt")\n'
            "with torch.no_grad():\n    scores = model(**inputs).logits[0]\n"
            f"{encoder.print_probabilities(self.task.labels)}"
        )
