"""Objective `choice`: which of a row's candidates most likely continues its prompt (paper, section 3.2: OPT).

The score of a candidate is the mean of the log-probabilities of its tokens after the prompt, normalized over the whole
vocabulary, or their sum (`objective.normalize`). The losses: cross-entropy over the scores of the row's candidates;
`lm`, cross-entropy of the right candidate's tokens, averaged over those of all rows (COPA and ReCoRD in the paper); and
accuracy. A row may have several right candidates: any counts as right, the first is trained.

A prompt is computed once for all of its candidates (decoder.py).
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mezo_cli.config.schema import Config
from mezo_cli.models import CAUSAL_LM, LoadedModel
from mezo_cli.objectives.base import Measured, Objective, Records
from mezo_cli.objectives.collate import Arrays, Batch
from mezo_cli.objectives.decoder import CandidateScorer, Row, plain_log_probs
from mezo_cli.objectives.prediction import ChosenCandidate
from mezo_cli.objectives.scoring import Evaluation, cross_entropy_of_rows, mean_of
from mezo_cli.objectives.settings import ChoiceConfig
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.tasks.choice import ChoiceEncoder, ChoiceRow

# What an evaluation follows from: `lm_loss` is minus the log-probability of the right candidate's tokens.
VALUES = ("cross_entropy", "right", "lm_loss", "tokens")


class Choice(Objective):
    """Scores the candidates of each row."""

    model_kind = CAUSAL_LM
    encoder_class = ChoiceEncoder
    prediction = ChosenCandidate

    def __init__(self, config: Config, loaded: LoadedModel, forward: PerturbedForward, encoder: Any) -> None:
        super().__init__(config, loaded, forward, encoder)
        assert isinstance(config.objective, ChoiceConfig)
        self._settings, self.loss_from_counts = config.objective, config.objective.loss == "lm"
        self.scorer = CandidateScorer(loaded.model, forward, _texts_of, "choice", normalizes_first=True)
        self.supports_paired_forward, self.frozen = self.scorer.is_packed, self.scorer.frozen

    def lay_out(self, rows: Sequence[ChoiceRow]) -> Arrays:
        """Lay out prompts and candidates for one forward; and `right`: bool [rows, most candidates]."""
        arrays = self.scorer.lay_out(rows)
        numbers = range(arrays["counts"].shape[1])
        return arrays | {"right": np.array([[number in row.right for number in numbers] for row in rows])}

    @classmethod
    def check_rows(cls, encoder: Any) -> list[ChoiceRow]:
        """Return two short rows of tokens that any text may have."""
        texts = ("a", "a b c", "b", "c d e")
        ids = [tuple(encoder.tokenizer.encode(text, add_special_tokens=False)) or (0,) for text in texts]
        prompts, words = ids[:2], tuple(ids[2:])
        return [ChoiceRow(prompt, words, tuple(map(len, words)), ("", ""), (1,)) for prompt in prompts]

    def scores(self, batch: Batch, log_probs: Tensor | None = None) -> Tensor:
        """Return the scores of the candidates, -inf where a row has fewer: float64 [signs, rows, most candidates]."""
        log_probs = self.scorer.log_probs(batch) if log_probs is None else log_probs
        counts = batch.layout["counts"]
        scores = log_probs / counts.clamp(min=1) if self._settings.normalize == "mean" else log_probs
        return scores.masked_fill(counts == 0, -math.inf)

    def outputs(self, batch: Batch) -> Tensor:
        """Return the mean log-probability of the trained candidate and the mean of all: float32 [rows, 2].

        [2, rows, 2] under both signs of a perturbation.
        """
        counts = batch.layout["counts"]
        means = self.scorer.log_probs(batch) / counts.clamp(min=1)
        of_all = means.sum(-1) / (counts > 0).sum(-1)
        return torch.stack([_of_trained(means, batch), of_all], dim=-1).float().squeeze(0)

    @classmethod
    def plain_outputs(cls, loaded: LoadedModel, rows: Sequence[ChoiceRow], encoder: Any) -> Tensor:
        """Return the same by the model's own forward, one candidate at a time."""
        outputs = []
        for row in rows:
            numbers, texts = range(len(row.candidates)), _texts_of(row)
            means = torch.stack([plain_log_probs(loaded, texts, number).mean() for number in numbers])
            outputs.append(torch.stack([means[row.label], means.mean()]))
        return torch.stack(outputs)

    def row_losses(self, batch: Batch) -> Tensor:
        """Return the loss of each row, [1, rows] or [2, rows]: cross-entropy, or 1 for a wrong prediction."""
        scores = self.scores(batch)
        if self._settings.loss == "accuracy":
            return 1.0 - _is_right(scores, batch)
        return torch.stack([cross_entropy_of_rows(of_sign, batch.labels) for of_sign in scores])

    def counts(self, batch: Batch) -> Tensor:
        """Return minus the log-probabilities of the tokens of all right candidates, and their number: [signs, 2]."""
        trained = _of_trained(self.scorer.log_probs(batch), batch)
        tokens = _of_trained(batch.layout["counts"].expand(len(trained), -1, -1), batch)
        return torch.stack([-trained.sum(-1), tokens.sum(-1).to(trained)], dim=-1)

    def measure(self, batch: Batch) -> Measured:
        """Return `VALUES` of each row, and a record: prompt, candidates, scores and their softmax, prediction."""
        log_probs = self.scorer.log_probs(batch)
        scores = self.scores(batch, log_probs)
        tokens = _of_trained(batch.layout["counts"].unsqueeze(0), batch)[0].to(scores)
        values = [cross_entropy_of_rows(scores[0], batch.labels), _is_right(scores, batch)[0]]
        values += [-_of_trained(log_probs, batch)[0], tokens]
        table = torch.cat([torch.stack(values, dim=1), scores[0]], dim=1).cpu()  # the one wait for the device
        records = list[dict[str, Any]]()
        for row, padded in zip(batch.rows, table.numpy()[:, len(VALUES) :], strict=True):
            of_row, right = padded[: len(row.texts)], [row.texts[number] for number in row.right]
            weights, prediction = np.exp(of_row - of_row.max()), row.texts[int(of_row.argmax())]
            record = {
                "prompt": self.encoder.decode(row),
                "candidates": list(row.texts),
                "scores": of_row.tolist(),
                "probabilities": (weights / weights.sum()).tolist(),
                "prediction": prediction,
            }
            if right:  # a row to predict has none
                record |= {"right": right, "accuracy": float(prediction in right)}
            records.append(record)
        return table[:, : len(VALUES)], records

    def assess(self, values: Tensor, rows: Sequence[ChoiceRow], records: Records | None = None) -> Evaluation:
        """Return the evaluation that `VALUES` of rows are: the accuracy, and the loss."""
        losses, right, lm_losses, tokens = values.double().numpy().T
        if self._settings.loss == "lm":
            of_loss = mean_of(lm_losses, tokens)
        else:
            of_loss = mean_of(losses if self._settings.loss == "cross_entropy" else 1.0 - right)
        accuracy = float(right.mean())
        loss = float(of_loss(np.arange(len(right))[None])[0]) if bool(values.isfinite().all()) else math.nan
        samples, text = {"accuracy": right == 1.0, "loss": of_loss}, f"accuracy {100 * accuracy:5.1f}%  loss {loss:.4f}"
        return Evaluation(loss, {"accuracy": accuracy}, values, list(records or []), samples=samples, text=text)


def _texts_of(row: ChoiceRow) -> Row:
    return row.input_ids, row.candidates, row.scored


def _of_trained(values: Tensor, batch: Batch) -> Tensor:  # [signs, rows, candidates] -> [signs, rows]
    return values.gather(-1, batch.labels.expand(len(values), -1).unsqueeze(-1)).squeeze(-1)


def _is_right(scores: Tensor, batch: Batch) -> Tensor:
    """Return 1 for each row whose prediction is right, else 0, nan where a score is not finite: [signs, rows]."""
    right = batch.layout["right"].expand(scores.shape).gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1)
    return torch.where((scores.isfinite() | (batch.layout["counts"] == 0)).all(-1), right.to(scores), math.nan)
