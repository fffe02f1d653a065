"""The trainable tensors theta by name, and their update theta <- decay theta + coefficient z, weight decay included.

Where theta is stored in half precision, the update of a step is computed in float32 and rounded once, stochastically:
see noise/rounding.py. It is the same rounding whether one step is applied or, in a replay, many to one part of theta.
"""

import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Self

import torch
from torch import Tensor, nn

from mezo_cli.config.schema import StepRecord
from mezo_cli.errors import UserError
from mezo_cli.perturb.noise import Direction, Noise
from mezo_cli.perturb.noise.counter import CounterNoise
from mezo_cli.perturb.noise.kernels import call_size
from mezo_cli.perturb.noise.rounding import MAX_ELEMENTS, round_
from mezo_cli.perturb.noise.spans import Span, compute_device, to_flat_storage

# Terms of whole steps that are applied to all tensors before the next ones. The noise keeps more scaled tables than
# that, so none is made again for every tensor; and the processor's cache holds them (4 MB).
TERMS_PER_PASS = 16

Term = tuple[Direction, float]


class WeightDecay:
    """The weight decay that steps without a gradient have deferred. It follows from the records, in order.

    Decay is theta - d theta + c z, d = 1 - decay, computed in float64 and rounded once. theta - d theta alone, rounded
    to float32, would be theta again for d below 3e-8, and MeZO's lr wd often is. c z is larger than what is rounded
    away, and differs from step to step: in the mean over the steps nothing is lost. A step whose recorded scalars
    are all 0 has no c z, so its decay is deferred: the next step that has some applies that of all steps since the
    last one.

    Attributes:
        deferred: the product of the deferred decays.
    """

    deferred = 1.0

    def take(self, decay: float, moves: bool) -> float:
        """Return the decay to apply in the next step: with what the steps before deferred, or 1 if it is deferred, too.

        Args:
            decay: the step's own, e.g. 1 - lr weight_decay.
            moves: whether a recorded scalar of the step is not 0.
        """
        decay *= self.deferred
        self.deferred = 1.0 if moves else decay
        return decay if moves else 1.0

    def take_each(self, terms: Sequence[Term], decays: Sequence[float]) -> Sequence[float]:
        """Return the decays to apply with these terms: those of a step all with its first term that is not 0."""
        if self.deferred == 1.0 and all(decay == 1.0 for decay in decays):
            return decays
        due: list[float] = []
        for of_step, with_decays in split_steps(terms, decays):
            moving = [len(due) + i for i, (_, coefficient) in enumerate(of_step) if coefficient]
            decay = self.take(math.prod(with_decays), bool(moving))
            due += [1.0] * len(of_step)
            if moving:
                due[moving[0]] = decay
        return due

    def rebuild(self, records: Iterable[StepRecord], weight_decay: float) -> None:
        """Defer what these steps deferred: all steps so far, or the last ones from one with a gradient on.

        Args:
            records: (step, projected gradients, lr), in order.
            weight_decay: the decay of a step is 1 - lr weight_decay.
        """
        self.deferred = 1.0
        for _, grads, lr in records:
            self.take(1.0 - lr * weight_decay, moves=lr != 0 and any(grads))


def split_steps(terms: Sequence[Term], decays: Sequence[float]) -> Iterator[tuple[list[Term], list[float]]]:
    """Yield the terms of each step, and their decays."""
    for _, of_step in groupby(zip(terms, decays, strict=True), lambda pair: pair[0][0][:2]):
        pairs = list(of_step)
        yield [term for term, _ in pairs], [decay for _, decay in pairs]


