"""Measure how far a run on generated text has moved its weights, and what it has forgotten of the rows of `data.keep`.

theta0 is copied to main memory as it is stored: a second copy of the trainable tensors (all of the model with
peft=none, the adapter else). What theta0 says of the answers of `data.keep` is the log-probability of every word at
each of their tokens, float32 in main memory too; files that would take more than `MOST_BYTES` are refused.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mezo_cli.config.schema import Config
from mezo_cli.data.files import read_table
from mezo_cli.data.table import task_rows
from mezo_cli.errors import UserError
from mezo_cli.objectives.generation import Generation
from mezo_cli.perturb.params import Params
from mezo_cli.tasks.generate import GenerateEncoder, PromptRow
from mezo_cli.training.session import Session

log = logging.getLogger("mezo")

MOST_BYTES = 4e9  # of the log-probabilities at theta0
PART = 1 << 22  # scalars of a tensor that are compared at a time, in float64


def read_kept_rows(config: Config, file: Path, tokenizer: Any) -> list[PromptRow]:
    """Return the rows of `data.keep`, encoded as the task's prompts are."""
    settings = config.task.generate.replace(prompt="{prompt}", answer="{answer}", gold=None)
    task = config.task.replace(labels=[], columns=[], rename={}, generate=settings)
    try:
        examples = task_rows(read_table([file], task), task).examples()
        rows = GenerateEncoder(task, tokenizer).encode_all(examples)
    except UserError as error:
        raise UserError(f"data.keep: {error}") from error
    tokens, words = sum(len(row.answer_ids) for row in rows), len(tokenizer)
    if 4 * tokens * words > MOST_BYTES:
        why = f"{tokens:,} tokens of answers times {words:,} words take {4 * tokens * words / 1e9:.3g} GB"
        raise UserError(f"data.keep={file}: {why}, and {MOST_BYTES / 1e9:g} GB are the limit; give fewer rows")
    return rows


class Forgetting:
    """Compares weights, the tensors of some names, with those that the run began with, at which `start` is.

    `rows` are those of `data.keep`. The session `start` is not kept.
    """

    def __init__(self, config: Config, start: Session, names: list[str], rows: list[PromptRow]) -> None:
        size = config.eval_batch_size
        self._batches = [rows[i : i + size] for i in range(0, len(rows), size)]
        self._start = {name: start.params.tensors[name].detach().to("cpu", copy=True).flatten() for name in names}
        self._before = [[of_row.cpu() for of_row in _log_probs(start, batch)] for batch in self._batches]
        copied = sum(p.nbytes for p in self._start.values())
        kept = sum(of_row.nbytes for batch in self._before for of_row in batch)
        log.info("start  kept in main memory for the drift: %.3g MB", (copied + kept) / 1e6)

    def measure(self, session: Session) -> dict[str, float]:
        """Return `drift`, and of the rows of `data.keep` `keep_log_prob` and `keep_kl`: means over their tokens."""
        figures = {"drift": _drift(session.params, self._start)}
        if not self._batches:
            return figures
        log_prob, divergence, tokens = 0.0, 0.0, 0
        for batch, before in zip(self._batches, self._before, strict=True):
            for row, after, known in zip(batch, _log_probs(session, batch), before, strict=True):
                old, new = known.double(), after.cpu().double()
                answer = torch.tensor(list(row.answer_ids)).unsqueeze(1)
                log_prob += float(new.gather(1, answer).sum())
                # A word that theta0 excludes (-inf) adds nothing.
                divergence += float(torch.where(old.exp() > 0, old.exp() * (old - new), 0.0).sum())
                tokens += len(row.answer_ids)
        return {**figures, "keep_log_prob": log_prob / tokens, "keep_kl": divergence / tokens}


def _log_probs(session: Session, rows: list[PromptRow]) -> list[Tensor]:
    assert isinstance(session.objective, Generation)
    return session.objective.answer_log_probs(session.objective.collate(rows))


def _drift(params: Params, start: dict[str, Tensor]) -> float:
    """Return |theta - theta0| / |theta0|, euclidean norms over all trainable tensors; 0 where nothing has moved."""
    moved, length = 0.0, 0.0
    for name, before in start.items():
        tensor = params.tensors[name].detach().flatten()
        for first in range(0, len(before), PART):
            old = before[first : first + PART].double()
            moved += float((tensor[first : first + PART].cpu().double() - old).square().sum())
            length += float(old.square().sum())
    return (moved / length) ** 0.5 if moved and length else 0.0
