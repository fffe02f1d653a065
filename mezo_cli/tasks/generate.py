"""Encode prompts that a decoder continues, and the answers that it should give (objective generate).

- The prompt starts with `task.bos_token_id`, or what the tokenizer itself puts before a text: OPT's </s>, Llama's <s>,
  nothing for GPT-2. With `task.generate.chat` it is what the tokenizer's chat template makes of messages; a special
  token that is spelled out in a message is then that token.
- Prompt and answer are tokenized as one text where the prompt's tokens are then those of the prompt alone, which a
  completion follows. Elsewhere the answer is tokenized by itself, if that gives the same text.
- The answer ends with the tokenizer's end token, unless it ends with a stop text.
- With an empty prompt the answer is plain text. Where the tokenizer puts nothing before a text, the first token of it
  is the prompt: it is read, not learned.
- A row that is too long is refused, or loses the start of its prompt, and of its answer if that is longer still.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mezo_cli.config.schema import Example, TaskConfig
from mezo_cli.errors import UserError
from mezo_cli.tasks.encoder import PromptEncoder, Tokenizer, describe_tokenizer, plain_backend, start_ids
from mezo_cli.tasks.template import ColumnPath, RowTemplate, describe

# Some chat templates write today's date, by a function of this name. A run that is resumed tomorrow must have the same
# prompts, so they get the date that Llama's templates fall back to.
_FIXED_DATE = "{% macro strftime_now(format) %}26 Jul 2024{% endmacro %}"
_MERGES = "the answer's first token merges with the end of the prompt; move the text between them into the answer"


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One tokenized row of a task with `generate`.

    Attributes:
        input_ids: the tokens of the prompt, one or more (int32).
        answer_ids: the tokens of the answer after the prompt (int32); empty without `task.generate.answer`.
        index: the number of the row in its split.
        columns: every column of the row, lists and records included.
        golds: the right texts; empty for a task with neither gold nor answer.
        cut: whether tokens were cut off on the left.
        skipped: the tokens of the prompt, from and to, that are left out where an answer is scored that is longer than
            a completion may be: what a completion follows does not depend on the answer.
        where: its file and line, for error lines: "train.jsonl:17".
    """

    input_ids: Sequence[int]
    answer_ids: Sequence[int]
    index: int
    columns: Mapping[str, Any]
    golds: tuple[str, ...]
    cut: bool = False
    where: str = ""
    skipped: tuple[int, int] = (0, 0)

    @property
    def text(self) -> list[int]:
        """The tokens of the prompt and the answer, as the answer is scored."""
        first, last = self.skipped
        return [*self.input_ids[:first], *self.input_ids[last:], *self.answer_ids]

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_ids", array("i", self.input_ids))
        object.__setattr__(self, "answer_ids", array("i", self.answer_ids))


class RowTexts:
    """The templates of a task's `generate`, parsed.

    Attributes:
        prompt: the prompt's; with `chat` a name without braces is a column.
        answer: the answer's; None: none.
        gold: the right text or texts; None: the answer.
        columns: those that the prompt, the answer and the gold texts read.
    """

    def __init__(self, task: TaskConfig) -> None:
        settings, where = task.generate, f"task '{task.name}', task.generate"
        if settings.prompt is None:
            raise UserError(f"{where} has no prompt: set task.generate.prompt (docs/how-to/own-task.md)")
        is_name = settings.chat and settings.prompt != "" and "{" not in settings.prompt
        self.prompt = RowTemplate(f"{{{settings.prompt}}}" if is_name else settings.prompt, f"{where}.prompt")
        self.answer = None if settings.answer is None else RowTemplate(settings.answer, f"{where}.answer")
        self.gold = None if settings.gold is None else ColumnPath(settings.gold, f"{where}.gold")
        answers = [*(self.answer.paths if self.answer else ()), *([self.gold] if self.gold else ())]
        self.columns = list(dict.fromkeys(path.column for path in [*self.prompt.paths, *answers]))


