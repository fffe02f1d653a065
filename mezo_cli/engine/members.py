"""Ask an engine about a batch for all members of a step: several per request, and requests ahead of the answers.

An objective asks for one member after the other, under `PerturbedForward.losses_of`. The requests for the next members
are sent before the answers of this one are used, so that the engine computes while mezo rewards completions.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mezo_cli.perturb.forward import Perturbation, PerturbedForward
from mezo_cli.perturb.noise import Direction

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
