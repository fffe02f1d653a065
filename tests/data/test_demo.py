"""The embedded demo data."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

import mezo_cli
from mezo_cli.config.schema import DataConfig
from mezo_cli.data import load
from mezo_cli.errors import UserError
from mezo_cli.tasks.generate import GenerateEncoder
from tests.data.sample_data import RTE, SST2, SST5
from tests.lm_bff import load_task

DECODER = Path(mezo_cli.__file__).parent / "demo" / "decoder"


def test_the_demo_fits_tasks_of_its_labels_whatever_their_column() -> None:
    splits = load(SST2, DataConfig(name="demo"), 42)
    mr = SST2.replace(name="mr", columns=["text"])
    assert load(mr, DataConfig(name="demo"), 42).fingerprint == splits.fingerprint
    assert len(load(SST2, DataConfig(name="demo", shots=4), 42).train) == 8


def test_a_task_with_a_prompt_and_no_columns_gets_the_arithmetic_problems() -> None:
    """A row of the file of tasks, tokenized as the script that trained the decoder wrote it."""
    task = load_task("demo-arithmetic")
    splits = load(task, DataConfig(name="demo"), 42)
    assert [len(split or []) for split in (splits.train, splits.dev, splits.test)] == [833, 192, 320]
    encoder = GenerateEncoder(task, AutoTokenizer.from_pretrained(DECODER))
    rows = encoder.encode_all(splits.train)
    assert {(len(row.input_ids), len(row.answer_ids)) for row in rows} == {(8, 8)}
    columns = rows[0].columns
    assert encoder.decode(rows[0]) == f"<s>{''.join(map(str, columns['numbers']))}>{columns['target']}="
    assert rows[0].golds == (columns["answer"],)


@pytest.mark.parametrize("task", [RTE, SST5], ids=lambda task: task.name)
def test_other_tasks_are_refused(task: object) -> None:
    with pytest.raises(UserError, match=r"data=demo does not fit task"):
        load(task, DataConfig(name="demo"), 42)
