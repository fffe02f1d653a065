"""Finding the files of a task in `data.dir`, which rows become train, dev and test, and the data fingerprint."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

import mezo_cli
from mezo_cli.config.schema import DataConfig, FilesConfig, HubSource, Splits
from mezo_cli.data import load
from mezo_cli.errors import UserError
from mezo_cli.tasks.generate import GenerateEncoder
from tests.data.sample_data import (
    HEADER,
    RTE,
    SST2,
    SST5,
    files_config,
    sst2_rows,
    words,
    write_jsonl,
    write_numbered,
    write_tsv,
)
from tests.lm_bff import load_task


def refused(said: str, folder: Path, **settings: Any) -> None:
    with pytest.raises(UserError, match=said):
        load(SST2, files_config(folder, **settings), 42)


def sizes(splits: Splits) -> tuple[int, int, int]:
    return len(splits.train), len(splits.dev), len(splits.test or [])


def test_full_data_holds_out_dev_and_tests_on_the_official_dev_set(glue: Path) -> None:
    splits = load(SST2, files_config(glue), 42)
    assert sizes(splits) == (90, 10, 20)
    assert [e.label for e in splits.dev].count(0) == 5
    assert words(splits.train) == words(splits.dev) == {"train"}
    assert words(splits.test) == {"dev"}
    assert not {e.where for e in splits.train} & {e.where for e in splits.dev}
    assert any("test.tsv has no column 'label'" in note for note in splits.notes)
    for size, rows in ((4, 4), (30, 30), (70, 50)):
        assert len(load(SST2, files_config(glue, dev_size=size), 42).dev) == rows
    assert load(SST2, files_config(glue), 43).dev != splits.dev
    assert load(SST2, files_config(glue), 42) == load(SST2, files_config(glue.parent), 42) == splits


@pytest.mark.parametrize(("name", "task"), [("SST-2/16-42", SST2), ("RTE/16-13", RTE), ("sst-5/16-87", SST5)])
def test_a_published_folder_equals_sampling_it(name: str, task: object, shared: Path) -> None:
    folder, seed = name.split("/")[0], int(name.split("-")[-1])
    source = shared / "data" / ("lm-bff" if task is SST5 else "glue") / folder
    prepared = load(task, files_config(shared / "data/k-shot-1k-test" / name), 0)
    drawn = load(task, files_config(source, shots=16), seed)
    assert prepared.fingerprint == drawn.fingerprint
    assert len(prepared.train) == len(prepared.dev) == 16 * len(task.labels)


def test_few_shot_with_named_columns_takes_the_test_set(tmp_path: Path) -> None:
    write_numbered(tmp_path, train=40, dev=8, test=1100)
    splits = load(SST2, files_config(tmp_path, shots=4), 42)
    assert sizes(splits) == (8, 8, 1000)
    assert words(splits.test) == {"test"}


def test_rows_that_say_two_things_and_shots_of_an_absent_class_are_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [{"sentence": "a", "label": 0}] * 40)
    refused(r"data\.shots=4: .*train\.jsonl has no row of class positive", tmp_path, shots=4)
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write('{"sentence": "a", "label": 0, "sentence": "b"}\n')
    refused(r"train\.jsonl:41: not a JSON object: the key 'sentence' twice", tmp_path)


def test_eval_limit_caps_dev_and_test_but_not_train(glue: Path) -> None:
    whole, capped = load(SST2, files_config(glue), 42), load(SST2, files_config(glue, eval_limit=5), 42)
    assert sizes(capped) == (90, 5, 5)
    assert set(capped.test or []) < set(whole.test or [])
    assert capped.test == load(SST2, files_config(glue, eval_limit=5), 7).test  # the same rows for every seed
    assert capped.fingerprint != whole.fingerprint


def test_train_size_draws_train_and_dev_as_the_papers_opt_runs_do(shared: Path) -> None:
    """By the reference's rule, written a second time: one legacy permutation of train, dev behind train."""
    whole = load(SST2, files_config(shared / "data/glue/SST-2", dev_size=1), 0)
    lines = (shared / "data/glue/SST-2/train.tsv").read_text().splitlines()[1:]
    splits = load(SST2, files_config(shared / "data/glue/SST-2", train_size=1000, dev_size=500, eval_limit=1000), 7)
    np.random.seed(7)
    order = np.random.permutation(len(lines))[:1500]
    assert [e.texts[0] for e in splits.train] == [lines[i].split("\t")[0] for i in order[:1000]]
    assert [e.texts[0] for e in splits.dev] == [lines[i].split("\t")[0] for i in order[1000:]]
    assert [str(e.label) for e in splits.dev] == [lines[i].split("\t")[1] for i in order[1000:]]
    assert splits.test == whole.test
    assert load(SST2, files_config(shared / "data/glue/SST-2", train_size=9, dev_size=9), 8).train != splits.train[:9]


