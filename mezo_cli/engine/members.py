"""Ask an engine about a batch for all members of a step: several per request, and requests ahead of the answers.

An objective asks for one member after the other, under `PerturbedForward.losses_of`. The requests for the next members
are sent before the answers of this one are used, so that the engine computes while mezo rewards completions.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mezo_cli.perturb.forward import Perturbation, PerturbedForward
from mezo_cli.perturb.noise import Direction

SCORED_AT_ONCE = 20  # tokens that are scored after one prompt: the most that a server of vLLM allows, as it is started
AHEAD = 2  # requests that are sent and not answered: the engine begins the second while the answer of the first is read


class Member(NamedTuple):
    """The weights theta + c z; theta where there is no direction."""

    direction: Direction | None
    c: float


Wait = Callable[[], list[Any]]  # waits for the answer to a request: a result per member


class Members:
    """The results of a request for the members of a step.

    Args:
        forward: says which members losses are computed with now, and next.
        send: sends a request, by method and params, for some members.
        at_once: the most members of a request.
    """

    def __init__(
        self,
        forward: PerturbedForward,
        send: Callable[[str, Mapping[str, Any], Sequence[Member]], Wait],
        at_once: int,
    ) -> None:
        self._forward, self._send, self._at_once = forward, send, at_once
        self._request: tuple[str, Mapping[str, Any]] | None = None
        self._left: list[Member] = []  # not sent yet
        self._sent: deque[tuple[Sequence[Member], Wait]] = deque()
        self._results: dict[Member, Any] = {}

    def ask(self, method: str, **params: Any) -> list[Any]:
        """Return the engine's result for each member whose weights are active: one per sign."""
        wanted = _members(self._forward.perturbation)
        if self._request != (method, params) or not self._comes(wanted):
            self.forget()
            self._request = method, params
            upcoming = [member for point in self._forward.upcoming for member in _members(point)]
            first = wanted[0]
            self._left = upcoming[upcoming.index(first) :] if first in upcoming else wanted
        while any(member not in self._results for member in wanted):
            self._fill()
            members, wait = self._sent.popleft()
            self._results |= zip(members, wait(), strict=True)
        self._fill()
        return [self._results.pop(member) for member in wanted]

    def _comes(self, wanted: Sequence[Member]) -> bool:
        """Return whether these members' results are there or will come."""
        known = {*self._results, *self._left, *(member for members, _ in self._sent for member in members)}
        return known.issuperset(wanted)

    def _fill(self) -> None:
        assert self._request is not None
        method, params = self._request
        while self._left and len(self._sent) < AHEAD:
            members, self._left = self._left[: self._at_once], self._left[self._at_once :]
            self._sent.append((members, self._send(method, params, members)))

    def forget(self) -> None:
        """Drop what has not been used: it was asked for other weights, or for another batch."""
        self._left = []
        while self._sent:
            self._sent.popleft()[1]()
        self._results.clear()
        self._request = None


def _members(perturbation: Perturbation | None) -> list[Member]:
    if perturbation is None:
        return [Member(None, 0.0)]
    return [Member(perturbation.direction, sign * perturbation.eps) for sign in perturbation.signs]


def token_scores(members: Members, texts: Sequence[tuple[Sequence[int], int]]) -> Tensor:
    """Return the scores of the last tokens of each text, one text after the other: float32 [signs, tokens].

    Each is scored after a prompt of all before it, of which the engine keeps the keys and values; tokens that follow
    the same prompt share its request. vLLM's own log-probabilities of a prompt's tokens fail on a CPU where it has
    adapters.

    Args:
        texts: token ids, and how many of them, at the end, are scored.
    """
    places = [(tuple(ids[:n]), ids[n]) for ids, count in texts for n in range(len(ids) - count, len(ids))]
    following: dict[tuple[int, ...], set[int]] = {}
    for prompt, token in places:
        following.setdefault(prompt, set()).add(token)
    prompts, tokens = [], []
    for prompt, after in following.items():
        for first in range(0, len(after), SCORED_AT_ONCE):
            prompts.append(prompt)
            tokens.append(sorted(after)[first : first + SCORED_AT_ONCE])
    of_signs = []
    for scores in members.ask("score", prompts=list(map(list, prompts)), tokens=tokens):
        asked = zip(prompts, tokens, scores, strict=True)
        by_place = {(p, token): score for p, own, of in asked for token, score in zip(own, of, strict=True)}
        of_signs.append([by_place[place] for place in places])
    return torch.tensor(of_signs)
