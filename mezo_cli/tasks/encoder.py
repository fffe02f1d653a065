"""The bases of the input encoders: check that task and tokenizer fit together, encode rows, decode them to look at."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from mezo_cli.config.schema import ChoicePrompt, Example, GeneratePrompt, TaskConfig, TokenizedExample
from mezo_cli.errors import UserError, join
from mezo_cli.tasks.template import quote

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast as Tokenizer
else:
    Tokenizer = Any  # transformers takes long to import

_CHUNK = 16_384  # rows tokenized at a time; bounds the memory of the tokenizer's own records
UNBOUNDED = 1 << 30  # tokens: no row is as long
_NO_LIMIT = 1_000_000  # transformers writes a huge model_max_length where it knows no limit

PROPOSE = "`mezo data --words` with the same settings proposes words"

Row = TypeVar("Row")  # what an encoder makes of a row


class InputEncoder(Generic[Row]):
    """Turns a task's rows into the token ids that an objective reads. A subclass defines `encode_chunk`.

    Class attributes:
        limit_key: the setting of the limit on a row's tokens.

    Args:
        task: the task. What it says of rows is checked against the tokenizer here.
        tokenizer: a fast tokenizer.
        limit: the most tokens of a row, if the model takes so many; None: `task.max_length`.

    Attributes:
        max_length: the most tokens of a row.
    """

    limit_key: ClassVar[str] = "task.max_length"

    def __init__(self, task: TaskConfig, tokenizer: Tokenizer, limit: int | None = None) -> None:
        if not tokenizer.is_fast:
            why = "is not a fast tokenizer (it has no tokenizer.json), and only these are supported"
            raise UserError(f"{describe_tokenizer(tokenizer)} {why}")
        self.task, self.tokenizer, most = task, tokenizer, tokenizer.model_max_length
        self.max_length = min(limit or task.max_length, most if 0 < most < _NO_LIMIT else UNBOUNDED)

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

    def decode_ids(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def decode(self, row: Row) -> str:
        """Return the input as the model sees it, special tokens included."""
        return self.decode_ids(row.input_ids)  # type: ignore[attr-defined]

    def show(self, row: Row) -> str:
        """Return a row with what rightly follows it, for `mezo data`."""
        return self.decode(row)

    def distinct_text(self, row: Row) -> str:
        """Return what no two rows should share."""
        return self.decode(row)

    def sizes(self, row: Row) -> dict[str, int]:
        """Return the sizes of a row that `mezo data` shows, by title."""
        return {"tokens per row": len(row.input_ids)}  # type: ignore[attr-defined]

    def templates(self) -> dict[str, str]:
        """Return the templates of what the model is given, by name, for a model card; {} where it shows an example."""
        return {}

    def write_snippet(self, variables: Sequence[str]) -> str | None:
        """Return the Python code of a model card that labels a text, or None where it cannot be told in a few lines.

        It has `tokenizer` and `model` as transformers loads them, computes label scores exactly as mezo does, and
        prints their probabilities. `variables` hold the text of each column.
        """
        return None


class PromptEncoder(InputEncoder[Row]):
    """The base of the encoders of prompts with texts that may follow them. A subclass defines `parts` and `make_row`.

    Rows have `input_ids`, the prompt, and `cut`. One that is too long is refused, or loses the start of its prompt.
    """

    def __init__(self, task: TaskConfig, tokenizer: Tokenizer, prompt: GeneratePrompt | ChoicePrompt) -> None:
        super().__init__(task, tokenizer, prompt.max_length or UNBOUNDED)
        self._has_answers, self._cuts = True, prompt.too_long == "cut" or task.demonstrations > 0

    def parts(self, columns: Mapping[str, Any], where: str) -> tuple[str, list[str]]:
        """Return the prompt of a row, and the texts that may follow it; `where` is its place, for error lines."""
        raise NotImplementedError

    def make_row(
        self, example: Example, where: str, prompt_ids: list[int], all_ids: list[list[int]], texts: list[str]
    ) -> Row:
        """Return a row, cut to the limit, given the tokens of its prompt, and of the prompt with each of its texts."""
        raise NotImplementedError

    def read(self, example: Example) -> tuple[Mapping[str, Any], str]:
        """Return the columns of a row and where it is."""
        named = zip(self.task.columns, example.texts, strict=True) if example.columns is None else example.columns
        return dict(named), describe_row(self.task, example)

    def encode_chunk(self, examples: Sequence[Example]) -> Iterable[Row]:
        """Tokenize prompts alone, and together with each text that may follow them."""
        read = [self.read(example) for example in examples]
        parts = [self.parts(*row) for row in read]
        pairs = [(self.lead(row) + prompt, texts) for row, (prompt, texts) in zip(examples, parts, strict=True)]
        all_prompt_ids = self._tokenize([prompt for prompt, _ in pairs])
        all_ids = iter(self._tokenize([prompt + text for prompt, texts in pairs for text in texts]))
        for example, (_, where), prompt_ids, (_, texts) in zip(examples, read, all_prompt_ids, pairs, strict=True):
            yield self.make_row(example, where, prompt_ids, [next(all_ids) for _ in texts], texts)

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        return tokenize(texts, self.tokenizer)

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

    Args:
        label_words: a word per label, in the same order; none for an objective that reads none.

    Attributes:
        label_ids: the token id (mlm) or token ids (lm) of each label word.
        keeps_mask: whether a row whose mask would be cut off loses the ends of its sentences instead, the longest
            first; without it such a row is refused.
    """

    scored_by: ClassVar[str] = ""

    def __init__(
        self, task: TaskConfig, tokenizer: Tokenizer, label_words: Sequence[str] = (), limit: int | None = None
    ) -> None:
        super().__init__(task, tokenizer, limit)
        if len(task.labels) < 2 or len(set(task.labels)) != len(task.labels):
            raise UserError(
                f"task '{task.name}': task.labels needs two or more names, all different, not [{join(task.labels)}]"
            )
        self.label_words, self.label_ids, self.keeps_mask = list(label_words), list[Any](), False

    def whole_words(self) -> dict[str, int]:
        """Return the words that are one token where a label word stands, and the token."""
        return whole_words(self.tokenizer)

    def encode_to_fit(self, examples: Sequence[Example]) -> tuple[list[TokenizedExample], list[bool]]:
        """Encode rows, in order, cut as by `encode_all` but with their masks; return for each whether it was cut."""
        keeping = copy.copy(self)
        keeping.keeps_mask = True
        rows, whole = keeping.encode_all(examples), self.without_limits().encode_all(examples)
        return rows, [len(row.input_ids) < len(full.input_ids) for row, full in zip(rows, whole, strict=True)]


