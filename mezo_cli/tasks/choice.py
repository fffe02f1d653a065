"""Encode prompts and the candidates that may continue them (objective choice; paper, appendix E.2: OPT's tasks).

- White space before a prompt and spaces after it are dropped, and spaces after a candidate.
- A candidate is tokenized together with its prompt, as one text. Its tokens are the last ones of that text: as many as
  it has more than the prompt alone. So where prompt and candidate merge, the tokens are those of the published code.
- Candidates share the tokens that all of these texts begin with. Nearly always that is the prompt.
- The prompt starts with what the tokenizer itself puts before a text: OPT's </s>, Llama's <s>, nothing for GPT-2.
- A row that is too long is refused, or loses the start of its prompt, but for the first token. All of its candidates
  have the same prompt: the one that leaves room for the longest.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mezo_cli.config.schema import Example, TaskConfig
from mezo_cli.errors import UserError, did_you_mean, join
from mezo_cli.tasks.encoder import PromptEncoder, Tokenizer, start_ids
from mezo_cli.tasks.template import ColumnPath, RowTemplate, describe

CANDIDATE = "candidate"  # in a template of `task.choice.candidates`: a text of `task.choice.each`


@dataclass(frozen=True, slots=True)
class ChoiceRow:
    """One tokenized row of a task with `choice`.

    Attributes:
        input_ids: the tokens that all candidates follow, one or more (int32): the prompt.
        candidates: the tokens of each candidate after these (int32).
        scored: how many of them, at the end, are scored: all, unless the candidate merged with the end of the prompt.
        texts: the text of each candidate.
        right: the numbers of the right candidates, of which the first is trained; empty for a row to predict.
        cut: whether the prompt lost its start.
    """

    input_ids: Sequence[int]
    candidates: tuple[Sequence[int], ...]
    scored: tuple[int, ...]
    texts: tuple[str, ...]
    right: tuple[int, ...]
    cut: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_ids", array("i", self.input_ids))
        object.__setattr__(self, "candidates", tuple(array("i", ids) for ids in self.candidates))

    @property
    def position(self) -> int:
        """The last token of the prompt."""
        return len(self.input_ids) - 1

    @property
    def label(self) -> int:
        """The number of the candidate that is trained; 0 for a row to predict."""
        return self.right[0] if self.right else 0


class ChoiceTexts:
    """The templates of a task's `choice`, parsed.

    Attributes:
        prompt: the prompt's.
        candidates: one per candidate; with `each` one, which is rendered for each text of that list.
        each: the list of texts; None: a row has all of `candidates`.
        right: the right one of them, or several; None without `each`.
        columns: those that the prompt and the candidates read, and that of the right one.
    """

    def __init__(self, task: TaskConfig) -> None:
        settings, where = task.choice, f"task '{task.name}', task.choice"
        self.prompt = RowTemplate(settings.prompt or "", f"{where}.prompt")
        self.candidates = [RowTemplate(text, f"{where}.candidates {text!r}") for text in settings.candidates]
        self.each = None if settings.each is None else ColumnPath(settings.each, f"{where}.each")
        self.right = None if settings.right is None else ColumnPath(settings.right, f"{where}.right")
        columns = [path.column for template in (self.prompt, *self.candidates) for path in template.paths]
        if self.each is None:
            for name in columns:
                if name not in task.columns:
                    near = f"{did_you_mean(name, task.columns)}; task.columns are {join(task.columns)}"
                    raise UserError(f"{where}: unknown column '{name}'{near}")
        elif not any(path.column == CANDIDATE for path in self.candidates[0].paths):
            raise UserError(f"{where}.candidates {settings.candidates[0]!r}: no {{{CANDIDATE}}}: all would be the same")
        else:
            columns = [*(name for name in columns if name != CANDIDATE), self.each.column]
        self.columns = list(dict.fromkeys([*columns, *([] if self.right is None else [self.right.column])]))


class ChoiceEncoder(PromptEncoder[ChoiceRow]):
    """A task's prompts and candidates for a decoder.

    Attributes:
        max_length: the most tokens of a prompt and its longest candidate.
    """

    limit_key = "task.choice.max_length"

    def __init__(self, task: TaskConfig, tokenizer: Tokenizer) -> None:
        super().__init__(task, tokenizer, task.choice)
        self._texts, self._start = ChoiceTexts(task), start_ids(tokenizer, task.bos_token_id)

    def parts(self, columns: Mapping[str, Any], where: str) -> tuple[str, list[str]]:
        """Return the prompt of a row and the texts of its candidates."""
        prompt, templates = self._texts.prompt.render(columns, where), self._texts.candidates
        if self._texts.each is None:
            texts = [template.render(columns, where) for template in templates]
        else:
            of_items = [{**columns, CANDIDATE: item} for item in self._items(columns, where)]
            texts = [templates[0].render(row, where) for row in of_items]
        for number, text in enumerate(texts, 1):
            if not text.strip():
                raise UserError(f"{where}: candidate {number} of {len(texts)} is empty")
        return prompt.lstrip().rstrip(" "), [text.rstrip(" ") for text in texts]

    def demonstration(self, example: Example) -> str:
        """Return the prompt of a row with the candidate that is trained."""
        prompt, texts = self.parts(*self.read(example))
        return prompt + texts[self._right(example)[0]]

    def templates(self) -> dict[str, str]:
        """Return the templates of the prompt and of the candidates."""
        choice = self.task.choice
        templates = {f"candidate {number}": text for number, text in enumerate(choice.candidates, 1)}
        if choice.each is not None:
            templates = {"candidates": choice.candidates[0], f"{CANDIDATE}: each of": choice.each}
        return {"prompt": choice.prompt or "", **templates}

    def sizes(self, row: ChoiceRow) -> dict[str, int]:
        """Return the tokens of the prompt and of the longest candidate, and the number of candidates."""
        longest = max(map(len, row.candidates))
        return {"tokens per prompt": len(row.input_ids), "longest candidate": longest, "candidates": len(row.texts)}

    def show(self, row: ChoiceRow) -> str:
        """Return the prompt and the candidates, the right ones with a star, as the model sees them."""
        shown = [f"'{self.decode_ids(ids)}'{'*' * (i in row.right)}" for i, ids in enumerate(row.candidates)]
        return f"{self.decode(row)} -> {' | '.join(shown)}"

    def distinct_text(self, row: ChoiceRow) -> str:
        """Return the prompt and the candidates: rows of ReCoRD share their prompts."""
        return self.show(row)

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        return super()._tokenize([text.lstrip() for text in texts])  # where the prompt is empty

    def _items(self, columns: Mapping[str, Any], where: str) -> list[str]:
        assert self._texts.each is not None
        value = self._texts.each.find(columns, where)
        if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
            what = f"task.choice.each={self._texts.each.text} {describe(value)}"
            raise UserError(f"{where}: {what}; it must be a list of texts, one or more")
        return value

    def _right(self, example: Example) -> tuple[int, ...]:
        if self._texts.right is None:
            return (example.label,)
        columns, where = self.read(example)
        wanted = self._texts.right.find_texts(columns, where, "task.choice.right")
        items = self._items(columns, where)
        numbers = dict.fromkeys(number for text in wanted for number, item in enumerate(items) if item == text)
        if not numbers:
            raise UserError(f"{where}: the right one, {join(wanted)}, is not among the {len(items)} candidates")
        return tuple(numbers)

    def make_row(
        self, example: Example, where: str, prompt_ids: list[int], all_ids: list[list[int]], texts: list[str]
    ) -> ChoiceRow:
        """Return the row, cut to the limit."""
        scored = [len(ids) - len(prompt_ids) for ids in all_ids]
        if min(scored) < 1:
            shown = texts[scored.index(min(scored))]
            raise UserError(f"{where}: the candidate {shown[:40]!r} adds no token to the prompt; change their border")
        contexts = [ids[: len(ids) - count] for ids, count in zip(all_ids, scored, strict=True)]
        first, last = min(contexts), max(contexts)  # what these two begin with, all in between do
        pairs = enumerate(zip(first, last, strict=False))
        common = next((number for number, (a, b) in pairs if a != b), min(len(first), len(last)))
        prompt, candidates = [*self._start, *all_ids[0][:common]], [ids[common:] for ids in all_ids]
        if not prompt:
            raise UserError(f"{where}: the prompt is empty, so nothing can follow it")
        longest = max(candidates, key=len)
        room, kept = self.max_length - len(longest), max(1, len(self._start))
        is_cut = len(prompt) > room
        if is_cut and not self._cuts:
            why = f"{len(prompt)} tokens of prompt and {len(longest)} of a candidate; the limit is {self.max_length}"
            raise UserError(f"{where}: {why}; shorten the row, or give task.choice.too_long=cut")
        if room < kept:
            shown = texts[candidates.index(longest)][:40]
            why = f"the candidate {shown!r} has {len(longest)} tokens, and the limit is {self.max_length}"
            raise UserError(f"{where}: {why}: it would be cut, or leave no room for a prompt (task.choice.max_length)")
        if is_cut:
            prompt = [*prompt[:kept], *prompt[len(prompt) - (room - kept) :]]
        right = self._right(example) if self._has_answers else ()
        return ChoiceRow(prompt, tuple(candidates), tuple(scored), tuple(texts), right, is_cut)
