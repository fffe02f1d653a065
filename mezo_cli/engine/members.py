"""Ask a server about a batch for all members of a step: several per request, and requests ahead of the answers.

An objective asks for one member after the other, under `PerturbedForward.losses_of`. The requests for the next members
are sent before the answers of this one are used, so that the server computes while mezo rewards completions.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from mezo_cli.engine.server import TOKENS
from mezo_cli.perturb.forward import Perturbation, PerturbedForward
from mezo_cli.perturb.noise import Direction

SCORED_AT_ONCE = 20  # tokens that are scored after one prompt: the most that a server of vLLM allows, as it is started
AHEAD = 2  # requests that are sent and not answered: the server begins the second while the answer of the first is read


class Member(NamedTuple):
    """The weights theta + c z; theta where there is no direction."""

    direction: Direction | None
    c: float


THETA = Member(None, 0.0)
Prompts: TypeAlias = list[Sequence[int]]
Settings: TypeAlias = list[Mapping[str, Any]]  # of each prompt
Wait = Callable[[], list[list[Any]]]  # waits for the answers to a request: [members][prompts]


class Members:
    """The answers to a request for the members of a step.

    Args:
        forward: says which members losses are computed with now, and next.
        send: sends a request for some members.
        at_once: the most members of a request.
    """

    def __init__(
        self, forward: PerturbedForward, send: Callable[[Prompts, Settings, Sequence[Member]], Wait], at_once: int
    ) -> None:
        self._forward, self._send, self._at_once = forward, send, at_once
        self._request: tuple[Prompts, Settings] = [], []
        self._left: list[Member] = []  # not sent yet
        self._sent: deque[tuple[Sequence[Member], Wait]] = deque()
        self._answers: dict[Member, list[Any]] = {}

    def ask(self, prompts: Prompts, settings: Settings) -> list[list[Any]]:
        """Return the answers to each prompt for each member whose weights are active: [signs][prompts]."""
        wanted = _members(self._forward.perturbation)
        known = {*self._answers, *self._left, *(member for members, _ in self._sent for member in members)}
        if self._request != (prompts, settings) or not known.issuperset(wanted):
            self.forget()
            self._request = prompts, settings
            upcoming = [member for point in self._forward.upcoming for member in _members(point)]
            first = wanted[0]
            self._left = upcoming[upcoming.index(first) :] if first in upcoming else wanted
        while any(member not in self._answers for member in wanted):
            self._fill()
            members, wait = self._sent.popleft()
            self._answers |= zip(members, wait(), strict=True)
        self._fill()
        return [self._answers.pop(member) for member in wanted]

    def _fill(self) -> None:
        while self._left and len(self._sent) < AHEAD:
            members, self._left = self._left[: self._at_once], self._left[self._at_once :]
            self._sent.append((members, self._send(*self._request, members)))

    def forget(self) -> None:
        """Drop what has not been used: it was asked for other weights, or for another batch."""
        self._left = []
        while self._sent:
            self._sent.popleft()[1]()
        self._answers.clear()

    def token_scores(self, texts: Sequence[tuple[Sequence[int], int]]) -> Tensor:
        """Return the log-probabilities of the last tokens of each text, one text after the other: [signs, tokens].

        Each is scored after a prompt of all before it, of which the server keeps the keys and values; tokens that
        follow the same prompt share its request. vLLM's own log-probabilities of a prompt's tokens fail on a CPU where
        it has adapters.

        Args:
            texts: token ids, and how many of them, at the end, are scored.
        """
        places = [(tuple(ids[:n]), ids[n]) for ids, count in texts for n in range(len(ids) - count, len(ids))]
        following: dict[tuple[int, ...], set[int]] = {}
        for prompt, token in places:
            following.setdefault(prompt, set()).add(token)
        prompts, settings = list[Sequence[int]](), list[Mapping[str, Any]]()
        for prompt, after in following.items():
            for first in range(0, len(after), SCORED_AT_ONCE):
                prompts.append(prompt)
                tokens = sorted(after)[first : first + SCORED_AT_ONCE]
                settings.append({"max_tokens": 1, "temperature": 0.0, TOKENS: tokens})
        of_signs = []
        for answers in self.ask(prompts, settings):
            asked = zip(prompts, answers, strict=True)
            by_place = {(prompt, token): score for prompt, of in asked for token, score in of.items()}
            of_signs.append([by_place[place] for place in places])
        return torch.tensor(of_signs)


def _members(perturbation: Perturbation | None) -> list[Member]:
    if perturbation is None:
        return [THETA]
    return [Member(perturbation.direction, sign * perturbation.eps) for sign in perturbation.signs]