def check_label_words(task: TaskConfig, words: Sequence[str], key: str, ids: Sequence[Any]) -> None:
    """Refuse another number of label words, the setting `key`, than of labels, and two words of the same token ids."""
    labels = task.labels
    if len(words) != len(labels):
        raise UserError(
            f"task '{task.name}' has {len(labels)} labels ({join(labels)}) but {len(words)} label words"
            f" ({join(words)}); {key} needs one for each, in the same order"
        )
    for index, of_word in enumerate(ids):
        first = ids.index(of_word)
        if first < index:
            raise UserError(
                f"task '{task.name}': labels '{labels[first]}' and '{labels[index]}' share their tokens,"
                f" through their words '{words[first]}' and '{words[index]}'"
            )


def whole_words(tokenizer: Tokenizer, before: str = " ", start: Sequence[int] = ()) -> dict[str, int]:
    """Return the words of two letters or more that are one token after a text, and the token; `start` is the text's."""
    texts = (text.strip() for text in tokenizer.batch_decode([[token] for token in range(len(tokenizer))]))
    words = [text for text in dict.fromkeys(texts) if len(text) > 1 and text.isalpha()]
    pairs = zip(words, tokenize([before + word for word in words], tokenizer), strict=True)
    return {word: ids[-1] for word, ids in pairs if ids[:-1] == [*start]}


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
    """Yield a tokenizer's backend without truncation and padding, to which a special token in a text is plain text.

    Its options are restored after the block. They are part of tokenizer.json: a checkpoint would save those of the last
    rows that were encoded, also by the tokenizer's own call.
    """
    backend = tokenizer.backend_tokenizer
    truncation, padding, special = backend.truncation, backend.padding, backend.encode_special_tokens
    try:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        yield backend
    finally:
        backend.encode_special_tokens = special
        backend.no_truncation()
        backend.no_padding()
        if truncation is not None:
            backend.enable_truncation(**truncation)
        if padding is not None:
            backend.enable_padding(**padding)


def describe_tokenizer(tokenizer: Tokenizer) -> str:
    """Return a tokenizer's class and where it was loaded from, for error lines."""
    source = tokenizer.name_or_path
    return f"the tokenizer {source} ({type(tokenizer).__name__})" if source else f"the {type(tokenizer).__name__}"


def describe_row(task: TaskConfig, example: Example) -> str:
    """Return the task and the row, by its place in its file or by its first words, for error lines."""
    row = str(example.texts[0] if example.texts else example.columns)
    return f"task '{task.name}', {example.where or f'the row {row[:40]!r}'}"


# --- the code of model cards ---

IDS = """

def ids(text):
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


"""


def print_probabilities(labels: Sequence[str]) -> str:
    """Return the line that prints the probability of each label, from the tensor `scores`."""
    return f"print(dict(zip([{', '.join(map(quote, labels))}], scores.softmax(-1).tolist())))\n"
