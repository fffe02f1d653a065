"""`optimizer.lr=auto`: four rates around a row of the table race, and the run takes the one with the lowest loss.

Each begins at the run's own start and takes a twentieth of the run's steps on rows of train, of which a part is held
out for the loss that decides. config.yaml and run.json then have the chosen rate, so that no second race is needed, and
the run is the same, bit for bit, as one with that rate given.
"""

import logging
import math
from typing import Any, cast

import torch

from mezo_cli.config.rates import find_rate, rates_around
from mezo_cli.config.schema import Config
from mezo_cli.config.stored import to_yaml
from mezo_cli.data.batch_sampler import make_sampler
from mezo_cli.errors import RunFailed, UserError
from mezo_cli.models.parameter_names import count_parameters
from mezo_cli.optim import not_finite
from mezo_cli.optim.base import ReplayableOptimizer
from mezo_cli.runs import Run, recovery
from mezo_cli.training.device_errors import explain_device_errors, smaller_batches
from mezo_cli.training.prepare import Prepared, prepare

log = logging.getLogger("mezo")

SHARE = 20  # a rate takes one step in so many of the run's
HELD_OUT, MOST_HELD_OUT = 4, 256  # one row of train in so many is held out, and at most so many


def with_chosen_rate(config: Config, run: Run) -> Config:
    """Return the config with the rate that wins; run.json and config.yaml have it then.

    Raises:
        UserError: where the table has no row for the model.
        RunFailed: when the loss of no rate is finite.
    """
    prepared = prepare(with_rate(config, 0.0), trains=True)
    row = find_rate(count_parameters(prepared.session.loaded.model), config.peft.name)
    if row is None:
        raise UserError(f"optimizer.lr=auto: there is no rate to begin with for peft={config.peft.name}: give a number")
    losses: dict[float, float] = {}
    for rate in rates_around(row):
        if losses:  # each begins at the run's start
            del prepared
            prepared = prepare(with_rate(config, rate), trains=True)
        with explain_device_errors("before the first step", smaller_batches(config), RunFailed):
            losses[rate] = race(prepared, rate)
        log.info("rate   optimizer.lr=%g: loss %.4g on held-out rows of train", rate, losses[rate])
    chosen = min(losses, key=lambda rate: (losses[rate], rate))
    if not math.isfinite(losses[chosen]):
        raise RunFailed(f"optimizer.lr=auto: the loss is not finite at any of {', '.join(f'{r:g}' for r in losses)}")
    steps, found = steps_of(config), with_rate(config, chosen)
    forwards = len(losses) * config.optimizer.count_forwards(steps, config.steps)["forwards"]
    finite = {f"{rate:g}": loss if math.isfinite(loss) else None for rate, loss in losses.items()}
    log.info("rate   optimizer.lr=%g, the best of %d after %d steps of each", chosen, len(losses), steps)
    if run.writes:
        run.update(race={"losses": finite, "steps": steps, "forwards": forwards, "chosen": chosen, "row": row.source})
        recovery.change_end(run, to_yaml(found), {"optimizer.lr": "auto"}, {"optimizer.lr": chosen})
    return found


def race(prepared: Prepared, rate: float) -> float:
    """Return the loss on the held-out rows after the steps of a rate; inf if a loss is not finite."""
    session, train = prepared.session, prepared.rows["train"]
    config, optimizer = session.config, cast(ReplayableOptimizer, session.optimizer)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(config.seed)).tolist()
    count = min(len(train) // HELD_OUT, MOST_HELD_OUT)
    if not count:
        raise UserError(
            f"optimizer.lr=auto: train has {len(train)} rows; {HELD_OUT} or more are needed to hold one out"
        )
    held, rows = ([train[i] for i in sorted(some)] for some in (order[:count], order[count:]))
    optimizer.config = optimizer.config.replace(lr=rate)
    optimizer.keep_start(lambda: session.params)
    sampler = make_sampler(config, rows)
    with torch.no_grad():
        for step in range(steps_of(config)):
            numbers = sampler.batch(config.batch_number(step))
            if not_finite(session.step([rows[i] for i in numbers], step, sampler.weights(numbers))):
                return math.inf
        loss = session.objective.evaluate(held, ranks=session.ranks).loss
    return loss if math.isfinite(loss) else math.inf


def steps_of(config: Config) -> int:
    """Return the steps that each rate takes."""
    return math.ceil(config.steps / SHARE)


def with_rate(config: Config, rate: float) -> Config:
    """Return the config with a rate."""
    optimizer: Any = config.optimizer
    return config.replace(optimizer=optimizer.replace(lr=rate))
