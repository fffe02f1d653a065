"""Run a packed model whose layers are read from disk: each layer once for all forwards of a step, or of an evaluation.

A forward is a perturbation and a batch: signs, samples and micro-batches make several of them per step. Each goes
through the model up to its layers, which only say what they are called with. Then every layer in turn is read, and runs
all forwards by the calls that it would have got; at last each goes from the last layer to the head.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mezo_cli.console import progress_log
from mezo_cli.errors import UserError
from mezo_cli.models.streaming import StreamedLayers
from mezo_cli.objectives.collate import Batch
from mezo_cli.objectives.frozen_layers import Computed, FrozenLayers, Rows
from mezo_cli.perturb.functional import swapped
from mezo_cli.perturb.plan import Perturbation

SAID_PASSES = 8  # through the layers whose progress is logged: those of the start and of the first step
STATES_BYTES = 256_000_000  # of the hidden states of forwards that go through a layer together

Pass = tuple[Perturbation | None, Batch]  # a forward
Call = tuple[tuple[Any, ...], dict[str, Any]]  # what a layer is called with after the hidden states


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
