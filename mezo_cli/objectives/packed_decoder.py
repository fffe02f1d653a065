"""Lay out prompts and label words for one forward of a decoder.

Every token attends to the earlier tokens of its own row. A label word of several tokens is scored after each of its
prefixes: after `(a,)` for the second token, after `(a, b)` for the third. Words that share a prefix share its
computation: a row is its prompt followed by the last token of each prefix, which attends to the prompt and to the
tokens of its own prefix.

    prompt  p p p p          prefixes (a), (a b), (c):  after the prompt the tokens a b c, at positions 4 5 4
    keys that b attends to   p p p p a b

`pack` lays all rows end to end, without padding (packing.py). It needs a model whose attention goes through
transformers' registry and takes our position ids, and that has no sliding window (`FAMILIES`). `pad` is for every other
model: one right-padded row per prompt and longest prefix. Both are exact, and compute everything in one forward: no
keys and values are kept for the next one, whose weights are others.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mezo_cli.objectives.packing import PackedLayout

FAMILIES = ("gpt2", "opt", "llama", "mistral", "qwen2", "qwen3", "gpt_neox")
Prefixes = Sequence[tuple[int, ...]]  # of label words, without the empty one; shorter ones first


def is_supported(model: Any) -> bool:
    """Return whether batches for this model can be packed."""
    return model.config.model_type in FAMILIES and getattr(model.config, "sliding_window", None) is None


def pack(input_ids: Tensor, attention_mask: Tensor, prefixes: Prefixes) -> tuple[dict[str, Any], Tensor]:
    """Lay a padded batch end to end: first all prompts, then the prefixes of each row.

    Args:
        input_ids, attention_mask: [rows, length], padded on either side.
        prefixes: what follows each prompt.

    Returns:
        The model's keyword arguments; and the index in its one row of the last token of each prompt, and then of each
        prefix, [1 + prefixes, rows].
    """
    real, lengths, extra = attention_mask.bool(), attention_mask.sum(dim=1), len(prefixes)
    count, device = len(input_ids), input_ids.device
    row = torch.arange(count, device=device)
    last = torch.tensor([prefix[-1] for prefix in prefixes], dtype=input_ids.dtype, device=device)
    depth = torch.tensor([len(prefix) for prefix in prefixes], dtype=torch.long, device=device)
    after_prompt = lengths.unsqueeze(1) + torch.arange(extra, device=device)
    positions = (real.cumsum(1) - 1)[real]
    mask = _attention_mask(lengths, int(lengths.max()) + extra, prefixes)
    inputs = {
        "input_ids": torch.cat([input_ids[real], last.repeat(count)]).unsqueeze(0),
        "position_ids": torch.cat([positions, (lengths.unsqueeze(1) + depth - 1).flatten()]).unsqueeze(0),
        "attention_mask": mask[:1, :, :1, :1],  # four-dimensional, so transformers makes no mask from it
        "packed_layout": PackedLayout(
            rows=torch.cat([real.nonzero()[:, 0], row.repeat_interleave(extra)]),
            positions=torch.cat([positions, after_prompt.flatten()]),
            mask=mask,
            shape=(count, mask.shape[-1]),
        ),
    }
    prefix_ends = lengths.sum() + row * extra + torch.arange(extra, device=device).unsqueeze(1)
    return inputs, torch.cat([(lengths.cumsum(0) - 1).unsqueeze(0), prefix_ends])


def _attention_mask(lengths: Tensor, length: int, prefixes: Prefixes) -> Tensor:
    """Return which keys each query attends to, given the prompts' lengths: bool [rows, 1, length, length]."""
    position = torch.arange(length, device=lengths.device)
    visible = (position <= position.unsqueeze(1)).expand(len(lengths), length, length)
    if prefixes:
        ends = torch.tensor([[a[: len(b)] == b for b in prefixes] for a in prefixes], device=lengths.device)
        number = position - lengths.unsqueeze(1)  # of the prefix; negative in the prompt, too large in the padding
        is_prefix = (number >= 0) & (number < len(prefixes))
        number = number.clamp(0, len(prefixes) - 1)
        same = ends[number.unsqueeze(2), number.unsqueeze(1)] & is_prefix.unsqueeze(2)
        visible = visible & (same | ~is_prefix.unsqueeze(1))
    return visible.unsqueeze(1)


def pad(input_ids: Tensor, attention_mask: Tensor, prefixes: Prefixes) -> tuple[dict[str, Any], Tensor]:
    """Lay a batch out in right-padded rows, one per prompt and longest prefix; otherwise like `pack`.

    No token attends to the padding after it, and positions count from the left as in every model.
    """
    longest = [p for p in prefixes if not any(len(q) > len(p) and q[: len(p)] == p for q in prefixes)] or [()]
    prompts = [row[real].tolist() for row, real in zip(input_ids, attention_mask.bool(), strict=True)]
    rows = [prompt + list(prefix) for prompt in prompts for prefix in longest]
    length, device = max(map(len, rows)), input_ids.device
    inputs = {
        "input_ids": torch.tensor([row + [0] * (length - len(row)) for row in rows], device=device),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows], device=device),
    }
    asked: list[tuple[int, ...]] = [(), *prefixes]
    row_of = [next(i for i, other in enumerate(longest) if other[: len(p)] == p) for p in asked]
    ends = [
        [(r * len(longest) + offset) * length + len(prompt) - 1 + len(p) for r, prompt in enumerate(prompts)]
        for p, offset in zip(asked, row_of, strict=True)
    ]
    return inputs, torch.tensor(ends, device=device)
