"""Compile the kernels of `avx512.cpp` for theta in float32 or bfloat16, on a CPU that has AVX-512."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mezo_cli.perturb.noise.compiled import Function

SOURCE = Path(__file__).with_suffix(".cpp")
TYPES = {torch.float32: "float", torch.bfloat16: "uint16_t"}  # in the source


class Operation(NamedTuple):
    """A function of the source: the dtypes of theta, the outputs, and the parameters after those that all have."""

    dtypes: tuple[torch.dtype, ...]
    outs: tuple[str, ...] = ()
    more: tuple[tuple[str, str], ...] = ()  # (type, name)


ROUNDING, FACTOR = ("const int64_t*", "rounding"), ("const double*", "decay_factor")
FRACTION = ("const double*", "fraction")
OPERATIONS = {
    "perturb": Operation(tuple(TYPES), ("out",)),
    "perturb_pair": Operation(tuple(TYPES), ("out", "out_minus")),
    "add": Operation((torch.float32,)),
    "decay": Operation((torch.float32,), (), (FACTOR,)),
    "shrink": Operation((torch.float32,), (), (FRACTION,)),
    "add_and_round": Operation((torch.bfloat16,), (), (ROUNDING,)),
    "decay_and_round": Operation((torch.bfloat16,), (), (ROUNDING, FACTOR)),
    "shrink_and_round": Operation((torch.bfloat16,), (), (ROUNDING, FRACTION)),
}


def compile_kernel(draw: str, operation: str, arrays: tuple[Tensor, ...]) -> "Function | None":
    """Compile one kernel, called as its tensor operations are; None where it does not apply.

    Args:
        draw: `Gaussian` or `Rademacher`; empty for another kind of noise.
        operation: of `OPERATIONS`.
        arrays: theta, then the outputs: for their device and dtypes.

    Raises:
        Exception: of many kinds, if there is no compiler or torch's private interface has changed.
    """
    if not draw or arrays[0].device.type != "cpu" or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    if arrays[0].dtype not in OPERATIONS[operation].dtypes or arrays[-1].dtype not in TYPES:
        return None
    code = _load(draw, operation, TYPES[arrays[0].dtype], TYPES[arrays[-1].dtype])
    threads, number = torch.get_num_threads(), len(arrays)

    def run(*tensors: Tensor) -> None:
        code(*tensors, tensors[number].shape[0], threads)

    return run


@cache
def _load(draw: str, operation: str, theta: str, out: str) -> "Function":
    """Compile and load the source with an entry point for one operation. torch keeps what it compiled on disk."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    _, outs, more = OPERATIONS[operation]
    rest = [("const float*", "scaled"), *more]
    parameters = [
        (f"{theta}*", "theta"),
        *((f"{out}*", name) for name in outs),
        *[("const int32_t*", "numbers"), ("const int64_t*", "keys"), ("const int64_t*", "step_sample")],
        *rest,
        *[("int64_t", "count"), ("int64_t", "threads")],
    ]
    arguments = ["theta", *outs, "tiles", *(name for _, name in rest)]
    entry = f"""
extern "C" void kernel({", ".join(f"{kind} {name}" for kind, name in parameters)}) {{
  const Tiles tiles = {{numbers, keys, step_sample, count, threads}};
  {operation}<{draw}>({", ".join(arguments)});
}}
"""
    return CppPythonBindingsCodeCache.load_pybinding([kind for kind, _ in parameters], SOURCE.read_text() + entry)
