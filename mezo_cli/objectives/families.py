"""The model families whose batches are packed: what packing needs to know of each, by transformers' `model_type`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mezo_cli.config.registry import DECODER_FAMILIES, ENCODER_FAMILIES, Registry


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


@dataclass(frozen=True)
class DecoderFamily:
    """A family of decoders, by what it calls the parts of a layer. Its attention goes through transformers' registry.

    Attributes:
        attention: the attention.
        norm: the norm before it.
        output: the product after the attention, a module of it.
        fused: the product that makes queries, keys and values, a module of it; None: q_proj, k_proj and v_proj.
        fuses_by_head: whether the fused product has queries, keys and values of each head as neighbours.
    """

    attention: str = "self_attn"
    norm: str = "input_layernorm"
    output: str = "o_proj"
    fused: str | None = None
    fuses_by_head: bool = False


def find_encoder_family(model: Any) -> EncoderFamily | None:
    """Return the family by which batches for an encoder are packed; None for one that gets padded batches."""
    family: EncoderFamily | None = _find(ENCODER_FAMILIES, model)
    return family


def find_decoder_family(model: Any) -> DecoderFamily | None:
    """Return the same for a decoder; None also where it attends within a sliding window."""
    family: DecoderFamily | None = _find(DECODER_FAMILIES, model)
    return family if getattr(model.config, "sliding_window", None) is None else None


def _find(families: Registry, model: Any) -> Any:
    name = model.config.model_type
    return families.load(name) if name in families.targets else None


ROBERTA = EncoderFamily(first_position=lambda config: config.pad_token_id + 1)
BERT = EncoderFamily()
LLAMA = DecoderFamily()  # Mistral, Qwen2 and Qwen3, too
OPT = DecoderFamily("self_attn", "self_attn_layer_norm", "out_proj")
GPT2 = DecoderFamily("attn", "ln_1", "c_proj", "c_attn")
GPT_NEOX = DecoderFamily("attention", "input_layernorm", "dense", "query_key_value", fuses_by_head=True)
