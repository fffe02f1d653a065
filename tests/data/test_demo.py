"""The embedded demo data."""

from dataclasses import replace

import pytest

from mezo_cli.config.schema import DataConfig
from mezo_cli.data import load
from mezo_cli.errors import UserError
from tests.data.sample_data import RTE, SST2, SST5


def test_the_demo_fits_tasks_of_its_labels_whatever_their_column() -> None:
    splits = load(SST2, DataConfig(name="demo"), 42)
    mr = replace(SST2, name="mr", columns=["text"])
    assert load(mr, DataConfig(name="demo"), 42).fingerprint == splits.fingerprint
    assert len(load(SST2, DataConfig(name="demo", shots=4), 42).train) == 8


@pytest.mark.parametrize("task", [RTE, SST5], ids=lambda task: task.name)
def test_other_tasks_are_refused(task: object) -> None:
    with pytest.raises(UserError, match=r"data=demo does not fit task"):
        load(task, DataConfig(name="demo"), 42)
