"""How rows lie in a decoder's forward, when words are to follow the prompts.

Every token sees its own row's earlier tokens and no others. Words that begin alike share what they share: a row is its
prompt and, behind it, each beginning's last token once, which sees the prompt and the beginning that it ends:

    prompt  p p p p          beginnings (a), (a b), (c):  behind the prompt a b c, at positions 4 5 4
    keys that b sees         p p p p a b

`pack` lays all rows end to end, without padding (`packing` says why); so it serves the families whose attention goes
through transformers' registry with position ids of our own, and without a window (`PACKED`). `pad` serves every other:
one right-padded row for each chain of beginnings. Both are exact, and within one forward: nothing is kept for the next,
whose weights are others.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mezo_cli.objectives.packing import Spread, packed_attention

ATTENTION = "mezo_packed_decoder"
PACKED = ("gpt2", "opt", "llama", "mistral", "qwen2", "qwen3", "gpt_neox")
Beginnings = Sequence[tuple[int, ...]]  # of words, each without the last token; shorter ones first


def packs(model: Any) -> bool:
    """Whether batches for this model can be packed."""
    config = model.config
    return config.model_type in PACKED and getattr(config, "sliding_window", None) is None


def enable(model: Any) -> None:
    """Send the model's attention through ours, which serves padded batches too."""
    AttentionInterface.register(ATTENTION, packed_causal_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    model.config._attn_implementation = ATTENTION


def pack(ids: Tensor, attention: Tensor, beginnings: Beginnings) -> tuple[dict[str, Any], Tensor]:
    """Lay a padded batch end to end: first all prompts, then each row's beginnings.

    Args:
        ids, attention: [rows, length], padded on either side.
        beginnings: what follows each prompt.

    Returns:
        The model's keyword arguments, and where in its one row the prompts end, and then each beginning:
        [1 + beginnings, rows].
    """
    real, n, extra = attention.bool(), attention.sum(dim=1), len(beginnings)
    count, device = len(ids), ids.device
    row = torch.arange(count, device=device)
    last = torch.tensor([b[-1] for b in beginnings], dtype=ids.dtype, device=device)
    depth = torch.tensor([len(b) for b in beginnings], dtype=torch.long, device=device)
    behind = n.unsqueeze(1) + torch.arange(extra, device=device)
    places = (real.cumsum(1) - 1)[real]
    mask = _visible(n, int(n.max()) + extra, beginnings)
    spread = Spread(
        rows=torch.cat([real.nonzero()[:, 0], row.repeat_interleave(extra)]),
        places=torch.cat([places, behind.flatten()]),
        mask=mask,
        shape=(count, mask.shape[-1]),
    )
    inputs = {
        "input_ids": torch.cat([ids[real], last.repeat(count)]).unsqueeze(0),
        "position_ids": torch.cat([places, (n.unsqueeze(1) + depth - 1).flatten()]).unsqueeze(0),
        "attention_mask": mask[:1, :, :1, :1],  # four-dimensional: no mask is made of it
        "spread": spread,
    }
    tails = n.sum() + row * extra + torch.arange(extra, device=device).unsqueeze(1)
    return inputs, torch.cat([(n.cumsum(0) - 1).unsqueeze(0), tails])


def _visible(n: Tensor, length: int, beginnings: Beginnings) -> Tensor:
    """Return which keys each query sees, bool [rows, 1, length, length], for rows of `n` tokens and the beginnings."""
    place = torch.arange(length, device=n.device)
    seen = (place <= place.unsqueeze(1)).expand(len(n), length, length)
    if beginnings:
        ends = torch.tensor([[a[: len(b)] == b for b in beginnings] for a in beginnings], device=n.device)
        which = place - n.unsqueeze(1)  # negative: a token of the prompt; too large: padding
        is_one = (which >= 0) & (which < len(beginnings))
        which = which.clamp(0, len(beginnings) - 1)
        same = ends[which.unsqueeze(2), which.unsqueeze(1)] & is_one.unsqueeze(2)
        seen = seen & (same | ~is_one.unsqueeze(1))
    return seen.unsqueeze(1)


def pad(ids: Tensor, attention: Tensor, beginnings: Beginnings) -> tuple[dict[str, Any], Tensor]:
    """Lay a batch in right-padded rows, one for each prompt and chain of beginnings; as `pack` otherwise.

    No real token sees the padding, which comes after it, and positions count from the left as every model's do.
    """
    chains = [b for b in beginnings if not any(len(o) > len(b) and o[: len(b)] == b for o in beginnings)] or [()]
    prompts = [row[real].tolist() for row, real in zip(ids, attention.bool(), strict=True)]
    rows = [prompt + list(chain) for prompt in prompts for chain in chains]
    length = max(map(len, rows))
    inputs = {
        "input_ids": torch.tensor([row + [0] * (length - len(row)) for row in rows], device=ids.device),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows], device=ids.device),
    }
    asked: list[tuple[int, ...]] = [(), *beginnings]
    chain_of = [next(i for i, chain in enumerate(chains) if chain[: len(b)] == b) for b in asked]
    at = [
        [(r * len(chains) + chain) * length + len(prompt) - 1 + len(b) for r, prompt in enumerate(prompts)]
        for b, chain in zip(asked, chain_of, strict=True)
    ]
    return inputs, torch.tensor(at, device=ids.device)


def packed_causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    spread: Spread | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attend to the visible tokens of one's own row; as `packing.packed_attention`, with heads that share keys."""
    if spread is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **more)
    groups = query.shape[1] // key.shape[1]
    key, value = (t if groups == 1 else t.repeat_interleave(groups, dim=1) for t in (key, value))
    return packed_attention(module, query, key, value, None, scaling, dropout, spread)
