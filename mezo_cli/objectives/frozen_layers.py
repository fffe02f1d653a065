"""Run a packed model whose lowest layers, if they hold no trained tensor, are computed once for both signs.

With `peft=head`, or with a LoRA or biases of the top layers, most layers are below the first trained tensor. Their
output depends neither on z nor on the step. So it is computed once per batch, for both signs and all directions, and
for rows that `keep` was given once per run.

The bits of a row's states depend on the other rows of the forward that computes them. So rows that are kept are
computed in groups that do not change, whichever batch asks first: a resumed run gets bitwise identical outputs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mezo_cli.objectives.collate import Batch, batches_by_length
from mezo_cli.perturb.forward import PerturbedForward

Rows = Sequence[Any]
InputsOf = Callable[[Batch], dict[str, Any]]


class _Computed(Exception):  # noqa: N818 (it ends a forward whose remaining layers are not needed)
    """Carries the output of the last frozen layer."""


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
    """

    def __init__(
        self, model: Any, forward: PerturbedForward, inputs_of: InputsOf, tokens_of: Callable[[Any], int], reads: bool
    ) -> None:
        self.count, self._model, self._forward = 0, model, forward
        self._inputs_of, self._tokens_of, self._reads = inputs_of, tokens_of, reads
        lists = [
            (module, name, child)
            for module in model.modules()
            for name, child in module.named_children()
            if isinstance(child, nn.ModuleList) and len(child) == model.config.num_hidden_layers
        ]
        self._parent, self._name, self._layers = lists[0]
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

        hooks = [layer.register_forward_hook(look) for layer in self._layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
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

    def _sizes(self, rows: Rows) -> list[int]:
        """Return how many states each row has: of all of its tokens, or of the one that the head reads."""
        return [1 if self._reads_alone else self._tokens_of(row) for row in rows]

    def logits(self, batch: Batch) -> Tensor:
        """Return the model's logits for a packed batch; under both signs of a perturbation, of one paired forward.

        Under autograd all layers are computed: there they may have dropout.
        """
        if not self.count or torch.is_grad_enabled():
            return self._run(batch)
        states = self._states_of(batch)
        if self._forward.num_signs == 2:
            states = torch.cat([states, states])
        last: Any = self._rest[0]
        setattr(self._parent, self._name, self._rest)
        patched, last.forward = last.forward, lambda *args, **kwargs: states
        try:
            return self._run(batch)
        finally:
            last.forward = patched
            setattr(self._parent, self._name, self._layers)

    def _run(self, batch: Batch) -> Tensor:
        inputs = self._inputs_of(batch)
        if self._forward.num_signs == 1:
            return self._model(**inputs).logits
        doubled = {key: torch.cat([value] * 2) if isinstance(value, Tensor) else value for key, value in inputs.items()}
        with self._forward.paired_forward():
            return self._model(**doubled).logits

    def _states_of(self, batch: Batch) -> Tensor:
        """Return what the frozen layers compute for a batch, put together from its rows' states if all are kept."""
        states, dtype = self._of_batch.get(batch), self._forward.compute_dtype
        if states is not None and states.dtype == dtype:
            return states
        if dtype == self._dtype and all(id(row) in self._groups for row in batch.rows):
            for row in batch.rows:
                if id(row) not in self._states:
                    group = self._groups[id(row)]
                    parts = self._compute(self._collate(group)).flatten(0, 1).split(self._sizes(group))
                    self._states.update(zip(map(id, group), parts, strict=True))
            of_rows = torch.cat([self._states[id(row)] for row in batch.rows])
            states = of_rows.unsqueeze(1 if self._reads_alone else 0)
        else:
            states = self._compute(batch)
        self._of_batch[batch] = states
        return states

    def _compute(self, batch: Batch) -> Tensor:
        """Run the frozen layers: [1, tokens, width], or [rows, 1, width] where only read positions are left."""

        def stop(module: nn.Module, args: Any, states: Tensor) -> None:
            raise _Computed(states)

        hook = self._layers[self.count - 1].register_forward_hook(stop)
        try:
            self._model(**self._inputs_of(batch))
        except _Computed as reached:
            return reached.args[0]
        finally:
            hook.remove()
        raise RuntimeError("the forward did not reach its last frozen layer")
