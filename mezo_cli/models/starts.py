"""What a run starts from: a fingerprint over all weights, and a file of what the base model does not hold of them.

A fresh head is stored whole. Of a decoder whose label words' rows were probed only those rows are, not the other
fifty thousand.
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


def fingerprint(model: Any, leaving: Collection[str] = ()) -> str:
    """Return the sha256 over the names, shapes and bytes of all parameters but those in `leaving`."""
    total = hashlib.sha256()
    for name, p in model.named_parameters():
        if name not in leaving:
            total.update(f"{name}{tuple(p.shape)}".encode())
            total.update(memoryview(p.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()))
    return total.hexdigest()


def check_fingerprint(model: Any, wanted: str, path: Path) -> None:
    """Refuse to replay a trajectory from other weights than it began with.

    Raises:
        UserError: naming the trajectory.
    """
    if fingerprint(model) != wanted:
        raise UserError(
            f"{path} began from other weights than these: model.path, or the run's start.safetensors, has changed"
        )


def keep(model: Any, names: Sequence[str], path: Path, rows: Mapping[str, list[int]] | None = None) -> None:
    """Store the named tensors whole, and of those named in `rows` these rows; no file where there are none."""
    state, rows = model.state_dict(), rows or {}
    tensors = {name: state[name] for name in names} | {name: state[name][chosen] for name, chosen in rows.items()}
    if tensors:
        plain = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        safetensors.torch.save_file(plain, path, {"rows": json.dumps(dict(rows))})


def restore(model: Any, path: Path) -> None:
    """Put stored tensors and rows back, if the run has any.

    Raises:
        UserError: when the file is damaged.
    """
    if not path.exists():
        return
    state = model.state_dict()
    tensors, rows = _read(path)
    for name, value in tensors.items():
        chosen = rows.get(name, slice(None))
        if name not in state or not _fits(state[name], chosen, value):
            raise UserError(f"{path} is damaged: the model has no tensor {name} of shape {list(value.shape)}")
        state[name][chosen] = value.to(state[name].device)


def _fits(tensor: Tensor, chosen: Any, value: Tensor) -> bool:
    """Whether `value` has the shape of the chosen rows of a tensor, all of them within it."""
    if isinstance(chosen, slice):
        return tensor.shape == value.shape
    inside = all(isinstance(row, int) and 0 <= row < len(tensor) for row in chosen)
    return inside and value.shape == (len(chosen), *tensor.shape[1:])


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """Return the tensors of a start file, and which rows of their own each of some of them is."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            rows = json.loads((file.metadata() or {}).get("rows", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    if not isinstance(rows, dict) or not all(isinstance(chosen, list) for chosen in rows.values()):
        raise UserError(f"{path} is damaged: its list of rows is none")
    return tensors, rows