def test_train_size_with_a_separate_dev_set(tmp_path: Path) -> None:
    write_numbered(tmp_path, train=40, dev=8, test=6)
    splits = load(SST2, files_config(tmp_path, train_size=10), 42)
    assert sizes(splits) == (10, 8, 6)
    assert len(set(splits.train)) == 10
    refused(r"train.jsonl: 40 rows, too few for data.train_size=41$", tmp_path, train_size=41)
    refused(r"data.shots=4 and data.train_size=10: give one of them", tmp_path, train_size=10, shots=4)


@pytest.mark.parametrize("more", [{}, {"train_size": 30, "dev_size": 5}, {"shots": 4}])
def test_a_test_set_is_held_out_of_a_single_file(more: dict[str, int], tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "all.jsonl", [{"sentence": f"row {i}", "label": int(i % 4 == 0)} for i in range(100)])
    one, test = load(SST2, files_config(path, **more), 7), load(SST2, files_config(path, test_size=20, **more), 7)
    assert one.test is None
    assert test.test is not None
    where = [{example.where for example in rows} for rows in (test.train, test.dev, test.test)]
    assert sum(map(len, where)) == len(set.union(*where))
    assert len(test.test) == 20
    if "train_size" not in more:
        assert [example.label for example in test.test].count(1) == 5
    for seed, same in ((7, True), (8, False)):
        assert (load(SST2, files_config(path, test_size=20, **more), seed).test == test.test) is same
    refused(r"all.jsonl: 100 rows, too few for data.test_size=99: train and dev need one", path, test_size=99)


def test_a_test_set_that_is_there_is_drawn_from(tmp_path: Path) -> None:
    write_numbered(tmp_path, train=40, validation=30)
    order = np.random.RandomState(3).permutation(30).tolist()
    drawn = load(SST2, files_config(tmp_path, train_size=10, dev_size=5, test_size=20), 3)
    assert [row.texts[0] for row in drawn.test or []] == [f"validation {i}" for i in order[:20]]
    every = load(SST2, files_config(tmp_path, train_size=10, dev_size=5, test_size=30), 3)  # permuted, as released
    assert [row.texts[0] for row in every.test or []] == [f"validation {i}" for i in order]
    assert len(load(SST2, files_config(tmp_path, test_size=1000, eval_limit=7), 3).test or []) == 7


@pytest.mark.parametrize(
    ("count", "dev_size", "as_released", "sizes"),
    [  # of the paper's tasks: train_size is 1000
        (2490, 500, False, (1000, 500)),  # RTE
        (250, 100, False, (150, 100)),  # CB
        (400, 100, False, (300, 100)),  # COPA
        (554, 500, True, (54, 500)),  # WSC
        (554, 500, False, (277, 277)),
        (1501, 500, True, (1000, 500)),
        (1499, 500, False, (999, 500)),
    ],
)
def test_train_and_dev_are_the_first_rows_of_one_permutation(
    count: int, dev_size: int, as_released: bool, sizes: tuple[int, int], tmp_path: Path
) -> None:
    rows = [{"sentence": str(i), "label": i % 2} for i in range(count)]
    write_jsonl(tmp_path / "train.jsonl", rows)
    write_jsonl(tmp_path / "validation.jsonl", rows[:10])
    settings = files_config(tmp_path, train_size=1000, dev_size=dev_size, test_size=1000, as_released=as_released)
    splits = load(SST2, settings, 0)
    np.random.seed(0)
    order = np.random.permutation(count)[:1500].tolist()[: sum(sizes)]
    numbers = [[int(row.texts[0]) for row in part] for part in (splits.train, splits.dev)]
    assert [len(part) for part in numbers] == [*sizes]
    assert numbers[0] + numbers[1] == order
    assert len(splits.test or []) == 10
    shortage = f"train: {sizes[0]} rows, not data.train_size=1000: train.jsonl has {count}"
    assert (shortage in splits.notes) == (sizes[0] < 1000)


def test_dev_as_released_leaves_a_row_for_train(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "all.jsonl", [{"sentence": str(i), "label": i % 2} for i in range(40)])
    sizes = {"train_size": 30, "dev_size": 40, "as_released": True}
    refused(r"40 rows, too few for data.train_size=30 and data.dev_size=40$", path, **sizes)
    refused(r"data.as_released=true is read with data.train_size alone, or by a task", path, as_released=True)


def test_the_fingerprint_depends_on_texts_labels_and_splits(tmp_path: Path) -> None:
    def print_of(rows: list[list[str]], name: str) -> str:
        write_tsv(tmp_path / name / "train.tsv", HEADER, rows)
        write_tsv(tmp_path / name / "dev.tsv", HEADER, sst2_rows(4))
        write_tsv(tmp_path / name / "test.tsv", HEADER, sst2_rows(4))
        return load(SST2, files_config(tmp_path / name), 1).fingerprint

    rows = sst2_rows(4)
    base = print_of(rows, "a")
    assert len(base) == 64
    assert print_of(rows, "b") == base
    first, *others = rows
    changed = [[[first[0].strip(), "0"], *others], [[first[0], "1"], *others], rows[::-1], rows[:3]]
    assert len({base, *(print_of(one, f"c{i}") for i, one in enumerate(changed))}) == 5


