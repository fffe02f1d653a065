"""The ranks of a run: how they meet, what they exchange, how they agree, and how the error of one ends all.

Two ways of exchange are used. The scalars of a step go through a gloo process group, whatever device the model is on:
it is quick, and notices a rank that is gone. What is rare (texts to compare, the run directory, errors) goes through
the store that the ranks met at, which also works when a rank has failed.
"""

import itertools
import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from mezo_cli.config.schema import Config
from mezo_cli.distributed.launch import read_launch
from mezo_cli.errors import RunFailed, RunStopped, UserError, first_line
from mezo_cli.process import versions
from mezo_cli.process.signals import import_torch

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
    """This process among the ranks of a run, which have joined a store of torch.distributed.

    Attributes:
        rank: its number; `is_first`: whether this is rank 0, which prints and writes.
        size: the number of ranks.
        split: what the ranks share in a step: `directions` or `rows`; "" until `start`.
        timeout: seconds to wait for another rank.
        exchanged: `step` or `evaluation` -> the sum over all ranks of the bytes that they gave to `gather` for it.
    """

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.rank, self.size, self._store = rank, size, store
        self.is_first, self.split, self.timeout = rank == 0, "", DEFAULT_TIMEOUT
        self.exchanged: Counter[str] = Counter()
        self._group: Any = None
        self._agreements = 0

    def start(self, config: Config) -> None:
        """Open the process group, unless it is open, and choose what the ranks share in a step of the run."""
        import torch.distributed as dist

        self.timeout = config.distributed.timeout
        by_samples = "directions" if getattr(config.optimizer, "points", 1) >= self.size else "rows"
        self.split = config.distributed.split or by_samples
        if not dist.is_initialized():
            place: dict[str, Any] = {"rank": self.rank, "world_size": self.size, "store": self._store}
            try:
                dist.init_process_group("gloo", timeout=timedelta(seconds=self.timeout), **place)
            except RuntimeError as error:
                raise self._lost(error) from error
        self._group = dist.group.WORLD

    def close(self) -> None:
        """Close the connections of the process group: a rank that waits for this one notices at once."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()

    # --- scalars ---

    def share_of(self, things: Sequence[T]) -> Sequence[T]:
        """Return this rank's share of things that all ranks have in the same order; shares differ by one at most."""
        first, last = (len(things) * number // self.size for number in (self.rank, self.rank + 1))
        return things[first:last]

    def gather(self, piece: bytes, sizes: Sequence[int], purpose: str) -> bytes:
        """Return the pieces of all ranks, in the order of the ranks.

        Args:
            sizes: the length of each rank's piece, which all ranks know.
            purpose: `step` or `evaluation`, for `exchanged`.

        Raises:
            RankLost: when a rank is gone, or does not answer within the timeout.
            UserError, RunFailed: the error that another rank has reported.
        """
        import torch

        to_all = torch.frombuffer(bytearray(piece * self.size), dtype=torch.uint8) if piece else torch.empty(0).byte()
        gathered = torch.empty(sum(sizes), dtype=torch.uint8)
        try:
            work = self._group.alltoall_base(gathered, to_all, list(sizes), [len(piece)] * self.size)
            while True:  # now and then look whether a rank that fails has reported it, and let signals in
                try:
                    work.wait(timedelta(seconds=LOOK_SECONDS))
                    break
                except RuntimeError:
                    if work.is_completed():
                        raise
                self._raise_reported()
        except RuntimeError as error:
            raise self._lost(error) from error
        self.exchanged[purpose] += sum(sizes)
        return gathered.numpy().tobytes()

    def gather_parts(self, values: "Tensor", sizes: Sequence[int], purpose: str) -> "Tensor":
        """Return the values of all ranks one after the other: [sum of sizes, ...], on the CPU.

        `values` are this rank's, [own, ...], on any device. All dimensions but the first are the same on all ranks;
        `sizes` are the first.
        """
        import torch

        part = values.cpu().contiguous()
        of_one = part.element_size() * math.prod(part.shape[1:])
        joined = self.gather(part.numpy().tobytes(), [size * of_one for size in sizes], purpose)
        return torch.frombuffer(bytearray(joined), dtype=part.dtype).view(sum(sizes), *part.shape[1:])

    def first_says(self, flag: bool) -> bool:
        """Return rank 0's flag: one byte of a step."""
        sizes = [1] + [0] * (self.size - 1)
        return self.gather(bytes([flag]) if self.is_first else b"", sizes, "step") == b"\1"

    # --- texts ---

    def exchange(self, text: str) -> list[str]:
        """Return the text that each rank gave, in their order. Every rank calls it at the same point.

        It waits `timeout` seconds for each of the others, and raises as `gather` does.
        """
        self._agreements += 1
        keys = [f"{self._agreements}/{rank}" for rank in range(self.size)]
        self._call(self._store.set, keys[self.rank], text)
        return [self._await(key, rank) for rank, key in enumerate(keys)]

    def from_first(self, text: str = "") -> str:
        """Return rank 0's text. The others wait until it has come to the same point."""
        self._agreements += 1
        if self.is_first:
            self._call(self._store.set, str(self._agreements), text)
            return text
        return self._await(str(self._agreements), 0)

    def check_same(self, what: str, text: str, raises: type[UserError | RunFailed] = UserError) -> None:
        """Check that all ranks have the same text, which is compared line by line; `what` names it: `config`."""
        texts = [one.splitlines() for one in self.exchange(text)]
        for rank, other in enumerate(texts):
            for ours, theirs in itertools.zip_longest(texts[0], other, fillvalue="nothing"):
                if ours != theirs:
                    raise raises(
                        f"rank {rank} has another {what} than rank 0: {theirs.strip()}; rank 0 has {ours.strip()}"
                    )

    def _await(self, key: str, rank: int) -> str:
        if self._missing([key], self.timeout, reported=True):
            raise RankLost(f"rank {rank} did not answer within distributed.timeout={self.timeout:g} s")
        value: bytes = self._call(self._store.get, key)
        return value.decode()

    def _missing(self, keys: Sequence[str], seconds: float, reported: bool = False) -> list[str]:
        """Wait until all keys are set; return those that are not by then. `reported`: raise what others report."""
        deadline, missing = time.monotonic() + seconds, list(keys)
        while missing := [key for key in missing if not self._call(self._store.check, [key])]:
            if reported:
                self._raise_reported()
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        return missing

    def _call(self, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except RuntimeError as error:  # the process that holds the store is gone
            raise RankLost(f"the store of the ranks is gone: {first_line(error)}") from error

    # --- errors ---

    def leave(self) -> None:
        """Say that this rank has read all that it needs; rank 0, whose store it may be, waits for the others."""
        if self.is_first:
            self._missing(self._others("left"), LEAVE_SECONDS)
        else:
            self._call(self._store.set, f"left/{self.rank}", "")

    def end_all(self, error: BaseException) -> NoReturn:
        """End the other ranks because of an error of this one: rank 0 says that it ends, another reports its error."""
        if isinstance(error, SystemExit):  # the exit status that the command line gives to an error
            status = error.code if isinstance(error.code, int) else 1
        elif isinstance(error, (RunStopped, KeyboardInterrupt)):
            status = 130
        else:
            status = 2 if isinstance(error, (UserError, OSError)) and not isinstance(error, RunFailed) else 1
        with suppress(RankLost):  # no other rank is left
            if self.is_first:
                self._call(self._store.set, "end", str(status))
                self._missing(self._others("ended"), ALIVE_SECONDS)  # the store may be this process's own
            elif not isinstance(error, (RankLost, RunStopped, SystemExit)):
                text = str(error) if isinstance(error, (UserError, RunFailed)) else f"{type(error).__name__}: {error}"
                text = "interrupted" if isinstance(error, KeyboardInterrupt) else text
                report = {"rank": self.rank, "by_user": isinstance(error, UserError), "text": text}
                self._call(self._store.compare_set, "error", "", json.dumps(report))  # the first report counts
        self.close()  # whoever waits for this rank notices
        if self.is_first:
            raise error
        with suppress(RankLost):
            if not self._missing(["end"], self.timeout):
                status = int(self._call(self._store.get, "end"))
                self._call(self._store.set, f"ended/{self.rank}", "")
        raise SystemExit(status) from error

    def _raise_reported(self) -> None:
        if not self.is_first and self._call(self._store.check, ["end"]):
            raise RankLost("rank 0 has ended")
        if not self._call(self._store.check, ["error"]):
            return
        error = json.loads(self._call(self._store.get, "error"))
        text = f"rank {error['rank']}: {error['text']}"
        raise UserError(text) if error["by_user"] else RunFailed(text)

    def _others(self, what: str) -> list[str]:
        return [f"{what}/{rank}" for rank in range(self.size) if rank != self.rank]

    def _lost(self, error: RuntimeError) -> Exception:
        """Return the error for an exchange that failed: what a rank has reported, or which ranks are gone."""
        try:
            self._raise_reported()
            self._call(self._store.set, f"alive/{self.rank}", "")
            missing = self._missing(self._others("alive"), ALIVE_SECONDS)
            self._raise_reported()
        except (UserError, RunFailed) as reported:
            return reported
        names = " and ".join(key.replace("alive/", "rank ") for key in missing) or "a rank"
        if "timed out" in str(error).lower():
            return RankLost(f"{names} did not answer within distributed.timeout={self.timeout:g} s")
        return RankLost(f"{names} ended: {first_line(error)}")


class Alone(Ranks):
    """A process that works alone: all is its own. `start` and `check_same` are not called for it."""

    def gather_parts(self, values: "Tensor", sizes: Sequence[int], purpose: str) -> "Tensor":
        """Return the values as they are, on their device and with their graph."""
        return values

    def first_says(self, flag: bool) -> bool:
        """Return the flag."""
        return flag

    def from_first(self, text: str = "") -> str:
        """Return the text."""
        return text


ALONE = Alone(0, 1, store=None)
current: ContextVar[Ranks] = ContextVar("ranks", default=ALONE)  # that share the work of this process


@contextmanager
def joined() -> Iterator[Ranks]:
    """Join the ranks that share the command, and end together with them: `ALONE` where there are no others.

    An error on rank 0 ends the other ranks. The error of another rank ends all: rank 0 raises it, with the rank's
    number, as soon as it waits for that rank. Ranks other than 0 end with rank 0's exit status, and print nothing.

    Raises:
        UserError: when the ranks do not meet, or run different code; and the error of another rank.
        RunFailed: the error of another rank; a rank that is gone, or hangs.
    """
    launch = read_launch()
    if launch is None:
        yield ALONE
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its warnings about a rank that is gone are 20 lines each
    import_torch()
    import torch
    import torch.distributed as dist

    found = versions.installed()
    if torch.cuda.is_available():  # `cuda` means the GPU with this rank's number on its host
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK") or 0) % torch.cuda.device_count())
    code = [f"{name} {found.get(name)}" for name in ("mezo-runner", "torch", "transformers", "numpy")]
    code.append(f"source files with sha256 {versions.source_digest()[:16]}")  # what results depend on
    try:  # the store is `torchrun`'s own, or that of rank 0
        seconds = timedelta(seconds=DEFAULT_TIMEOUT)
        store, rank, size = next(iter(dist.rendezvous("env://", *launch, timeout=seconds)))
    except (RuntimeError, ValueError, OSError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} (MASTER_ADDR:MASTER_PORT)"
        raise UserError(f"the {launch[1]} ranks did not meet at {address}: {first_line(error)}") from error
    ranks = Ranks(rank, size, dist.PrefixStore("mezo", store))  # torchrun has keys of its own in it
    token = current.set(ranks)
    try:
        ranks.check_same("version", "\n".join(code))
        yield ranks
        ranks.leave()
    except BaseException as error:
        ranks.end_all(error)
    finally:
        current.reset(token)
        ranks.close()


@contextmanager
def in_turn(ranks: Ranks) -> Iterator[None]:
    """Let rank 0 pass the block first, which may repair or download files, and then the others."""
    if not ranks.is_first:
        ranks.from_first()
    yield
    if ranks.is_first:
        ranks.from_first("passed")


def split_sizes(count: int, size: int) -> list[int]:
    """Return how many of `count` things each rank takes, as `Ranks.share_of` shares them."""
    return [count * (rank + 1) // size - count * rank // size for rank in range(size)]
