"""Prepare as training does, refuse what it would refuse, in the same words, and run the checks in order."""

import time
from collections.abc import Iterator

from mezo_cli.config.schema import Config
from mezo_cli.diagnosis import cost, label_words, signal
from mezo_cli.diagnosis import data as data_check
from mezo_cli.diagnosis.findings import Deadline, Section
from mezo_cli.objectives.classification import Classification
from mezo_cli.objectives.generation import Generation
from mezo_cli.process.memory import explain_device_errors
from mezo_cli.session.opening import Prepared, prepare
from mezo_cli.session.session import smaller_batches

WORDS, SIGNAL, COST = 0.15, 0.4, 0.35  # fractions of the time that is left when the check begins


def prepare_run(config: Config) -> tuple[Prepared, float]:
    """Prepare a new run; return it and the seconds that it took."""
    start = time.perf_counter()
    prepared = prepare(config, trains=True)
    session = prepared.session
    with explain_device_errors("before the first step", smaller_batches(config)):
        if config.init == "linear_probe":
            assert isinstance(session.objective, Classification)
            session.objective.output_layer()
        session.objective.check_start(prepared.rows["train"])
    return prepared, time.perf_counter() - start


def diagnose(prepared: Prepared, loading: float, deadline: Deadline) -> Iterator[Section]:
    """Yield the section of each check as it is done; `loading`: the seconds in which the run was prepared."""
    session = prepared.session
    advice = smaller_batches(session.config)
    if isinstance(session.objective, Classification):
        with explain_device_errors("scoring dev rows", advice):
            yield label_words.check(prepared, deadline.part(WORDS))
    yield data_check.check(prepared)
    with explain_device_errors("losses of a batch", advice):
        # A reward is constant almost everywhere: it has no derivative that g could be compared with, and no best lr.
        by_rewards = isinstance(session.objective, Generation) and not session.config.objective.is_differentiable
        yield (signal.check_rewards if by_rewards else signal.check)(prepared, deadline.part(SIGNAL))
    with explain_device_errors("one step", advice):
        section = cost.check(prepared, loading, deadline.part(COST))
        cost.judge_rival(section, prepared, deadline)
        yield section
