"""Lay out prompts and label words for one forward of a decoder.

Every token attends to the earlier tokens of its own row. A label word of several tokens is scored after each of its
starts: after `(a,)` for the second token, after `(a, b)` for the third. Words that share a start share its computation:
a row is its prompt followed by the last token of each start, which attends to the prompt and to the tokens of its own
start.

    prompt  p p p p          word starts (a), (a b), (c):  after the prompt the tokens a b c, at positions 4 5 4
    keys that b attends to   p p p p a b

`pack` lays all rows end to end, without padding (packing.py). It needs a model whose attention goes through
transformers' registry and takes our position ids, and that has no sliding window (families.py). `pad` is for every
other model: one right-padded row per prompt and longest start. Both are exact, and compute everything in one forward:
no keys and values are kept for the next one, whose weights are others.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mezo_cli.objectives.collate import Arrays
from mezo_cli.objectives.packing import PackedLayout, pack_rows

Prompts = Sequence[Sequence[int]]
WordStarts = Sequence[tuple[int, ...]]  # of label words, without the empty one; shorter ones first


def pack(prompts: Prompts, word_starts: WordStarts) -> Arrays:
    """Lay prompts end to end: first all prompts, then the word starts of each row.

    Returns:
        The arrays that `packed_inputs` reads: input_ids and position_ids; rows and positions, the place of each token
        in the padded batch, [tokens]; lengths of the prompts, [rows]; starts_with, bool [word starts, word starts]:
        whether one starts with the other; and scored_positions, the index in the packed row of the last token of each
        prompt, and then of each word start, [1 + word starts, rows].
    """
    packed, count, extra = pack_rows(prompts), len(prompts), len(word_starts)
    lengths, row, number = packed["lengths"], np.arange(count), np.arange(extra)
    last = np.array([start[-1] for start in word_starts], dtype=np.int64)
    depth = np.array([len(start) for start in word_starts], dtype=np.int64)
    starts_with = [[a[: len(b)] == b for b in word_starts] for a in word_starts]
    start_ends = lengths.sum() + row * extra + number[:, None]
    return {
        "input_ids": np.concatenate([*prompts, np.tile(last, count)]),
        "position_ids": np.concatenate([packed["positions"], (lengths[:, None] + depth - 1).ravel()]),
        "rows": np.concatenate([packed["rows"], row.repeat(extra)]),
        "positions": np.concatenate([packed["positions"], (lengths[:, None] + number).ravel()]),
        "lengths": lengths,
        "starts_with": np.array(starts_with, dtype=bool).reshape(extra, extra),
        "scored_positions": np.concatenate([(packed["starts"] + lengths - 1)[None], start_ends]),
    }


def packed_inputs(layout: dict[str, Tensor], longest: int) -> dict[str, Any]:
    """Return the model's keyword arguments for what `pack` laid out; `longest`: the length of the longest prompt."""
    starts_with = layout["starts_with"]
    mask = _attention_mask(layout["lengths"], longest + len(starts_with), starts_with)
    read = layout["scored_positions"]  # [positions, rows]
    read_mask = mask[torch.arange(len(mask), device=mask.device), 0, layout["positions"][read]]
    shape = (len(mask), mask.shape[-1])
    return {
        "input_ids": layout["input_ids"].unsqueeze(0),
        "position_ids": layout["position_ids"].unsqueeze(0),
        "attention_mask": mask[:1, :, :1, :1],  # four-dimensional, so transformers makes no mask from it
        "packed_layout": PackedLayout(
            layout["rows"], layout["positions"], mask, shape, read.flatten(), read_mask.transpose(0, 1).unsqueeze(1)
        ),
    }


def _attention_mask(lengths: Tensor, length: int, starts_with: Tensor) -> Tensor:
    """Return which keys each query attends to, given the prompts' lengths: bool [rows, 1, length, length]."""
    position = torch.arange(length, device=lengths.device)
    visible = (position <= position.unsqueeze(1)).expand(len(lengths), length, length)
    if len(starts_with):
        number = position - lengths.unsqueeze(1)  # of the word start; negative in the prompt, too large in the padding
        is_word_start = (number >= 0) & (number < len(starts_with))
        number = number.clamp(0, len(starts_with) - 1)
        same = starts_with[number.unsqueeze(2), number.unsqueeze(1)] & is_word_start.unsqueeze(2)
        visible = visible & (same | ~is_word_start.unsqueeze(1))
    return visible.unsqueeze(1)


def pad(prompts: Prompts, word_starts: WordStarts) -> Arrays:
    """Lay a batch out in right-padded rows, one per prompt and longest word start.

    No token attends to the padding after it, and positions count from the left as in every model.

    Returns:
        input_ids and attention_mask, [rows, length]; and scored_positions, as `pack`'s, in the rows laid end to end.
    """
    longest = [p for p in word_starts if not any(len(q) > len(p) and q[: len(p)] == p for q in word_starts)] or [()]
    rows = [[*prompt, *start] for prompt in prompts for start in longest]
    length = max(map(len, rows))
    starts: list[tuple[int, ...]] = [(), *word_starts]
    row_of = [next(i for i, other in enumerate(longest) if other[: len(p)] == p) for p in starts]
    ends = [
        [(r * len(longest) + offset) * length + len(prompt) - 1 + len(p) for r, prompt in enumerate(prompts)]
        for p, offset in zip(starts, row_of, strict=True)
    ]
    return {
        "input_ids": np.array([row + [0] * (length - len(row)) for row in rows]),
        "attention_mask": np.array([[1] * len(row) + [0] * (length - len(row)) for row in rows]),
        "scored_positions": np.array(ends),
    }
