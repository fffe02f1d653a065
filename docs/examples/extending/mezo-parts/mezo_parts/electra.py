"""ELECTRA, whose layers are BERT's."""

from mezo_cli.objectives.packing import EncoderFamily

ELECTRA = EncoderFamily(last_attention="encoder.layer.{last}.attention")
