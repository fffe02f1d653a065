"""The model families whose batches are packed: what packing needs to know of each, by transformers' `model_type`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mezo_cli.config.registry import DECODER_FAMILIES, ENCODER_FAMILIES


@dataclass(frozen=True)
class EncoderFamily:
    """A family of encoders. Its attention goes through transformers' registry of attention functions.

    Attributes:
        last_attention: path of the last layer's attention in the body, {last} for the layer's number. It has the
            modules `self` (with query, key and value) and `output`, as BERT's has.
        first_position: returns the first position id, from the model's config.
    """

    last_attention: str = "encoder.layer.{last}.attention"
    first_position: Callable[[Any], int] = lambda config: 0


class DecoderFamily:
    """A family of decoders: its attention goes through transformers' registry, which is all that packing needs."""


def find_encoder_family(model: Any) -> EncoderFamily | None:
    """Return the family by which batches for an encoder are packed; None for one that gets padded batches."""
    name = model.config.model_type
    return ENCODER_FAMILIES.load(name) if name in ENCODER_FAMILIES.targets else None


def packs_decoder(model: Any) -> bool:
    """Return whether batches for a decoder are packed: not where it attends within a sliding window."""
    return model.config.model_type in DECODER_FAMILIES.targets and getattr(model.config, "sliding_window", None) is None


ROBERTA = EncoderFamily(first_position=lambda config: config.pad_token_id + 1)
BERT = EncoderFamily()
