"""What `auto` stands for, found before the first step, by a new run alone: config.yaml and run.json have it then.

`optimizer.lr=auto`: four rates around a row of the table race, and the run takes the best. Each begins at the run's own
start and takes a twentieth of the run's steps on rows of train, of which a part is held out for the loss that decides:
the row's own rate is taken unless the loss of another is lower beyond chance. No second race is needed, and the run is
the same, bit for bit, as one with that rate given.

`micro_batch_size=auto`: the most rows per forward that fit, tried on the longest rows. A GPU says when its memory is
used up: all rows are tried first, and half as many until they fit. A CPU does not, the kernel kills the process: from
one row on the number grows, by the measured memory per row, below what is free.
"""

import gc
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from mezo_cli.config.rates import FACTORS, Rate, find_rate
from mezo_cli.config.schema import Config
from mezo_cli.console import log
from mezo_cli.data.sampling import make_sampler
from mezo_cli.distributed.ranks import ALONE, current
from mezo_cli.errors import RunFailed, RunStopped, UserError
from mezo_cli.models.quantized import count_parameters
from mezo_cli.objectives.scoring import Evaluation
from mezo_cli.optim import not_finite
from mezo_cli.optim.base import ReplayableOptimizer
from mezo_cli.process.memory import explain_device_errors, free_memory, is_out_of_memory, peak_memory, reset_peak_memory
from mezo_cli.runs import Run, recovery
from mezo_cli.session.opening import Prepared, prepare
from mezo_cli.session.session import Session, smaller_batches, smaller_model

SHARE = 20  # a rate takes one step in so many of the run's
HELD_OUT, MOST_HELD_OUT = 4, 256  # one row of train in so many is held out, and at most so many
MARGIN = 0.1  # of the free memory, for what the trials do not show: a checkpoint, a copy of the start


def with_chosen_rate(config: Config, run: Run) -> tuple[Config, float]:
    """Return the config with the rate that wins, which its files have then, and the seconds since the first step.

    A race that `max_seconds` ends has no winner: the row's own rate is taken.

    Raises:
        UserError: where the table has no row for the model.
        RunFailed: when the loss of no rate is finite.
    """
    ended: dict[float, Evaluation | None] = {}
    ticks: list[float] = []  # when each step of the race ended

    def tick() -> None:
        ticks.append(time.perf_counter())
        if config.max_seconds is not None and current.get().first_says(ticks[-1] - ticks[0] >= config.max_seconds):
            raise RunStopped

    steps = math.ceil(config.steps / SHARE)  # of each rate
    try:
        rates: list[float] = []
        while not rates or len(ended) < len(rates):
            with prepare(with_rate(config, 0.0), trains=True, tells=False) as prepared:  # at the run's start
                if not rates:
                    row = _rate_of_table(prepared.session)
                    rates = [float(f"{row.lr * factor:.2g}") for factor in FACTORS]
                rate = rates[len(ended)]
                with explain_device_errors("before the first step", smaller_batches(config), RunFailed):
                    result = ended[rate] = race(prepared, rate, tick)
            loss = result.loss if result else math.inf
            log.info("rate   optimizer.lr=%g: loss %.4g on held-out rows of train", rate, loss)
        first = choose(ended, row.lr, config.model.wider_range)
        chosen = for_more_steps(ended, first, row.lr)
        why = "its loss is the lowest, and lower than that of the table's row beyond chance"
        if chosen < first:
            why = f"the next below {first:g}, whose loss is the lowest: for more steps that may be too large"
        elif chosen == row.lr:
            why = "that of the table's row: no other's loss is lower beyond chance"
        log.info("rate   optimizer.lr=%g, chosen of %d after %d steps of each: %s", chosen, len(ended), steps, why)
    except RunStopped:
        chosen = row.lr
        log.info("rate   optimizer.lr=%g, the table's: after %d rates max_seconds was over", chosen, len(ended))
    found = with_rate(config, chosen)
    taken = [steps] * len(ended) + [max(0, len(ticks) - steps * len(ended))]
    forwards = sum(config.optimizer.count_forwards(count, config.steps)["forwards"] for count in taken)
    losses = {f"{rate:g}": result.loss if result else None for rate, result in ended.items()}
    if run.writes:
        run.update(race={"losses": losses, "steps": steps, "forwards": forwards, "chosen": chosen, "row": row.source})
    recovery.change_config(run, found, {"optimizer.lr": "auto"}, {"optimizer.lr": chosen})
    return found, time.perf_counter() - ticks[0]


