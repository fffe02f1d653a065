"""The tensors of files, and their names: those of a checkpoint against the model made from config.json, of a start.

transformers drops a tensor that the model does not use, and converts integers to floats. Both can mean that config.json
belongs to another checkpoint: with fewer layers than the file has, the model loads and gives other scores.

start.safetensors has the initial weights that the base checkpoint does not contain: a new head, an adapter. A new
tensor is stored whole, unless it is a copy of one of the base's, as the trained head of peft=head is: then its name is
stored. When a linear probe has set the label words' rows of a decoder over the vocabulary, only these rows are stored.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from mezo_cli.console import log
from mezo_cli.errors import UserError, join
from mezo_cli.models.quantized import describe, library_of, quantized_layers
from mezo_cli.models.streaming import streamed_layers
from mezo_cli.process.memory import release_file_pages

MAX_SHOWN = 6  # names in one line
WRAPPERS = re.compile(r"\.(modules_to_save\.default|original_module|base_layer|default)(?=\.)")
FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names


def check_stored(files: Iterable[Path], unused: Iterable[str], model: Any, path: str) -> None:
    """Refuse unused tensors inside the model's layers, and parameters that are stored as anything but floats.

    `unused` are the names of tensors in the files that the model did not take: of layers, or poolers, other heads, and
    buffers of old files, which are logged.
    """
    names, modules, body = sorted(unused), dict(model.named_modules()), model.base_model_prefix
    for name in names:
        for full in (name, f"{body}.{name}"):  # a file of the body alone names its tensors so
            owner = modules.get(full.rpartition(".")[0])
            # It may be a former buffer in a module that is made of modules alone (GPT-2's attn.bias).
            had_buffers = owner is not None and list(owner.children()) and not list(owner.parameters(recurse=False))
            if isinstance(modules.get(re.split(r"\.\d+\.", full)[0]), nn.ModuleList) and not had_buffers:
                raise UserError(
                    f"model.path={path}: with its config.json the model has no place for the checkpoint's tensor {name}"
                    ": config.json is that of another checkpoint"
                )
    if names:
        log.info("not used of the checkpoint, which the model has no place for: %s", format_names(names))
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for file in files:
        for name, dtype in _read_dtypes(file):
            modern = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
            if dtype not in FLOATS and parameters & {modern, f"{body}.{modern}"}:
                raise UserError(f"model.path={path}: {file.name} stores {name} as {dtype}; allowed are {join(FLOATS)}")


def dtype_of_files(files: Iterable[Path]) -> torch.dtype:
    """Return the dtype of all float tensors of a checkpoint, in which they are loaded without a copy.

    float32 if they differ, or have more bytes.
    """
    names = {dtype for file in files for _, dtype in _read_dtypes(file) if dtype in FLOATS}
    halves = {"F16": torch.float16, "BF16": torch.bfloat16}
    return halves.get(names.pop(), torch.float32) if len(names) == 1 else torch.float32


def _read_dtypes(file: Path) -> Iterator[tuple[str, str]]:
    with safetensors.safe_open(file, "pt") as opened:
        for name in opened.keys():  # noqa: SIM118 (it is not a dict)
            yield name, opened.get_slice(name).get_dtype()


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a safetensors file that a run wrote, and its metadata."""
    if not path.is_file():  # a pipe: opening it would wait
        raise UserError(f"{path} is damaged or missing: it is not a regular file")
    try:
        with safetensors.safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged or missing: {error}") from error


# --- names ---


def base_name(name: str) -> str:
    """Return a parameter's name without what `peft` inserts: the base model's name for it, where it has the tensor."""
    return WRAPPERS.sub("", name)


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


# --- the start of a run ---


def fingerprint(model: Any, exclude: Collection[str] = ()) -> str:
    """Return the sha256 over the names, shapes and bytes of all parameters except those named in `exclude`.

    Of a quantised layer it is over the bits, the scales and, for nf4, the version of the library; of layers that are
    read as they run, over the sha256 of their files.
    """
    total, streamed = hashlib.sha256(), streamed_layers(model)
    named = [(name, p) for name, p in model.named_parameters() if name not in exclude]
    if streamed is not None:
        total.update(streamed.sha256.encode())
        named = [(name, p) for name, p in named if not streamed.has(p)]
    tensors = [(name, p.detach()) for name, p in named]
    for path, layer in quantized_layers(model).items() if streamed is None else ():
        tensors.append((f"{layer.how}{library_of(layer.how)}{path}.bits", layer.bits))
        tensors.append((f"{path}.scale", layer.scale))
    for name, tensor in tensors:
        total.update(f"{name}{tuple(tensor.shape)}".encode())
        total.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        if streamed is not None:  # of embeddings and an output layer a step reads a few rows
            release_file_pages(tensor)
    return total.hexdigest()


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
    state, rows, copies = model.state_dict(), rows or {}, {}
    for name in (name for name in names if name not in rows):
        bits = state[name].contiguous().view(torch.uint8)
        for other in sorted(state.keys() - {*names, *rows}):
            same = state[other].shape == state[name].shape
            if same and torch.equal(bits, state[other].contiguous().view(torch.uint8)):
                copies[name] = other
                break
    tensors = {name: state[name] for name in names if name not in copies}
    tensors |= {name: state[name][chosen] for name, chosen in rows.items()}
    if tensors or copies:
        on_cpu = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        # One entry: safetensors writes several in an order that changes from run to run.
        safetensors.torch.save_file(on_cpu, path, {"rows": json.dumps({**rows, **copies})})


@torch.no_grad()
def copy_stored(model: Any, files: Iterable[Path]) -> None:
    """Copy the tensors of a model's files into it, in place: every parameter, and the buffers that are stored."""
    state, copied = model.state_dict(), set()
    for file in files:
        for name, value in read_tensors(file)[0].items():
            if name not in state or state[name].shape != value.shape:
                raise UserError(f"{file}: the model has no tensor {name} of shape {list(value.shape)}")
            state[name].copy_(value)
            release_file_pages(value)
            copied.add(state[name].data_ptr())
    lacking = [name for name, p in model.named_parameters() if p.data_ptr() not in copied]  # of tied ones one is stored
    if lacking:
        raise UserError(f"{files}: they have no tensor {lacking[0]}")


def load_initial_state(model: Any, path: Path) -> None:
    """Load the saved tensors and rows into a model; do nothing when there is no file."""
    if not path.exists():
        return
    state, (tensors, metadata) = model.state_dict(), read_tensors(path)
    try:
        stored = json.loads(metadata.get("rows", "{}"))
        for name, original in stored.items():
            if isinstance(original, str):  # a copy
                tensors[name] = state[original]
        for name, value in tensors.items():
            chosen = stored[name] if isinstance(stored.get(name), list) else slice(None)
            if state[name][chosen].shape != value.shape:
                raise UserError(f"{path} is damaged: the model has no tensor {name} of shape {list(value.shape)}")
            state[name][chosen] = value.to(state[name].device)
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged or of another model: {type(error).__name__}: {error}") from error
