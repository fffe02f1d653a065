"""Which rows become train, dev and test; the fingerprint; the demo; the export folder."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mezo_cli.data import describe, export, load
from mezo_cli.errors import UserError
from mezo_cli.schema import DataConfig, Example, Splits
from tests.data.given import MNLI, RTE, SST2, SST5, files, jsonl, sst2_rows, tsv

HEADER = "sentence\tlabel"


@pytest.fixture
def glue(tmp_path: Path) -> Path:
    """A full GLUE folder: 100 rows of train, 20 of dev, a test file without labels."""
    tsv(tmp_path / "SST-2/train.tsv", HEADER, sst2_rows(100, "train"))
    tsv(tmp_path / "SST-2/dev.tsv", HEADER, sst2_rows(20, "dev"))
    tsv(tmp_path / "SST-2/test.tsv", "index\tsentence", [[str(i), f"test {i}"] for i in range(30)])
    return tmp_path / "SST-2"


def words(examples: list[Example] | None) -> set[str]:
    return {example.texts[0].split()[0] for example in examples or []}


def test_full_data_holds_dev_out_and_tests_on_the_official_dev_set(glue: Path) -> None:
    splits = load(SST2, files(glue), 42)
    assert (len(splits.train), len(splits.dev), len(splits.test or [])) == (90, 10, 20)
    assert [e.label for e in splits.dev].count(0) == 5
    assert words(splits.train) == words(splits.dev) == {"train"}
    assert words(splits.test) == {"dev"}
    assert not {e.where for e in splits.train} & {e.where for e in splits.dev}
    assert any("test.tsv has no column 'label'" in note for note in splits.notes)
    assert len(load(SST2, files(glue, dev_size=4), 42).dev) == 4
    assert load(SST2, files(glue), 43).dev != splits.dev
    assert load(SST2, files(glue), 42) == splits


def test_one_folder_for_several_tasks(glue: Path) -> None:
    assert load(SST2, files(glue.parent), 42) == load(SST2, files(glue), 42)


def test_a_prepared_folder_is_used_as_it_is(tmp_path: Path) -> None:
    rows = {stem: sst2_rows(count, stem) for stem, count in (("train", 8), ("dev", 6), ("test", 4))}
    for stem, content in rows.items():
        tsv(tmp_path / f"{stem}.tsv", HEADER, content)
    splits = load(SST2, files(tmp_path), 1)
    for part, stem in ((splits.train, "train"), (splits.dev, "dev"), (splits.test, "test")):
        assert [list(e.texts) for e in part or []] == [[text] for text, _ in rows[stem]]
    assert load(SST2, files(tmp_path), 2) == splits


@pytest.mark.parametrize(("name", "task"), [("SST-2/16-42", SST2), ("RTE/16-13", RTE), ("sst-5/16-87", SST5)])
def test_a_published_folder_equals_sampling_it(name: str, task: object, shared: Path) -> None:
    folder, seed = name.split("/")[0], int(name.split("-")[-1])
    source = shared / "data" / ("lm-bff" if task is SST5 else "glue") / folder
    prepared = load(task, files(shared / "data/k-shot-1k-test" / name), 0)
    drawn = load(task, files(source, shots=16), seed)
    assert prepared.fingerprint == drawn.fingerprint
    assert len(prepared.train) == len(prepared.dev) == 16 * len(task.labels)


def test_mnli_tests_on_the_matched_set(shared: Path) -> None:
    folder = shared / "data/k-shot-1k-test/MNLI/16-42"
    splits = load(MNLI, files(folder), 0)
    assert (len(splits.train), len(splits.dev), len(splits.test or [])) == (48, 48, 1000)
    assert splits.train[0].texts == ("That's all right.", "That's fine.")
    assert MNLI.labels[splits.train[0].label] == "entailment"
    assert (splits.test or [])[0].where == "test_matched.tsv:2"


def test_real_sst2_in_full(shared: Path) -> None:
    splits = load(SST2, files(shared / "data/glue/SST-2"), 42)
    assert (len(splits.train), len(splits.dev), len(splits.test or [])) == (66_349, 1000, 872)
    assert all(e.texts[0].endswith(" ") for e in splits.test or [])


def test_train_and_test_without_dev(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("".join(f"{i % 5},text {i}\n" for i in range(50)))
    (tmp_path / "test.csv").write_text("4,other\n")
    splits = load(SST5, files(tmp_path), 42)
    assert (len(splits.train), len(splits.dev), len(splits.test or [])) == (45, 5, 1)


def test_one_file_alone_has_no_test(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "all.jsonl", [{"sentence": f"s {i}", "label": i % 2} for i in range(30)])
    whole, few = load(SST2, files(path), 42), load(SST2, files(path, shots=4), 42)
    assert (len(whole.train), len(whole.dev), whole.test) == (27, 3, None)
    assert (len(few.train), len(few.dev), few.test) == (8, 8, None)


def test_validation_is_another_name_of_dev_and_minus_one_marks_no_test_set(tmp_path: Path) -> None:
    for stem, count in (("train", 20), ("validation", 8)):
        jsonl(tmp_path / f"{stem}.jsonl", [{"sentence": f"{stem} {i}", "label": i % 2} for i in range(count)])
    jsonl(tmp_path / "test.jsonl", [{"sentence": f"test {i}", "label": -1} for i in range(9)])
    splits = load(SST2, files(tmp_path), 42)
    assert words(splits.test) == {"validation"}
    assert any("-1 in every row" in note for note in splits.notes)
    jsonl(tmp_path / "test.jsonl", [{"sentence": f"test {i}", "label": i - 1} for i in range(3)])
    with pytest.raises(UserError, match=r"test.jsonl:1: label -1"):
        load(SST2, files(tmp_path), 42)


def test_few_shot_with_named_columns_takes_the_test_set(tmp_path: Path) -> None:
    for stem, count in (("train", 40), ("dev", 8), ("test", 1100)):
        jsonl(tmp_path / f"{stem}.jsonl", [{"sentence": f"{stem} {i}", "label": i % 2} for i in range(count)])
    splits = load(SST2, files(tmp_path, shots=4), 42)
    assert (len(splits.train), len(splits.dev), len(splits.test or [])) == (8, 8, 1000)
    assert words(splits.test) == {"test"}


def test_eval_limit_caps_dev_and_test_but_not_train(glue: Path) -> None:
    whole, capped = load(SST2, files(glue), 42), load(SST2, files(glue, eval_limit=5), 42)
    assert (len(capped.train), len(capped.dev), len(capped.test or [])) == (90, 5, 5)
    assert set(capped.test or []) < set(whole.test or [])
    assert capped.test == load(SST2, files(glue, eval_limit=5), 7).test  # the same rows for every seed
    assert capped.fingerprint != whole.fingerprint


def test_train_size_draws_train_and_dev_as_the_papers_opt_runs_do(shared: Path) -> None:
    """By the reference's rule, written a second time: one legacy permutation of train, dev behind train."""
    whole = load(SST2, files(shared / "data/glue/SST-2", dev_size=1), 0)
    lines = (shared / "data/glue/SST-2/train.tsv").read_text().splitlines()[1:]
    splits = load(SST2, files(shared / "data/glue/SST-2", train_size=1000, dev_size=500, eval_limit=1000), 7)
    np.random.seed(7)
    order = np.random.permutation(len(lines))[:1500]
    assert [e.texts[0] for e in splits.train] == [lines[i].split("\t")[0] for i in order[:1000]]
    assert [e.texts[0] for e in splits.dev] == [lines[i].split("\t")[0] for i in order[1000:]]
    assert [str(e.label) for e in splits.dev] == [lines[i].split("\t")[1] for i in order[1000:]]
    assert splits.test == whole.test
    assert load(SST2, files(shared / "data/glue/SST-2", train_size=9, dev_size=9), 8).train != splits.train[:9]


