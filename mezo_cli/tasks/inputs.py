"""What every kind of input does: check that task and tokenizer go together, encode rows, show a row."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mezo_cli.errors import UserError, listed
from mezo_cli.schema import Encoded, Example, TaskConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast as Tokenizer

_CHUNK = 16_384  # rows tokenised at a time: bounds the memory that the tokenizer's own records take
_NO_LIMIT = 1_000_000  # transformers writes a huge model_max_length where it knows none


class Inputs:
    """A task's rows as an objective reads them.

    Attributes:
        limit: the length in tokens that rows are cut at.
        words: the label words, in label order; empty for an objective that reads none.
        label_ids: what stands for each word: a token id (mlm), or the ids of its tokens (lm).
    """

    def __init__(self, task: TaskConfig, tokenizer: "Tokenizer") -> None:
        if not tokenizer.is_fast:
            raise UserError(
                f"{named(tokenizer)} is not a fast tokenizer (it has no tokenizer.json); such are not supported"
            )
        labels = list(task.labels)
        if len(labels) < 2 or len(set(labels)) != len(labels):
            raise UserError(
                f"task '{task.name}': task.labels needs two or more names, all different, not [{listed(labels)}]"
            )
        self.task = task
        self.tokenizer = tokenizer
        self.limit = longest_row(tokenizer, task.max_length)
        self.words: list[str] = []
        self.label_ids: list = []

    def encode(self, example: Example) -> Encoded:
        """Return one row's token ids: what `encode_all` gives for it."""
        return self.encode_all([example])[0]

    def encode_all(self, examples: Sequence[Example]) -> list[Encoded]:
        """Encode rows in order, many at a time."""
        chunks = (examples[start : start + _CHUNK] for start in range(0, len(examples), _CHUNK))
        return [row for chunk in chunks for row in self._encode_chunk(chunk)]

    def show(self, encoded: Encoded) -> str:
        """Return the input as the model sees it: the ids decoded, special tokens visible."""
        return str(self.tokenizer.decode(encoded.ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _encode_chunk(self, examples: Sequence[Example]) -> Iterable[Encoded]:
        raise NotImplementedError


def longest_row(tokenizer: "Tokenizer", wanted: int) -> int:
    """Return `wanted`, or the most that the model takes where that is known and less."""
    known = 0 < tokenizer.model_max_length < _NO_LIMIT
    return min(wanted, tokenizer.model_max_length) if known else wanted


def tokenize(texts: list[str], tokenizer: "Tokenizer") -> list[list[int]]:
    """Return the ids of each text as plain text: no special token is added to it, none is read out of it."""
    # The backend is three times as fast as the tokenizer's own call, which resets these three settings by itself.
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    all_ids = [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
    # Unigram vocabularies (XLM-R, ALBERT) hold the mask as a piece of text too: a second mask is never let through.
    mask_id = tokenizer.mask_token_id
    return [[i for i in ids if i != mask_id] if mask_id in ids else ids for ids in all_ids]


def named(tokenizer: "Tokenizer") -> str:
    """Name a tokenizer in an error line: its class and where it was loaded from."""
    source = tokenizer.name_or_path
    return f"the tokenizer {source} ({type(tokenizer).__name__})" if source else f"the {type(tokenizer).__name__}"
