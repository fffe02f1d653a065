"""Find the weights that a model reads outside their own modules: patched forwards do not perturb those reads.

Examples are an embedding that `F.linear` elsewhere uses as its weight, and the output projection of
`nn.MultiheadAttention`.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.noise import Direction


def find_uncovered(forward: PerturbedForward, run: Callable[[], object], direction: Direction, eps: float) -> list[str]:
    """Run a forward with perturbed weights and return the names of the tensors whose plain values it reads.

    Every operation that the forward dispatches is looked at, except the noise's own.

    Args:
        forward: the model's patched forwards.
        run: runs the model once.
        direction, eps: the perturbation.
    """
    reads = _PlainReads(forward.params.tensors)
    noise = forward.params.noise
    forward.params.noise = _Unwatched(noise)  # it has every method of the noise
    try:
        with forward.perturbed(direction, eps, (1,)), reads:
            run()
    finally:
        forward.params.noise = noise
    return [name for name in forward.params.tensors if name in reads.names_read]


class _PlainReads(TorchDispatchMode):
    """Record which tensors the operations inside read, by address: their views count as they do."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        used = sorted((p.data_ptr(), p.data_ptr() + p.nbytes, name) for name, p in tensors.items() if p.numel())
        self._starts = [start for start, _, _ in used]
        self._used = used
        self.names_read: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record the operands, unless the operation only makes a view, and run it."""
        if not func.is_view:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Tensor) and value.layout is torch.strided:
                    self._record(value)
        return func(*args, **(kwargs or {}))

    def _record(self, value: Tensor) -> None:
        index = bisect_right(self._starts, value.data_ptr()) - 1
        if index >= 0 and value.numel() and value.data_ptr() < self._used[index][1]:
            self.names_read.add(self._used[index][2])


class _Unwatched:
    """The noise, with its methods run outside the watch: it has to read theta, and may compile its kernels."""

    def __init__(self, noise: object) -> None:
        self._noise = noise

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._noise, name)
        if not callable(value):
            return value

        def unwatched(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return value(*args, **kwargs)

        return unwatched
