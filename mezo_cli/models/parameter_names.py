"""Names of parameters: as the base model calls them, and in short for the log."""

import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from mezo_cli.models.quantized import quantized_layers

MAX_SHOWN = 6  # names in one line
WRAPPERS = re.compile(r"\.(modules_to_save\.default|original_module|base_layer|default)(?=\.)")


def base_name(name: str) -> str:
    """Return a parameter's name without what `peft` inserts: the base model's name for it, where it has the tensor."""
    return WRAPPERS.sub("", name)


def count_parameters(model: nn.Module) -> int:
    """Return the number of scalars in a model, without the frozen originals of modules that `peft` has copied."""
    quantised = sum(layer.in_features * layer.out_features for layer in quantized_layers(model).values())
    return quantised + sum(p.numel() for name, p in model.named_parameters() if ".original_module." not in name)


def format_names(names: Iterable[str]) -> str:
    """Return names in short: layer numbers as *, and names that differ in one part as one name with braces."""
    rows = [tuple(re.sub(r"\.\d+\.", ".*.", base_name(name)).split(".")) for name in names]
    for position in range(1, max(map(len, rows)) + 1):  # parts counted from the end
        groups: dict[Any, dict[str, None]] = {}
        for row in rows:
            head, part, tail = row[:-position], row[-position:][:1], row[len(row) - position + 1 :]
            groups.setdefault((head, tail), {})[part[0] if len(row) >= position else ""] = None
        rows = [
            (*head, next(iter(parts)) if len(parts) == 1 else f"{{{','.join(parts)}}}", *tail)
            for (head, tail), parts in groups.items()
        ]
    shown = [".".join(part for part in row if part) for row in rows]
    more = f" and {len(shown) - MAX_SHOWN} more" if len(shown) > MAX_SHOWN else ""
    return ", ".join(shown[:MAX_SHOWN]) + more
