"""Encode prompts that a decoder continues with a label word (objective lm; paper, section 3.2 and appendix: OPT).

The template `task.lm.template` ends in `{mask}`, the place of the label word:

- the prompt is tokenized together with its word, as one text, so the tokens are those of the whole text;
- there is a space before the word, unless the template has a line end there, as RTE's does;
- the prompt starts with `task.bos_token_id`, or what the tokenizer itself puts before a text: OPT's </s>, Llama's <s>,
  nothing for GPT-2;
- a prompt that is too long loses its start and keeps its end, where the question is.
"""

from collections.abc import Iterable, Sequence

from mezo_cli.config.schema import Example, TaskConfig, TokenizedExample
from mezo_cli.errors import UserError
from mezo_cli.tasks import encoder
from mezo_cli.tasks.encoder import ClassificationEncoder, Tokenizer, describe_row, describe_tokenizer, tokenize
from mezo_cli.tasks.template import Literal, Sentence, Special, parse_template, quote

_SHOWN = 1 << 20  # tokens; a longer limit of a prompt is none
_MERGES = "its first token merges with the end of the text before it; end task.lm.template in other words before {mask}"


class LmEncoder(ClassificationEncoder):
    """A task's prompts and label words for a decoder.

    `label_ids` holds the tokens of each label word, in label order, the same for every row. `max_length` is the most
    tokens that the model is given: a prompt, and the longest word without its last token. A `TokenizedExample` is the
    prompt alone, and its `position` is the last one: the next token is the first of the label word.
    """

    scored_by = "label words that continue a prompt"

    def __init__(self, task: TaskConfig, tokenizer: Tokenizer) -> None:
        words, limit = task.lm.label_words or task.label_words, task.lm.max_length or encoder.UNBOUNDED
        super().__init__(task, tokenizer, words, limit)
        if task.lm.template is None:
            column = task.columns[-1] if task.columns else "text"
            raise UserError(
                f"task '{task.name}' has no template for decoders (objective=lm): set task.lm.template to one that ends"
                f" in the label word's place, e.g. '{{{column}}} It was {{mask}}', and task.lm.label_words if they "
                f"differ{task.offered}"
            )
        parts = parse_template(task.lm.template, list(task.columns), task.name)
        parts = parts[parts[0] == Special("cls") : len(parts) - (parts[-1] == Special("sep+"))]
        where = f"task '{task.name}', task.lm.template {task.lm.template!r}"
        if parts[-1] != Special("mask"):
            raise UserError(f"{where}: {{mask}}, the label word's place, must come last: what follows it is not scored")
        self._parts = [part for part in parts[:-1] if not isinstance(part, Special)]
        if len(self._parts) != len(parts) - 1:
            raise UserError(f"{where}: a decoder's prompt has no {{sep}}; write the text that separates them, or \\n")
        last = self._parts[-1]
        self._space = "" if isinstance(last, Literal) and last.text.endswith("\n") else " "
        key = "task.lm.label_words" if task.lm.label_words else "task.label_words"
        self.label_ids = [self._word_ids(index) for index in range(min(len(words), len(task.labels)))]
        encoder.check_label_words(task, words, key, self.label_ids)
        self._start = encoder.start_ids(tokenizer, task.bos_token_id)
        if self._max_prompt < 1:
            raise UserError(f"task '{task.name}': a limit of {self.max_length} tokens leaves none for the prompt")

    @property
    def _max_prompt(self) -> int:  # tokens
        return self.max_length - len(self._start) - max(map(len, self.label_ids)) + 1

    def prompt(self, texts: Sequence[str]) -> str:
        """Return the text before the label word."""
        return "".join(part.render(texts) if isinstance(part, Sentence) else part.text for part in self._parts)

    def demonstration(self, example: Example) -> str:
        """Return the prompt of a row with the word of its label."""
        return self.prompt(example.texts) + self.continuation(example.label)

    def write_snippet(self, variables: Sequence[str]) -> str:
        """Return code that tokenizes the prompt with the first word, and scores every word after it."""
        word, cut = self.label_ids[0], f"[-{self._max_prompt}:]" if self._max_prompt < _SHOWN else ""
        parts = [quote(part.text) if isinstance(part, Literal) else part.write_code(variables) for part in self._parts]
        lines = [
            f"prompt = {' + '.join(parts)}",
            f"prompt_ids = {self._start} + ids(prompt + {quote(self.continuation(0))})[:-{len(word)}]{cut}",
            "scores = []",
            f"for word in {self.label_ids}:  # after the prompt: {' '.join(', '.join(self.label_words).split())}",
            "    with torch.no_grad():",
            "        logits = model(input_ids=torch.tensor([prompt_ids + word])).logits[0, -len(word) - 1 : -1]",
            "    scores.append(logits.log_softmax(-1)[range(len(word)), word].sum())",
            "scores = torch.stack(scores)",
            encoder.print_probabilities(self.task.labels),
        ]
        return encoder.IDS + "\n".join(lines)

    def continuation(self, index: int) -> str:
        """Return the text of a label's word after the prompt, with its leading space where it has one."""
        return self._space + self.label_words[index]

    def whole_words(self) -> dict[str, int]:
        """Return the words that are one token after a prompt, and the token."""
        before = self.prompt(["a"] * len(self.task.columns)) + self._space
        return encoder.whole_words(self.tokenizer, before, self._prompt_ids)

    def decode(self, row: TokenizedExample) -> str:
        """Return the prompt as the model sees it, in one line: a line end is shown as \\n."""
        return super().decode(row).replace("\n", "\\n")

    def encode_chunk(self, examples: Sequence[Example]) -> Iterable[TokenizedExample]:
        """Tokenize each prompt with the first label's word, and cut the word off.

        `_word_ids` has checked that the prompt's tokens are the same before every word.
        """
        word, text = self.label_ids[0], self.continuation(0)
        texts = [self.lead(example) + self.prompt(example.texts) + text for example in examples]
        for example, ids in zip(examples, tokenize(texts, self.tokenizer), strict=True):
            if ids[-len(word) :] != word:
                raise UserError(f"{describe_row(self.task, example)}: {_MERGES}")
            ids = self._start + ids[: -len(word)][-self._max_prompt :]
            if not ids:
                raise UserError(f"{describe_row(self.task, example)}: the prompt is empty, so nothing can follow it")
            yield TokenizedExample(ids, [0] * len(ids), len(ids) - 1, example.label)

    def _word_ids(self, index: int) -> list[int]:
        """Return the tokens of a label's word after a prompt; the prompt's tokens must not depend on the word."""
        prompt = self.prompt(["a"] * len(self.task.columns))
        label, text = self.task.labels[index], self.label_words[index]
        which = f"task '{self.task.name}': the label word '{text}' (label '{label}')"
        with encoder.plain_backend(self.tokenizer) as backend:
            encoding = backend.encode(prompt + self.continuation(index), add_special_tokens=False)
        word = [token for token, (_, end) in zip(encoding.ids, encoding.offsets, strict=True) if end > len(prompt)]
        if not text.strip() or not word or self.tokenizer.unk_token_id in word:
            raise UserError(
                f"{which} is not a word of {describe_tokenizer(self.tokenizer)}; choose another: {encoder.PROPOSE}"
            )
        start = encoding.offsets[len(encoding.ids) - len(word)][0]
        prompt_ids = encoding.ids[: -len(word)]
        if index == 0:
            self._prompt_ids = prompt_ids
        if start < len(prompt) or encoding.ids[-len(word) :] != word or prompt_ids != self._prompt_ids:
            raise UserError(f"{which}: {_MERGES}")
        return word
