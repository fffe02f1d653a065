"""Run a decoder on prompts and what may follow them, in one forward.

A row is its prompt, followed by its continuations one after the other. A token of a continuation attends to the prompt
and to the earlier tokens of its own continuation, and its position continues the prompt's:

    prompt  p p p p          continuations (a b), (c d e):  after the prompt a b c d e, at positions 4 5 4 5 6
    keys that d attends to   p p p p c d

So a prompt is computed once for all of its continuations. Rows are laid end to end, without padding (packing.py), for a
model whose attention goes through transformers' registry and takes our position ids, and that has no sliding window
(families.py). For every other model there is one right-padded row per prompt and continuation. Both are exact: no keys
and values are kept for the next forward, whose weights are others.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mezo_cli.objectives.collate import Arrays, Batch
from mezo_cli.objectives.families import packs_decoder
from mezo_cli.objectives.frozen_layers import FrozenLayers
from mezo_cli.objectives.packing import PackedLayout, pack_rows, packed_logits, use_packed_attention
from mezo_cli.perturb.forward import PerturbedForward

PROMPT = -1  # in place of the number of a continuation

Row = tuple[Sequence[int], Sequence[Sequence[int]]]  # a prompt, and its continuations: one at least, perhaps empty
# Where a token is among the hidden states, laid end to end, of (row, continuation, token); token -1: the prompt's last.
Place = Callable[[int, int, int], int]


class PackedDecoder:
    """A decoder with prompts and continuations. Where its family is supported, its attention is replaced for good.

    Args:
        model: the decoder.
        forward: runs it with perturbed weights.
        tokens_of: returns the number of tokens that a batch has for a row.

    Attributes:
        is_packed: whether its batches are packed, and one forward can compute both signs.
        frozen: its lowest layers, if it is packed.
    """

    def __init__(self, model: Any, forward: PerturbedForward, tokens_of: Callable[[Any], int]) -> None:
        self._model, self._forward = model, forward
        self._batch: Batch | None = None
        self._inputs: dict[str, Any] = {}  # the model's keyword arguments for `self._batch`
        self.is_packed = packs_decoder(model)
        self.frozen: FrozenLayers | None = None
        if self.is_packed:
            self.frozen = FrozenLayers(model, forward, tokens_of, reads=False)
            use_packed_attention(model)

    @property
    def layout(self) -> dict[str, Tensor]:
        """The layout of the batch that is running."""
        assert self._batch is not None
        return self._batch.layout

    def lay_out(self, rows: Sequence[Row]) -> tuple[Arrays, Place]:
        """Lay rows out for one forward: the arrays that `logits` reads in `batch.layout`."""
        return (pack if self.is_packed else pad)(rows)

    def logits(self, batch: Batch) -> Tensor:
        """Return what the head does; under both signs of a perturbation, in one paired forward if the batch is packed.

        The batch has the arrays of `lay_out`.
        """
        if self.frozen is not None:
            return packed_logits(self._model, self._forward, self.frozen, batch, self._inputs_of)
        logits: Tensor = self._model(**self._inputs_of(batch)).logits
        return logits

    def states_at(self, states: Tensor, places: Tensor) -> Tensor:
        """Return the hidden states that the head gets at some places, float32: [signs, *places, width]."""
        states = states if self.is_packed else states.flatten(0, 1).unsqueeze(0)
        return states[:, places].float()

    def _inputs_of(self, batch: Batch) -> dict[str, Any]:
        if batch is not self._batch:  # a step may ask twice for the same batch
            self._batch = batch
            if self.is_packed:
                self._inputs = packed_inputs(self.layout, self.layout["input_ids"].numel() > batch.tokens)
            else:
                self._inputs = {name: self.layout[name] for name in ("input_ids", "attention_mask")}
        return {**self._inputs, "use_cache": False}


def pack(rows: Sequence[Row]) -> tuple[Arrays, Place]:
    """Lay rows end to end.

    Returns:
        The arrays that `packed_inputs` reads: input_ids and position_ids, [tokens]; rows and positions, the place of
        each token in the padded batch, [tokens]; and branch, the number of each token's continuation, or PROMPT, [rows,
        length].
    """
    texts = [[*prompt, *chain.from_iterable(continuations)] for prompt, continuations in rows]
    packed = pack_rows(texts)
    branch = np.full((len(rows), packed["lengths"].max()), PROMPT)
    position_ids, firsts = packed["positions"].copy(), []
    for row, (prompt, continuations) in enumerate(rows):
        start = int(packed["starts"][row])
        firsts.append([start + at for at in accumulate(map(len, continuations), initial=len(prompt))])
        for number, (first, ids) in enumerate(zip(firsts[row][:-1], continuations, strict=True)):
            branch[row, first - start : first - start + len(ids)] = number
            position_ids[first : first + len(ids)] = range(len(prompt), len(prompt) + len(ids))

    def place(row: int, number: int, token: int) -> int:
        return firsts[row][0] - 1 if token < 0 else firsts[row][number] + token

    arrays = {"input_ids": np.concatenate(texts), "position_ids": position_ids, "branch": branch}
    return arrays | {name: packed[name] for name in ("rows", "positions")}, place


def packed_inputs(layout: dict[str, Tensor], has_continuations: bool) -> dict[str, Any]:
    """Return the model's keyword arguments for what `pack` laid out."""
    mask = _attention_mask(layout["branch"], has_continuations)
    shape = (len(mask), mask.shape[-1])
    return {
        "input_ids": layout["input_ids"].unsqueeze(0),
        "position_ids": layout["position_ids"].unsqueeze(0),
        "attention_mask": mask[:1, :, :1, :1],  # four-dimensional, so transformers makes no mask from it
        "packed_layout": PackedLayout(layout["rows"], layout["positions"], mask, shape),
    }


def _attention_mask(branch: Tensor, has_continuations: bool) -> Tensor:
    """Return which keys each query attends to: bool [rows, 1, length, length]. The padding is at the end."""
    rows, length = branch.shape
    position = torch.arange(length, device=branch.device)
    visible = (position <= position.unsqueeze(1)).expand(rows, length, length)
    if has_continuations:
        same = (branch.unsqueeze(1) == branch.unsqueeze(2)).logical_or_(branch.unsqueeze(1) == PROMPT)
        visible = same.logical_and_(visible)
    return visible.unsqueeze(1)


def pad(rows: Sequence[Row]) -> tuple[Arrays, Place]:
    """Lay a batch out in right-padded rows, one per prompt and continuation.

    No token attends to the padding after it, and positions count from the left as in every model.

    Returns:
        input_ids and attention_mask, [continuations of all rows, length].
    """
    texts = [[*prompt, *ids] for prompt, continuations in rows for ids in continuations]
    length, firsts = max(map(len, texts)), list(accumulate((len(own) for _, own in rows), initial=0))

    def place(row: int, number: int, token: int) -> int:
        return (firsts[row] + number) * length + len(rows[row][0]) + token

    arrays = {
        "input_ids": np.array([text + [0] * (length - len(text)) for text in texts]),
        "attention_mask": np.array([[1] * len(text) + [0] * (length - len(text)) for text in texts]),
    }
    return arrays, place
