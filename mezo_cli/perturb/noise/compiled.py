"""Compile a kernel and check it against its eager form; without a compiler, run the eager form.

On a CPU a kernel is compiled from C++ (`simd.py`), on a GPU by Triton (`gpu.py`).

Every call of a kernel is one call of the operator `mezo::noise`, so profilers and counters see one operation.
"""

import logging
import os
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from mezo_cli.errors import first_line
from mezo_cli.perturb.noise import simd
from mezo_cli.perturb.noise.simd import EAGER

log = logging.getLogger("mezo")

Function = Callable[..., None]
Native = Callable[[tuple[Tensor, ...]], Function]  # arrays -> the compiled function, as `simd.compile_kernel`
CHECKED_TILES = 3  # compiled code must be bitwise identical on as many tiles before it is used


def compile_native(kind: str, operation: str, tile: int, arrays: tuple[Tensor, ...]) -> Function:
    """Return a kernel for the device of these arrays, by `simd.py` or `gpu.py`; ImportError without Triton."""
    if arrays[0].device.type == "cpu":
        return simd.compile_kernel(kind, operation, tile, arrays)
    from mezo_cli.perturb.noise import gpu

    return gpu.compile_kernel(kind, operation, tile, arrays)


class Kernel:
    """One function over tiles (at least two), compiled at its first call per device, dtype and number of threads.

    MEZO_EAGER=1 or MEZO_SIMD=eager in the environment selects the eager form: bitwise identical, 10 to 30 times slower.

    Args:
        function: takes tensors only: first `arrays` tensors with `tile` elements per tile (theta, then the
            outputs), then the numbers (int32 [T]) and keys (int64 [T]) of the tiles, then tensors whose sizes do not
            depend on T.
        arrays: 1 for theta <- f(theta), one more per output.
        tile: elements per tile.
        max_tiles: tiles per call at most, on a CPU.
        native: compiles the kernel for arrays like the given ones.
    """

    # Why the kernels are not compiled. Shared by all: one failure shows that there is no compiler, or that its
    # interfaces have changed.
    compiler_error: ClassVar[str | None] = None

    def __init__(self, function: Function, arrays: int, tile: int, max_tiles: int, native: Native) -> None:
        self.function, self.arrays, self.tile, self.max_tiles = function, arrays, tile, max_tiles
        self.native = native
        self.compiled: dict[Any, Function] = {}  # by device, dtype and number of threads
        self._number = len(_ALL)
        _ALL.append(self)

    def __call__(self, *tensors: Tensor) -> None:
        """Run the kernel; all tensors are on one device."""
        if self.find(*tensors) is self.function:
            self._prepare(*tensors)  # here, because an operator is no place to compile in
        torch.ops.mezo.noise(self._number, tensors[: self.arrays], tensors[self.arrays :])

    def find(self, *tensors: Tensor) -> Function:
        """Return the compiled function, or the eager one while there is none."""
        return self.function if _eager() else self.compiled.get(self._key(*tensors), self.function)

    def _prepare(self, *tensors: Tensor) -> None:
        """Compile the function, and compare it with the eager one on a few tiles; if that fails, say so in the log."""
        if Kernel.compiler_error is not None or _eager():
            return
        arrays, rest = tensors[: self.arrays], tensors[self.arrays + 2 :]
        try:
            compiled = self.native(arrays)
            actual, expected = self._example(arrays), self._example(arrays)
            compiled(*actual, *rest)
            self.function(*expected, *rest)
            if not all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)):
                raise ValueError("the compiled code gives other numbers than the eager code")
        except Exception as error:  # a compiler fails in many ways, for which torch has no common type
            Kernel.compiler_error = first_line(error)
            log.warning("warning: %s", describe_kernels()[1])
            return
        self.compiled[self._key(*tensors)] = compiled

    def _key(self, *tensors: Tensor) -> Any:
        """Return what the compiled code depends on besides sizes."""
        last = tensors[self.arrays - 1]
        return last.device, tensors[0].dtype, last.dtype, torch.get_num_threads()

    def _example(self, arrays: tuple[Tensor, ...]) -> list[Tensor]:
        device = arrays[0].device
        theta = torch.linspace(-1, 1, CHECKED_TILES * self.tile, device=device).to(arrays[0].dtype)
        outs = [torch.empty_like(theta, dtype=array.dtype) for array in arrays[1:]]
        numbers = torch.arange(CHECKED_TILES, dtype=torch.int32, device=device)
        return [theta, *outs, numbers, numbers.long() * -0x61C8864680B583EB]  # any keys, of 64 bits


_ALL: list[Kernel] = []  # the operator takes the number of a kernel: its arguments are tensors and numbers


def _run(number: int, arrays: list[Tensor], rest: list[Tensor]) -> None:
    _ALL[number].find(*arrays)(*arrays, *rest)


def _run_eager(number: int, arrays: list[Tensor], rest: list[Tensor]) -> None:
    _ALL[number].function(*arrays, *rest)


_LIBRARY = torch.library.Library("mezo", "DEF")
_LIBRARY.define("noise(int kernel, Tensor(a!)[] arrays, Tensor[] rest) -> ()")
_LIBRARY.impl("noise", _run, "CompositeExplicitAutograd")
torch.library.register_fake("mezo::noise", _run_eager, lib=_LIBRARY)


def describe_kernels() -> tuple[str, str]:
    """Return how this process runs the kernels, and the reason if they are slower than they could be, else "".

    The first is `compiled` or `eager`.
    """
    if _eager():
        variable = "MEZO_SIMD=eager" if os.environ.get("MEZO_SIMD") == EAGER else "MEZO_EAGER"
        return "eager", f"the noise is not compiled, and 10 to 30 times slower: {variable} is set"
    if Kernel.compiler_error is not None:
        return "eager", f"the noise is not compiled, and 10 to 30 times slower: {Kernel.compiler_error}"
    return "compiled", ""


def _eager() -> bool:
    return os.environ.get("MEZO_EAGER", "") not in ("", "0") or os.environ.get("MEZO_SIMD") == EAGER
