"""Ranks as threads of this process: what `ShardGroup` exchanges, without torch.distributed."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class ThreadGroup:
    """One rank; all ranks share `slots` and `meeting`. The methods are those of `ShardGroup`."""

    def __init__(self, rank: int, slots: list[Any], meeting: threading.Barrier) -> None:
        self.rank, self.size, self._slots, self._meeting = rank, len(slots), slots, meeting
        self.received = 0  # bytes

    def _exchange(self, value: Any) -> list[Any]:
        self._slots[self.rank] = value
        self._meeting.wait()
        return list(self._slots)

    def gather_(self, whole: Tensor, purpose: str) -> None:
        others = self._exchange(whole)
        parts = [other.chunk(self.size)[source] for source, other in enumerate(others)]
        for source, (target, part) in enumerate(zip(whole.chunk(self.size), parts, strict=True)):
            if source != self.rank:
                target.copy_(part)
                self.received += part.nbytes
        self._meeting.wait()

    def sum_(self, values: Tensor, purpose: str) -> None:
        assert not values.is_floating_point()
        others = self._exchange(values.clone())
        values.copy_(torch.stack(others).sum(0))
        self._meeting.wait()

    def broadcast_(self, values: Tensor, source: int) -> None:
        others = self._exchange(values)
        if source != self.rank:
            values.copy_(others[source])
        self._meeting.wait()

    def barrier(self) -> None:
        self._meeting.wait()


def run_ranks(size: int, work: Callable[[ThreadGroup], Any]) -> list[Any]:
    """Call `work` for each rank in a thread of its own; return the results in the order of the ranks."""
    slots: list[Any] = [None] * size
    meeting = threading.Barrier(size, timeout=120)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with torch.no_grad():
                results[rank] = work(ThreadGroup(rank, slots, meeting))
        except BaseException as error:
            errors.append(error)
            meeting.abort()  # the other ranks do not wait for this one

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), next(iter(errors), None))
    if first is not None:
        raise first
    return results
