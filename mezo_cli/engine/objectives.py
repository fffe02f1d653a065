"""What each objective asks an engine for: log-probabilities of labels and candidates, completions of prompts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mezo_cli.engine.engine import Engine
from mezo_cli.engine.members import Members
from mezo_cli.objectives.choice import Choice
from mezo_cli.objectives.collate import Batch
from mezo_cli.objectives.decoder import CandidateScorer, Lm, sum_of_candidates
from mezo_cli.objectives.decoding import Completion, CompletionText, Sampling
from mezo_cli.objectives.generation import Generation
from mezo_cli.objectives.scoring import in_float64
from mezo_cli.objectives.settings import GenerateConfig
from mezo_cli.tasks.generate import PromptRow

SCORED = 16  # tokens of a row whose scores are compared with the model's own


class EngineScores:
    """Lets an engine score the label words of objective lm and the candidates of choice; both signs in one request."""

    @staticmethod
    def longest(objective: Lm | Choice, rows: Sequence[Any]) -> int:
        """Return the tokens of the longest prompt with its longest candidate, whose last token is only scored."""
        return max(len(ids) for ids, _ in texts_of(objective.scorer, rows)) - 1

    @staticmethod
    def attach(objective: Lm | Choice, engine: Engine, rows: Sequence[Any]) -> None:
        """Let an engine score the candidates of an objective; compare some scores when it has just started."""
        members, scorer = engine.attach(objective.loaded, objective.forward), objective.scorer

        def by_engine(batch: Batch) -> Tensor:
            of_tokens = members.token_scores(texts_of(scorer, batch.rows)).to(batch.labels.device)
            return sum_of_candidates(in_float64(of_tokens), batch.layout)

        def comparable(scores: Tensor) -> Tensor:  # the model's own may be without the prompt's normalizer
            return scores if scorer.normalizes_first else scores.log_softmax(-1)

        batch = objective.collate(rows)
        engine.check(
            objective.forward, lambda: comparable(scorer.log_probs(batch)), lambda: comparable(by_engine(batch))
        )
        scorer.engine = by_engine


def texts_of(scorer: CandidateScorer, rows: Sequence[Any]) -> list[tuple[list[int], int]]:
    """Return each row's prompt with each of its candidates, and how many tokens of it, at the end, are scored."""
    return [
        ([*prompt, *ids], count)
        for prompt, candidates, counts in map(scorer.read, rows)
        for ids, count in zip(candidates, counts, strict=True)
    ]


class EngineAnswers:
    """An engine's completions of prompts and scores of answers, for objective generate.

    Where a completion ends, and what its text is, is decided here by the tokens, as without an engine.
    """

    def __init__(self, members: Members, tokenizer: Any, ends: frozenset[int]) -> None:
        self._members, self._tokenizer, self._ends = members, tokenizer, ends

    @staticmethod
    def longest(objective: Generation, rows: Sequence[PromptRow]) -> int:
        """Return the tokens of the longest prompt with its answer, or with a completion."""
        assert isinstance(objective.config.objective, GenerateConfig)
        room = objective.config.objective.completion_tokens(objective.config)
        return max(len(row.input_ids) + max(len(row.answer_ids), room) for row in rows)

    @staticmethod
    def attach(objective: Generation, engine: Engine, rows: Sequence[PromptRow]) -> None:
        """Let an engine complete the prompts and score the answers of an objective from now on.

        When it has just started, the losses of the rows' last tokens are compared with the model's own.
        """
        members = engine.attach(objective.loaded, objective.forward)
        answers = EngineAnswers(members, objective.loaded.tokenizer, objective.decoder.ends)
        scored = [with_last_tokens_scored(row) for row in rows]
        batch = objective.collate(scored)
        engine.check(objective.forward, lambda: objective.answer_losses(batch).cpu(), lambda: answers.losses(scored))
        objective.engine = answers

    def complete(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling) -> list[Completion]:
        """Complete each prompt; with a temperature by the engine's random numbers of the prompt's seed."""
        text = CompletionText(self._tokenizer, sampling.stop, sampling.keep_stop)
        common = {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "stop": list(sampling.stop),
            "stop_token_ids": sorted(self._ends),
        }
        (of_all,) = self._members.ask(list(prompts), [{**common, "seed": seed} for seed in seeds])
        completions = []
        for ids in of_all:  # each ends where one without an engine ends: the engine may find a stop text later
            pairs = enumerate(ids, start=1)
            end = next((n for n, token in pairs if token in self._ends or text.has_ended(ids[:n])), None)
            said = ids[:end]
            shown = said[:-1] if said and said[-1] in self._ends else said
            completions.append(Completion(said, text.of(shown), end is None and len(ids) >= sampling.max_new_tokens))
        return completions

    def losses(self, rows: Sequence[PromptRow]) -> Tensor:
        """Return the sum of the losses of each answer's tokens: float64 [rows]."""
        texts = [(row.text, len(row.answer_ids)) for row in rows]
        (of_all,) = self._members.token_scores(texts).double()
        return -torch.stack([of_row.sum() for of_row in of_all.split([count for _, count in texts])])


def with_last_tokens_scored(row: PromptRow) -> PromptRow:
    """Return a row whose answer is the last tokens of its prompt and answer; a text of one token is taken twice."""
    text = row.text if len(row.text) > 1 else row.text * 2
    begin = max(1, len(text) - SCORED)
    return replace(row, input_ids=text[:begin], answer_ids=text[begin:], skipped=(0, 0))
