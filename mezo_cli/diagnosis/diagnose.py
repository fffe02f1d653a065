"""Run the checks in order within the time limit."""

import logging
from collections.abc import Iterator

from mezo_cli.config.schema import Splits
from mezo_cli.diagnosis import cost, data, label_words, signal, tuned
from mezo_cli.diagnosis.deadline import Deadline
from mezo_cli.diagnosis.findings import Section
from mezo_cli.diagnosis.plan import Plan
from mezo_cli.diagnosis.prepared import Prepared
from mezo_cli.training.device_errors import explain_device_errors, smaller_batches

log = logging.getLogger("mezo")

WORDS, DATA, SIGNAL = 0.3, 0.25, 0.6  # shares of the time that is left when the check begins


def diagnose(prepared: Prepared, splits: Splits, plan: Plan, deadline: Deadline) -> Iterator[Section]:
    """Yield the section of each check as it is done.

    Raises:
        UserError: when memory runs out, or a score is not finite.
    """
    advice = smaller_batches(prepared.config)
    with explain_device_errors("scoring dev rows", advice):
        yield label_words.check(prepared, deadline.part(WORDS))
    yield data.check(prepared, splits, deadline.part(DATA))
    yield tuned.check(prepared)
    with explain_device_errors("losses of a batch", advice):
        yield signal.check(prepared, deadline.part(SIGNAL))
    with explain_device_errors("one step", advice):
        yield cost.check(prepared, plan, deadline)
