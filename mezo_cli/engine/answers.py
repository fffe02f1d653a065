"""What objective generate asks an engine for: completions of prompts, and the log-probabilities of answers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mezo_cli.engine.members import Members
from mezo_cli.models.completion_text import CompletionText
from mezo_cli.models.decoding import Completion, Sampling

if TYPE_CHECKING:
    from mezo_cli.tasks.generate import PromptRow


class EngineAnswers:
    """An engine's answers, with the weights that are active in the session's forwards.

    Where a completion ends, and what its text is, is decided here by the tokens, as without an engine.

    Args:
        members: asks the engine.
        tokenizer: of the model.
        ends: the tokens that end a completion.
    """

    def __init__(self, members: Members, tokenizer: Any, ends: frozenset[int]) -> None:
        self._members, self._tokenizer, self._ends = members, tokenizer, ends

    def complete(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling) -> list[Completion]:
        """Complete each prompt; with a temperature by the engine's random numbers of the prompt's seed."""
        text = CompletionText(self._tokenizer, sampling.stop, sampling.keep_stop)
        of_signs = self._members.ask(
            "generate",
            prompts=[list(prompt) for prompt in prompts],
            seeds=list(seeds),
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            stop=list(sampling.stop),
            ends=sorted(self._ends),
        )
        return [self._completion(ids, text, sampling.max_new_tokens) for ids in of_signs[0]]

    def _completion(self, ids: list[int], text: CompletionText, limit: int) -> Completion:
        """Return the completion that ends where one without an engine ends: it may find a stop text later."""
        for number, token in enumerate(ids, start=1):
            if token in self._ends:
                return Completion(ids[:number], text.of(ids[: number - 1]), False)
            if text.has_ended(ids[:number]):
                return Completion(ids[:number], text.of(ids[:number]), False)
        return Completion(ids, text.of(ids), len(ids) >= limit)

    def log_probs(self, rows: Sequence["PromptRow"]) -> list[Tensor]:
        """Return the log-probability of each token of each row's answer: float64 [tokens] per row.

        Each token is scored after a prompt of all before it, of which the engine keeps the keys and values. vLLM's own
        log-probabilities of a prompt's tokens fail on a CPU where it has adapters.
        """
        texts = [[*row.input_ids, *row.answer_ids] for row in rows]
        places = [(i, n) for i, row in enumerate(rows) for n in range(len(row.input_ids), len(texts[i]))]
        prompts, tokens = [texts[i][:n] for i, n in places], [[texts[i][n]] for i, n in places]
        (scores,) = self._members.ask("score", prompts=prompts, tokens=tokens)
        of_all = torch.tensor([score for (score,) in scores], dtype=torch.float64)
        return list(of_all.split([len(row.answer_ids) for row in rows]))
