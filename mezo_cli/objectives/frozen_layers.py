"""Run a packed model whose frozen layers are computed once for both signs, or whose layers are read from disk.

With `peft=head`, or with a LoRA or biases of the top layers, most layers are below the first trained tensor. Their
output depends neither on z nor on the step. So it is computed once per batch, for both signs and all directions, and
for rows that `keep` was given once per run. The bits of a row's states depend on the other rows of the forward that
computes them. So rows that are kept are computed in groups that do not change, whichever batch asks first: a resumed
run gets bitwise identical outputs.

Layers that are read from disk are read once for all forwards of a step, or of an evaluation. A forward is a
perturbation and a batch: signs, samples and micro-batches make several of them per step. Each goes through the model up
to its layers, which only say what they are called with. Then every layer in turn is read, and runs all forwards by the
calls that it would have got; at last each goes from the last layer to the head.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mezo_cli.console import progress_log
from mezo_cli.errors import UserError
from mezo_cli.models.streaming import StreamedLayers, numbered_layers, streamed_layers
from mezo_cli.objectives.collate import Batch, batches_by_length
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.functional import swapped
from mezo_cli.perturb.plan import Perturbation

SAID_PASSES = 8  # through the layers whose progress is logged: those of the start and of the first step
STATES_BYTES = 256_000_000  # of the hidden states of forwards that go through a layer together

Rows = Sequence[Any]
InputsOf = Callable[[Batch], dict[str, Any]]
Pass = tuple[Perturbation | None, Batch]  # a forward
Call = tuple[tuple[Any, ...], dict[str, Any]]  # what a layer is called with after the hidden states


class Computed(Exception):  # noqa: N818 (it ends a forward whose remaining layers are not needed)
    """What was to be computed is there."""


class FrozenLayers:
    """A packed model, and the layers at its beginning that no trained tensor reaches with what they have computed.

    Args:
        model: of a family that is packed; its layers are in one `ModuleList`, and each returns its hidden states.
        forward: runs it with perturbed weights.
        inputs_of: makes the keyword arguments of the model for a batch.
        tokens_of: returns the number of tokens that a batch has for a row.
        reads: whether the last layer leaves one position of each row alone, which the head reads: an encoder's does.

    Attributes:
        count: the number of these layers; 0 until `find`.
        expected: the batches whose logits will be asked for one after the other; used where layers are read from disk.
    """

    def __init__(
        self, model: Any, forward: PerturbedForward, inputs_of: InputsOf, tokens_of: Callable[[Any], int], reads: bool
    ) -> None:
        self.count, self._model, self._forward = 0, model, forward
        self.expected: Sequence[Batch] = ()
        self._inputs_of, self._tokens_of, self._reads = inputs_of, tokens_of, reads
        self._parent, self._name, self._layers = numbered_layers(model)
        self._reads_alone = False  # whether they are all layers, of whose output one position per row is left
        self._rest = self._layers  # the last frozen layer, which returns its known output, and those above
        # Of a batch for as long as it is used: the micro-batches of a step are gone through once per sign.
        self._of_batch: WeakKeyDictionary[Batch, Tensor] = WeakKeyDictionary()
        self._groups: dict[int, Rows] = {}  # id of a row that is kept -> the rows that are computed with it
        self._states: dict[int, Tensor] = {}  # id of a row -> [tokens, width]
        self._dtype: torch.dtype | None = None  # the compute dtype of the states that are kept
        self._collate: Callable[[Rows], Batch] = NotImplemented

    @contextmanager
    def find(self) -> Iterator[None]:
        """Find the frozen layers from the forward inside, which builds an autograd graph."""
        trained: list[bool] = []

        def look(module: nn.Module, args: Any, states: Tensor) -> None:
            trained.append(states.requires_grad)

        with ExitStack() as hooks:
            for layer in self._layers:
                hooks.enter_context(layer.register_forward_hook(look))
            yield
        self.count = [*trained, True].index(True)
        self._rest = self._layers[max(self.count - 1, 0) :]
        self._reads_alone = self._reads and self.count == len(self._layers)

    def keep(self, rows: Rows, group_size: int, collate: Callable[[Rows], Batch], most: int) -> int:
        """Keep the states of rows, which are recognized by identity, from when they are first computed.

        `group_size` rows are computed together. Return the memory that the states will take, in bytes; 0 if that is
        more than `most`, and they are not kept.
        """
        dtype = self._forward.compute_dtype
        size = sum(self._sizes(rows)) * self._model.config.hidden_size * dtype.itemsize
        if size > most:
            return 0
        self._collate, self._dtype = collate, dtype
        for numbers in batches_by_length(rows, group_size):
            group = [rows[i] for i in numbers]
            self._groups.update((id(row), group) for row in group)
        return size

    def keeps(self, row: Any) -> bool:
        """Return whether the states of a row are kept, once they are computed."""
        return id(row) in self._groups

    def _sizes(self, rows: Rows) -> list[int]:  # of how many tokens a row has states
        return [1 if self._reads_alone else self._tokens_of(row) for row in rows]

    def logits(self, batch: Batch) -> Tensor:
        """Return the model's logits for a packed batch; under both signs of a perturbation, of one paired forward.

        Under autograd all layers are computed: there they may have dropout.
        """
        if not self.count or torch.is_grad_enabled():
            return self._run(batch)
        states = torch.cat(self._states_of([batch]) * self._forward.num_signs)
        return self._from_layer(batch, states, self._rest)

    def collated(self, parts: Sequence[Rows], collate: Callable[[Rows], Batch]) -> Iterator[Batch]:
        """Yield the batches of an evaluation, of which several may go through the layers together: here one by one."""
        return map(collate, parts)

    def _from_layer(self, batch: Batch, states: Tensor, rest: Any) -> Tensor:
        """Return the logits that follow from the output of a layer, `rest`[0]; `rest` are it and those above."""
        setattr(self._parent, self._name, rest)
        try:
            with swapped("forward", {rest[0]: lambda *args, **kwargs: states}):
                return self._run(batch)
        finally:
            setattr(self._parent, self._name, self._layers)

    def _run(self, batch: Batch) -> Tensor:
        inputs = self._inputs_of(batch)
        if self._forward.num_signs == 1:
            return self._model(**inputs).logits
        doubled = {key: torch.cat([value] * 2) if isinstance(value, Tensor) else value for key, value in inputs.items()}
        with self._forward.paired_forward():
            return self._model(**doubled).logits

    def _states_of(self, batches: Sequence[Batch]) -> list[Tensor]:
        dtype = self._forward.compute_dtype
        new = [one for one in dict.fromkeys(batches) if one not in self._of_batch or self._of_batch[one].dtype != dtype]
        kept = [one for one in new if dtype == self._dtype and all(map(self.keeps, one.rows))]
        rows = [row for one in kept for row in one.rows if id(row) not in self._states]
        groups = list({id(self._groups[id(row)]): self._groups[id(row)] for row in rows}.values())
        alone = [one for one in new if one not in kept]
        states = self._compute([*map(self._collate, groups), *alone])
        for group, of_group in zip(groups, states[: len(groups)], strict=True):
            parts = of_group.flatten(0, 1).split(self._sizes(group))
            self._states.update(zip(map(id, group), parts, strict=True))
        for one in kept:
            of_rows = torch.cat([self._states[id(row)] for row in one.rows])
            self._of_batch[one] = of_rows.unsqueeze(1 if self._reads_alone else 0)
        self._of_batch.update(zip(alone, states[len(groups) :], strict=True))
        return [self._of_batch[one] for one in batches]

    def _compute(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Run the frozen layers: [1, tokens, width] of each batch, or [rows, 1, width] of read positions."""
        states: list[Tensor] = []

        def stop(module: nn.Module, args: Any, output: Tensor) -> None:
            states.append(output)
            raise Computed

        with self._layers[self.count - 1].register_forward_hook(stop):
            for batch in batches:
                with suppress(Computed):
                    self._model(**self._inputs_of(batch))
        return states


