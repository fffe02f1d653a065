"""The objectives of encoders: `mlm` fills in the mask of a prompt with a label word, `cls` has a head on the text."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mezo_cli.config.schema import Config, TokenizedExample
from mezo_cli.errors import UserError
from mezo_cli.models import MASKED_LM, SEQUENCE_CLASSIFIER, LoadedModel
from mezo_cli.objectives.base import linear_in_float32
from mezo_cli.objectives.classification import Classification
from mezo_cli.objectives.collate import Arrays, Batch
from mezo_cli.objectives.packed_encoder import pack_encoder
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.tasks import ClsEncoder, MlmEncoder


class _Encoded(Classification):
    """Computes packed batches where the encoder's family is supported."""

    def __init__(self, config: Config, loaded: LoadedModel, forward: PerturbedForward, encoder: Any) -> None:
        super().__init__(config, loaded, forward, encoder)
        self._packed = pack_encoder(loaded.model, forward)
        self.supports_paired_forward = self._packed is not None
        self.frozen = None if self._packed is None else self._packed.frozen

    def lay_out(self, rows: Sequence[TokenizedExample]) -> Arrays | None:
        """Pack rows, where the model's family is supported."""
        return None if self._packed is None else self._packed.lay_out(rows)


class Mlm(_Encoded):
    """The logits of the label words at the mask (paper, section 3; LM-BFF).

    Only the mask position goes through the head, and only the label words' rows of the decoder are computed, whether
    its weight is tied to the input embeddings or not.
    """

    model_kind = MASKED_LM
    encoder_class = MlmEncoder

    def __init__(self, config: Config, loaded: LoadedModel, forward: PerturbedForward, encoder: Any) -> None:
        model, decoder = loaded.model, loaded.model.get_output_embeddings()
        if not isinstance(decoder, nn.Linear):
            raise UserError(f"{type(model).__name__} has no decoder over the vocabulary: objective=mlm needs one")
        super().__init__(config, loaded, forward, encoder)
        self._decoder = decoder
        self._label_rows = torch.tensor(list(encoder.label_ids)).to(decoder.weight.device)
        self._rows: Tensor | None = self._label_rows  # of the decoder that are computed; None: all
        self._positions: Tensor | None = None  # of the masks, while a padded forward is running
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
        return linear_in_float32(self.forward, self._decoder, self._rows, hidden)


class Cls(_Encoded):
    """The logits of transformers' sequence-classification head.

    In the model families that are packed the head reads the first token of a row.
    """

    model_kind = SEQUENCE_CLASSIFIER
    encoder_class = ClsEncoder

    def __init__(self, config: Config, loaded: LoadedModel, forward: PerturbedForward, encoder: Any) -> None:
        super().__init__(config, loaded, forward, encoder)
        # The linear layers over the labels; of a head that an adapter has copied, the copy is the last.
        linear = [module for module in loaded.model.modules() if isinstance(module, nn.Linear)]
        layers = [layer for layer in linear if layer.out_features == loaded.model.config.num_labels]
        self._label_layer = layers[-1] if layers else None
        if self._label_layer is not None:
            forward.unpatch(self._label_layer)
            self._label_layer.forward = self._score_labels  # type: ignore[method-assign,assignment]

    @staticmethod
    def reference_logits(model: Any, batch: Batch, label_ids: Sequence[int]) -> Tensor:
        """Return the logits of the padded batch."""
        return model(**batch.inputs()).logits

    def logits(self, batch: Batch) -> Tensor:
        """Return the head's logits, float32: [rows, labels], or [2, rows, labels] in a paired forward."""
        if self._packed is not None:
            return self._packed.logits(batch).float()
        return self.model(**batch.inputs()).logits.float()

    def output_layer(self) -> tuple[nn.Linear, Tensor | None]:
        """Return the last linear layer over the labels, of which all rows score labels."""
        if self._label_layer is None:
            labels = self.model.config.num_labels
            raise UserError(f"{type(self.model).__name__} has no linear layer over its {labels} classes")
        return self._label_layer, None

    def _score_labels(self, hidden: Tensor) -> Tensor:
        """Replace the label layer's forward: [signs * rows, ..., width] -> [signs * rows, ..., labels], float32."""
        assert self._label_layer is not None
        return linear_in_float32(self.forward, self._label_layer, None, hidden).view(*hidden.shape[:-1], -1)
