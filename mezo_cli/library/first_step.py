"""What the first step of a `MezoOptimizer` does besides: find what the loss depends on.

Patched forwards do not perturb weights that a model reads outside their own modules, such as an embedding that
`F.linear` elsewhere uses as its weight, and the output projection of `nn.MultiheadAttention`: they are found, too.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from mezo_cli.errors import UserError
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.functional import swapped
from mezo_cli.perturb.noise import Direction

Closure = Callable[[], Tensor | float]


def to_tensor(loss: Tensor | float) -> Tensor:
    """Return a closure's loss as a tensor of shape []."""
    if isinstance(loss, Tensor):
        if loss.numel() != 1:
            raise UserError(f"the closure returned a tensor of shape {list(loss.shape)}; it must return one loss")
        return loss.reshape(())
    return torch.tensor(float(loss), dtype=torch.float64)


def loss_with_graph(closure: Closure, tensors: Iterable[Tensor]) -> Tensor:
    """Return a closure's loss with its autograd graph, [], without the activations that a backward would need.

    So the memory is that of a forward without gradients. A closure that itself takes a gradient needs them: it is
    called again, and they are kept.
    """
    with torch.enable_grad(), ExitStack() as hooks:
        for p in tensors:
            if p.requires_grad:
                hooks.enter_context(p.register_post_accumulate_grad_hook(_refuse_gradient))
        try:
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _refuse_activation):
                return to_tensor(closure())
        except _ActivationNeededError:
            return to_tensor(closure())


def _refuse_gradient(p: Tensor) -> None:
    p.grad = None
    raise UserError("the closure calls backward(): MeZO needs no gradient; leave it out, and return the loss alone")


class _ActivationNeededError(Exception):
    """A backward needs an activation that was not kept."""


def _refuse_activation(packed: None) -> Tensor:
    raise _ActivationNeededError


def find_uncovered(forward: PerturbedForward, run: Callable[[], object], direction: Direction, eps: float) -> list[str]:
    """Run a forward with perturbed weights and return the names of the tensors whose plain values it reads.

    Every operation that the forward dispatches is looked at, except the noise's own. `run` runs the model once.
    """
    reads, noise = _PlainReads(forward.params.tensors), forward.params.noise
    # What forwards call of the noise runs outside the watch: it has to read theta, and may compile its kernels.
    methods = {name: _disable_current_modes()(getattr(noise, name)) for name in ("perturb", "perturb_rows")}
    unwatched = swapped("noise", {forward.params: SimpleNamespace(**methods)})
    with unwatched, forward.perturbed(direction, eps, (1,)), reads:
        run()
    return [name for name in forward.params.tensors if name in reads.names_read]


class _PlainReads(TorchDispatchMode):
    """Record which tensors the operations inside read, by address: their views count as they do."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._used = sorted((p.data_ptr(), p.data_ptr() + p.nbytes, name) for name, p in tensors.items() if p.numel())
        self._starts = [start for start, _, _ in self._used]
        self.names_read: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record the operands, unless the operation only makes a view, and run it."""
        if not func.is_view:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Tensor) and value.layout is torch.strided and value.numel():
                    index = bisect_right(self._starts, value.data_ptr()) - 1
                    if index >= 0 and value.data_ptr() < self._used[index][1]:
                        self.names_read.add(self._used[index][2])
        return func(*args, **(kwargs or {}))
