"""Save and fingerprint the initial weights that the base checkpoint does not contain: a new head, an adapter.

A new tensor is stored whole, unless it is a copy of one of the base's, as the trained head of peft=head is: then its
name is stored. When a linear probe has set the label words' rows of a decoder over the vocabulary, only these rows are
stored.
"""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from mezo_cli.errors import UserError
from mezo_cli.models.quantized import describe, quantized_layers
from mezo_cli.models.stored_tensors import read_tensors


def fingerprint(model: Any, exclude: Collection[str] = ()) -> str:
    """Return the sha256 over the names, shapes and bytes of all parameters except those named in `exclude`.

    Of a quantised layer it is over the bits, the scales and, for nf4, the version of the library.
    """
    total = hashlib.sha256()
    for name, p in model.named_parameters():
        if name not in exclude:
            _add(total, name, p.detach())
    for path, layer in quantized_layers(model).items():
        total.update(f"{layer.how}{layer.library}".encode())
        _add(total, f"{path}.bits", layer.bits)
        _add(total, f"{path}.scale", layer.scale)
    return total.hexdigest()


def _add(total: Any, name: str, tensor: Tensor) -> None:
    total.update(f"{name}{tuple(tensor.shape)}".encode())
    total.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def check_fingerprint(model: Any, wanted: str, path: Path) -> None:
    """Refuse to replay a trajectory on other weights than it started from."""
    if fingerprint(model) != wanted:
        quantised = describe(model)
        changed = "model.path" if quantised == "none" else f"model.path, model.quantize (now {quantised})"
        raise UserError(
            f"{path} started from other weights than these: {changed}, or the run's start.safetensors, has changed"
        )


def save_initial_state(
    model: Any, names: Sequence[str], path: Path, rows: Mapping[str, list[int]] | None = None
) -> None:
    """Save tensors of a model to a safetensors file; write no file when there are none.

    Args:
        names: of tensors that are saved: whole, or as the name of a tensor of the base that has the same bits.
        rows: name -> row numbers, of tensors of which only these rows are saved.
    """
    state, rows = model.state_dict(), rows or {}
    copies = _find_copies({name: tensor for name, tensor in state.items() if name not in rows}, names)
    tensors = {name: state[name] for name in names if name not in copies}
    tensors |= {name: state[name][chosen] for name, chosen in rows.items()}
    if tensors or copies:
        on_cpu = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        # One entry: safetensors writes several in an order that changes from run to run.
        safetensors.torch.save_file(on_cpu, path, {"rows": json.dumps({**rows, **copies})})


def _find_copies(state: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, str]:
    """Return, for each named tensor with the bits of one that is not named, the name of the latter."""
    copies = {}
    for name in names:
        bits = state[name].contiguous().view(torch.uint8)
        for other in sorted(state.keys() - set(names)):
            same = state[other].shape == state[name].shape
            if same and torch.equal(bits, state[other].contiguous().view(torch.uint8)):
                copies[name] = other
                break
    return copies


def load_initial_state(model: Any, path: Path) -> None:
    """Load the saved tensors and rows into a model; do nothing when there is no file."""
    if not path.exists():
        return
    state = model.state_dict()
    tensors, rows, copies = _read(path)
    for name, original in copies.items():
        if not {name, original} <= state.keys() or state[name].shape != state[original].shape:
            raise UserError(f"{path} is damaged: the model has no tensors {name} and {original} of one shape")
        state[name][:] = state[original]
    for name, value in tensors.items():
        chosen = rows.get(name, slice(None))
        try:
            fits = state[name][chosen].shape == value.shape
        except (KeyError, IndexError, TypeError):
            fits = False
        if not fits:
            raise UserError(f"{path} is damaged: the model has no tensor {name} of shape {list(value.shape)}")
        state[name][chosen] = value.to(state[name].device)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, list[int]], dict[str, str]]:
    """Return the tensors of the file, the row numbers of those that are only rows, and the originals of copies."""
    tensors, metadata = read_tensors(path)
    try:
        stored = json.loads(metadata.get("rows", "{}"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    if not isinstance(stored, dict) or not all(isinstance(value, (list, str)) for value in stored.values()):
        raise UserError(f"{path} is damaged: its list of rows is not valid")
    copies = {name: original for name, original in stored.items() if isinstance(original, str)}
    return tensors, {name: rows for name, rows in stored.items() if name not in copies}, copies
