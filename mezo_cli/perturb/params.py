"""The trainable tensors theta by name, and their update theta <- decay theta + coefficient z."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from mezo_cli.errors import UserError
from mezo_cli.perturb.noise import Direction, Noise

# Terms that are applied to all tensors before the next ones. The noise keeps more scaled tables than that, so none is
# made again for every tensor; and the processor's cache holds them (4 MB).
TERMS_PER_PASS = 16
DEVICE_BLOCKS = 128  # blocks of the noise that make one block off the CPU, where launches set the size and not a cache


class Params:
    """Trainable tensors by name, with the noise that updates them.

    Args:
        model: a transformers model; its own `named_parameters()` give the names (tied tensors once).
        noise: draws z for a direction, a name and a shape.

    Attributes:
        tensors: name -> parameter, the trainable ones, in the model's order. All of them until `select_reachable`.
    """

    def __init__(self, model: nn.Module, noise: Noise) -> None:
        self.noise = noise
        self.tensors: dict[str, nn.Parameter] = {n: p for n, p in model.named_parameters() if p.requires_grad}

    @property
    def count(self) -> int:
        """Number of trainable scalars."""
        return sum(p.numel() for p in self.tensors.values())

    def select_reachable(self, output: Tensor) -> list[str]:
        """Keep only the tensors in the autograd graph of `output`; return the names of the others.

        Raises:
            UserError: when no trainable tensor is in the graph.
        """
        leaves = graph_leaves(output)
        reachable = {name: p for name, p in self.tensors.items() if id(p) in leaves}
        if not reachable:
            raise UserError("no trainable parameter reaches the loss: there is nothing to train")
        unreachable = [name for name in self.tensors if name not in reachable]
        self.tensors = reachable
        return unreachable

    def update(self, terms: Sequence[tuple[Direction, float]], decays: Sequence[float]) -> None:
        """Apply theta <- decay theta + coefficient z for each (direction, coefficient) in order, in place.

        Args:
            terms: (direction, coefficient), in order.
            decays: one per term.
        """
        for first in range(0, len(terms), TERMS_PER_PASS):
            some = slice(first, first + TERMS_PER_PASS)
            for name, p in self.tensors.items():
                self.noise.update_(name, p.data, terms[some], decays[some])

    def blocks(self) -> Iterator[tuple[str, int, Tensor]]:
        """Yield theta in blocks that suit the device: (name, first element, a flat view to be written in place).

        For an optimizer whose update is not of the form of `update`: it draws z for a block by `noise.update_`.
        """
        for name, p in self.tensors.items():
            flat = p.data.view(-1)
            size = self.noise.block * (1 if flat.device.type == "cpu" else DEVICE_BLOCKS)
            for start in range(0, flat.numel(), size):
                yield name, start, flat[start : start + size]


def graph_leaves(output: Tensor) -> set[int]:
    """Return the ids of the leaf tensors in the autograd graph of `output`."""
    found: set[int] = set()
    visited: set[Any] = set()
    stack: list[Any] = [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        stack.extend(parent for parent, _ in node.next_functions)
    return found
