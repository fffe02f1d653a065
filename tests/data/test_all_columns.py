"""Rows of a task without labels: every column is kept, from files and from the hub, and mistakes are one line."""

from datetime import date
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mezo_cli.config.schema import DataConfig, GeneratePrompt, HubSource, TaskConfig
from mezo_cli.data import load
from mezo_cli.errors import UserError
from tests.data.sample_data import HEADER, SST2, files_config, sst2_rows, write_jsonl, write_tsv

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
