"""Compile a kernel and check it against its eager form; without a compiler, run the eager form.

On a CPU a kernel is compiled from C++ of its own (`simd.py`), elsewhere from its tensor operations.

Every call of a kernel is one call of the operator `mezo::noise`, so profilers and counters see one operation.
"""

import inspect
import logging
import os
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from mezo_cli.errors import first_line
from mezo_cli.perturb.noise.simd import EAGER

log = logging.getLogger("mezo")

Function = Callable[..., None]
Native = Callable[[tuple[Tensor, ...]], Function]  # arrays -> the compiled function, as `simd.compile_kernel`
OPTIONS: dict[str, Any] = {"assert_indirect_indexing": False}  # the only index is masked to the length of its table
CHECKED_TILES = 3  # compiled code must be bitwise identical on as many tiles before it is used
# Kernels of all kinds share their code objects, by which torch counts recompilations.
DYNAMO = {"recompile_limit": 1024}


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
        native: compiles the kernel for a CPU, for arrays like the given ones.
    """

    # Why the kernels are not compiled. Shared by all: one failure shows that there is no compiler, or that torch's
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
        if _eager():
            return self.function
        return self.compiled.get(self._key(*tensors), self.function)

    def _prepare(self, *tensors: Tensor) -> None:
        """Compile and check the function; if that fails, say so in the log."""
        if Kernel.compiler_error is not None or _eager():
            return
        arrays, rest = tensors[: self.arrays], tensors[self.arrays + 2 :]
        try:
            on_cpu = arrays[0].device.type == "cpu"
            compiled = self._checked(self.native(arrays) if on_cpu else self._compile(arrays, rest), arrays, rest)
        except Exception as error:  # a compiler fails in many ways, for which torch has no common type
            Kernel.compiler_error = first_line(error)
            log.warning("warning: %s", describe_kernels()[1])
            return
        self.compiled[self._key(*tensors)] = compiled

    def _checked(self, compiled: Function, arrays: tuple[Tensor, ...], rest: tuple[Tensor, ...]) -> Function:
        """Return the compiled function if it is bitwise identical to the eager one on a few tiles."""
        actual, expected = self._example(CHECKED_TILES, arrays), self._example(CHECKED_TILES, arrays)
        compiled(*actual, *rest)
        self.function(*expected, *rest)
        if not all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)):
            raise ValueError("the compiled code gives other numbers than the eager code")
        return compiled

    def _key(self, *tensors: Tensor) -> Any:
        """Return what the compiled code depends on besides sizes."""
        last = tensors[self.arrays - 1]
        return last.device, tensors[0].dtype, last.dtype, torch.get_num_threads()

    def _example(self, count: int, arrays: tuple[Tensor, ...]) -> list[Tensor]:
        """Return arrays of `count` tiles with some values, and the numbers and keys of the tiles."""
        device = arrays[0].device
        theta = torch.linspace(-1, 1, count * self.tile, device=device).to(arrays[0].dtype)
        outs = [torch.empty_like(theta, dtype=array.dtype) for array in arrays[1:]]
        numbers = torch.arange(count, dtype=torch.int32, device=device)
        return [theta, *outs, numbers, numbers.long() * -0x61C8864680B583EB]  # any keys, of 64 bits

    def _compile(self, arrays: tuple[Tensor, ...], rest: tuple[Tensor, ...]) -> Function:
        """Compile by torch, and return the machine code without torch.compile's guards.

        At every call the guards would check, in some 20 us, what `__call__` looks up; a model has hundreds of small
        tensors. The code takes sizes besides tensors, so each of its inputs is found by its name or its size.
        """
        from torch._inductor.compile_fx import compile_fx

        graphs: list[tuple[list[str], list[Any], Function]] = []

        def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
            code: Any = compile_fx(graph, inputs, config_patches=OPTIONS)
            graphs.append((names, inputs, code))
            return code

        with torch._dynamo.config.patch(DYNAMO):
            # The compiler decides by the sizes of its first example: give it a large one.
            example = self._example(self.max_tiles, arrays)
            torch.compile(self.function, dynamic=True, fullgraph=True, backend=backend)(*example, *rest)
        ((names, inputs, code),) = graphs
        parameters = list(inspect.signature(self.function).parameters)
        sizes = {self.max_tiles: 1, self.max_tiles * self.tile: self.tile}  # size in the example -> elements per tile
        slots: list[tuple[int, int]] = []  # (index of a tensor, 0), (-1, elements per tile) or (-2, a constant)
        for name, value in zip(names, inputs, strict=True):
            if isinstance(value, Tensor):
                slots.append((parameters.index(name.lower().strip("_").removeprefix("l_")), 0))
            else:
                hint = int(value.node.hint)
                slots.append((-1, sizes[hint]) if hint in sizes else (-2, hint))

        def unguarded(*tensors: Tensor) -> None:
            count = tensors[self.arrays].shape[0]
            code(*[tensors[i] if i >= 0 else size * count if i == -1 else size for i, size in slots])

        return unguarded


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
