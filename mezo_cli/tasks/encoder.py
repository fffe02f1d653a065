"""The bases of the input encoders: check that task and tokenizer fit together, encode rows, decode them to look at."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from mezo_cli.config.schema import ChoicePrompt, Example, GeneratePrompt, TaskConfig, TokenizedExample
from mezo_cli.errors import UserError, join

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast as Tokenizer
else:
    Tokenizer = Any  # transformers takes long to import

_CHUNK = 16_384  # rows tokenized at a time; bounds the memory of the tokenizer's own records
UNBOUNDED = 1 << 30  # tokens: no row is as long
_NO_LIMIT = 1_000_000  # transformers writes a huge model_max_length where it knows no limit


Row = TypeVar("Row")  # what an encoder makes of a row


class InputEncoder(Generic[Row]):
    """Turns a task's rows into the token ids that an objective reads. A subclass defines `encode_chunk`.

    Class attributes:
        limit_key: the setting of the limit on a row's tokens.
        demonstrates: whether a row may come after demonstrations; then a subclass defines `demonstration`.

    Args:
        task: the task. What it says of rows is checked against the tokenizer here.
        tokenizer: a fast tokenizer.

    Attributes:
        max_length: the most tokens of a row.
    """

    demonstrates: ClassVar[bool] = False
    limit_key: ClassVar[str] = "task.max_length"

    def __init__(self, task: TaskConfig, tokenizer: Tokenizer) -> None:
        if not tokenizer.is_fast:
            raise UserError(
                f"{describe_tokenizer(tokenizer)} is not a fast tokenizer (it has no tokenizer.json), and only these"
                " are supported"
            )
        self.task = task
        self.tokenizer = tokenizer
        self.max_length = max_row_length(tokenizer, task.max_length)

    def encode(self, example: Example) -> Row:
        """Encode one row."""
        return self.encode_all([example])[0]

    def encode_all(self, examples: Sequence[Example]) -> list[Row]:
        """Encode rows, in order."""
        chunks = (examples[start : start + _CHUNK] for start in range(0, len(examples), _CHUNK))
        return [row for chunk in chunks for row in self.encode_chunk(chunk)]

    def encode_chunk(self, examples: Sequence[Example]) -> Iterable[Row]:
        """Encode rows, in order; `encode_all` calls it with a bounded number of them."""
        raise NotImplementedError

    def encode_to_fit(self, examples: Sequence[Example]) -> tuple[list[Row], list[bool]]:
        """Encode rows to predict, in order, so that each fits, and return for each whether some of it was cut off."""
        raise NotImplementedError

    def demonstration(self, example: Example) -> str:
        """Return a row as it is shown before another one: its prompt with what rightly follows it."""
        raise NotImplementedError

    def lead(self, example: Example) -> str:
        """Return the text before a row's prompt: its demonstrations, each with an empty line after it."""
        return "".join(f"{self.demonstration(row).strip()}\n\n" for row in example.demonstrations)

    def without_limits(self) -> Self:
        """Return an encoder that cuts nothing off."""
        other = copy.copy(self)
        other.max_length = UNBOUNDED
        return other

    def decode(self, row: Row) -> str:
        """Return the input as the model sees it, special tokens included."""
        return self.decode_ids(row.input_ids)  # type: ignore[attr-defined]

    def write_snippet(self, variables: Sequence[str]) -> str | None:
        """Return the Python code of a model card that labels a text, or None where it cannot be told in a few lines.

        It has `tokenizer` and `model` as transformers loads them, computes label scores exactly as mezo does, and
        prints their probabilities. `tasks/snippet.py` has pieces of it.

        Args:
            variables: the variable that holds the text of each column.
        """
        return None

    def write_pipeline(self, variables: Sequence[str]) -> str | None:
        """Return such code for the variable `pipe`, the `transformers.pipeline` of the objective's model.

        None where a pipeline would give the model other tokens. What a pipeline of text generation prints is the text.
        """
        return None

    def templates(self) -> dict[str, str]:
        """Return the templates of what the model is given, by name, for a model card; {} where it shows an example."""
        return {}

    def sizes(self, row: Row) -> dict[str, int]:
        """Return the sizes of a row that `mezo data` shows, by title."""
        return {"tokens per row": len(row.input_ids)}  # type: ignore[attr-defined]

    def show(self, row: Row) -> str:
        """Return a row with what rightly follows it, for `mezo data`."""
        return self.decode(row)

    def distinct_text(self, row: Row) -> str:
        """Return what no two rows should share."""
        return self.decode(row)

    def decode_ids(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


class PromptEncoder(InputEncoder[Row]):
    """The base of the encoders of prompts with what may follow them. Rows have `input_ids`, the prompt, and `cut`.

    A row that is too long is refused, or loses the start of its prompt.
    """

    demonstrates = True

    def __init__(self, task: TaskConfig, tokenizer: Tokenizer, prompt: GeneratePrompt | ChoicePrompt) -> None:
        super().__init__(task, tokenizer)
        self._has_answers, self._cuts = True, prompt.too_long == "cut" or task.demonstrations > 0
        self.max_length = max_row_length(tokenizer, prompt.max_length or UNBOUNDED)

    def encode_to_fit(self, examples: Sequence[Example]) -> tuple[list[Row], list[bool]]:
        """Encode prompts without what rightly follows them, and return for each whether it was cut to fit."""
        other = copy.copy(self)
        other._has_answers, other._cuts = False, True
        rows: list[Any] = other.encode_all(examples)
        return rows, [row.cut for row in rows]


class ClassificationEncoder(InputEncoder[TokenizedExample]):
    """The base of the encoders of rows with labels. A subclass defines `encode_chunk`.

    Class attributes:
        scored_by: what scores a label, in words: "label words at the mask"; empty: the objective's name says it.

    Attributes:
        max_length: rows are cut at this many tokens.
        label_words: in label order; empty for an objective that reads none.
        label_ids: the token id (mlm) or token ids (lm) of each label word; empty for an objective that reads none.
    """

    scored_by: ClassVar[str] = ""

    def __init__(self, task: TaskConfig, tokenizer: Tokenizer) -> None:
        super().__init__(task, tokenizer)
        labels = list(task.labels)
        if len(labels) < 2 or len(set(labels)) != len(labels):
            raise UserError(
                f"task '{task.name}': task.labels needs two or more names, all different, not [{join(labels)}]"
            )
        self.label_words = self.task_label_words(task)
        self.label_ids: list[Any] = []

    @staticmethod
    def task_label_words(task: TaskConfig) -> list[str]:
        """Return a task's label words, in label order; empty for an objective that reads none."""
        return []

    def encode_to_fit(self, examples: Sequence[Example]) -> tuple[list[TokenizedExample], list[bool]]:
        """Encode rows, in order, and return for each whether some of it was cut off.

        Rows are cut as by `encode_all`. A row that `encode_all` refuses, because its mask would be cut off, loses the
        ends of its sentences, the longest first.
        """
        rows, whole = self._keeping_mask().encode_all(examples), self.without_limits().encode_all(examples)
        return rows, [len(row.input_ids) < len(full.input_ids) for row, full in zip(rows, whole, strict=True)]

    def _keeping_mask(self) -> Self:
        """Return an encoder that never cuts the mask off; an encoder that has no mask returns itself."""
        return self


def check_one_per_label(task: TaskConfig, words: Sequence[str], key: str) -> None:
    """Refuse a number of label words that differs from that of the labels."""
    if len(words) != len(task.labels):
        raise UserError(
            f"task '{task.name}' has {len(task.labels)} labels ({join(task.labels)}) but {len(words)} label words"
            f" ({join(words)}); {key} needs one for each, in the same order"
        )


def max_row_length(tokenizer: Tokenizer, wanted: int) -> int:
    """Return `wanted`, or the most tokens that the model takes when that is known and less."""
    known = 0 < tokenizer.model_max_length < _NO_LIMIT
    return min(wanted, tokenizer.model_max_length) if known else wanted


def start_ids(tokenizer: Tokenizer, bos_token_id: int | None) -> list[int]:
    """Return a token, or the special tokens that the tokenizer itself puts before a text."""
    if bos_token_id is not None:
        if bos_token_id >= len(tokenizer):
            what = f"{describe_tokenizer(tokenizer)} has {len(tokenizer)} tokens"
            raise UserError(f"task.bos_token_id={bos_token_id}: {what}, from 0")
        return [bos_token_id]
    encoding = tokenizer.backend_tokenizer.encode("a", add_special_tokens=True)
    return encoding.ids[: encoding.special_tokens_mask.index(0)]


def tokenize(texts: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the token ids of each text. No special token is added, and one spelled out in a text is plain text."""
    # The backend is three times as fast as the tokenizer's own call, which sets these three options itself.
    with plain_backend(tokenizer) as backend:
        all_ids = [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
    # Unigram vocabularies (XLM-R, ALBERT) have the mask as a piece of plain text: drop it, a row has one mask only.
    mask_id = tokenizer.mask_token_id
    return [[i for i in ids if i != mask_id] if mask_id in ids else ids for ids in all_ids]


@contextmanager
def plain_backend(tokenizer: Tokenizer) -> Iterator[Any]:
    """Yield a tokenizer's backend without truncation and padding, to which a special token in a text is plain text."""
    with restored_options(tokenizer) as backend:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        yield backend


@contextmanager
def restored_options(tokenizer: Tokenizer) -> Iterator[Any]:
    """Yield a tokenizer's backend, and restore its truncation, padding and special tokens after the block.

    They are part of tokenizer.json: a checkpoint would save those of the last rows that were encoded.
    """
    backend = tokenizer.backend_tokenizer
    truncation, padding, special = backend.truncation, backend.padding, backend.encode_special_tokens
    try:
        yield backend
    finally:
        backend.encode_special_tokens = special
        if truncation is None:
            backend.no_truncation()
        else:
            backend.enable_truncation(**truncation)
        if padding is None:
            backend.no_padding()
        else:
            backend.enable_padding(**padding)


def describe_tokenizer(tokenizer: Tokenizer) -> str:
    """Return a tokenizer's class and where it was loaded from, for error lines."""
    source = tokenizer.name_or_path
    return f"the tokenizer {source} ({type(tokenizer).__name__})" if source else f"the {type(tokenizer).__name__}"


def describe_row(task: TaskConfig, example: Example) -> str:
    """Return the task and the row, by its place in its file or by its first words, for error lines."""
    row = str(example.texts[0] if example.texts else example.columns)
    return f"task '{task.name}', {example.where or f'the row {row[:40]!r}'}"