def test_short_classes_are_noted_and_an_empty_dev_is_refused(glue: Path) -> None:
    write_tsv(glue / "train.tsv", HEADER, [*sst2_rows(20), *[["more", "0"]] * 5])
    notes = load(SST2, files_config(glue, shots=8), 42).notes
    assert any(note == "dev: fewer than 8 rows for class 'negative' 7, 'positive' 2" for note in notes), notes
    refused(r"no rows are left for dev.*data.shots=20", glue, shots=20)
    write_tsv(glue / "train.tsv", HEADER, [[f"good {i}", "1"] for i in range(20)])
    notes = load(SST2, files_config(glue), 42).notes
    assert "train: no rows for class 'negative' 0" in notes, notes


def test_a_prepared_folder_is_used_as_it_is(tmp_path: Path) -> None:
    rows = {stem: sst2_rows(count, stem) for stem, count in (("train", 8), ("dev", 6), ("test", 4))}
    for stem, content in rows.items():
        write_tsv(tmp_path / f"{stem}.tsv", HEADER, content)
    splits = load(SST2, files_config(tmp_path), 1)
    for part, stem in ((splits.train, "train"), (splits.dev, "dev"), (splits.test, "test")):
        assert [list(e.texts) for e in part or []] == [[text] for text, _ in rows[stem]]
    assert load(SST2, files_config(tmp_path), 2) == splits


@pytest.mark.parametrize("label", [-1, -1.0, None, math.nan, "", "?", "N/A"])
def test_validation_is_another_name_of_dev_and_no_label_in_any_row_is_no_test_set(label: Any, tmp_path: Path) -> None:
    write_numbered(tmp_path, train=20, validation=8)
    write_jsonl(tmp_path / "test.jsonl", [{"sentence": "test", "label": label}] * 9)
    splits = load(SST2, files_config(tmp_path), 42)
    assert words(splits.test) == {"validation"}
    assert any("in every row: without labels it is no test set" in note for note in splits.notes)
    write_jsonl(tmp_path / "test.jsonl", [{"sentence": "test", "label": one} for one in (0, label, 1)])
    refused(r"test.jsonl:2: no label .*; 1 of 3 rows are without a label", tmp_path)
    own = SST2.replace(labels=["none", "some"], files=SST2.files.replace(labels=[]), hub=HubSource())
    write_jsonl(tmp_path / "a.jsonl", [{"sentence": "a", "label": one} for one in own.labels])
    loaded = load(own, files_config(tmp_path / "a.jsonl"), 1)
    assert {row.label for row in [*loaded.train, *loaded.dev]} == {0, 1}


@pytest.mark.parametrize(
    ("file", "content", "path", "parts"),
    [  # a file that is written, what is loaded, what is said
        ("", "", "nowhere", ["no such file or folder"]),
        ("", "", "SST-3", ["no such file or folder", "did you mean 'SST-2'"]),
        ("empty/a.txt", "x", "empty", ["no training file", "train.jsonl", "there is: a.txt"]),
        ("a.txt", "x", "a.txt", ["allowed: .tsv, .csv"]),
        ("SST-2/train.csv", "x", "SST-2", ["train.tsv, train.csv"]),
        ("SST-2/validation.tsv", "x", "SST-2", ["dev.tsv, validation.tsv"]),
        ("SST-2/dev.tsv", HEADER, "SST-2", ["dev.tsv: no rows"]),
        ("in/train.tsv/a.txt", "x", "in", ["train.tsv: this is a folder; a file is needed"]),
        ("", "", "/dev/full", ["data.dir=/dev/full: this is neither a folder nor a regular file"]),
    ],
)
def test_errors_in_a_folder(file: str, content: str, path: str, parts: list[str], glue: Path) -> None:
    if file:
        (glue.parent / file).parent.mkdir(parents=True, exist_ok=True)
        (glue.parent / file).write_text(content)
    with pytest.raises(UserError) as caught:
        load(SST2, files_config(glue.parent / path), 42)
    for part in parts:
        assert part in str(caught.value)


def test_a_source_must_be_given_and_fit(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data=files needs data.dir"):
        load(SST2, FilesConfig(name="files"), 42)
    with pytest.raises(UserError, match=r"'sst2' has no data set on the hub .* data=files"):
        load(SST2.replace(hub=HubSource()), DataConfig(name="hub"), 42)
    for task in (RTE, SST5):
        with pytest.raises(UserError, match=r"data=demo does not fit task"):
            load(task, DataConfig(name="demo"), 42)
    for target in ("nowhere", "train.tsv"):  # dangling, a loop
        (tmp_path / "train.tsv").unlink(missing_ok=True)
        (tmp_path / "train.tsv").symlink_to(target)
        refused(r"train.tsv: this is a link that leads nowhere; a file is needed", tmp_path)


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
