"""The objectives of encoders: `mlm` fills in the mask of a prompt with a label word, `cls` has a head on the text.

Batches are packed for the families whose position ids and last layer are known (packing.py). The head reads one
position per row, the mask or the first token. So in the last layer all tokens get keys and values, and only these
positions get queries and what follows.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mezo_cli.config.registry import ENCODER_FAMILIES
from mezo_cli.config.schema import Config, TokenizedExample
from mezo_cli.errors import UserError
from mezo_cli.models import MASKED_LM, SEQUENCE_CLASSIFIER, LoadedModel
from mezo_cli.models.loading import label_layer
from mezo_cli.objectives.base import linear_in_float32
from mezo_cli.objectives.classification import Classification
from mezo_cli.objectives.collate import Arrays, Batch, collate
from mezo_cli.objectives.frozen_layers import packed_forward
from mezo_cli.objectives.packing import ATTENTION, PackedLayout, attend, pack_rows
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.functional import swapped
from mezo_cli.tasks import ClsEncoder, MlmEncoder


class _Encoder(Classification):
    """An encoder with a head. Where its family is supported, its attention is replaced for good."""

    def __init__(self, config: Config, loaded: LoadedModel, forward: PerturbedForward, encoder: Any) -> None:
        super().__init__(config, loaded, forward, encoder)
        model, name = loaded.model, loaded.model.config.model_type
        family = ENCODER_FAMILIES.load(name) if name in ENCODER_FAMILIES.targets else None
        # The positions that are to be selected: in packed rows between the last layer's attention and its output, in
        # padded rows before the head.
        self._read: Tensor | None = None
        self.supports_paired_forward = family is not None
        if family is not None:
            self.frozen = packed_forward(model, forward, self._inputs_of, lambda row: len(row.input_ids), reads=True)
            self._first_position = model.config.pad_token_id + 1 if family.positions_follow_padding else 0
            model.config._attn_implementation = ATTENTION
            last = family.last_attention.format(last=model.config.num_hidden_layers - 1)
            attention: Any = getattr(model, model.base_model_prefix).get_submodule(last)
            attention.self.forward = partial(self._attend, attention.self, attention.self.forward)
            attention.output.register_forward_pre_hook(self._select_residual)

    def lay_out(self, rows: Sequence[TokenizedExample]) -> Arrays | None:
        """Pack rows, where the family is supported. The head reads the position of each that is scored, or its first.

        Return what `pack_rows` does, and position_ids and token_type_ids, [tokens]; is_token, bool [rows, length]; and
        scored_positions, [rows], in the packed row.
        """
        if self.frozen is None:
            return None
        packed = pack_rows([row.input_ids for row in rows])
        return packed | {
            "position_ids": packed["positions"] + self._first_position,
            "token_type_ids": np.concatenate([row.token_type_ids for row in rows]),
            "is_token": np.arange(packed["lengths"].max()) < packed["lengths"][:, None],
            "scored_positions": packed["starts"] + [max(row.position, 0) for row in rows],
        }

    def logits(self, batch: Batch) -> Tensor:
        """Return the head's scores, float32: [rows, labels], or [2, rows, labels] in a paired forward."""
        if self.frozen is not None:
            signs, logits = self.forward.num_signs, self.frozen.logits(batch)
        else:
            with swapped("_read", {self: batch.positions}):
                signs, logits = 1, self.model(**batch.layout).logits
        return logits.view(signs, len(batch.rows), -1).squeeze(0).float()

    def _inputs_of(self, batch: Batch) -> dict[str, Any]:
        layout = batch.layout
        mask = layout["is_token"][:, None, None, :]
        is_even = layout["rows"].numel() == mask.numel()  # all rows have the same length
        shape, padding = (len(batch.rows), mask.shape[-1]), None if is_even else mask
        packed = PackedLayout(layout["rows"], layout["positions"], padding, shape, layout["scored_positions"])
        inputs: dict[str, Any] = {
            "input_ids": layout["input_ids"].unsqueeze(0),
            "position_ids": layout["position_ids"].unsqueeze(0),
            "attention_mask": mask,  # four-dimensional, so transformers makes no mask from it
            "packed_layout": packed,
        }
        if "token_type_ids" in self.loaded.tokenizer.model_input_names:
            inputs["token_type_ids"] = layout["token_type_ids"].unsqueeze(0)
        return inputs

    def _attend(
        self,
        module: Any,
        original_forward: Callable[..., Any],
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        packed_layout: PackedLayout | None = None,
        **inputs: Any,
    ) -> Any:
        """Replace the last layer's attention: attend from the read positions alone, [signs, rows, width].

        Not under autograd: dropout would draw another mask than in earlier versions.
        """
        self._read = None if packed_layout is None else packed_layout.read
        if packed_layout is None or self._read is None or torch.is_grad_enabled():
            return original_forward(
                hidden_states, attention_mask, past_key_values, packed_layout=packed_layout, **inputs
            )
        read = hidden_states[:, self._read]
        query, key, value = (
            project(states).unflatten(-1, (-1, module.attention_head_size)).transpose(1, 2)
            for project, states in ((module.query, read), (module.key, hidden_states), (module.value, hidden_states))
        )
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, module.layer_idx)
        of_rows = query.transpose(1, 2).flatten(0, 1).unsqueeze(2)  # [signs * rows, heads, 1, width]
        return attend(of_rows, key, value, packed_layout, scaling=module.scaling).view(*read.shape[:2], -1), None

    def _select_residual(self, module: nn.Module, args: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | None:
        """Keep the positions that the head reads: [signs, tokens, width] -> [signs * rows, 1, width]."""
        if self._read is None:
            return None
        (attended, residual), read, self._read = args, self._read, None
        if torch.is_grad_enabled():
            attended = attended[:, read]
        return attended.flatten(0, 1).unsqueeze(1), residual[:, read].flatten(0, 1).unsqueeze(1)


class Mlm(_Encoder):
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
        forward.unpatch(decoder)
        # [signs * rows, 1, width] -> [signs, rows, labels or words], float32
        decoder.forward = lambda hidden: linear_in_float32(forward, decoder, self._rows)(hidden)  # type: ignore[method-assign,assignment]
        if self.frozen is None:
            body = getattr(model, model.base_model_prefix)
            for child in model.children():
                if child is not body:
                    child.register_forward_pre_hook(self._select_positions)

    @classmethod
    def plain_outputs(cls, loaded: LoadedModel, rows: Sequence[TokenizedExample], encoder: Any) -> Tensor:
        """Return the logits of the whole vocabulary at all positions, and select."""
        batch = collate(rows, loaded)
        scores = loaded.model(**batch.layout).logits
        at_mask = scores[torch.arange(len(rows), device=scores.device), batch.positions]
        return at_mask.index_select(1, torch.tensor(list(encoder.label_ids)).to(scores.device))

    def output_layer(self) -> tuple[nn.Linear, Tensor | None]:
        """Return the decoder, and its rows of the label words, in label order."""
        return self._decoder, self._label_rows

    def vocabulary_logits(self, batch: Batch) -> Tensor:
        """Return the whole vocabulary's logits at the mask, float32 [rows, words]."""
        with swapped("_rows", {self: None}):
            return self.logits(batch)

    def _select_positions(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Keep the mask position of each row of a padded batch: [rows, length, width] -> [rows, 1, width]."""
        if self._read is None:
            return None
        positions, self._read = self._read, None
        rows = torch.arange(len(positions), device=positions.device)
        return (args[0][rows, positions].unsqueeze(1), *args[1:])


class Cls(_Encoder):
    """The logits of transformers' sequence-classification head.

    In the model families that are packed the head reads the first token of a row.
    """

    model_kind = SEQUENCE_CLASSIFIER
    encoder_class = ClsEncoder

    def __init__(self, config: Config, loaded: LoadedModel, forward: PerturbedForward, encoder: Any) -> None:
        super().__init__(config, loaded, forward, encoder)
        self._label_layer = layer = label_layer(loaded.model)
        if layer is not None:
            forward.unpatch(layer)
            # [signs * rows, ..., width] -> [signs * rows, ..., labels], float32
            layer.forward = lambda hidden: linear_in_float32(forward, layer, None)(hidden).view(*hidden.shape[:-1], -1)  # type: ignore[method-assign,assignment]

    @classmethod
    def plain_outputs(cls, loaded: LoadedModel, rows: Sequence[TokenizedExample], encoder: Any) -> Tensor:
        """Return the logits of padded rows."""
        return loaded.model(**collate(rows, loaded).layout).logits

    def output_layer(self) -> tuple[nn.Linear, Tensor | None]:
        """Return the last linear layer over the labels, of which all rows score labels."""
        if self._label_layer is None:
            labels = self.model.config.num_labels
            raise UserError(f"{type(self.model).__name__} has no linear layer over its {labels} classes")
        return self._label_layer, None
