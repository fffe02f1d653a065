"""Compile the kernels of `avx512.cpp` for theta in float32, on a CPU that has AVX-512."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mezo_cli.perturb.noise.compiled import Function

SOURCE = Path(__file__).with_suffix(".cpp")
OUTS = {torch.float32: "float", torch.bfloat16: "uint16_t"}  # dtype of an output -> its type in the source
# operation -> parameters besides theta and the tiles: (type, name); OUT is the type of the outputs
OPERATIONS = {
    "perturb": [("OUT*", "out")],
    "perturb_pair": [("OUT*", "out"), ("OUT*", "out_minus")],
    "add": [],
    "decay": [],
}


def compile_kernel(draw: str, operation: str, arrays: tuple[Tensor, ...]) -> "Function | None":
    """Compile one kernel, called as `kernels.make_kernels` defines it; None where it does not apply.

    Args:
        draw: `Gaussian` or `Rademacher`; empty for another kind of noise.
        operation: of `OPERATIONS`.
        arrays: theta, then the outputs: for their device and dtypes.

    Raises:
        Exception: of many kinds, if there is no compiler or torch's private interface has changed.
    """
    theta, *outs = arrays
    if not draw or theta.device.type != "cpu" or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    if theta.dtype != torch.float32 or any(out.dtype not in OUTS for out in outs):
        return None
    out = OUTS[outs[0].dtype] if outs else ""
    code, threads, number = _load(draw, operation, out), torch.get_num_threads(), len(arrays)

    def run(*tensors: Tensor) -> None:
        code(*tensors, tensors[number].shape[0], threads)

    return run


@cache
def _load(draw: str, operation: str, out: str) -> "Function":
    """Compile and load the source with an entry point for one operation. torch keeps what it compiled on disk."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    outs = [(kind.replace("OUT", out), name) for kind, name in OPERATIONS[operation]]
    tiles = [("const int32_t*", "numbers"), ("const int64_t*", "keys"), ("const int64_t*", "step_sample")]
    rest = [("const float*", "scaled")] + ([("const double*", "decay_factor")] if operation == "decay" else [])
    parameters = [("float*", "theta"), *outs, *tiles, *rest, ("int64_t", "count"), ("int64_t", "threads")]
    arguments = ["theta", *(name for _, name in outs), "tiles", *(name for _, name in rest)]
    entry = f"""
extern "C" void kernel({", ".join(f"{kind} {name}" for kind, name in parameters)}) {{
  const Tiles tiles = {{numbers, keys, step_sample, count, threads}};
  {operation}<{draw}>({", ".join(arguments)});
}}
"""
    return CppPythonBindingsCodeCache.load_pybinding([kind for kind, _ in parameters], SOURCE.read_text() + entry)