class StreamedForward(FrozenLayers):
    """A packed model whose layers are read as they run. See `FrozenLayers` for those that no trained tensor reaches."""

    def __init__(self, streamed: StreamedLayers, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.streamed, self._most = streamed, max(streamed.memory, STATES_BYTES)
        self._outputs: dict[Pass, Tensor] = {}  # the last layer's output, from when it is computed until it is used

    def logits(self, batch: Batch) -> Tensor:
        """Return the model's logits for a packed batch, as the resident model computes them."""
        if torch.is_grad_enabled():
            return self._run(batch)
        key = self._forward.perturbation, batch
        if key not in self._outputs:
            if self._forward.reach.outside:
                raise UserError("model.stream=true: a weight of this model is used outside its own module; use false")
            passes = self._upcoming(batch)
            first = self._states_of([one for _, one in passes]) if self.count else None
            self._outputs = dict(zip(passes, self._through(passes, first, len(self._layers)), strict=True))
        with self.streamed.unread():
            return self._from_layer(batch, self._outputs.pop(key), self._layers[-1:])

    def collated(self, parts: Sequence[Rows], collate: Callable[[Rows], Batch]) -> Iterator[Batch]:
        """Yield the batches of an evaluation, of which so many as fit go through the layers together."""
        while parts:
            count = self._fitting([(rows, 1) for rows in parts])
            self.expected = [collate(rows) for rows in parts[:count]]
            yield from self.expected
            parts = parts[count:]

    def _fitting(self, forwards: Sequence[tuple[Rows, int]]) -> int:
        """Return how many forwards from the first on, of rows and signs, may go through the layers together."""
        width = self._model.config.hidden_size * self._forward.compute_dtype.itemsize
        sizes = accumulate(width * signs * sum(map(self._tokens_of, rows)) for rows, signs in forwards)
        return max(1, sum(size <= self._most for size in sizes))

    def _upcoming(self, batch: Batch) -> list[Pass]:
        """Return the forward that is asked for and the next ones of the same step, as many as fit in memory."""
        now, points = self._forward.perturbation, list(self._forward.upcoming)
        if now is not None and len(now.signs) == 1:  # each sign by a forward of its own
            split = [[z] if z is None else [z._replace(signs=(sign,)) for sign in z.signs] for z in points]
            points = [z for of_signs in split for z in of_signs]
        batches = self.expected if batch in self.expected else [batch]
        passes = list(dict.fromkeys((z, one) for z in (points if now in points else [now]) for one in batches))
        passes = passes[passes.index((now, batch)) :]
        return passes[: self._fitting([(one.rows, len(z.signs) if z else 1) for z, one in passes])]

    def _compute(self, batches: Sequence[Batch]) -> list[Tensor]:
        return self._through([(None, batch) for batch in batches], None, self.count)

    def _through(self, passes: Sequence[Pass], states: list[Tensor] | None, stop: int) -> list[Tensor]:
        """Return the output of layer `stop` - 1 for each forward. `states` are those of the frozen layers, if known."""
        begin, recorded = 0 if states is None else self.count, []
        for z, batch in passes:
            with self._forward.seeing(z):
                recorded.append(self._record(batch))
        found = [hidden for _, hidden in recorded]
        if states is not None:
            signs = [len(z.signs) if z else 1 for z, _ in passes]
            found = [torch.cat([state] * count) for state, count in zip(states, signs, strict=True)]
        is_new = self.streamed.bytes_read < SAID_PASSES * sum(self.streamed.sizes)
        report = progress_log("reading layers", stop, "layers") if is_new else lambda done: None
        for number in range(begin, stop):
            with self.streamed.reading(number):
                for i, (z, _) in enumerate(passes):
                    args, kwargs = recorded[i][0][number]
                    with self._forward.seeing(z, paired=True):  # no weight is read outside its own module
                        found[i] = self._layers[number](found[i], *args, **kwargs)
            report(number + 1)
        return found

    def _record(self, batch: Batch) -> tuple[list[Call], Tensor]:
        """Return what each layer is called with in the forward of a batch, and the hidden states of the first."""
        calls, before = list[Call](), list[Tensor]()

        def record(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            calls.append((args, kwargs))
            before.append(hidden_states)
            if len(calls) == len(self._layers):
                raise Computed
            return hidden_states

        layers = dict.fromkeys(self._layers, record)
        with swapped("forward", layers), self.streamed.unread(), suppress(Computed):
            self._run(batch)
        return calls, before[0]


def packed_forward(model: Any, *args: Any, **kwargs: Any) -> FrozenLayers:
    """Return what runs a packed model: its layers are in memory, or are read as they run. See `FrozenLayers`."""
    streamed = streamed_layers(model)
    if streamed is None:
        return FrozenLayers(model, *args, **kwargs)
    return StreamedForward(streamed, model, *args, **kwargs)
