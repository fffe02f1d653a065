"""The perplexity of a text, by a decoder: an objective that neither scores labels nor generates."""

import math
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field

from mezo_cli.config.schema import ObjectiveConfig, Positive
from mezo_cli.models import CAUSAL_LM
from mezo_cli.objectives.base import Objective
from mezo_cli.objectives.scoring import Evaluation
from mezo_cli.tasks import GenerateEncoder, PromptRow


class PerplexityConfig(ObjectiveConfig):
    """Settings of objective perplexity."""

    implementation: ClassVar[str] = "mezo_parts.perplexity:Perplexity"
    needs_labels: ClassVar[bool] = False
    default_metric: ClassVar[str] = "perplexity"
    metric_names: ClassVar[list[str]] = ["perplexity"]
    lower_is_better: ClassVar[frozenset[str]] = frozenset({"perplexity", "loss"})
    is_differentiable: ClassVar[bool] = True

    loss: Literal["nll"] = "nll"
    context: Positive = Field(1, description="tokens at the start of a text that are read only")


class Perplexity(Objective):
    """The mean cross-entropy of a text's tokens, each given those before it."""

    model_kind = CAUSAL_LM
    encoder_class = GenerateEncoder

    def collate(self, rows):
        """Return rows, token ids and mask, padded on the right."""
        texts = [torch.tensor([*row.input_ids, *row.answer_ids]) for row in rows]
        ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=0)
        mask = torch.arange(ids.shape[1]) < torch.tensor([len(text) for text in texts]).unsqueeze(1)
        return rows, ids.to(self.loaded.device), mask.to(self.loaded.device)

    @classmethod
    def check_rows(cls, encoder):
        """Return two short rows of tokens that any text may have."""
        return [PromptRow([0] * length, (), index, {}, ()) for index, length in enumerate((2, 4))]

    def row_losses(self, batch):
        """Return the mean over the tokens of each row, [1, rows]."""
        _, ids, mask = batch
        logits = self.model(input_ids=ids, attention_mask=mask.long()).logits[:, :-1].double()
        scored = mask[:, 1:].clone()
        scored[:, : self.config.objective.context - 1] = False
        losses = F.cross_entropy(logits.mT, ids[:, 1:], reduction="none") * scored
        return (losses.sum(1) / scored.sum(1).clamp(min=1)).unsqueeze(0)

    def outputs(self, batch):
        """Return the logits after the last token of each row."""
        _, ids, mask = batch
        logits = self.model(input_ids=ids, attention_mask=mask.long()).logits
        return logits[torch.arange(len(ids)), mask.sum(1) - 1].float()

    @classmethod
    def plain_outputs(cls, loaded, rows, encoder):
        """Return the same by the model's own forward, each row by itself."""
        texts = [torch.tensor([[*row.input_ids, *row.answer_ids]]).to(loaded.device) for row in rows]
        return torch.cat([loaded.model(input_ids=ids).logits[:, -1].float() for ids in texts])

    def measure(self, batch):
        """Return the loss of each row, and its perplexity as its record."""
        losses = self.row_losses(batch)[0]
        return losses.unsqueeze(1), [{"perplexity": math.exp(loss)} for loss in losses.tolist()]

    def assess(self, values, rows, records=None):
        """Return the mean loss, and e to its power."""
        loss = float(values.mean())
        metrics = {"perplexity": math.exp(loss)}
        return Evaluation(loss, metrics, values, list(records or []), text=f"perplexity {metrics['perplexity']:.3f}")