class GenerateEncoder(PromptEncoder[PromptRow]):
    """A task's prompts and answers for a decoder.

    Attributes:
        max_length: the most tokens of a prompt and its answer, or its completion.
        stop: the texts that end a completion.
        keep_stop: whether a completion keeps the text that ended it.
    """

    limit_key = "task.generate.max_length"

    def __init__(self, task: TaskConfig, tokenizer: Tokenizer) -> None:
        settings = task.generate
        super().__init__(task, tokenizer, settings)
        self._texts, self._room = RowTexts(task), 0
        self.stop, self.keep_stop = [text.replace("\\n", "\n") for text in settings.stop], settings.keep_stop
        if settings.chat and not tokenizer.chat_template:
            why = f"{describe_tokenizer(tokenizer)} has no chat template"
            raise UserError(f"task '{task.name}', task.generate.chat=true: {why}; use a chat model, or chat=false")
        self._start = [] if settings.chat else start_ids(tokenizer, task.bos_token_id)
        self._is_plain_text = settings.prompt == ""
        if self._is_plain_text and (settings.chat or settings.answer is None):
            needs = "chat=true needs a prompt" if settings.chat else "and no answer: there is nothing to learn"
            raise UserError(f"task '{task.name}': task.generate.prompt is empty; {needs}")

    def leave_room(self, max_new_tokens: int) -> None:
        """Let each row that is encoded from now on leave room for a completion after its prompt."""
        if len(self._start) + 1 + max_new_tokens > self.max_length:
            limit = f"the limit of {self.max_length} tokens (task.generate.max_length, or the model's)"
            raise UserError(f"objective.max_new_tokens={max_new_tokens}: {limit} leaves none for a prompt")
        self._room = max_new_tokens

    def encode_all(self, examples: Sequence[Example]) -> list[PromptRow]:
        """Encode the rows of a split, in order, and number them."""
        rows = zip(super().encode_all(examples), examples, strict=True)
        return [replace(row, index=index, where=example.where) for index, (row, example) in enumerate(rows)]

    def parts(self, columns: Mapping[str, Any], where: str) -> tuple[str, list[str]]:
        """Return the prompt of a row and its answer; none if the task has none, or only prompts are encoded."""
        prompt = self._chat(columns, where) if self.task.generate.chat else self._texts.prompt.render(columns, where)
        if self._texts.answer is None or not self._has_answers:
            return prompt, []
        answer = self._texts.answer.render(columns, where)
        if not answer.strip() and not self._is_plain_text:
            raise UserError(f"{where}: the answer {answer!r} is empty")
        return prompt, [answer]

    def demonstration(self, example: Example) -> str:
        """Return the prompt of a row with its answer."""
        row, answer = self.read(example), self._texts.answer
        return self.parts(*row)[0] + ("" if answer is None else answer.render(*row))

    def _chat(self, columns: Mapping[str, Any], where: str) -> str:
        template, system = self._texts.prompt, self.task.generate.system
        path = template.only_path
        value = None if path is None else path.find(columns, where)
        if path is not None and isinstance(value, list):
            wrong = next((m for m in value if not (isinstance(m, Mapping) and {"role", "content"} <= m.keys())), None)
            if wrong is not None or not value:
                what = f"'{path.text}' {describe(value if wrong is None else wrong)}"
                raise UserError(f"{where}: {what}; a message is a record with role and content")
            if system is not None and value[0]["role"] == "system":
                why = "begins with a system message, and task.generate.system gives another"
                raise UserError(f"{where}: '{path.text}' {why}")
            # The model is to write the assistant's message at the end.
            messages = [dict(m) for m in (value[:-1] if value[-1]["role"] == "assistant" else value)]
        else:
            messages = [{"role": "user", "content": template.render(columns, where)}]
        if system is not None:
            messages = [{"role": "system", "content": system}, *messages]
        dated = _FIXED_DATE + self.tokenizer.get_chat_template()
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages, chat_template=dated, add_generation_prompt=True, tokenize=False
                )
            )
        except Exception as error:  # the template is a program of the tokenizer's
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(f"{where}: the tokenizer's chat template takes no such messages: {reason}") from error

    def templates(self) -> dict[str, str]:
        """Return the templates of the prompt and the answer."""
        settings = self.task.generate
        return {"prompt": settings.prompt or "", **({} if settings.answer is None else {"answer": settings.answer})}

    def sizes(self, row: PromptRow) -> dict[str, int]:
        """Return the tokens of the prompt, and of the answer if the task has one."""
        answer = {} if self._texts.answer is None else {"tokens per answer": len(row.answer_ids)}
        return {"tokens per prompt": len(row.input_ids), **answer}

    def show(self, row: PromptRow) -> str:
        """Return the prompt and the answer as the model sees them."""
        return self.decode(row) + (f" -> '{self.decode_ids(row.answer_ids)}'" if row.answer_ids else "")

    def distinct_text(self, row: PromptRow) -> str:
        """Return the prompt; of plain text the text."""
        return self.decode_ids(row.answer_ids) if self._is_plain_text else self.decode(row)

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        if not self.task.generate.chat:
            return super()._tokenize(texts)
        with plain_backend(self.tokenizer) as backend:
            backend.encode_special_tokens = False  # what the chat template writes has special tokens in it
            return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _answer_ids(self, answer: str, prompt_ids: list[int], ids: list[int], where: str) -> list[int]:
        answer_ids = ids[len(prompt_ids) :]
        if ids[: len(prompt_ids)] != prompt_ids:
            answer_ids = self._tokenize([answer])[0]
            if self.decode_ids([*prompt_ids, *answer_ids]) != self.decode_ids(ids):
                raise UserError(f"{where}: {_MERGES}")
        end = self.tokenizer.eos_token_id
        return answer_ids if end is None or answer.endswith(tuple(self.stop)) else [*answer_ids, end]

    def make_row(
        self, example: Example, where: str, prompt_ids: list[int], all_ids: list[list[int]], texts: list[str]
    ) -> PromptRow:
        """Return the row, cut to the limit."""
        if not (prompt_ids or self._start or self._is_plain_text):
            raise UserError(f"{where}: the prompt is empty, so nothing can follow it")
        columns, golds = self.read(example)[0], texts
        if self._texts.gold is not None and self._has_answers:
            golds = self._texts.gold.find_texts(columns, where, "task.generate.gold")
        elif not self.keep_stop:  # the answer as a completion would give it
            golds = [text.removesuffix(next(filter(text.endswith, self.stop), "")) for text in texts]
        prompt, answer = prompt_ids, self._answer_ids(texts[0], prompt_ids, all_ids[0], where) if texts else []
        length, space = len(prompt) + max(len(answer), self._room), self.max_length - len(self._start)
        is_cut = length > space
        if is_cut and not self._cuts:
            what = "answer" if len(answer) >= self._room else f"objective.max_new_tokens={self._room}"
            why = f"{len(self._start) + length} tokens of prompt and {what}, and the limit is {self.max_length}"
            raise UserError(f"{where}: {why}; shorten the row, or give task.generate.too_long=cut")
        if is_cut:
            answer = answer[-space:]
            prompt = prompt[max(0, len(prompt) - max(0, space - (self._room or len(answer)))) :]
        over, ids = len(prompt) + len(answer) - space, [*self._start, *prompt]
        skipped = (len(self._start), len(self._start) + over) if over > 0 else (0, 0)
        if not ids:  # plain text, and no start token to learn its first token from
            ids, answer = answer[:1], answer[1:]
        if self._is_plain_text and not answer:
            raise UserError(f"{where}: the text is empty: there is nothing to learn")
        return PromptRow(ids, answer, 0, columns, tuple(golds), is_cut, skipped=skipped)