def test_train_size_beside_a_dev_set_of_its_own(tmp_path: Path) -> None:
    for stem, count in (("train", 40), ("dev", 8), ("test", 6)):
        jsonl(tmp_path / f"{stem}.jsonl", [{"sentence": f"{stem} {i}", "label": i % 2} for i in range(count)])
    splits = load(SST2, files(tmp_path, train_size=10), 42)
    assert (len(splits.train), len(splits.dev), len(splits.test or [])) == (10, 8, 6)
    assert len(set(splits.train)) == 10
    with pytest.raises(UserError, match=r"train.jsonl: 40 rows, too few for data.train_size=41$"):
        load(SST2, files(tmp_path, train_size=41), 42)
    with pytest.raises(UserError, match=r"data.shots=4 and data.train_size=10: give one of them"):
        load(SST2, files(tmp_path, train_size=10, shots=4), 42)
    (tmp_path / "dev.jsonl").unlink()
    with pytest.raises(UserError, match=r"40 rows, too few for data.train_size=30 and data.dev_size=20"):
        load(SST2, files(tmp_path, train_size=30, dev_size=20), 42)


def test_fingerprint_follows_texts_labels_and_places_in_splits(tmp_path: Path) -> None:
    def print_of(rows: list[list[str]], name: str) -> str:
        tsv(tmp_path / name / "train.tsv", HEADER, rows)
        tsv(tmp_path / name / "dev.tsv", HEADER, sst2_rows(4))
        tsv(tmp_path / name / "test.tsv", HEADER, sst2_rows(4))
        return load(SST2, files(tmp_path / name), 1).fingerprint

    rows = sst2_rows(4)
    base = print_of(rows, "a")
    assert len(base) == 64
    assert print_of(rows, "b") == base
    changed = [
        [[rows[0][0].strip(), "0"], *rows[1:]],
        [[rows[0][0], "1"], *rows[1:]],
        rows[::-1],
        rows[:3],
    ]
    assert len({base, *(print_of(one, f"c{i}") for i, one in enumerate(changed))}) == 5


