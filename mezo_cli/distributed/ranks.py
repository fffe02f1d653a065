"""The ranks of a run: what they exchange, how they agree, and how the error of one reaches rank 0.

Two ways of exchange are used. The scalars of a step go through a gloo process group, whatever device the model is on:
it is quick, and notices a rank that is gone. What is rare (texts to compare, the run directory, errors) goes through
the store that the ranks met at, which also works when a rank has failed.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from mezo_cli.config.schema import Config
from mezo_cli.errors import RunFailed, UserError, first_line

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

POLL_SECONDS = 0.01  # between two looks at the store
LOOK_SECONDS = 0.5  # between two looks at the store while an exchange waits for another rank
DEFAULT_TIMEOUT = 120.0  # until the config is known
LEAVE_SECONDS = 10.0  # how long rank 0 waits at the end for ranks that may still read from its store
ALIVE_SECONDS = 1.0  # how long a rank waits, when something has failed, for word from those that are still there


class RankLost(RunFailed):
    """An exchange that failed because another rank is gone or hangs."""


class Ranks:
    """This process among the ranks of a run.

    Args:
        rank: its number.
        size: the number of ranks.
        store: a store of torch.distributed that all ranks have joined.
        restarts: how often the ranks have been started again.

    Attributes:
        split: what the ranks share in a step: `directions` or `rows`; "" until `start`.
        timeout: seconds to wait for another rank.
        exchanged: `step` or `evaluation` -> the sum over all ranks of the bytes that they gave to `gather` for it.
    """

    def __init__(self, rank: int, size: int, store: Any, restarts: int = 0) -> None:
        self.rank, self.size, self._store, self.restarts = rank, size, store, restarts
        self.split, self.timeout = "", DEFAULT_TIMEOUT
        self.exchanged: Counter[str] = Counter()
        self._group: Any = None
        self._agreements = 0

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self.rank == 0

    # --- start and end ---

    def start(self, config: Config, group: Any = None) -> None:
        """Open the process group, and choose what the ranks share in a step.

        Args:
            config: of the run.
            group: a process group that is open already.
        """
        self.timeout = config.distributed.timeout
        by_samples = "directions" if getattr(config.optimizer, "directions", 1) >= self.size else "rows"
        self.split = config.distributed.split or by_samples
        self._group = group if group is not None else self._open_group()

    def _open_group(self) -> Any:
        import torch.distributed as dist

        seconds = timedelta(seconds=self.timeout)
        try:
            dist.init_process_group("gloo", store=self._store, rank=self.rank, world_size=self.size, timeout=seconds)
        except RuntimeError as error:
            raise self._lost(error) from error
        return dist.group.WORLD

    def close(self) -> None:
        """Close the connections of the process group: a rank that waits for this one notices at once."""
        import torch.distributed as dist

        self._group = None
        if dist.is_initialized():
            dist.destroy_process_group()

    # --- scalars ---

    def own(self, things: Sequence[Any]) -> Sequence[Any]:
        """Return this rank's share of things that all ranks have in the same order."""
        return split_part(things, self.rank, self.size)

    def gather(self, piece: bytes, sizes: Sequence[int], purpose: str) -> bytes:
        """Return the pieces of all ranks, in the order of the ranks.

        Args:
            piece: this rank's.
            sizes: the length of each rank's piece, which all ranks know.
            purpose: `step` or `evaluation`, for `exchanged`.

        Raises:
            RankLost: when a rank is gone, or does not answer within the timeout.
            UserError, RunFailed: the error that another rank has reported.
        """
        import torch

        assert len(piece) == sizes[self.rank]
        to_all = torch.frombuffer(bytearray(piece * self.size), dtype=torch.uint8) if piece else torch.empty(0).byte()
        gathered = torch.empty(sum(sizes), dtype=torch.uint8)
        try:
            self._wait(self._group.alltoall_base(gathered, to_all, list(sizes), [len(piece)] * self.size))
        except RuntimeError as error:
            raise self._lost(error) from error
        self.exchanged[purpose] += sum(sizes)
        return gathered.numpy().tobytes()

    def _wait(self, work: Any) -> None:
        """Wait for an exchange; look now and then whether a rank that fails has reported it, and let signals in."""
        while True:
            try:
                work.wait(timedelta(seconds=LOOK_SECONDS))
                return
            except RuntimeError:
                if work.is_completed():
                    raise
            self._raise_reported()

    def gather_parts(self, values: "Tensor", sizes: Sequence[int], purpose: str) -> "Tensor":
        """Return the values of all ranks one after the other: [sum of sizes, ...], on the CPU.

        Args:
            values: this rank's, [own, ...], on any device. All dimensions but the first are the same on all ranks.
            sizes: the first dimension on each rank.
            purpose: as for `gather`.
        """
        import torch

        own = values.cpu().contiguous()
        of_one = own.element_size() * math.prod(own.shape[1:])
        joined = self.gather(own.numpy().tobytes(), [size * of_one for size in sizes], purpose)
        return torch.frombuffer(bytearray(joined), dtype=own.dtype).view(sum(sizes), *own.shape[1:])

    def first_says(self, flag: bool) -> bool:
        """Return rank 0's flag: one byte of a step."""
        sizes = [1] + [0] * (self.size - 1)
        return self.gather(bytes([flag]) if self.is_first else b"", sizes, "step") == b"\1"

    # --- texts ---

    def exchange(self, text: str, timeout: float | None = None) -> list[str]:
        """Return the text that each rank gave, in their order. Every rank calls it at the same point.

        Args:
            text: this rank's.
            timeout: seconds to wait for each of the others; None: `timeout`.

        Raises:
            RankLost: when a rank does not give its text within the timeout.
            UserError, RunFailed: the error that another rank has reported.
        """
        self._agreements += 1
        keys = [f"{self._agreements}/{rank}" for rank in range(self.size)]
        self._call(self._store.set, keys[self.rank], text)
        return [self._await(key, rank, timeout) for rank, key in enumerate(keys)]

    def from_first(self, text: str = "") -> str:
        """Return rank 0's text. The others wait until it has come to the same point."""
        self._agreements += 1
        if self.is_first:
            self._call(self._store.set, str(self._agreements), text)
            return text
        return self._await(str(self._agreements), 0)

    def check_same(self, what: str, text: str) -> None:
        """Check that all ranks have the same text, which is compared line by line.

        Args:
            what: the text, for the error: `config`.
            text: this rank's.
        """
        texts = self.exchange(text)
        for rank, other in enumerate(texts):
            if other != texts[0]:
                ours, theirs = _first_difference(texts[0], other)
                raise UserError(f"rank {rank} has another {what} than rank 0: {theirs}; rank 0 has {ours}")

    def _await(self, key: str, rank: int, timeout: float | None = None) -> str:
        """Return the value of a key that another rank sets."""
        seconds = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        while not self._call(self._store.check, [key]):
            self._raise_reported()
            if time.monotonic() > deadline:
                raise RankLost(
                    f"rank {rank} did not answer within {seconds:g} s (distributed.timeout={self.timeout:g})"
                )
            time.sleep(POLL_SECONDS)
        value: bytes = self._call(self._store.get, key)
        return value.decode()

    def _call(self, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except RuntimeError as error:  # the process that holds the store is gone
            raise RankLost(f"the store of the ranks is gone: {first_line(error)}") from error

    # --- errors ---

    def report(self, error: BaseException) -> None:
        """Report to the other ranks how this one failed. The first report counts."""
        text = str(error) if isinstance(error, (UserError, RunFailed)) else f"{type(error).__name__}: {error}"
        text = "interrupted" if isinstance(error, KeyboardInterrupt) else text
        document = json.dumps({"rank": self.rank, "by_user": isinstance(error, UserError), "text": text})
        self._call(self._store.compare_set, "error", "", document)

    def end(self, status: int) -> None:
        """Report to the other ranks that rank 0 has ended, and its exit status."""
        self._call(self._store.set, "end", str(status))
        self._await_all("ended")  # the store may be this process's own

    def leave(self) -> None:
        """Say that this rank has read all that it needs; rank 0, whose store it may be, waits for the others."""
        if self.is_first:
            self._await_all("left", LEAVE_SECONDS)
        else:
            self._call(self._store.set, f"left/{self.rank}", "")

    def await_end(self) -> int | None:
        """Return the exit status of rank 0, when it has ended; None if that cannot be known."""
        try:
            deadline = time.monotonic() + self.timeout
            while time.monotonic() < deadline:
                if self._call(self._store.check, ["end"]):
                    status = int(self._call(self._store.get, "end"))
                    self._call(self._store.set, f"ended/{self.rank}", "")
                    return status
                time.sleep(POLL_SECONDS)
        except RankLost:
            pass
        return None

    def _raise_reported(self) -> None:
        """Raise the error that another rank has reported, with its rank, if there is one."""
        if not self.is_first and self._call(self._store.check, ["end"]):
            raise RankLost("rank 0 has ended")
        if not self._call(self._store.check, ["error"]):
            return
        error = json.loads(self._call(self._store.get, "error"))
        text = f"rank {error['rank']}: {error['text']}"
        raise UserError(text) if error["by_user"] else RunFailed(text)

    def _await_all(self, what: str, seconds: float = ALIVE_SECONDS) -> list[int]:
        """Wait a moment until every other rank has set its key of that name; return those that have not."""
        deadline = time.monotonic() + seconds
        missing = [rank for rank in range(self.size) if rank != self.rank]
        while missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if not self._call(self._store.check, [f"{what}/{rank}"])]
            time.sleep(POLL_SECONDS)
        return missing

    def _lost(self, error: RuntimeError) -> Exception:
        """Return the error for an exchange that failed: what a rank has reported, or which ranks are gone."""
        try:
            self._raise_reported()
            self._call(self._store.set, f"alive/{self.rank}", "")
            missing = self._await_all("alive")
            self._raise_reported()
        except (UserError, RunFailed) as reported:
            return reported
        names = " and ".join(f"rank {rank}" for rank in missing) or "a rank"
        if "timed out" in str(error).lower():
            return RankLost(f"{names} did not answer within distributed.timeout={self.timeout:g} s")
        return RankLost(f"{names} ended: {first_line(error)}")


