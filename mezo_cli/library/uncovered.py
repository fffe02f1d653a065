"""Find the weights that a model reads outside their own modules: patched forwards do not perturb those reads.

Examples are an embedding that a linear layer elsewhere uses as its weight, the output projection of
`nn.MultiheadAttention`, and the weights of `nn.LSTM`, which it keeps in a list.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
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
    forward.params.noise = _Unwatched(noise, reads)  # it has every method of the noise
    try:
        with forward.perturbed(direction, eps, (1,)), reads:
            run()
    finally:
        forward.params.noise = noise
    return [name for name in forward.params.tensors if name in reads.found]


class _PlainReads(TorchDispatchMode):
    """Record which tensors the operations inside read, by address: their views count as they do."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        used = sorted((p.data_ptr(), p.data_ptr() + p.nbytes, name) for name, p in tensors.items() if p.numel())
        self._starts = [start for start, _, _ in used]
        self._used = used
        self._paused = 0
        self.found: set[str] = set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not record inside."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record the operands, unless the operation only makes a view, and run it."""
        if not self._paused and not func.is_view:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Tensor) and value.layout is torch.strided:
                    self._record(value)
        return func(*args, **(kwargs or {}))

    def _record(self, value: Tensor) -> None:
        index = bisect_right(self._starts, value.data_ptr()) - 1
        if index >= 0 and value.numel() and value.data_ptr() < self._used[index][1]:
            self.found.add(self._used[index][2])


class _Unwatched:
    """The noise, with its methods run outside the watch: it has to read theta."""

    def __init__(self, noise: object, reads: _PlainReads) -> None:
        self._noise, self._reads = noise, reads

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._noise, name)
        if not callable(value):
            return value

        def unwatched(*args: Any, **kwargs: Any) -> Any:
            with self._reads.paused():
                return value(*args, **kwargs)

        return unwatched
