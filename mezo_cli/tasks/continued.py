"""A prompt that a decoder continues with a label word (objective lm; paper, section 3.2 and appendix: the OPT runs).

The template `task.lm.template` ends in `{mask}`, the place of the label word:

- the prompt is tokenised together with its word, as one text, so that the tokens are those of the whole;
- a space stands before the word unless the template puts a line end there, as RTE's does;
- before the prompt comes what the tokenizer itself puts before a text: OPT's </s>, Llama's <s>, nothing for GPT-2;
- a prompt that is too long loses its beginning and keeps its end, where the question stands.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mezo_cli.errors import UserError, listed
from mezo_cli.schema import Encoded, Example, TaskConfig
from mezo_cli.tasks.inputs import Inputs, longest_row, named, tokenize
from mezo_cli.templates import Literal, Sentence, Special, Template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast as Tokenizer

_UNBOUNDED = 1 << 30  # where neither the model nor task.lm.max_length says how long a row may be


class Continued(Inputs):
    """A task's prompts and label words seen through a decoder's tokenizer.

    `label_ids` holds each label word's tokens, in label order, the same for every row. `limit` is the most that the
    model is fed: a prompt and all but the last token of the longest word. An `Encoded` is the prompt alone, and its
    `mask` is the last position, where the next token is the word's first.

    Raises UserError for a task without a template for decoders, and for a template or a label word that does not fit.
    """

    def __init__(self, task: TaskConfig, tokenizer: "Tokenizer") -> None:
        super().__init__(task, tokenizer)
        self._parts = _before_the_word(task)
        self.words = list(task.lm.label_words or task.label_words)
        if len(self.words) != len(task.labels):
            key = "task.lm.label_words" if task.lm.label_words else "task.label_words"
            raise UserError(
                f"task '{task.name}' has {len(task.labels)} labels ({listed(task.labels)}) but {len(self.words)} label"
                f" words ({listed(self.words)}); {key} needs one for each, in the same order"
            )
        last = self._parts[-1]
        self._space = "" if isinstance(last, Literal) and last.text.endswith("\n") else " "
        self.label_ids = [self._word_ids(index) for index in range(len(self.words))]
        self._check_distinct()
        self._start = _start(tokenizer)
        self.limit = longest_row(tokenizer, task.lm.max_length or _UNBOUNDED)
        self._room = self.limit - len(self._start) - max(map(len, self.label_ids)) + 1
        if self._room < 1:
            raise UserError(f"task '{task.name}': a limit of {self.limit} tokens leaves no room for the prompt")

    def prompt(self, texts: Sequence[str]) -> str:
        """Return the text before the label word."""
        parts = (p.render(texts[p.column]) if isinstance(p, Sentence) else p.text for p in self._parts)
        return "".join(parts)

    def continuation(self, index: int) -> str:
        """Return the text of a label's word as it follows the prompt, with its leading space where it has one."""
        return self._space + self.words[index]

    def show(self, encoded: Encoded) -> str:
        """Return the prompt as the model sees it, on one line: a line end is shown as \\n."""
        return super().show(encoded).replace("\n", "\\n")

    def _encode_chunk(self, examples: Sequence[Example]) -> Iterable[Encoded]:
        # The first label's word stands for all: `_word_ids` has seen that what comes before a word is the same.
        word, follows = self.label_ids[0], self.continuation(0)
        texts = [self.prompt(example.texts) + follows for example in examples]
        for example, ids in zip(examples, tokenize(texts, self.tokenizer), strict=True):
            if ids[-len(word) :] != word:
                raise UserError(f"{self._row(example)}: {_MERGES}")
            ids = self._start + ids[: -len(word)][-self._room :]
            if not ids:
                raise UserError(f"{self._row(example)}: the prompt is empty, so there is nothing to go on from")
            yield Encoded(ids, [0] * len(ids), len(ids) - 1, example.label)

    def _word_ids(self, index: int) -> list[int]:
        """Return the tokens of a label's word after a prompt; the prompt's own must not depend on the word."""
        backend, prompt = self.tokenizer.backend_tokenizer, self.prompt(["a"] * len(self.task.columns))
        which = f"task '{self.task.name}': the label word '{self.words[index]}' (label '{self.task.labels[index]}')"
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        seen = backend.encode(prompt + self.continuation(index), add_special_tokens=False)
        word = [token for token, (_, end) in zip(seen.ids, seen.offsets, strict=True) if end > len(prompt)]
        if not self.words[index].strip() or not word or self.tokenizer.unk_token_id in word:
            raise UserError(f"{which} is no word of {named(self.tokenizer)}; choose another")
        begins = seen.offsets[len(seen.ids) - len(word)][0]
        # A label's prompt, tokenised with its word, must be every label's: then all are scored after the same tokens.
        first = seen.ids[: -len(word)]
        if index == 0:
            self._probe = first
        if begins < len(prompt) or seen.ids[-len(word) :] != word or first != self._probe:
            raise UserError(f"{which}: {_MERGES}")
        return word

    def _check_distinct(self) -> None:
        for index, word in enumerate(self.label_ids):
            if word in self.label_ids[:index]:
                first = self.label_ids.index(word)
                raise UserError(
                    f"task '{self.task.name}': labels '{self.task.labels[first]}' and '{self.task.labels[index]}' share"
                    f" their tokens, through their words '{self.words[first]}' and '{self.words[index]}'"
                )

    def _row(self, example: Example) -> str:
        return f"task '{self.task.name}', {example.where or f'the row {example.texts[0][:40]!r}'}"


_MERGES = "its first token takes in the end of the text before it; end task.lm.template in other words before {mask}"


def _before_the_word(task: TaskConfig) -> list[Literal | Sentence]:
    """Parse the template and return its parts without the mask that ends it."""
    if task.lm.template is None:
        near = task.columns[-1] if task.columns else "text"
        raise UserError(
            f"task '{task.name}' has no template for decoders (objective=lm): set task.lm.template to one that ends in "
            f"the label word's place, e.g. '{{{near}}} It was {{mask}}', and task.lm.label_words if they differ"
        )
    template = Template.parse(task.lm.template, list(task.columns), task.name)
    where = f"task '{task.name}', task.lm.template {template.text!r}"
    parts = list(template.parts)
    if parts and parts[0] == Special("cls"):
        parts.pop(0)
    if parts and parts[-1] == Special("sep+"):
        parts.pop()
    if parts[-1] != Special("mask"):
        raise UserError(f"{where}: {{mask}}, the label word's place, must stand last: what follows it is not scored")
    told = [part for part in parts[:-1] if not isinstance(part, Special)]
    if len(told) != len(parts) - 1:
        raise UserError(f"{where}: a decoder's prompt has no {{sep}}; write the text that stands between, or \\n")
    return told


def _start(tokenizer: "Tokenizer") -> list[int]:
    """Return what the tokenizer itself puts before a text; what it puts behind one is left out."""
    seen = tokenizer.backend_tokenizer.encode("a", add_special_tokens=True)
    return seen.ids[: seen.special_tokens_mask.index(0)]