def test_short_groups_are_noted_and_an_empty_dev_is_refused(glue: Path) -> None:
    tsv(glue / "train.tsv", HEADER, [*sst2_rows(20), *[["more", "0"]] * 5])
    notes = load(SST2, files(glue, shots=8), 42).notes
    assert any(note == "dev: fewer than 8 rows for class 'negative' 7, 'positive' 2" for note in notes), notes
    with pytest.raises(UserError, match=r"no rows are left for dev.*data.shots=20"):
        load(SST2, files(glue, shots=20), 42)


def test_export_writes_short_and_empty_groups_with_a_warning(
    glue: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        export(SST2, files(glue, shots=60), 42, tmp_path / "out")
    expected = "train: fewer than 60 rows for class 'negative' 50, 'positive' 50"
    assert expected in caplog.text
    heard: list[str] = []
    export(SST2, files(glue, shots=60), 42, tmp_path / "out", warn=heard.append)
    assert expected in heard
    assert (tmp_path / "out/dev.tsv").read_text() == HEADER + "\n"
    assert len((tmp_path / "out/train.tsv").read_text().splitlines()) == 101


def test_export_writes_what_load_gives(glue: Path, tmp_path: Path) -> None:
    for settings in ({}, {"shots": 5}, {"shots": 5, "eval_limit": 3}):
        config, out = files(glue, **settings), tmp_path / f"out{len(settings)}{len(str(settings))}"
        written = export(SST2, config, 42, out)
        assert [p.name for p in written] == ["train.tsv", "dev.tsv", "test.tsv"]
        assert load(SST2, files(out), 0).fingerprint == load(SST2, config, 42).fingerprint


def test_export_of_named_columns_keeps_them(tmp_path: Path) -> None:
    rows = [{"id": i, "sentence": f"é {i} ", "label": SST2.labels[i % 2]} for i in range(20)]
    path = jsonl(tmp_path / "all.jsonl", rows)
    config = files(path, shots=3)
    written = export(SST2, config, 42, tmp_path / "out")
    assert [p.name for p in written] == ["train.jsonl", "dev.jsonl"]
    import json

    lines = [json.loads(line) for line in written[0].read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 6
    assert all(line in rows for line in lines)


def test_export_keeps_crlf_and_ends_every_line(tmp_path: Path) -> None:
    content = "sentence\tlabel\r\n" + "".join(f"s {i} \t{i % 2}\r\n" for i in range(9)) + "last\t1"
    (tmp_path / "train.tsv").write_bytes(content.encode())
    (train, dev) = export(SST2, files(tmp_path / "train.tsv", shots=4), 3, tmp_path / "out")
    written = (train.read_bytes() + dev.read_bytes()).decode()
    assert written.count("sentence\tlabel\r\n") == 2
    source = {line.rstrip("\r\n") for line in content.split("\n")}
    assert {line.rstrip("\r") for line in written.split("\n")} <= source | {""}


def test_export_refuses_to_overwrite_other_content(glue: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = export(SST2, files(glue, shots=5), 42, out)
    before = {p.name: p.read_bytes() for p in first}
    assert export(SST2, files(glue, shots=5), 42, out) == first  # the same again is no change
    with pytest.raises(UserError, match=r"train.tsv.* other content"):
        export(SST2, files(glue, shots=5), 43, out)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed/train.csv").write_text("1,a\n")
    with pytest.raises(UserError, match=r"train.csv"):
        export(SST2, files(glue, shots=5), 43, tmp_path / "mixed")
    with pytest.raises(UserError, match=r"this is a file"):
        export(SST2, files(glue, shots=5), 43, tmp_path / "mixed/train.csv")
    with pytest.raises(UserError, match=r"other content"):
        export(SST2, files(glue, shots=5), 43, glue)


def test_a_failed_export_leaves_nothing_half_written(
    glue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.write_bytes

    def fails(self: Path, content: bytes) -> int:
        if "dev" in self.name:
            raise OSError(28, "No space left on device")
        return real(self, content)

    monkeypatch.setattr(Path, "write_bytes", fails)
    with pytest.raises(UserError, match=r"No space left on device"):
        export(SST2, files(glue, shots=5), 42, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


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
def test_what_is_wrong_with_a_folder(make: object, parts: list[str], glue: Path) -> None:
    with pytest.raises(UserError) as caught:
        load(SST2, files(make(glue.parent)), 42)
    for part in parts:
        assert part in str(caught.value)


def test_data_dir_must_be_given_and_be_for_files(glue: Path) -> None:
    with pytest.raises(UserError, match=r"data=files needs data.dir"):
        load(SST2, DataConfig(name="files"), 42)
    with pytest.raises(UserError, match=r"data.dir=x is read by data=files only"):
        load(SST2, DataConfig(name="hub", dir="x"), 42)


def test_a_relative_folder_is_looked_up_from_here(glue: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(glue.parent)
    assert load(SST2, files(Path("SST-2")), 42) == load(SST2, files(glue), 42)


def test_the_demo_is_balanced_and_its_splits_are_disjoint() -> None:
    splits = load(SST2, DataConfig(name="demo"), 42)
    assert splits.test is not None
    parts = [splits.train, splits.dev, splits.test]
    for part in parts:
        assert len(part) >= 40
        assert abs(sum(e.label for e in part) - len(part) / 2) <= 1
    sentences = [e.texts[0] for part in parts for e in part]
    assert len(set(sentences)) == len(sentences)
    mr = replace(SST2, name="mr", columns=["text"])
    assert load(mr, DataConfig(name="demo"), 42).fingerprint == splits.fingerprint
    assert len(load(SST2, DataConfig(name="demo", shots=4), 42).train) == 8


@pytest.mark.parametrize("task", [RTE, SST5], ids=lambda task: task.name)
def test_the_demo_fits_no_other_task(task: object) -> None:
    with pytest.raises(UserError, match=r"data=demo does not fit task"):
        load(task, DataConfig(name="demo"), 42)


def test_describe_counts_rows_and_words() -> None:
    rows = [Example(("one two", "three"), 0), Example(("a b c d", ""), 1), Example(("x", "y z a b c d e f g"), 1)]
    facts = describe(Splits(rows, [], None), RTE)
    assert facts["train"]["rows"] == 3
    assert facts["train"]["labels"] == {"entailment": 1, "not_entailment": 2}
    assert facts["train"]["words"] == {"min": 3, "median": 4.0, "p95": pytest.approx(9.4), "max": 10}
    assert facts["dev"]["rows"] == 0
    assert facts["test"] is None
