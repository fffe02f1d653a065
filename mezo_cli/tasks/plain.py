"""Texts as a plain input (objective cls), no template."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mezo_cli.errors import UserError, listed
from mezo_cli.schema import Encoded, Example, TaskConfig
from mezo_cli.tasks.inputs import Inputs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast as Tokenizer


class PlainInput(Inputs):
    """A task's texts as one plain input (objective cls): one sentence, or a pair, as the tokenizer itself joins them.

    The tokenizer puts its special tokens and cuts the longer sentence first at `limit`. `mask` is -1. Raises
    UserError for a task of more than two columns.
    """

    def __init__(self, task: TaskConfig, tokenizer: "Tokenizer") -> None:
        super().__init__(task, tokenizer)
        if not 1 <= len(task.columns) <= 2:
            raise UserError(
                f"task '{task.name}': objective=cls reads one or two texts, task.columns has {len(task.columns)}"
                f" ({listed(task.columns) or 'none'})"
            )
        self._has_segments = "token_type_ids" in tokenizer.model_input_names

    def _encode_chunk(self, examples: Sequence[Example]) -> Iterable[Encoded]:
        texts = [list(column) for column in zip(*(example.texts for example in examples), strict=True)]
        batch = self.tokenizer(
            *texts,
            truncation=True,
            max_length=self.limit,
            return_token_type_ids=self._has_segments,
            return_attention_mask=False,
            split_special_tokens=True,
            verbose=False,
        )
        all_ids = batch["input_ids"]
        all_segments = batch["token_type_ids"] if self._has_segments else ([0] * len(ids) for ids in all_ids)
        for example, ids, segments in zip(examples, all_ids, all_segments, strict=True):
            yield Encoded(ids, segments, -1, example.label)