def _rate_of_table(session: Session) -> Rate:
    peft = session.config.peft.name
    row = find_rate(count_parameters(session.loaded.model), peft)
    if row is None:
        raise UserError(f"optimizer.lr=auto: there is no rate to begin with for peft={peft}: give a number")
    return row


def choose(ended: Mapping[float, Evaluation | None], usual: float, advice: str = "") -> float:
    """Return the rate with the lowest loss, of the usual one and those whose loss is lower than its beyond chance.

    Beyond chance: the 95% interval of the difference, paired by row, has no 0 in it. None is a loss that is not finite.
    """
    finite = {rate: result for rate, result in ended.items() if result}
    if not finite:
        rates = ", ".join(f"{rate:g}" for rate in ended)
        raise RunFailed(f"optimizer.lr=auto: the loss is not finite at any of {rates}{advice}")
    before = finite.get(usual)

    def is_lower(result: Evaluation) -> bool:
        return result.summary(before)["intervals"].get("loss", (0.0, 0.0))[1] < 0

    better = {rate: one.loss for rate, one in finite.items() if before is None or one is before or is_lower(one)}
    return min(better, key=lambda rate: (better[rate], rate))


def for_more_steps(ended: Mapping[float, Evaluation | None], first: float, usual: float) -> float:
    """Return the rate for the whole run: `first`, which has won; if that is above the usual one, the next lower.

    What wins a twentieth of the steps was two to four times the best of whole runs (docs/how-to/choose-a-rate.md).
    """
    lower = [rate for rate, result in ended.items() if result and usual <= rate < first]
    return max(lower, default=first)


def race(prepared: Prepared, rate: float, tick: Callable[[], None]) -> Evaluation | None:
    """Return the evaluation on the held-out rows after the steps of a rate; None if a loss is not finite.

    `tick` is called after each step.
    """
    session, train = prepared.session, prepared.rows["train"]
    config, optimizer = session.config, cast(ReplayableOptimizer, session.optimizer)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(config.seed)).tolist()
    count = min(len(train) // HELD_OUT, MOST_HELD_OUT)
    if not count:
        raise UserError(
            f"optimizer.lr=auto: train has {len(train)} rows; {HELD_OUT} or more are needed to hold one out"
        )
    held, rows = ([train[i] for i in sorted(numbers)] for numbers in (order[:count], order[count:]))
    optimizer.config = optimizer.config.replace(lr=rate)
    optimizer.keep_start(session.params)
    sampler = make_sampler(config, rows)
    with torch.no_grad():
        for step in range(math.ceil(config.steps / SHARE)):
            numbers = sampler.batch(config.batch_number(step))
            if not_finite(session.step([rows[i] for i in numbers], step, sampler.weights(numbers))):
                return None
            tick()
        found = session.objective.evaluate(held, ranks=session.ranks)
    return found if found.is_finite else None


def with_rate(config: Config, rate: float) -> Config:
    """Return the config with a rate."""
    optimizer: Any = config.optimizer
    return config.replace(optimizer=optimizer.replace(lr=rate))


# --- micro_batch_size=auto ---


def with_chosen_micro_batch(config: Config, run: Run) -> Config:
    """Return the config with the most rows per forward that fit, which its files have then; ranks take the smallest.

    Raises:
        UserError: where not even one row fits.
    """
    first = config.replace(micro_batch_size=1)
    first = with_rate(first, 0.0) if config.optimizer.picks_rate else first
    with prepare(first, trains=True, tells=False) as prepared:
        session, ranks = prepared.session, current.get()
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

    def tokens(row: Any) -> int:  # those of answers and candidates among them
        return sum(map(len, [row.input_ids, getattr(row, "answer_ids", ()), *getattr(row, "candidates", ())]))

    train = sorted(prepared.rows["train"], key=tokens, reverse=True)[: session.config.batch_size]
    of_all = sorted((row for rows in prepared.rows.values() for row in rows), key=tokens, reverse=True)

    def take(size: int) -> None:
        session.config = session.objective.config = session.config.replace(micro_batch_size=size)
        with torch.no_grad():
            if session.config.steps:
                session.step(train[:size], 0)
            session.objective.evaluate(of_all[: min(size, session.config.eval_batch_size)])

    return take


def _halve(take: Callable[[int], None], size: int) -> int:
    """Return the first number of rows, of `size`, a half, a quarter and so on, for which the device has the memory."""
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
