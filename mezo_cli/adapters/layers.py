"""The numbered layers of a model, of which a method may train the top ones alone."""

import re
from typing import Any

from mezo_cli.errors import UserError


def first_trained_layer(model: Any, layers: int, name: str) -> int:
    """Return the number of the lowest of the top `layers` layers.

    Raises:
        UserError: when the model has fewer.
    """
    count: int = model.config.num_hidden_layers
    if layers > count:
        raise UserError(f"peft.layers={layers}: {name} has {count} layer{'' if count == 1 else 's'}")
    return count - layers


def is_below(parameter: str, layer: int) -> bool:
    """Return whether a parameter is in a lower layer, or in the embeddings before the layers."""
    number = re.search(r"\.(\d+)\.", parameter)
    return int(number[1]) < layer if number else "embed" in parameter
