"""Join the ranks of a launch for the time of a command, and end together with them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

from mezo_cli import system
from mezo_cli.distributed.launch import Launch, read_launch
from mezo_cli.distributed.ranks import ALONE, DEFAULT_TIMEOUT, RankLost, Ranks, sharing
from mezo_cli.errors import RunFailed, RunStopped, UserError, first_line


@contextmanager
def joined() -> Iterator[Ranks]:
    """Yield the ranks that share the command: `ALONE` where there are no others.

    An error on rank 0 ends the other ranks. The error of another rank ends all: rank 0 raises it, with the rank's
    number, as soon as it waits for that rank. Ranks other than 0 end with rank 0's exit status, and print nothing.

    Raises:
        UserError: when the ranks do not meet, or run different code; and the error of another rank.
        RunFailed: the error of another rank; a rank that is gone, or hangs.
        SystemExit: in place of any error on a rank other than 0.
    """
    launch = read_launch()
    if launch is None:
        yield ALONE
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its warnings about a rank that is gone are 20 lines each
    system.import_torch()
    import torch

    versions = system.versions()
    if torch.cuda.is_available():  # `cuda` means the GPU with this rank's number on its host
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK") or 0) % torch.cuda.device_count())
    code = [f"{name} {versions.get(name)}" for name in ("mezo-runner", "torch", "transformers", "numpy")]
    code.append(f"source files with sha256 {system.source_digest()[:16]}")  # what results depend on
    ranks = Ranks(launch.rank, launch.size, _meet(launch), launch.restarts)
    try:
        with sharing(ranks):
            ranks.check_same("version", "\n".join(code))
            yield ranks
            ranks.leave()
    except BaseException as error:
        _end_all(ranks, error)
    finally:
        ranks.close()


@contextmanager
def in_turn(ranks: Ranks) -> Iterator[None]:
    """Let rank 0 pass the block first, which may repair or download files, and then the others."""
    if not ranks.is_first:
        ranks.from_first()
    yield
    if ranks.is_first:
        ranks.from_first("passed")


def _end_all(ranks: Ranks, error: BaseException) -> NoReturn:
    """End the other ranks because of an error of this one."""
    status = exit_status(error)
    try:
        if ranks.is_first:
            ranks.end(status)
        elif not isinstance(error, (RankLost, RunStopped, SystemExit)):
            ranks.report(error)
    except RankLost:  # no other rank is left
        pass
    ranks.close()  # whoever waits for this rank notices
    if ranks.is_first:
        raise error
    of_first = ranks.await_end()
    raise SystemExit(status if of_first is None else of_first) from error


def exit_status(error: BaseException) -> int:
    """Return the exit status that the command line gives to an error."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, (RunStopped, KeyboardInterrupt)):
        return 130
    return 2 if isinstance(error, (UserError, OSError)) and not isinstance(error, RunFailed) else 1


def _meet(launch: Launch) -> Any:
    """Return the store at which the ranks meet: `torchrun`'s own, or that of rank 0."""
    import torch.distributed as dist

    try:
        seconds = timedelta(seconds=DEFAULT_TIMEOUT)
        store, _, _ = next(iter(dist.rendezvous("env://", launch.rank, launch.size, timeout=seconds)))
    except (RuntimeError, ValueError, OSError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        address += " (MASTER_ADDR:MASTER_PORT)"
        raise UserError(f"the {launch.size} ranks did not meet at {address}: {first_line(error)}") from error
    # torchrun keeps its store when it starts the ranks again: what they wrote into it before must not be found.
    return dist.PrefixStore(f"start {launch.restarts}", store)
