"""The trainable tensors theta by name, and their update theta <- decay theta + coefficient z."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from mezo_cli.errors import UserError
from mezo_cli.perturb.noise import Direction, Noise
from mezo_cli.perturb.noise.spans import Span
from mezo_cli.perturb.storage import move_to_flat_storage

# Terms that are applied to all tensors before the next ones. The noise keeps more scaled tables than that, so none is
# made again for every tensor; and the processor's cache holds them (4 MB).
TERMS_PER_PASS = 16


class Params:
    """Trainable tensors by name, in flat storage, with the noise that updates them.

    Args:
        model: a transformers model; its own `named_parameters()` give the names (tied tensors once).
        noise: draws z for a direction and a span of the storage.

    Attributes:
        noise: as given.
    """

    def __init__(self, model: nn.Module, noise: Noise) -> None:
        self.noise = noise
        self._tensors: Mapping[str, nn.Parameter] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._spans: dict[Any, list[Span]] = {}  # of the tensors, and cut to a size
        self._places: dict[str, Span] = {}  # of all tensors, in the order of the storage
        for segment in move_to_flat_storage(self._tensors, noise.tile):
            ends = segment.ends.tolist()
            for (name, _), first, last in zip(segment.tensors, [0, *ends], ends, strict=False):
                self._places[name] = Span(segment, first, last)

    @property
    def tensors(self) -> Mapping[str, nn.Parameter]:
        """name -> parameter, the trainable ones, in the model's order. All of them until `select_reachable`."""
        return self._tensors

    @tensors.setter
    def tensors(self, tensors: Mapping[str, nn.Parameter]) -> None:
        self._tensors = tensors
        self._spans = {}

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

    def span(self, name: str) -> Span:
        """Return where a tensor is in the storage."""
        return self._places[name]

    def spans(self, names: Iterable[str]) -> list[Span]:
        """Return where these tensors are in the storage, neighbours as one span."""
        wanted, found = set(names), list[Span]()
        for name, place in self._places.items():
            if name not in wanted:
                continue
            if found and found[-1].segment is place.segment and found[-1].last == place.first:
                place = Span(place.segment, found.pop().first, place.last)
            found.append(place)
        return found

    def update(
        self, terms: Sequence[tuple[Direction, float]], decays: Sequence[float], names: Sequence[str] | None = None
    ) -> None:
        """Apply theta <- decay theta + coefficient z for each (direction, coefficient) in order, in place.

        Args:
            terms: (direction, coefficient), in order.
            decays: one per term.
            names: of the tensors; None for all.
        """
        chosen = None if names is None else tuple(names)
        if chosen not in self._spans:
            self._spans[chosen] = self.spans(self.tensors if chosen is None else chosen)
        for first in range(0, len(terms), TERMS_PER_PASS):
            some = slice(first, first + TERMS_PER_PASS)
            self.noise.begin_pass()
            for span in self._spans[chosen]:
                self.noise.update_(span, span.theta, terms[some], decays[some])

    def blocks(self) -> list[Span]:
        """Begin a pass, and return theta in spans that suit the device: `span.theta` is to be written in place.

        For an optimizer whose update is not of the form of `update`: it draws z for a span by `noise.update_`.
        """
        self.noise.begin_pass()
        size = self.noise.block_size(next(iter(self.tensors.values())).device)
        if size not in self._spans:
            self._spans[size] = [part for span in self.spans(self.tensors) for _, part in span.split(size)]
        return self._spans[size]


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
