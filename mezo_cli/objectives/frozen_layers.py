"""Compute the lowest layers, which hold no trained tensor, once per batch: their output is the same for both signs.

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

from mezo_cli.objectives.collate import Batch
from mezo_cli.perturb.forward import PerturbedForward

Forward = Callable[[Batch], Any]
Rows = Sequence[Any]


class _Computed(Exception):  # noqa: N818 (it ends a forward whose remaining layers are not needed)
    """Carries the output of the last frozen layer."""

    def __init__(self, states: Tensor) -> None:
        self.states = states


class FrozenLayers:
    """The layers at the beginning of a model that no trained tensor reaches, and what they have computed.

    Args:
        model: of a family that is packed; its layers are in one `ModuleList`.
        forward: runs it with perturbed weights.
        tokens_of: returns the number of tokens that a batch has for a row.
        reads: whether the last layer leaves one position of each row alone, which the head reads: an encoder's does.

    Attributes:
        count: the number of these layers; 0 until `find`.
    """

    def __init__(
        self,
        model: Any,
        forward: PerturbedForward,
        tokens_of: Callable[[Any], int] = lambda row: len(row.input_ids),
        reads: bool = True,
    ) -> None:
        self.count = 0
        self._forward, self._config, self._tokens_of, self._has_reads = forward, model.config, tokens_of, reads
        self._parent, self._name, self._layers = _layers_of(model)
        self._rest = nn.ModuleList()  # the last frozen layer, which returns its known output, and those above
        # Of a batch for as long as it is used: the micro-batches of a step are gone through once per sign.
        self._of_batch: WeakKeyDictionary[Batch, tuple[torch.dtype, Tensor]] = WeakKeyDictionary()
        self._groups: dict[int, Rows] = {}  # id of a row that is kept -> the rows that are computed with it
        self._states: dict[int, Tensor] = {}  # id of a row -> [tokens, width]
        self._dtype = torch.float32  # the compute dtype of the states that are kept
        self._collate: Callable[[Rows], Batch] | None = None

    @contextmanager
    def find(self) -> Iterator[None]:
        """Find the frozen layers from the forward inside, which builds an autograd graph."""
        trained: list[bool] = []
        hooks = [
            layer.register_forward_hook(lambda module, args, output: trained.append(_tensor(output).requires_grad))
            for layer in self._layers
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.count = next((number for number, value in enumerate(trained) if value), len(trained))
        self._rest = nn.ModuleList(self._layers[max(self.count - 1, 0) :])

    def keep(self, rows: Rows, group_size: int, collate: Callable[[Rows], Batch]) -> None:
        """Keep the states of rows from when they are first computed.

        Args:
            rows: the rows; they are recognized by identity.
            group_size: rows that are computed together.
            collate: makes a batch of rows.
        """
        self._collate, self._dtype = collate, self._forward.compute_dtype
        ordered = sorted(rows, key=lambda row: len(row.input_ids))
        for start in range(0, len(ordered), group_size):
            group = ordered[start : start + group_size]
            self._groups.update((id(row), group) for row in group)

    def bytes_of(self, rows: Rows) -> int:
        """Return the memory that the states of rows take, in bytes."""
        left_out = (lambda row: len(row.input_ids) - 1) if self._reads else (lambda row: 0)
        tokens = sum(self._tokens_of(row) - left_out(row) for row in rows)
        return tokens * self._config.hidden_size * self._forward.compute_dtype.itemsize

    @property
    def _reads(self) -> bool:
        """Whether all layers are frozen, so that of their output only the read positions are there."""
        return self._has_reads and self.count == len(self._layers)

    @contextmanager
    def skipped(self, batch: Batch, run: Forward) -> Iterator[None]:
        """Let a forward of `batch` inside begin after the frozen layers, with their output.

        Under autograd nothing is skipped: there layers may have dropout. `run` runs the model on a batch, one sign; it
        is stopped after the frozen layers.
        """
        if not self.count or torch.is_grad_enabled():
            yield
            return
        states = self._states_of(batch, run)
        if self._forward.num_signs == 2:
            states = torch.cat([states, states])
        last: Any = self._rest[0]
        setattr(self._parent, self._name, self._rest)
        patched = last.forward
        last.forward = lambda *args, **kwargs: states
        try:
            yield
        finally:
            last.forward = patched
            setattr(self._parent, self._name, self._layers)

    def _states_of(self, batch: Batch, run: Forward) -> Tensor:
        dtype = self._forward.compute_dtype
        known, states = self._of_batch.get(batch, (None, None))
        if states is None or known != dtype:
            kept = dtype == self._dtype and all(id(row) in self._groups for row in batch.rows)
            states = self._gather(batch, run) if kept else self._compute(batch, run)
            self._of_batch[batch] = dtype, states
        return states

    def _compute(self, batch: Batch, run: Forward) -> Tensor:
        """Run the frozen layers: [1, tokens, width], or [rows, 1, width] where only read positions are left."""

        def stop(module: nn.Module, args: Any, output: Any) -> None:
            raise _Computed(_tensor(output))

        hook = self._layers[self.count - 1].register_forward_hook(stop)
        try:
            run(batch)
        except _Computed as reached:
            return reached.states
        finally:
            hook.remove()
        raise RuntimeError("the forward did not reach its last frozen layer")

    def _gather(self, batch: Batch, run: Forward) -> Tensor:
        """Return the states of a batch, put together from those of its rows."""
        assert self._collate is not None
        for row in batch.rows:
            if id(row) not in self._states:
                group = self._collate(self._groups[id(row)])
                parts = self._split(self._compute(group, run), group)
                self._states.update((id(one), part) for one, part in zip(group.rows, parts, strict=True))
        return _join([self._states[id(row)] for row in batch.rows], batch, self._reads)

    def _split(self, states: Tensor, batch: Batch) -> list[Tensor]:
        """Return the states of each row: [tokens, width], its tokens in order; of `reads` those that the head reads."""
        if self._reads:
            return list(states)
        return list(states[0][_by_row(batch)].split([self._tokens_of(row) for row in batch.rows]))


def _layers_of(model: Any) -> tuple[nn.Module, str, nn.ModuleList]:
    """Return the module that has the model's layers, the name of its attribute, and the layers."""
    count = model.config.num_hidden_layers
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return module, name, child
    raise ValueError(f"{type(model).__name__} has no list of {count} layers")


def _tensor(output: Any) -> Tensor:
    """Return the hidden states of a layer's output."""
    states: Tensor = output[0] if isinstance(output, tuple) else output
    return states


def _join(parts: Sequence[Tensor], batch: Batch, reads: bool) -> Tensor:
    """Do the opposite of `_split`."""
    if reads:
        return torch.stack(list(parts))
    together = torch.cat(list(parts))
    states = torch.empty_like(together)
    states[_by_row(batch)] = together
    return states.unsqueeze(0)


def _by_row(batch: Batch) -> Tensor:
    """Return the numbers of the packed tokens, row after row."""
    return batch.layout["rows"].argsort(stable=True)
