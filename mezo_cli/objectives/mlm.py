"""Objective `mlm`: fill in the mask of a prompt with one of the label words."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mezo_cli.config.schema import Config
from mezo_cli.errors import UserError
from mezo_cli.models import MASKED_LM, LoadedModel
from mezo_cli.objectives.classification import Classification
from mezo_cli.objectives.collate import Batch
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.tasks import MlmEncoder


class MaskedLabelScorer(Classification):
    """The logits of the label words at the mask (paper, section 3; LM-BFF).

    Only the mask position goes through the head, and only the label words' rows of the decoder are computed, whether
    its weight is tied to the input embeddings or not.
    """

    model_kind = MASKED_LM
    encoder_class = MlmEncoder

    def __init__(self, config: Config, loaded: LoadedModel, forward: PerturbedForward, encoder: Any) -> None:
        super().__init__(config, loaded, forward, encoder)
        model, label_ids = loaded.model, encoder.label_ids
        decoder = model.get_output_embeddings()
        if not isinstance(decoder, nn.Linear):
            raise UserError(f"{type(model).__name__} has no decoder over the vocabulary: objective=mlm needs one")
        self._decoder = decoder
        self._label_rows = torch.tensor(list(label_ids)).to(decoder.weight.device)
        self._rows: Tensor | None = self._label_rows  # of the decoder that are computed; None: all
        self._positions: Tensor | None = None  # of the masks, while a padded forward is running
        self._pack()
        forward.unpatch(decoder)
        decoder.forward = self._score_label_rows  # type: ignore[method-assign,assignment]
        if self._packed is None:
            body = getattr(model, model.base_model_prefix)
            for child in model.children():
                if child is not body:
                    child.register_forward_pre_hook(self._select_positions)

    @staticmethod
    def reference_logits(model: Any, batch: Batch, label_ids: Sequence[int]) -> Tensor:
        """Return the logits by the model's own forward: of all positions and the whole vocabulary, then select."""
        scores = model(**batch.inputs()).logits
        at_mask = scores[torch.arange(len(batch.positions), device=scores.device), batch.positions]
        return at_mask.index_select(1, torch.tensor(list(label_ids)).to(scores.device))

    def logits(self, batch: Batch) -> Tensor:
        """Return the label words' logits, float32: [rows, labels], or [2, rows, labels] in a paired forward."""
        if self._packed is not None:
            return self._packed.logits(batch)
        self._positions = batch.positions
        return self.model(**batch.inputs()).logits.view(len(batch.positions), -1)

    def output_layer(self) -> tuple[nn.Linear, Tensor | None]:
        """Return the decoder, and its rows of the label words, in label order."""
        return self._decoder, self._label_rows

    def vocabulary_logits(self, batch: Batch) -> Tensor:
        """Return the whole vocabulary's logits at the mask, float32 [rows, words]."""
        self._rows = None
        try:
            return self.logits(batch)
        finally:
            self._rows = self._label_rows

    def _select_positions(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Keep the mask position of each row of a padded batch: [rows, length, width] -> [rows, 1, width]."""
        if self._positions is None:
            return None
        positions, self._positions = self._positions, None
        rows = torch.arange(len(positions), device=positions.device)
        return (args[0][rows, positions].unsqueeze(1), *args[1:])

    def _score_label_rows(self, hidden: Tensor) -> Tensor:
        """Replace the decoder's forward: [signs * rows, 1, width] -> [signs, rows, labels or words], float32."""
        return self._linear_in_float32(self._decoder, self._rows, hidden)
