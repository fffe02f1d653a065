"""`micro_batch_size=auto`: the most rows per forward that fit, tried on the longest rows before the first step.

A GPU says when its memory is used up: all rows are tried first, and half as many until they fit. A CPU does not, the
kernel kills the process: from one row on the number grows, by the measured memory per row, below what is free. Then
config.yaml and run.json have the number, so that a resumed run keeps it.
"""

import gc
import math
from collections.abc import Callable

import torch

from mezo_cli.config.schema import Config
from mezo_cli.console import log
from mezo_cli.distributed.ranks import ALONE, current
from mezo_cli.objectives.collate import longest_first
from mezo_cli.process.device_errors import explain_device_errors, is_out_of_memory
from mezo_cli.process.memory import free_memory, peak_memory, reset_peak_memory
from mezo_cli.runs import Run, recovery
from mezo_cli.session.opening import Prepared, prepare
from mezo_cli.session.session import smaller_model
from mezo_cli.training.rate import with_rate

MARGIN = 0.1  # of the free memory, for what the trials do not show: a checkpoint, a copy of the start


def with_chosen_micro_batch(config: Config, run: Run) -> Config:
    """Return the config with the most rows per forward that fit, which its files have then; ranks take the smallest.

    Raises:
        UserError: where not even one row fits.
    """
    first = config.replace(micro_batch_size=1)
    first = with_rate(first, 0.0) if config.optimizer.picks_rate else first
    with prepare(first, trains=True, tells=False) as prepared:
        session, ranks = prepared.session, current()
        session.ranks = session.forward.ranks = ALONE  # each rank tries for itself
        shared = ranks.size if ranks.split == "rows" else 1
        rows = [math.ceil(min(config.batch_size, len(prepared.rows["train"])) / shared)]
        rows += [min(config.eval_batch_size, len(of)) for of in prepared.rows.values()]
        with explain_device_errors("micro_batch_size=auto: one row", smaller_model(config)):
            if session.loaded.device.type == "cpu":
                size = _grow(prepared, max(rows), ranks.size)
            else:
                size = _halve(trial(prepared), max(rows))
    size = min(map(int, ranks.exchange(str(size)))) if ranks.size > 1 else size
    log.info("memory micro_batch_size=%d: the most rows per forward that fit, of %d", size, max(rows))
    found = config.replace(micro_batch_size=size)
    recovery.change_config(run, found, {"micro_batch_size": "auto"}, {"micro_batch_size": size})
    return found


def trial(prepared: Prepared) -> Callable[[int], None]:
    """Return a function that takes a step and evaluates, with so many of the longest rows in one forward."""
    session = prepared.session
    train = longest_first(prepared.rows["train"])[: session.config.batch_size]
    of_all = longest_first([row for rows in prepared.rows.values() for row in rows])

    def take(size: int) -> None:
        session.config = session.objective.config = session.config.replace(micro_batch_size=size)
        with torch.no_grad():
            if session.config.steps:
                session.step(train[:size], 0)
            session.objective.evaluate(of_all[: min(size, session.config.eval_batch_size)])

    return take


def _halve(take: Callable[[int], None], most: int) -> int:
    """Return the first number of rows, of `most`, a half, a quarter and so on, for which the device has the memory."""
    size = most
    while True:
        try:
            take(size)
            return size
        except Exception as error:
            if size == 1 or not is_out_of_memory(error):
                raise
        gc.collect()  # the error's traceback held the tensors
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        size = math.ceil(size / 2)


def _grow(prepared: Prepared, most: int, processes: int) -> int:
    """Return the most rows, up to `most`, that stay below this process's part of the free memory."""
    take, device = trial(prepared), prepared.session.loaded.device

    def measure(size: int) -> int:
        reset_peak_memory()
        if size:
            take(size)
        return peak_memory(device)

    start = measure(0)
    limit = start + (1 - MARGIN) * free_memory() / processes - prepared.states_bytes
    size, peak = 1, measure(1)
    per_row: float = peak - start
    while size < most:
        larger = min(2 * size, most, size + int(max(0.0, limit - peak) / max(per_row, 1)))
        if larger == size:
            break
        found = measure(larger)
        if found > limit:
            break
        per_row = (found - peak) / (larger - size)
        size, peak = larger, found
    return size
