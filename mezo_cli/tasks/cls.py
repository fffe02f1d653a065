"""Encode a task's texts for a classification head (objective cls): one text or a pair, no template."""

from collections.abc import Iterable, Sequence

from mezo_cli.config.schema import Example, TaskConfig, TokenizedExample
from mezo_cli.errors import UserError, join
from mezo_cli.tasks.encoder import ClassificationEncoder, Tokenizer, plain_backend, print_probabilities


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
        with plain_backend(self.tokenizer):
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
            f"{print_probabilities(self.task.labels)}"
        )
