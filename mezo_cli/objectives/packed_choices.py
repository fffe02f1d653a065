"""Lay out prompts and their candidates for one forward of a decoder.

A row is its prompt, followed by its candidates one after the other. A token of a candidate attends to the prompt and to
the earlier tokens of its own candidate, and its position continues the prompt's:

    prompt  p p p p          candidates (a b), (c d e):  after the prompt a b c d e, at positions 4 5 4 5 6
    keys that d attends to   p p p p c d

So a prompt is computed once for all of its candidates, exactly. `pack` lays rows end to end (packing.py); `pad` is for
a model that is not packed (families.py): one right-padded row per prompt and candidate.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mezo_cli.objectives.collate import Arrays
from mezo_cli.objectives.packing import PackedLayout, pack_rows
from mezo_cli.tasks.choice import ChoiceRow

PROMPT = -1  # in place of the number of a candidate


def pack(rows: Sequence[ChoiceRow]) -> Arrays:
    """Lay rows end to end.

    Returns:
        The arrays that `packed_inputs` reads: input_ids and position_ids, [tokens]; rows and positions, the place of
        each token in the padded batch, [tokens]; candidate, the number of each token's candidate in its row, or PROMPT,
        [rows, length]; and those of `_scored`.
    """
    packed = pack_rows([[*row.input_ids, *chain(*row.candidates)] for row in rows])
    candidate = np.full((len(rows), packed["lengths"].max()), PROMPT)
    position_ids, starts = [], []
    for number, row in enumerate(rows):
        prompt, lengths = len(row.input_ids), [len(ids) for ids in row.candidates]
        candidate[number, prompt : row.tokens] = np.repeat(np.arange(len(lengths)), lengths)
        position_ids += [*range(prompt), *(prompt + i for length in lengths for i in range(length))]
        first = packed["starts"][number]
        starts.append([int(first) + prompt + sum(lengths[:i]) for i in range(len(lengths))])

    def before(row: int, number: int, token: int) -> int:
        return int(packed["starts"][row]) + rows[row].position if token == 0 else starts[row][number] + token - 1

    return {
        "input_ids": np.concatenate([ids for row in rows for ids in (row.input_ids, *row.candidates)]),
        "position_ids": np.array(position_ids),
        "rows": packed["rows"],
        "positions": packed["positions"],
        "candidate": candidate,
        **_scored(rows, before),
    }


def pad(rows: Sequence[ChoiceRow]) -> Arrays:
    """Lay a batch out in right-padded rows, one per prompt and candidate.

    No token attends to the padding after it, and positions count from the left as in every model.

    Returns:
        input_ids and attention_mask, [candidates of all rows, length]; and the arrays of `_scored`, whose positions are
        those of these rows laid end to end.
    """
    texts = [[*row.input_ids, *ids] for row in rows for ids in row.candidates]
    length, counts = max(map(len, texts)), [len(row.candidates) for row in rows]

    def before(row: int, number: int, token: int) -> int:
        return (sum(counts[:row]) + number) * length + rows[row].position + token

    return {
        "input_ids": np.array([text + [0] * (length - len(text)) for text in texts]),
        "attention_mask": np.array([[1] * len(text) + [0] * (length - len(text)) for text in texts]),
        **_scored(rows, before),
    }


def _scored(rows: Sequence[ChoiceRow], before: Callable[[int, int, int], int]) -> Arrays:
    """Return which tokens are scored, from which positions, and what they belong to.

    `before` returns the position before a token, of (row, candidate, token in it).

    Returns:
        read: the positions that the head reads, [read]; head_rows: the tokens that are scored, each once; read_of and
        token_of: for each token that is scored its position in `read` and its number in `head_rows`, [scored]; slots:
        the scored tokens of each candidate, [rows, most candidates, most tokens], the first `counts` of which are
        valid, [rows, most candidates]; and right: whether a candidate is right, bool [rows, most candidates].
    """
    width = max(len(row.candidates) for row in rows)
    counts = np.array([[*row.scored, *[0] * (width - len(row.scored))] for row in rows])
    slots = np.zeros((*counts.shape, counts.max()), dtype=np.int64)
    right = np.zeros(counts.shape, dtype=bool)
    positions: list[int] = []
    tokens: list[int] = []
    for i, row in enumerate(rows):
        right[i, list(row.right)] = True
        for j, (ids, count) in enumerate(zip(row.candidates, row.scored, strict=True)):
            slots[i, j, :count] = range(len(tokens), len(tokens) + count)
            positions += [before(i, j, token) for token in range(len(ids) - count, len(ids))]
            tokens += ids[len(ids) - count :]
    read, read_of = np.unique(positions, return_inverse=True)
    head_rows, token_of = np.unique(tokens, return_inverse=True)
    return {
        "read": read,
        "read_of": read_of,
        "head_rows": head_rows,
        "token_of": token_of,
        "slots": slots,
        "counts": counts,
        "right": right,
    }


def packed_inputs(layout: dict[str, Tensor]) -> dict[str, Any]:
    """Return the model's keyword arguments for what `pack` laid out."""
    candidate = layout["candidate"]
    count, length = candidate.shape
    position = torch.arange(length, device=candidate.device)
    visible = (candidate.unsqueeze(1) == candidate.unsqueeze(2)).logical_or_(candidate.unsqueeze(1) == PROMPT)
    mask = visible.logical_and_(position <= position.unsqueeze(1)).unsqueeze(1)  # the padding is at the end
    return {
        "input_ids": layout["input_ids"].unsqueeze(0),
        "position_ids": layout["position_ids"].unsqueeze(0),
        "attention_mask": mask[:1, :, :1, :1],  # four-dimensional, so transformers makes no mask from it
        "packed_layout": PackedLayout(layout["rows"], layout["positions"], mask, (count, length)),
    }
