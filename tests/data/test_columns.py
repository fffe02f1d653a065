"""Rows by their columns: every one is kept where there are no labels; the OPT table's tasks; rows to predict."""

import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mezo_cli.config.schema import DataConfig, Example, GeneratePrompt, HubSource, Splits, TaskConfig
from mezo_cli.data import load, texts
from mezo_cli.errors import UserError
from tests import tiny
from tests.command_line import HANGS
from tests.data.sample_data import HEADER, SST2, files_config, sst2_rows, write_jsonl, write_tsv
from tests.hub_server import COMMIT, Hub
from tests.lm_bff import load_task
from tests.opt_tasks import CHOICES, GENERATED, expected, rows

QA = TaskConfig(
    name="qa",
    rename={"ask": "question"},
    generate=GeneratePrompt(prompt="Question: {question|strip}\\nAnswer:", answer=" {answers.text[0]}\n"),
    hub=HubSource(test=None),
)


def qa_rows(n: int) -> list[dict[str, Any]]:
    return [
        {
            "ask": f"what is {i} + {i}? ",
            "answers": {"text": [str(2 * i), f"it is {2 * i}"], "start": [i, 0]},
            "numbers": [i, i],
            "note": None,
        }
        for i in range(n)
    ]


def renamed(row: dict[str, Any]) -> dict[str, Any]:
    return {"question" if name == "ask" else name: value for name, value in row.items()}


def number(columns: dict[str, Any]) -> int:
    return int(columns["question"].split()[2])


def columns(task: TaskConfig, data: DataConfig) -> list[dict[str, Any]]:
    """Return the columns of all rows, in the order of the questions."""
    splits = load(task, data, 1)
    return sorted((dict(row.columns or {}) for row in [*splits.train, *splits.dev]), key=number)


def test_every_source_keeps_every_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = qa_rows(20)
    wanted = [renamed(row) for row in rows]
    (tmp_path / "hub").mkdir()
    write_jsonl(tmp_path / "hub" / "train.jsonl", rows)
    assert columns(QA, files_config(tmp_path / "hub")) == wanted
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "all.parquet")
    assert columns(QA, files_config(tmp_path / "all.parquet")) == wanted
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    task = QA.replace(hub=QA.hub.replace(path=str(tmp_path / "hub")))
    assert columns(task, DataConfig(name="hub")) == wanted


