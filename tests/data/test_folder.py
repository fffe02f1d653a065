"""Finding the files of a task in `data.dir`."""

from pathlib import Path

import pytest

from mezo_cli.config.schema import Example, FilesConfig
from mezo_cli.data import load
from mezo_cli.errors import UserError
from tests.data.sample_data import HEADER, SST2, SST5, files_config, sst2_rows, write_jsonl, write_tsv


def words(examples: list[Example] | None) -> set[str]:
    return {example.texts[0].split()[0] for example in examples or []}


def test_one_folder_for_several_tasks(glue: Path) -> None:
    assert load(SST2, files_config(glue.parent), 42) == load(SST2, files_config(glue), 42)


def test_a_prepared_folder_is_used_as_it_is(tmp_path: Path) -> None:
    rows = {stem: sst2_rows(count, stem) for stem, count in (("train", 8), ("dev", 6), ("test", 4))}
    for stem, content in rows.items():
        write_tsv(tmp_path / f"{stem}.tsv", HEADER, content)
    splits = load(SST2, files_config(tmp_path), 1)
    for part, stem in ((splits.train, "train"), (splits.dev, "dev"), (splits.test, "test")):
        assert [list(e.texts) for e in part or []] == [[text] for text, _ in rows[stem]]
    assert load(SST2, files_config(tmp_path), 2) == splits


def test_train_and_test_without_dev(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("".join(f"{i % 5},text {i}\n" for i in range(50)))
    (tmp_path / "test.csv").write_text("4,other\n")
    splits = load(SST5, files_config(tmp_path), 42)
    assert (len(splits.train), len(splits.dev), len(splits.test or [])) == (45, 5, 1)


def test_a_single_file_has_no_test_split(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "all.jsonl", [{"sentence": f"s {i}", "label": i % 2} for i in range(30)])
    whole, few = load(SST2, files_config(path), 42), load(SST2, files_config(path, shots=4), 42)
    assert (len(whole.train), len(whole.dev), whole.test) == (27, 3, None)
    assert (len(few.train), len(few.dev), few.test) == (8, 8, None)


def test_validation_is_another_name_of_dev_and_minus_one_marks_no_test_set(tmp_path: Path) -> None:
    for stem, count in (("train", 20), ("validation", 8)):
        write_jsonl(tmp_path / f"{stem}.jsonl", [{"sentence": f"{stem} {i}", "label": i % 2} for i in range(count)])
    write_jsonl(tmp_path / "test.jsonl", [{"sentence": f"test {i}", "label": -1} for i in range(9)])
    splits = load(SST2, files_config(tmp_path), 42)
    assert words(splits.test) == {"validation"}
    assert any("-1 in every row" in note for note in splits.notes)
    write_jsonl(tmp_path / "test.jsonl", [{"sentence": f"test {i}", "label": i - 1} for i in range(3)])
    with pytest.raises(UserError, match=r"test.jsonl:1: label -1"):
        load(SST2, files_config(tmp_path), 42)


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda root: root / "nowhere", ["no such file or folder"]),
        (lambda root: root / "SST-3", ["no such file or folder", "did you mean 'SST-2'"]),
        (
            lambda root: (root / "empty").mkdir() or root / "empty",
            ["no training file", "train.jsonl", "there is: nothing"],
        ),
        (lambda root: (root / "a.txt").write_text("x") and root / "a.txt", ["allowed: .tsv, .csv"]),
        (lambda root: (root / "SST-2/train.csv").write_text("x") and root / "SST-2", ["train.tsv, train.csv"]),
        (lambda root: (root / "SST-2/validation.tsv").write_text("x") and root / "SST-2", ["dev.tsv, validation.tsv"]),
        (lambda root: (root / "SST-2/dev.tsv").write_text(HEADER + "\n") and root / "SST-2", ["dev.tsv: no rows"]),
    ],
)
def test_errors_in_a_folder(make: object, parts: list[str], glue: Path) -> None:
    with pytest.raises(UserError) as caught:
        load(SST2, files_config(make(glue.parent)), 42)
    for part in parts:
        assert part in str(caught.value)


def test_data_dir_must_be_given(glue: Path) -> None:
    with pytest.raises(UserError, match=r"data=files needs data.dir"):
        load(SST2, FilesConfig(name="files"), 42)
