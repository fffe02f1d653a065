"""Run a packed model whose lowest layers, if they hold no trained tensor, are computed once for both signs.

With `peft=head`, or with a LoRA or biases of the top layers, most layers are below the first trained tensor. Their
output depends neither on z nor on the step. So it is computed once per batch, for both signs and all directions, and
for rows that `keep` was given once per run.

The bits of a row's states depend on the other rows of the forward that computes them. So rows that are kept are
computed in groups that do not change, whichever batch asks first: a resumed run gets bitwise identical outputs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mezo_cli.models.streaming import numbered_layers, streamed_layers
from mezo_cli.objectives.collate import Batch, batches_by_length
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.functional import swapped

Rows = Sequence[Any]
InputsOf = Callable[[Batch], dict[str, Any]]


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
        yield from map(collate, parts)

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
        kept = [one for one in new if dtype == self._dtype and all(id(row) in self._groups for row in one.rows)]
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


def packed_forward(model: Any, *args: Any, **kwargs: Any) -> FrozenLayers:
    """Return what runs a packed model: its layers are in memory, or are read as they run. See `FrozenLayers`."""
    streamed = streamed_layers(model)
    if streamed is None:
        return FrozenLayers(model, *args, **kwargs)
    from mezo_cli.objectives.streamed_forward import StreamedForward  # which imports this module

    return StreamedForward(streamed, model, *args, **kwargs)
