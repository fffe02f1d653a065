"""How this process was started: alone, or as one of the ranks of a `torchrun` or `srun`. Imports no torch."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout

from mezo_cli.errors import UserError, join

COMMANDS = ("train", "resume", "eval", "predict")  # those that ranks can share
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
WAIT_SECONDS = 10.0  # how long a rank that has failed waits for rank 0 to end


def read_launch(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Return the number of this rank, from 0, of how many; None if it is alone: WORLD_SIZE is 1 or not set."""
    size = int(environment.get("WORLD_SIZE") or 1)
    if size == 1:
        return None
    for name in NEEDED:
        if not environment.get(name):
            raise UserError(
                f"WORLD_SIZE={size}, but {name} is not set: ranks are started by torchrun, or with {join(NEEDED)} set"
            )
    rank = int(environment["RANK"])
    if not 0 <= rank < size:
        raise UserError(f"RANK={rank}: with WORLD_SIZE={size} it is a number from 0 to {size - 1}")
    return rank, size


def check_command(name: str | None) -> None:
    """Refuse a command that ranks cannot share, each would do it by itself; and ranks that are started again."""
    launch = read_launch()
    if launch is None:
        return
    if name is not None and name not in COMMANDS:
        raise UserError(f"mezo {name}: {launch[1]} ranks were started; they can share {join(COMMANDS)} alone")
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0):
        raise UserError("torchrun --max-restarts: ranks do not continue their run: give 0, and then `mezo resume RUN`")


@contextmanager
def silent_followers() -> Iterator[None]:
    """Discard what a rank other than 0 prints inside the block: they all print the same.

    Where the block ends with an error, `torchrun` sends SIGTERM to all ranks once one of them is gone. So the others
    wait for that signal: rank 0 has then printed the error, and is the one that `torchrun` reports.
    """
    try:
        launch = read_launch()
    except UserError:  # reported by the command
        launch = None
    if launch is None or launch[0] == 0:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as null, redirect_stdout(null), redirect_stderr(null):
        try:
            yield
        except SystemExit as error:
            if error.code not in (None, 0, 130) and "TORCHELASTIC_RUN_ID" in os.environ:
                time.sleep(WAIT_SECONDS)
            raise
