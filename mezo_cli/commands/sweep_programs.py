"""What runs a program for a sweep is not taken from its record, which may be another user's: resume asks for it."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from mezo_cli.config.own_code import NOT_STORED, PYTHON, VARIABLE, check_stored, has_own_python
from mezo_cli.config.sweep_plan import SweepPlan
from mezo_cli.errors import UserError
from mezo_cli.runs import sweep_record
from mezo_cli.runs.sweep_record import SweepRecord


def check_record(folder: Path, record: SweepRecord, given: Sequence[str]) -> None:
    """Check that the overrides of a stored record run no code, but for those that the user has given now.

    Raises:
        UserError: for the first one that may.
    """
    texts = [*record.overrides, *(text for job in record.jobs or () for text in job.overrides)]
    check_stored((text for text in texts if text not in given), folder / sweep_record.NAME)


def with_engine_python(folder: Path, record: SweepRecord, plan: SweepPlan) -> SweepRecord:
    """Return the record with whether the user's own program runs the engine of the jobs; which one is not stored.

    Raises:
        UserError: when it did until now, and is not given again.
    """
    given = bool(plan.python) or any(has_own_python(job.config) for job in plan.jobs or ())
    if record.own_engine_python and not given and not os.environ.get(VARIABLE):
        raise UserError(f"{folder} was started with an {PYTHON}, {NOT_STORED}")
    return dataclasses.replace(record, own_engine_python=given or record.own_engine_python)
