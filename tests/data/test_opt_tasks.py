"""The rows of the paper's OPT tasks, with lists and records: the same from a hub, from Parquet and from JSONL."""

import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest

from mezo_cli.config.schema import Example, Splits
from mezo_cli.data import load
from tests import tiny
from tests.command_line import HANGS
from tests.data.sample_data import files_config
from tests.hub_server import COMMIT, Hub
from tests.lm_bff import load_task
from tests.opt_tasks import CHOICES, GENERATED, expected, rows

TASKS = [*CHOICES, *GENERATED]
CLASSES = {  # the label's, on the hub
    "sst2": ["negative", "positive"],
    "rte": ["entailment", "not_entailment"],
    "cb": ["entailment", "contradiction", "neutral"],
    "copa": ["choice1", "choice2"],
    **{name: ["False", "True"] for name in ("wsc", "wic", "multirc")},
}
SIZES = {"train_size": 3, "dev_size": 2, "test_size": 1}
LOAD_ALL = f"""
import json, sys
from mezo_cli.config.schema import DataConfig
from mezo_cli.data import load
from tests.lm_bff import load_task
for name in {TASKS}:
    splits = load(load_task(name), DataConfig(name="hub", **{SIZES}), 0)
    rows = [*splits.train, *splits.dev, *splits.test]
    print(json.dumps([name, splits.revision, [[row.texts, row.label, row.columns] for row in rows]]))
"""


def contents(splits: Splits) -> list[object]:
    """Return what was read of the rows, as JSON has it."""
    examples: list[Example] = [*splits.train, *splits.dev, *(splits.test or [])]
    return json.loads(json.dumps([[row.texts, row.label, row.columns] for row in examples]))


def write_repository(root: Path, name: str) -> Path:
    """Write a task's rows as a data set on the hub, and return the folder of its Parquet files."""
    hub = load_task(name).hub
    config = hub.name or {"squad": "plain_text"}.get(name, "default")
    repository = root / "datasets" / str(hub.path)
    folder, readme = repository / config, repository / "README.md"
    folder.mkdir(parents=True)
    for split, part in (("train", rows(name)[:6]), ("validation", rows(name)[6:])):
        table = datasets.Dataset.from_list(part)
        if name in CLASSES:
            table = table.cast_column("label", datasets.ClassLabel(names=CLASSES[name]))
        table.to_parquet(str(folder / f"{split}-00000-of-00001.parquet"))
    lines = [f"- config_name: {config}", "  data_files:"]
    for split in ("train", "validation"):
        lines += [f"  - split: {split}", f"    path: {config}/{split}-*"]
    before = readme.read_text().removesuffix("---\n") if readme.exists() else "---\nconfigs:\n"
    readme.write_text(before + "\n".join([*lines, "---", ""]))
    return folder


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", TASKS)
def test_jsonl_and_parquet_give_the_same_rows(name: str, tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    parquet, jsonl = write_repository(tmp_path, name), tmp_path / "jsonl"
    for split, part in (("train", rows(name)[:6]), ("validation", rows(name)[6:])):
        tiny.write_jsonl(jsonl / f"{split}.jsonl", part)
    splits = load(load_task(name), files_config(jsonl, **SIZES), 0)
    assert contents(splits) == contents(load(load_task(name), files_config(parquet, **SIZES), 0))
    order = np.random.RandomState(0).permutation(6).tolist()
    assert [row.where for row in [*splits.train, *splits.dev]] == [f"train.jsonl:{i + 1}" for i in order[:5]]
    if name not in ("record", *GENERATED):
        right = [expected(name, rows(name)[i])[1].index(expected(name, rows(name)[i])[2][0]) for i in order[:5]]
        assert [row.label for row in [*splits.train, *splits.dev]] == right


@pytest.mark.slow
def test_the_hub_gives_the_same_rows(tmp_path: Path) -> None:
    folders = {name: write_repository(tmp_path / "hub", name) for name in TASKS}
    with Hub(tmp_path / "hub") as hub:
        there = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        environment = {**os.environ, **there, "PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, "-c", LOAD_ALL]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [name for name, _, _ in answers] == TASKS
    for name, revision, content in answers:
        assert revision == COMMIT
        assert content == contents(load(load_task(name), files_config(folders[name], **SIZES), 0))
