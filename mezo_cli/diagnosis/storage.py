"""Measure how fast this machine multiplies by weights in float32, bfloat16, int8 and nf4, and say which of them fit.

Timed are the matrices of one layer on the tokens of one batch, and multiplied by the number of layers: no other model
is loaded.
"""

import re
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mezo_cli import system
from mezo_cli.config.rules import check_quantizer
from mezo_cli.diagnosis.cost import format_bytes
from mezo_cli.diagnosis.findings import DOUBT, OK, Deadline, Section
from mezo_cli.errors import UserError
from mezo_cli.models.parameter_names import count_parameters
from mezo_cli.models.quantized import QuantizedLinear
from mezo_cli.training.session import Session

TITLE = "weights"
ROUNDS = 3  # after one that is not timed
FITS = 0.9  # of the memory that is free


def check(session: Session, train: Sequence[Any], deadline: Deadline) -> Section:
    """Measure the products of one batch with each kind of weights.

    Args:
        session: its model is in memory.
        train: the rows, of which one batch is taken.
        deadline: a kind for which there is no time is left out.
    """
    section, matrices = Section(TITLE), _matrices(session.loaded.model)
    if not matrices:
        section.add(OK, "storage", "its layers are not nn.Linear: model.quantize is not for this model")
        return section
    first = next(iter(matrices)).split(".")
    depth = next(i for i, part in enumerate(first) if part.isdecimal())
    layer = [m for path, m in matrices.items() if path.split(".")[: depth + 1] == first[: depth + 1]]
    tokens = sum(len(row.input_ids) for row in train[: session.config.batch_size])
    elements = sum(m.in_features * m.out_features for m in layer)
    factor = sum(m.in_features * m.out_features for m in matrices.values()) / elements
    seconds: dict[str, float] = {}
    missing = ""
    for kind in ("float32", "bfloat16", "int8", "nf4"):
        try:
            check_quantizer(kind)
        except UserError as error:
            missing = f" {kind} is not timed: {error}."  # more time would not help
            continue
        expected = 2 * (1 + ROUNDS) * max(seconds.values(), default=0.0) / factor + elements * 2e-7 * (kind == "nf4")
        if deadline.allows(expected):
            seconds[kind] = factor * _time_layer(layer, kind, tokens, session.loaded.device)
        else:
            section.cut.append(f"products with weights in {kind}")
    _judge(section, seconds, weight_bytes(session.loaded.model, matrices), session, missing)
    return section


def _matrices(model: nn.Module) -> dict[str, nn.Linear]:
    """Return path -> matrix of the numbered layers, without those of a LoRA."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and re.search(r"\.\d+\.", path) and "lora_" not in path
    }


@torch.no_grad()
def _time_layer(layer: Sequence[nn.Linear], kind: str, tokens: int, device: torch.device) -> float:
    """Return the seconds of the products of one layer: the median of some rounds."""
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    products: list[tuple[Callable[[Tensor], Tensor], Tensor]] = []
    for matrix in layer:
        weight = matrix.dequantized() if isinstance(matrix, QuantizedLinear) else matrix.weight.detach()
        input = torch.ones(tokens, matrix.in_features, dtype=dtype, device=device)
        if kind in ("int8", "nf4"):
            products.append((QuantizedLinear(kind, weight.cpu(), None).to(device), input))
        else:
            fixed = nn.Linear(1, 1, bias=False, device="meta")
            fixed.weight = nn.Parameter(weight.to(dtype))
            products.append((fixed, input))
    taken = []
    for _ in range(1 + ROUNDS):
        start = time.perf_counter()
        for product, input in products:
            product(input)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def weight_bytes(model: nn.Module, matrices: dict[str, nn.Linear]) -> dict[str, int]:
    """Return the bytes of all weights of a model for each way to store them."""
    total = count_parameters(model)
    inside = sum(m.in_features * m.out_features for m in matrices.values())
    rows, rest = sum(m.out_features for m in matrices.values()), 4 * (total - inside)
    return {
        "float32": 4 * total,
        "bfloat16": 2 * total,
        "int8": inside + 4 * rows + rest,
        "nf4": inside // 2 + inside // 16 + rest,
    }


def _judge(section: Section, seconds: dict[str, float], sizes: dict[str, int], session: Session, missing: str) -> None:
    """Say which kind is the fastest, the smallest, `missing` for want of a package, and which fit in free memory."""
    model = session.config.model
    own = model.dtype if model.quantize == "none" else model.quantize
    parts = [f"{kind} {format_bytes(size)}" for kind, size in sizes.items()]
    parts = [
        f"{part}, {seconds[kind]:.2g} s" if kind in seconds else part for kind, part in zip(sizes, parts, strict=True)
    ]
    text = f"weights, and the layers' products of one batch: {'; '.join(parts)}."
    fastest, smallest = min(seconds, key=lambda kind: seconds[kind], default=""), min(sizes, key=lambda k: sizes[k])
    if fastest:
        text += f" {fastest} is the fastest here, {smallest} the smallest."
    text += missing
    verdict, advice, fitting = OK, "", list(sizes)
    free = system.available_memory(session.loaded.device)
    if free is not None:
        free += sizes.get(own, 2 * sizes["bfloat16"])  # which the model takes already
        fitting = [kind for kind, size in sizes.items() if size < FITS * free]
        text += f" {format_bytes(free)} are free for them: {', '.join(fitting) or 'none'} fit."
        if own not in fitting and own in sizes:
            verdict, advice = DOUBT, f"choose among {', '.join(fitting) or 'smaller models'}"
    section.add(verdict, "storage", text, advice, seconds=seconds, bytes=sizes, free_bytes=free, fitting=fitting)
