"""A pass over tiles: compiled where there is a compiler and checked against its own eager form, else eager."""

import inspect
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Pass = Callable[..., None]
OPTIONS: dict[str, Any] = {"assert_indirect_indexing": False}  # the one index is masked to its table's length
CHECKED = 3  # tiles that freshly compiled code must get right, bit for bit


class Kernel:
    """One pass over whole tiles, two at least; compiled at its first call for a device, dtype and number of threads.

    The environment's MEZO_EAGER=1 asks for the eager path: the same bits, 10 to 30 times slower.

    Args:
        function: takes tensors only: first `arrays` of them with an element for each of the tiles' (theta, float32,
            and what is written), then `tiles` (int64 [T]), then some that do not depend on T.
        arrays: 1 for theta <- f(theta), one more for each output.
        tile: elements a tile.
        at_once: tiles a call is given at most.
    """

    broken = False  # shared: one failure is enough to know that there is no compiler

    def __init__(self, function: Pass, arrays: int, tile: int, at_once: int) -> None:
        self.function, self.arrays, self.tile, self.at_once = function, arrays, tile, at_once
        self._made: dict[Any, Pass] = {}

    def __call__(self, *tensors: Tensor) -> None:
        """Run the pass; all tensors on one device."""
        last = tensors[self.arrays - 1]
        made = self._made.get((last.device, last.dtype, torch.get_num_threads()))
        if made is None or _eager():
            made = self._make(*tensors)
        made(*tensors)

    def _make(self, *tensors: Tensor) -> Pass:
        if Kernel.broken or _eager():
            return self.function
        last, rest = tensors[self.arrays - 1], tensors[self.arrays + 1 :]
        try:
            made = self._compile(last, rest)
            trial, proof = self._example(CHECKED, last), self._example(CHECKED, last)
            made(*trial, *rest)
            self.function(*proof, *rest)
            if not all(torch.equal(a, b) for a, b in zip(trial, proof, strict=True)):
                raise ValueError("compiled code gives other numbers than the same code run step by step")
        except Exception as error:  # a compiler fails in many ways that torch has no common type for
            Kernel.broken = True
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(f"the noise is not compiled, and 10 to 30 times slower: {reason}", stacklevel=5)
            return self.function
        self._made[last.device, last.dtype, torch.get_num_threads()] = made
        return made

    def _compile(self, last: Tensor, rest: tuple[Tensor, ...]) -> Pass:
        # The compiler judges by the first sizes it sees whether threads are worth their while: show it the largest.
        example = self._example(self.at_once, last)
        try:
            return self._without_guards(*example, *rest)
        except Exception:  # torch's inner workings have moved: its own front door does as well, 20 us a call later
            made = torch.compile(self.function, dynamic=True, fullgraph=True, options=OPTIONS)
            made(*example, *rest)
            return made

    def _example(self, count: int, last: Tensor) -> list[Tensor]:
        """The arrays, filled with something, and `tiles`."""
        theta = torch.linspace(-1, 1, count * self.tile, device=last.device)
        outs = [torch.empty_like(theta, dtype=last.dtype) for _ in range(self.arrays - 1)]
        return [theta, *outs, torch.arange(count, device=last.device)]

    def _without_guards(self, *tensors: Tensor) -> Pass:
        """Compile, and take the machine code out from behind torch.compile's guards.

        The guards would check at every call, for some 20 us, what `__call__` looks up; a model has hundreds of small
        tensors. The code takes sizes beside tensors, so each of its inputs is found by its name or its size.
        """
        from torch._inductor.compile_fx import compile_fx

        found: list[tuple[list[str], list[Any], Pass]] = []

        def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
            code: Any = compile_fx(graph, inputs, config_patches=OPTIONS)
            found.append((names, inputs, code))
            return code

        torch.compile(self.function, dynamic=True, fullgraph=True, backend=backend)(*tensors)
        ((names, inputs, code),) = found
        parameters = list(inspect.signature(self.function).parameters)
        sizes = {self.at_once: 1, self.at_once * self.tile: self.tile}  # a size seen -> elements a tile
        slots: list[tuple[int, int]] = []  # (which tensor, 0), (-1, elements a tile) or (-2, a constant)
        for name, value in zip(names, inputs, strict=True):
            if isinstance(value, Tensor):
                slots.append((parameters.index(name.lower().strip("_").removeprefix("l_")), 0))
            else:
                hint = int(value.node.hint)
                slots.append((-1, sizes[hint]) if hint in sizes else (-2, hint))

        def direct(*tensors: Tensor) -> None:
            count = tensors[self.arrays].shape[0]
            code(*[tensors[i] if i >= 0 else size * count if i == -1 else size for i, size in slots])

        return direct


def _eager() -> bool:
    return os.environ.get("MEZO_EAGER", "") not in ("", "0")