class Alone(Ranks):
    """A process that works alone: all is its own, and nothing is exchanged."""

    def __init__(self) -> None:
        super().__init__(0, 1, store=None)

    def start(self, config: Config, group: Any = None) -> None:
        """There is nothing to open."""

    def gather_parts(self, values: "Tensor", sizes: Sequence[int], purpose: str) -> "Tensor":
        """Return the values as they are, on their device and with their graph."""
        return values

    def first_says(self, flag: bool) -> bool:
        """Return the flag."""
        return flag

    def exchange(self, text: str, timeout: float | None = None) -> list[str]:
        """Return the text of this process alone."""
        return [text]

    def from_first(self, text: str = "") -> str:
        """Return the text."""
        return text


ALONE = Alone()
_current: ContextVar[Ranks] = ContextVar("ranks", default=ALONE)


def current() -> Ranks:
    """Return the ranks that share the work of this process; `ALONE` where there are no others."""
    return _current.get()


@contextmanager
def sharing(ranks: Ranks) -> Iterator[None]:
    """Let `current` return these ranks inside the block."""
    token = _current.set(ranks)
    try:
        yield
    finally:
        _current.reset(token)


def _first_difference(ours: str, theirs: str) -> tuple[str, str]:
    """Return the first line in which two texts differ, of each; "nothing" where one has ended."""
    first, second = ours.splitlines(), theirs.splitlines()
    length = max(len(first), len(second))
    pairs = zip(first + ["nothing"] * (length - len(first)), second + ["nothing"] * (length - len(second)), strict=True)
    one, other = next((a, b) for a, b in pairs if a != b)
    return one.strip(), other.strip()


def split_bounds(count: int, rank: int, size: int) -> tuple[int, int]:
    """Return the first and the last + 1 of `count` things that `rank` of `size` ranks takes: parts differ by one."""
    return count * rank // size, count * (rank + 1) // size


def split_part(things: Sequence[T], rank: int, size: int) -> Sequence[T]:
    """Return the things that a rank takes, in their order."""
    first, last = split_bounds(len(things), rank, size)
    return things[first:last]


def split_sizes(count: int, size: int) -> list[int]:
    """Return how many of `count` things each rank takes."""
    bounds = [split_bounds(count, rank, size) for rank in range(size)]
    return [last - first for first, last in bounds]
