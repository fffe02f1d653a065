"""What the first step of a `MezoOptimizer` does besides: find what the loss depends on, and say that it takes long."""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mezo_cli.errors import UserError

log = logging.getLogger("mezo")

Closure = Callable[[], Tensor | float]
LONG = 5.0  # seconds after which the first step says what it does


@contextmanager
def saying_what_takes_long(compiles: bool) -> Iterator[None]:
    """Log one line if what is inside takes long.

    Args:
        compiles: whether the kernels of the noise may be compiled inside.
    """
    what = "it compiles the kernels that draw z, once per machine, and " if compiles else "it "
    text = "MezoOptimizer: the first step is still running: %scalls the closure twice more than later ones"
    timer = threading.Timer(LONG, log.warning, (text, what))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def to_tensor(loss: Tensor | float) -> Tensor:
    """Return a closure's loss as a tensor of shape [].

    Raises:
        UserError: for a tensor of several elements, or what is no number.
    """
    if isinstance(loss, Tensor):
        if loss.numel() != 1:
            raise UserError(f"the closure returned a tensor of shape {list(loss.shape)}; it must return one loss")
        return loss.reshape(())
    try:
        return torch.tensor(float(loss), dtype=torch.float64)
    except (TypeError, ValueError) as error:
        raise UserError(f"the closure returned {type(loss).__name__}; it must return a number or a tensor") from error


def loss_with_graph(closure: Closure, tensors: Iterable[Tensor]) -> Tensor:
    """Return a closure's loss with its autograd graph, [], without the activations that a backward would need.

    So the memory is that of a forward without gradients. A closure that itself takes a gradient needs them: it is
    called again, and they are kept.

    Raises:
        UserError: when the closure calls backward(), at the first of `tensors` that gets a gradient.
    """
    hooks = [p.register_post_accumulate_grad_hook(_refuse_gradient) for p in tensors if p.requires_grad]
    try:
        with torch.enable_grad():
            try:
                with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _refuse_activation):
                    return to_tensor(closure())
            except _ActivationNeededError:
                return to_tensor(closure())
    finally:
        for hook in hooks:
            hook.remove()


def _refuse_gradient(p: Tensor) -> None:
    p.grad = None
    raise UserError("the closure calls backward(): MeZO needs no gradient; leave it out, and return the loss alone")


class _ActivationNeededError(Exception):
    """A backward needs an activation that was not kept."""


def _refuse_activation(packed: None) -> Tensor:
    raise _ActivationNeededError
