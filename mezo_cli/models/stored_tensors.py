"""Check the tensors of a checkpoint's files against the model that was built from its config.json.

transformers drops a tensor that the model does not use, and converts integers to floats. Both can mean that config.json
belongs to another checkpoint: with fewer layers than the file has, the model loads and gives other scores.
"""

import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor, nn

from mezo_cli.errors import UserError
from mezo_cli.models.parameter_names import format_names

log = logging.getLogger("mezo")

FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names


def check_unused(unused: Iterable[str], model: Any, path: str) -> None:
    """Refuse unused tensors inside the model's layers; log all others (poolers, other heads, buffers of old files).

    `unused` are the names of tensors in the files that the model did not take.
    """
    names, modules = sorted(unused), dict(model.named_modules())
    for name in names:
        for full in (name, _with_body(model, name)):
            owner = modules.get(full.rpartition(".")[0])
            if isinstance(modules.get(re.split(r"\.\d+\.", full)[0]), nn.ModuleList) and not _had_buffers(owner):
                raise UserError(
                    f"model.path={path}: with its config.json the model has no place for the checkpoint's tensor {name}"
                    ": config.json is that of another checkpoint"
                )
    if names:
        log.info("not used of the checkpoint, which the model has no place for: %s", format_names(names))


def check_dtypes(files: Iterable[Path], model: Any, path: str) -> None:
    """Refuse parameters that are stored as anything but floats."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for file in files:
        for name, dtype in _read_dtypes(file):
            modern = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
            if dtype not in FLOATS and parameters & {modern, _with_body(model, modern)}:
                allowed = ", ".join(FLOATS)
                raise UserError(f"model.path={path}: {file.name} stores {name} as {dtype}; allowed are {allowed}")


def dtype_of_files(files: Iterable[Path]) -> torch.dtype:
    """Return the dtype of all float tensors of a checkpoint, in which they are loaded without a copy.

    float32 if they differ, or have more bytes.
    """
    names = {dtype for file in files for _, dtype in _read_dtypes(file) if dtype in FLOATS}
    halves = {"F16": torch.float16, "BF16": torch.bfloat16}
    return halves.get(names.pop(), torch.float32) if len(names) == 1 else torch.float32


def _had_buffers(module: nn.Module | None) -> bool:
    """Whether a tensor of a module may be a former buffer: it is made of modules alone (GPT-2's attn.bias)."""
    if module is None or not list(module.children()):
        return False
    return all(p is None for p in module._parameters.values())


def _with_body(model: Any, name: str) -> str:
    """Return the name in the whole model of a tensor that a file of the body alone names."""
    return f"{model.base_model_prefix}.{name}"


def _read_dtypes(file: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, dtype) of each tensor of a safetensors file."""
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