def test_texts_that_look_like_another_type_arrive_as_written(tmp_path: Path) -> None:
    task = QA.replace(generate=GeneratePrompt(prompt="{question}"), rename={})
    rows = [{"question": text} for text in ("NA", "null", "007", "2020-01-01")]
    for suffix in ("csv", "tsv"):
        (tmp_path / f"all.{suffix}").write_text("\n".join(["question", *(row["question"] for row in rows)]) + "\n")
    write_jsonl(tmp_path / "all.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "all.parquet")
    for suffix in ("csv", "tsv", "jsonl", "parquet"):
        splits = load(task, files_config(tmp_path / f"all.{suffix}"), 1)
        read = [dict(row.columns or {}) for row in [*splits.train, *splits.dev]]
        assert sorted(read, key=str) == sorted(rows, key=str), suffix


def test_a_key_that_a_row_lacks_is_no_column_of_it_and_a_date_is_its_text(tmp_path: Path) -> None:
    task = QA.replace(generate=GeneratePrompt(prompt="{question}"), rename={})
    rows = [{"question": "what is 0", "extra": [1]}, {"question": "what is 1"}]
    assert columns(task, files_config(write_jsonl(tmp_path / "all.jsonl", rows))) == rows
    dated = [{"question": "what is 0", "day": date(2026, 1, 2)}, {"question": "what is 1", "day": None}]
    pq.write_table(pa.Table.from_pylist(dated), tmp_path / "all.parquet")
    assert [row["day"] for row in columns(task, files_config(tmp_path / "all.parquet"))] == ["2026-01-02", None]


def test_splits_are_drawn_without_labels(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "all.jsonl", qa_rows(50))
    plain = load(QA, files_config(path), 7)
    assert (len(plain.train), len(plain.dev), plain.test) == (45, 5, None)
    assert all((row.texts, row.label) == ((), -1) for row in plain.train)
    assert plain.notes == ["dev: 5 rows held out of all.jsonl; test: none"]
    for sizes in ({"test_size": 10, "dev_size": 4}, {"train_size": 12, "dev_size": 4, "test_size": 10}):
        split = load(QA, files_config(path, **sizes), 7)
        parts = [{row.where for row in rows or []} for rows in (split.train, split.dev, split.test)]
        assert [len(part) for part in parts] == [sizes.get("train_size", 36), 4, 10]
        assert len(set.union(*parts)) == sum(map(len, parts))


def test_the_fingerprint_is_over_all_columns(tmp_path: Path) -> None:
    rows = qa_rows(10)

    def fingerprint(rows: list[dict[str, Any]]) -> str:
        return load(QA, files_config(write_jsonl(tmp_path / "all.jsonl", rows)), 1).fingerprint

    first = fingerprint(rows)
    assert fingerprint([dict(reversed(row.items())) for row in rows]) == first
    rows[3] = {**rows[3], "numbers": [3, 4]}
    assert fingerprint(rows) != first


def test_a_task_with_labels_is_read_without_them_too(tmp_path: Path) -> None:
    task = SST2.replace(generate=GeneratePrompt(prompt="{sentence} It was", gold="label"))
    rows = sst2_rows(20, "train")
    path = write_tsv(tmp_path / "all.tsv", HEADER, rows)
    labelled, unlabelled = load(task, files_config(path), 1), load(task.replace(labels=[]), files_config(path), 1)
    assert labelled.fingerprint == load(SST2, files_config(path), 1).fingerprint != unlabelled.fingerprint
    assert all(row.columns is None for row in labelled.train)
    assert set(unlabelled.train[0].columns or {}) == {"sentence", "label"}


def test_a_test_file_without_the_answers_is_no_test_set(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", qa_rows(20))
    write_jsonl(tmp_path / "test.jsonl", [{"ask": "what is 1"}])
    splits = load(QA, files_config(tmp_path), 1)
    assert splits.test is None
    assert "test.jsonl has no column 'answers', which task 'qa' reads: it is no test set" in splits.notes


@pytest.mark.parametrize(
    ("settings", "data", "said"),
    [
        ({"prompt": "{questoin}"}, {}, "no column 'questoin', which task 'qa' reads; the columns are: ask, answers"),
        ({"answer": "{answer}"}, {}, "no column 'answer', which task 'qa' reads"),
        ({"gold": "solution"}, {}, "no column 'solution', which task 'qa' reads"),
        ({"prompt": "{question"}, {}, "task 'qa', task.generate.prompt: unbalanced brace at character 1"),
        ({"prompt": "{question|stirp}"}, {}, "unknown filter 'stirp' (did you mean 'strip'?)"),
        ({"prompt": "{question} {mask}"}, {}, "has no place for {mask} or {sep}"),
        ({"prompt": "{question[}"}, {}, "'question[' is no column"),
        ({"prompt": None}, {}, "task 'qa', task.generate has no prompt"),
        ({}, {"shots": 4}, "data.shots=4: task 'qa': its rows are read without labels"),
        ({}, {"test_size": 30}, "too few for data.test_size=30"),
    ],
)
def test_mistakes(settings: dict[str, Any], data: dict[str, Any], said: str, tmp_path: Path) -> None:
    task = QA.replace(generate=QA.generate.replace(**settings))
    with pytest.raises(UserError) as caught:
        load(task, files_config(write_jsonl(tmp_path / "all.jsonl", qa_rows(9)), **data), 1)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_damaged_text_is_refused_in_any_column(tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    path.write_text('{"question": "a", "x": ["\\ud800"]}\n' * 4)
    with pytest.raises(UserError, match=r"all.jsonl:\d: column 'x' contains an unpaired surrogate"):
        load(QA.replace(rename={}, generate=GeneratePrompt(prompt="{question}")), files_config(path), 1)


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


LABELS = ["no", "yes"]
PAIR = TaskConfig(name="nli", labels=LABELS, columns=["premise", "hypothesis"], rename={"s1": "premise"})
ONE = TaskConfig(name="tone", labels=LABELS, columns=["text"])
QUESTIONS = TaskConfig(name="qa", generate=GeneratePrompt(prompt="{context} {question}", answer="{answers[0]}"))


def test_words_of_a_pair_and_of_one_column() -> None:
    words = ["premise=a = b", "hypothesis=c", "hypothesis=d", "premise=e"]
    assert [row.texts for row in texts.from_words(words, PAIR)] == [("a = b", "c"), ("e", "d")]
    assert [row.texts for row in texts.from_words(["a=b", "text=c"], ONE)] == [("a=b",), ("c",)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a text"], "task 'nli' reads premise, hypothesis"),
        (["premis=a"], "did you mean 'premise'"),
        (["premise=a"], "lacks hypothesis"),
        (["premise=a", "premise=b"], "once per row"),
        (["premise=a", "hypothesis= "], "needs a text"),
    ],
)
def test_wrong_words(words: list[str], said: str) -> None:
    with pytest.raises(UserError) as error:
        texts.from_words(words, PAIR)
    assert said in str(error.value)


def test_lines_of_a_pair() -> None:
    found = texts.from_lines([b"a\tb\r\n", b"\n", b"c\t d"], "in", PAIR)
    assert [row.texts for row in found] == [("a", "b"), ("c", " d")]
    with pytest.raises(UserError, match=r"in:1: 1 field, expected 2 \(premise, hypothesis\), separated by tabs"):
        list(texts.from_lines([b"a\n"], "in", PAIR))


def test_rows_in_memory() -> None:
    for row in ({"premise": "a", "hypothesis": "b", "id": 3}, ("a", "b"), ["a", "b"]):
        assert [one.texts for one in texts.from_memory([row], PAIR)] == [("a", "b")]
    assert texts.from_memory([], PAIR) == []
    wrong: list[tuple[Any, str]] = [
        ("a", ", row 1: a str where a mapping of premise, hypothesis is expected"),
        ({"premise": "a"}, ", row 1: column 'hypothesis' is missing"),
        (("a", None), ", row 1: column 'hypothesis' is null"),
        (("a", "\ud800"), ", row 1: column 'hypothesis' contains an unpaired surrogate"),
        (("a", "b", "c"), ", row 1: a tuple where a mapping of premise, hypothesis is expected"),
        (3, ", row 1: a int where"),
    ]
    for row, said in wrong:
        with pytest.raises(UserError, match=f"^rows{said}"):
            texts.from_memory([("a", "b"), row], PAIR)
    with pytest.raises(
        UserError, match=r"^rows: no column 'hypothesis', which task 'nli' reads; the columns are: premise"
    ):
        texts.from_memory([{"premise": "a"}], PAIR)


def test_rows_of_a_task_without_labels_have_the_columns_of_its_prompt(tmp_path: Path) -> None:
    wanted = [{"context": "a", "question": "b?"}]
    words = texts.from_words(["context=a", "question=b?"], QUESTIONS)
    assert [row.columns for row in words] == wanted
    assert [row.columns for row in texts.from_lines([b"a\tb?"], "lines", QUESTIONS)] == wanted
    assert texts.from_memory([["a", "b?"]], QUESTIONS)[0].columns == wanted[0]
    more = {**wanted[0], "numbers": [1, 2], "answers": []}
    assert texts.from_memory([more], QUESTIONS)[0].columns == more
    (tmp_path / "rows.jsonl").write_text(json.dumps(more) + "\n")
    [row] = texts.from_file(tmp_path / "rows.jsonl", QUESTIONS)
    assert (row.columns, row.where) == (more, "rows.jsonl:1")
    with pytest.raises(UserError, match="no column 'question', which task 'qa' reads"):
        texts.from_file(tiny.write_jsonl(tmp_path / "other.jsonl", [{"context": "a"}]), QUESTIONS)