class Params:
    """Trainable tensors by name, in flat storage, with the noise that updates them.

    Args:
        model: a transformers model; its own `named_parameters()` give the names (tied tensors once).
        names: of the trainable tensors; None for all with requires_grad.

    Attributes:
        tensors: name -> parameter, the trainable ones, in the model's order. All of them until `select_reachable`.
        fuses: whether a step of one term is one kernel where theta is in half precision. Bitwise identical.
        decay: in which arithmetic, and at which step, weight decay is applied.
        nonnegative: names of tensors of which the update of each step ends with max(theta, 0).
        span_of: name of any tensor -> where it is in the storage.
    """

    fuses = True

    def __init__(self, model: nn.Module, noise: Noise, names: Collection[str] | None = None) -> None:
        self.noise = noise
        self.decay = WeightDecay()
        self.nonnegative: Collection[str] = ()
        self.tensors: Mapping[str, nn.Parameter] = {
            n: p for n, p in model.named_parameters() if (p.requires_grad if names is None else n in names)
        }
        self._copy: Tensor | None = None  # of a span of theta
        self._wide: Tensor | None = None  # likewise, in float64
        self._spans: dict[int | None, list[Span]] = {}  # of the tensors, by the size that they are cut to
        self._spans_of: Mapping[str, nn.Parameter] = self.tensors
        self.span_of: dict[str, Span] = {}  # in the order of the storage
        for segment in to_flat_storage(self.tensors, noise.tile):
            ends = segment.ends.tolist()
            for (name, _), first, last in zip(segment.tensors, [0, *ends], ends, strict=False):
                self.span_of[name] = Span(segment, first, last)

    @property
    def dtype(self) -> torch.dtype:
        """How theta is stored: all trainable tensors alike."""
        return next(iter(self.tensors.values())).dtype

    @property
    def count(self) -> int:
        """Number of trainable scalars."""
        return sum(p.numel() for p in self.tensors.values())

    def select_reachable(self, output: Tensor) -> list[str]:
        """Keep only the tensors in the autograd graph of `output`; return the names of the others."""
        leaves: set[int] = set()  # ids of the tensors
        visited: set[Any] = {None}
        stack: list[Any] = [output.grad_fn]
        while stack:
            node = stack.pop()
            if node not in visited:
                visited.add(node)
                leaves.add(id(getattr(node, "variable", None)))
                stack.extend(parent for parent, _ in node.next_functions)
        reachable = {name: p for name, p in self.tensors.items() if id(p) in leaves}
        if not reachable:
            raise UserError("no trainable parameter reaches the loss: there is nothing to train")
        everything, self.tensors = self.tensors, reachable
        return [name for name in everything if name not in reachable]

    def subset(self, names: Collection[str]) -> Self:
        """Return these tensors, where they are in the storage, with a weight decay of their own."""
        part = copy.copy(self)
        part.tensors = {name: p for name, p in self.tensors.items() if name in names}
        part.decay = WeightDecay()
        return part

    def spans(self, names: Iterable[str]) -> list[Span]:
        """Return where these tensors are in the storage, neighbours as one span."""
        wanted, joined = set(names), list[Span]()
        for name, span in self.span_of.items():
            if name not in wanted:
                continue
            if joined and joined[-1].segment is span.segment and joined[-1].last == span.first:
                span = Span(span.segment, joined.pop().first, span.last)
            joined.append(span)
        return joined

    def perturbed(
        self, name: str, direction: Direction, c: float, dtype: torch.dtype | None = None, signs: int = 1
    ) -> Tensor:
        """Return a tensor as theta + c z and, for two signs, theta - c z, rounded to a dtype: [signs, *shape]."""
        p, span = self.tensors[name], self.span_of[name]
        outs = torch.empty(signs, span.numel, dtype=dtype or p.dtype, device=p.device)
        self.noise.perturb(direction, span, c, *outs)
        return outs[:, : p.numel()].view(signs, *p.shape)

    def update(self, terms: Sequence[Term], decays: Sequence[float]) -> None:
        """Apply theta <- decay theta + coefficient z for each (direction, coefficient) in order, in place.

        Args:
            terms: (direction, coefficient), in order. The directions of a step have its number: where theta has two
                bytes, it is rounded when the number changes.
            decays: one per term, e.g. 1 - lr weight_decay with the first one of a step and 1 with the others.
        """
        decays, in_half = self.decay.take_each(terms, decays), self.dtype != torch.float32
        if in_half or self.nonnegative:
            passes = _passes(terms, decays, 1 if self.nonnegative else TERMS_PER_PASS)
        else:  # a pass may end inside a step
            starts = range(0, len(terms), TERMS_PER_PASS)
            passes = ((terms[i : i + TERMS_PER_PASS], decays[i : i + TERMS_PER_PASS]) for i in starts)
        for of_pass, with_decays in passes:
            one_each = len({direction[:2] for direction, _ in of_pass}) == len(of_pass)
            for span in self.blocks(MAX_ELEMENTS if in_half else None):
                if not in_half or (self.fuses and one_each and isinstance(self.noise, CounterNoise)):
                    self.noise.update_(span, span.theta, of_pass, with_decays, decay_in_float64=True)
                else:  # one rounding per step
                    theta = self.load(span)
                    for of_step, of_decays in split_steps(of_pass, with_decays):
                        self.noise.update_(span, theta, of_step, of_decays, decay_in_float64=True)
                        self.round_(span, theta, of_step[0][0])
                    self.store(span, theta)
            for name in self.nonnegative:
                if name in self.tensors:
                    self.tensors[name].data.clamp_(min=0.0)

    def blocks(self, size: int | None) -> list[Span]:
        """Begin a pass, and return theta in spans: on a CPU of about `size` elements, `noise.block`, if given.

        For an optimizer whose update is not of the form of `update`: it draws z for a span by `noise.update_`, and
        writes theta by `load`, `decay_and_subtract`, `round_` and `store`.
        """
        self.noise.begin_pass()
        if self._spans_of is not self.tensors:
            self._spans, self._spans_of = {}, self.tensors
        if size not in self._spans:
            self._spans[size] = spans = self.spans(self.tensors)
            if size is not None:
                size_there = call_size(size, spans[0].theta.device)
                self._spans[size] = [part for span in spans for _, part in span.split(size_there)]
        return self._spans[size]

    def load(self, span: Span) -> Tensor:
        """Return a span of theta in float32 [span.numel]: itself, or a copy if it is stored in half precision.

        A copy is valid until the next one: it is always in the same memory.
        """
        theta = span.theta
        if theta.dtype == torch.float32:
            return theta
        if self._copy is None or len(self._copy) < span.numel or self._copy.device != theta.device:
            self._copy = torch.empty(span.numel, dtype=torch.float32, device=theta.device)
        return self._copy[: span.numel].copy_(theta)

    def decay_and_subtract(
        self, theta: Tensor, step: Tensor, decay: float, then: Callable[[Tensor], None] | None = None
    ) -> None:
        """Apply theta <- decay theta - step, in place: in float64 and rounded once.

        Args:
            theta: what `load` returned.
            step: float32, like theta.
            decay: what `self.decay.take` returned.
            then: changes the result in place, before it is rounded; float64, like theta.
        """
        if then is None and decay == 1.0:
            theta.sub_(step)
            return
        device = compute_device(theta.device)
        if self._wide is None or len(self._wide) < len(theta) or self._wide.device != device:
            self._wide = torch.empty(len(theta), dtype=torch.float64, device=device)
        wide = self._wide[: len(theta)].copy_(theta.to(device)).mul_(decay).sub_(step.to(device))
        if then is not None:
            then(wide)
        theta.copy_(wide if device == theta.device else wide.float())

    def round_(self, span: Span, theta: Tensor, direction: Direction) -> None:
        """End a step: round what `load` returned to values that are stored exactly; float32 stays as it is.

        Args:
            span: where it is in the storage.
            theta: with the step's update, float32.
            direction: any of the step's.
        """
        if span.theta.dtype != torch.float32:
            round_(theta, span, span.theta.dtype, direction)

    def store(self, span: Span, theta: Tensor) -> None:
        """Write to the storage what `load` returned, rounded."""
        if theta is not span.theta:
            span.theta.copy_(theta)


def _passes(
    terms: Sequence[Term], decays: Sequence[float], most: int
) -> Iterator[tuple[Sequence[Term], Sequence[float]]]:
    """Yield the terms and decays of whole steps, of one step or of as many as have `most` terms."""
    of_pass: list[Term] = []
    with_decays: list[float] = []
    for of_step, of_decays in split_steps(terms, decays):
        if of_pass and len(of_pass) + len(of_step) > most:
            yield of_pass, with_decays
            of_pass, with_decays = [], []
        of_pass, with_decays = of_pass + of_step, with_decays + of_decays
    if of_pass:
        yield of_pass, with_decays
