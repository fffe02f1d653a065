"""Measure how far a run on generated text has moved its weights, and what it has forgotten of the rows of `data.keep`.

For the drift theta0 is copied to main memory as it is stored: a second copy of the trainable tensors (all of the model
with peft=none, the adapter else), where `objective.drift` asks for it, or where it is null and that is small. What
theta0 says of the answers of `data.keep` is the log-probability of every word at each of their tokens, float32 in main
memory too.
"""

import torch
from torch import Tensor

from mezo_cli.config.schema import Config
from mezo_cli.console import log
from mezo_cli.objectives.generation import Generation
from mezo_cli.objectives.settings import GenerateConfig
from mezo_cli.perturb.params import Params
from mezo_cli.session.session import Session
from mezo_cli.tasks.generate import PromptRow

SMALL_COPY = 1e9  # bytes of a copy of theta0 that is made unasked
PART = 1 << 22  # scalars of a tensor that are compared at a time, in float32


class Forgetting:
    """Compares the weights of a session with those that it has now, at the start of the run.

    `rows` are those of `data.keep`.
    """

    def __init__(self, config: Config, session: Session, rows: list[PromptRow]) -> None:
        size, tensors = config.eval_batch_size, session.params.tensors
        self._batches = [rows[i : i + size] for i in range(0, len(rows), size)]
        self._before = [[of_row.cpu() for of_row in _log_probs(session, batch)] for batch in self._batches]
        copied = sum(p.nbytes for p in tensors.values())
        assert isinstance(config.objective, GenerateConfig)
        wanted = copied <= SMALL_COPY if config.objective.drift is None else config.objective.drift
        if not wanted:
            tensors, copied = {}, 0
            log.info("start  the drift is not measured: objective.drift=true keeps a copy of the weights for it")
        self._start = {name: p.detach().to("cpu", copy=True).flatten() for name, p in tensors.items()}
        kept = sum(of_row.nbytes for batch in self._before for of_row in batch)
        if copied + kept:
            log.info("start  kept in main memory for the drift: %.3g MB", (copied + kept) / 1e6)

    def measure(self, session: Session) -> dict[str, float]:
        """Return `drift`, and of the rows of `data.keep` `keep_log_prob` and `keep_kl`: means over their tokens."""
        figures = {"drift": _drift(session.params, self._start)} if self._start else {}
        if not self._batches:
            return figures
        log_prob, divergence, tokens = 0.0, 0.0, 0
        for batch, before in zip(self._batches, self._before, strict=True):
            for row, after, log_probs in zip(batch, _log_probs(session, batch), before, strict=True):
                old, new = log_probs.double(), after.cpu().double()
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
    moved, length = 0.0, 0.0  # |theta - theta0|^2 and |theta0|^2, over all trainable tensors
    for name, before in start.items():
        tensor = params.tensors[name].detach().flatten()
        for first in range(0, len(before), PART):
            old = before[first : first + PART].to(tensor.device).float()
            moved += _sum_of_squares(tensor[first : first + PART].float() - old)
            length += _sum_of_squares(old)
    return (moved / length) ** 0.5 if moved and length else 0.0


def _sum_of_squares(part: Tensor) -> float:
    on_host = part.device.type == "mps"  # which has no float64
    return float((part.cpu() if on_host else part).square().sum(dtype=torch.float64))
