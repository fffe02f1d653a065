"""The scores of the last tokens of texts, each after the tokens before it, by an engine."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mezo_cli.engine.members import Members

AT_ONCE = 20  # tokens that are scored after one prompt: the most that a server of vLLM allows, as it is started


def token_scores(members: Members, texts: Sequence[tuple[Sequence[int], int]]) -> Tensor:
    """Return the scores of the last tokens of each text, one text after the other: float32 [signs, tokens].

    Each is scored after a prompt of all before it, of which the engine keeps the keys and values; tokens that follow
    the same prompt share its request. vLLM's own log-probabilities of a prompt's tokens fail on a CPU where it has
    adapters.

    Args:
        members: asks the engine.
        texts: token ids, and how many of them, at the end, are scored.
    """
    places = [(tuple(ids[:n]), ids[n]) for ids, count in texts for n in range(len(ids) - count, len(ids))]
    following: dict[tuple[int, ...], set[int]] = {}
    for prompt, token in places:
        following.setdefault(prompt, set()).add(token)
    prompts, tokens = [], []
    for prompt, after in following.items():
        for first in range(0, len(after), AT_ONCE):
            prompts.append(prompt)
            tokens.append(sorted(after)[first : first + AT_ONCE])
    of_signs = []
    for scores in members.ask("score", prompts=list(map(list, prompts)), tokens=tokens):
        asked = zip(prompts, tokens, scores, strict=True)
        by_place = {(p, token): score for p, own, of in asked for token, score in zip(own, of, strict=True)}
        of_signs.append([by_place[place] for place in places])
    return torch.tensor(of_signs)
