"""Reading files: all formats give the same rows, texts are unchanged, and an error names its line."""

import csv
import io
import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mezo_cli.config.schema import Example, FileSource, Splits, TaskConfig
from mezo_cli.data import load
from mezo_cli.errors import UserError
from tests.data.sample_data import COLA, HEADER, MRPC, RTE, SST2, SST5, files_config, sst2_rows, write_jsonl, write_tsv

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
FIELD = TEXT.filter(lambda text: not set(text) & set("\t\n"))


def folder(root: Path, train: str | bytes, suffix: str = ".tsv") -> Path:
    root.mkdir(exist_ok=True)
    (root / f"train{suffix}").write_bytes(train if isinstance(train, bytes) else train.encode())
    return root


def texts(examples: list[Example]) -> list[tuple[tuple[str, ...], int]]:
    return [(e.texts, e.label) for e in examples]


def all_rows(splits: Splits) -> list[Example]:
    """The rows of a single file, back in file order."""
    place = lambda e: int(e.where.replace(" row ", ":").rsplit(":", 1)[1])  # noqa: E731
    return sorted([*splits.train, *splits.dev], key=place)


def error_line(task: TaskConfig, root: Path, *parts: str, **settings: object) -> str:
    with pytest.raises(UserError) as caught:
        load(task, files_config(root, **settings), 42)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message
    return message


def test_texts_are_not_stripped_and_locations_are_lines(tmp_path: Path) -> None:
    path = write_tsv(tmp_path / "all.tsv", HEADER, [["  a b ", "0"], ["\u2028c\x85 \r d", "1"], ['"quoted', "1"]])
    rows = all_rows(load(SST2, files_config(path), 42))
    assert rows == [
        Example(("  a b ",), 0, "all.tsv:2"),
        Example(("\u2028c\x85 \r d",), 1, "all.tsv:3"),
        Example(('"quoted',), 1, "all.tsv:4"),
    ]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(FIELD, FIELD, st.integers(0, 1)), min_size=2, max_size=8), crlf=st.booleans())
def test_a_tsv_keeps_any_text(rows: list[tuple[str, str, int]], crlf: bool, tmp_path: Path) -> None:
    path = write_tsv(
        tmp_path / "all.tsv",
        "sentence1\tlabel\tsentence2",
        [[one, RTE.labels[label], two.rstrip("\r") if crlf else two + "."] for one, two, label in rows],
        "\r\n" if crlf else "\n",
    )
    expected = [((one, two.rstrip("\r") if crlf else two + "."), label) for one, two, label in rows]
    assert texts(all_rows(load(RTE, files_config(path), 1))) == expected


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(TEXT, st.integers(0, 4)), min_size=2, max_size=8))
def test_csv_and_jsonl_keep_any_text(rows: list[tuple[str, int]], tmp_path: Path) -> None:
    out = io.StringIO()
    csv.writer(out).writerows([label, text] for text, label in rows)
    plain = tmp_path / "plain.csv"
    plain.write_bytes(out.getvalue().encode())
    named = tmp_path / "named.csv"
    named.write_bytes(b"text,label\r\n" + "".join(_csv(text, SST5.labels[label]) for text, label in rows).encode())
    lines = write_jsonl(tmp_path / "all.jsonl", [{"label": SST5.labels[label], "text": text} for text, label in rows])
    expected = [((text,), label) for text, label in rows]
    for path in (plain, named, lines):
        assert texts(all_rows(load(SST5, files_config(path), 1))) == expected


def test_a_csv_field_of_any_length(tmp_path: Path) -> None:
    text = "a" * 200_000
    path = folder(tmp_path, "".join(_csv(str(i % 5), f"{text}{i}") for i in range(10)), ".csv")
    assert max(len(row.texts[0]) for row in load(SST5, files_config(path), 42).train) == 200_001


def _csv(*fields: str) -> str:
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL).writerow(fields)
    return out.getvalue()


def test_all_formats_give_the_same_data(tmp_path: Path) -> None:
    rows = [{"sentence": f"text {i} ", "label": SST2.labels[i % 2]} for i in range(40)]
    write_jsonl(tmp_path / "a/all.jsonl", rows)
    (tmp_path / "a/all.json").write_text(json.dumps(rows))
    (tmp_path / "a/lines.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a/all.csv").write_text("label,sentence\n" + "".join(f"{r['label']},{r['sentence']}\n" for r in rows))
    write_tsv(tmp_path / "a/all.tsv", HEADER, [[r["sentence"], r["label"]] for r in rows])
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a/all.parquet")
    prints = {p.name: load(SST2, files_config(p), 5).fingerprint for p in (tmp_path / "a").iterdir()}
    assert len(prints) == 6
    assert len(set(prints.values())) == 1, prints


def test_class_numbers_of_a_datasets_parquet_are_mapped_by_name(tmp_path: Path) -> None:
    """The hub's RTE has 0 = entailment; a task with the other order must not see its own index in it."""
    names = ["not_entailment", "entailment"]  # not the task's order
    features = datasets.Features(
        {k: datasets.Value("string") for k in ("sentence1", "sentence2")} | {"label": datasets.ClassLabel(names=names)}
    )
    rows = {"sentence1": [f"p{i}" for i in range(4)], "sentence2": ["h"] * 4, "label": [0, 1, 1, 0]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "all.parquet"))
    loaded = all_rows(load(RTE, files_config(tmp_path / "all.parquet"), 1))
    assert [RTE.labels[e.label] for e in loaded] == [names[i] for i in rows["label"]]
    assert loaded[2].where == "all.parquet row 3"


def test_parquet_shards_are_one_split(tmp_path: Path) -> None:
    for shard in (0, 1):
        rows = [{"sentence": f"{shard} {i}", "label": SST2.labels[i % 2]} for i in range(10)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"train-0000{shard}-of-00002.parquet")
    assert len(all_rows(load(SST2, files_config(tmp_path), 1))) == 20
    (tmp_path / "train-00001-of-00002.parquet").unlink()
    error_line(SST2, tmp_path, "1 of the 2 shards")


def test_a_note_says_how_label_numbers_are_read(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"sentence": f"s{i}", "label": i % 2} for i in range(4)])
    assert load(SST2, files_config(path), 1).notes[0] == "a.jsonl: label numbers are read as 0 = negative, 1 = positive"


def test_a_renamed_column_wins_over_numbers_of_the_same_name(tmp_path: Path) -> None:
    rows = [{"text": f"t{i}", "label": 4 - i, "label_text": SST5.labels[i]} for i in range(5)]
    loaded = all_rows(load(SST5, files_config(write_jsonl(tmp_path / "a.jsonl", rows)), 1))
    assert [e.label for e in loaded] == [0, 1, 2, 3, 4]


def test_cola_without_header_and_mrpc_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = write_tsv(tmp_path / "all.tsv", None, [["gj04", "1", "", "A b."], ["gj04", "0", "*", "B a."]])
    assert texts(all_rows(load(COLA, files_config(path), 1))) == [(("A b.",), 1), (("B a.",), 0)]
    header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String"
    path = write_tsv(tmp_path / "all.tsv", header, [["1", "5", "6", 'Say "x', "y"], ["0", "7", "8", "a", "b"]])
    assert texts(all_rows(load(MRPC, files_config(path), 1))) == [(('Say "x', "y"), 1), (("a", "b"), 0)]


def test_rows_without_an_agreed_label_are_left_out_only_if_the_task_says_so(tmp_path: Path) -> None:
    path = write_tsv(tmp_path / "a.tsv", HEADER, [["a", "0"], ["b", "-"], ["c", "1"], ["d", "0"]])
    loaded = load(SST2.replace(skip_labels=["-", "-1"]), files_config(path), 1)
    assert [e.where for e in all_rows(loaded)] == ["a.tsv:2", "a.tsv:4", "a.tsv:5"]
    assert "a.tsv: 1 rows left out" in loaded.notes[0]
    error_line(SST2, path, "a.tsv:3", "'-'")


@pytest.mark.parametrize(
    ("train", "parts"),
    [
        ("sentence\tlabel\na\t0\nb\n", ["train.tsv:3", "1 field, expected 2"]),
        ("sentence\tlabel\na\t0\nb\t1\tc\n", ["train.tsv:3", "3 fields, expected 2"]),
        ("text\tlabel\na\t0\n", ["train.tsv: no column 'sentence'", "text, label", "task.rename"]),
        ("sentence,label\na,0\n", ["its fields are separated by commas: a .csv needs commas, a .tsv tabs"]),
        ('"sentence";"label"\n"a, b";0\n', ["train.tsv:1: its fields are separated by semicolons"]),
        ("sentence\tlabel\tlabel\na\t0\t0\n", ["'label' occurs 2 times"]),
        ("sentence\tlabel\na\t0\nb\tpositiv\n", ["train.tsv:3", "'positiv'", "negative, positive", "mean 'positive'"]),
        ("sentence\tlabel\na\t0\nb\t-1\n", ["train.tsv:3", "-1", "1 of 2 rows are without a label"]),
        ("sentence\tlabel\na\t0\nb\tNaN\n", ["tsv:3: no label", "leave them out: 'task.skip_labels=[\"NaN\"]'"]),
        (f"sentence\tlabel\na\t0\nb\t{'x' * 99}\n", [f"unknown label '{'x' * 40} [...] {'x' * 40}' for"]),
        ("sentence\tlabel\n", ["train.tsv: no rows"]),
        ("", ["train.tsv: empty file"]),
        ("sentence\tlabel\na\t0\n", ["train.tsv: 1 row", "at least 2"]),
        (b"sentence\tlabel\na\t0\ncaf\xe9\t1\n", ["train.tsv:3", "0xe9", "UTF-8"]),
        (b"sentence\tlabel\na\t0\nb\0\t1\n", ["train.tsv:3", "NUL character"]),
        ("sentence\tlabel\na\t0\n".encode("utf-16"), ["train.tsv:1", "UTF-16"]),
    ],
)
def test_errors_in_a_tsv(train: str | bytes, parts: list[str], tmp_path: Path) -> None:
    error_line(SST2, folder(tmp_path / "in", train), *parts)


@pytest.mark.parametrize("shots", [None, 1])
def test_a_damaged_row_is_found_even_if_it_is_not_drawn(shots: int | None, tmp_path: Path) -> None:
    rows = [*sst2_rows(500), ["a row", "of three", "1"]]
    path = write_tsv(tmp_path / "in/train.tsv", HEADER, rows)
    error_line(SST2, path.parent, "train.tsv:502", shots=shots)


@pytest.mark.parametrize(
    ("suffix", "train", "parts"),
    [
        (".csv", "\ufeff", ["train.csv: empty file"]),
        (".csv", "0,a\n1,b,c\n", ["train.csv:2", "3 fields"]),
        (".csv", "text;label\na, b;0\n", ["train.csv:1: its fields are separated by semicolons"]),
        (".csv", '4;"ok"\n', ["train.csv:1: its fields are separated by semicolons"]),
        (".csv", "text,label\na,0\nb,\n", ["train.csv:3: no label", "1 of 2 rows"]),
        (".csv", '0,"a\nb"\n1,"open\n', ["train.csv:3", "quoting"]),
        (".csv", '0,"a\nb"\n7,c\n', ["train.csv:3", "'7'", "very negative"]),
        (".csv", "review,stars\nok,4\n", ["train.csv:1", "if line 1 is a header, it must name text, label"]),
        (".csv", "label,review,more\n4,ok,x\n", ["no column 'text'", "label, review, more"]),
        (".jsonl", '{"text": "a", "label": "neutral"}\n{"text": "b", "label": \n', ["train.jsonl:2", "JSON"]),
        (".jsonl", '{"text": "a", "label": "neutral"}\n\n["b"]\n', ["train.jsonl:3", "list"]),
        (".jsonl", '{"text": "a", "label": "neutral"}\n{"text": "b"}\n', ["train.jsonl:2", "no label"]),
        (".jsonl", '{"text": "a", "label": "neutral"}\n{"label": "neutral"}\n', ["train.jsonl:2", "'text' is missing"]),
        (".jsonl", '{"text": "a", "label": "neutral"}\n{"text": 3, "label": "neutral"}\n', ["jsonl:2", "the int '3'"]),
        (".jsonl", '{"text": "a", "label": "neutral"}\n{"text": "\\u0000", "label": 1}\n', ["jsonl:2", "NUL"]),
        (".jsonl", '{"text": "a", "label": "neutral"}\n{"text": "\\ud800", "label": 1}\n', ["jsonl:2", "surrogate"]),
        (".json", '[{"text": "a", "label": 1}, {"text": "b", "label": "x"}]', ["train.json row 2", "'x'"]),
        (".jsonl", f'{{"text": "a", "label": {"1" * 5000}}}', ["train.jsonl:1: not a JSON object"]),
        (".json", f'[{{"text": "a", "label": {"1" * 5000}}}]', ["train.json:1: not a JSON array"]),
        (".json", "[1, 2]", ["train.json row 1", "int"]),
        (".json", '{"text": {"0": "a"}, "label": {"0": 1}}', ["train.json: one object per row is needed", "records"]),
        (".json", '{\n"text": ["a"]}', ["train.json:1: not a JSON object", "one object per row is needed"]),
        (".json", '[{"text": "a"},\n {"text": ]', ["train.json:2"]),
        (".parquet", "PAR1 no", ["train.parquet", "Parquet"]),
    ],
)
def test_errors_in_other_formats(suffix: str, train: str, parts: list[str], tmp_path: Path) -> None:
    error_line(SST5, folder(tmp_path / "in", train, suffix), *parts)


def test_a_label_with_two_meanings_is_refused(tmp_path: Path) -> None:
    task = SST2.replace(hub=SST2.hub.replace(labels=["1", "0"]))
    path = write_jsonl(tmp_path / "a.jsonl", [{"sentence": "a", "label": label} for label in (0, 1)])
    error_line(task, path, "label '1' means 'positive' by task.files.labels and 'negative' by task.hub.labels")
    named = write_jsonl(tmp_path / "b.jsonl", [{"sentence": "a", "label": label} for label in SST2.labels])
    assert [e.label for e in all_rows(load(task, files_config(named), 1))] == [0, 1]


def test_the_spelling_of_files_wins_in_a_glue_folder(tmp_path: Path) -> None:
    spelled = FileSource(labels=["entailment", "not_entailment"])
    task = TaskConfig(name="swap", labels=["no", "yes"], columns=["sentence"], files=spelled)
    path = write_tsv(tmp_path / "a.tsv", HEADER, [["a", "not_entailment"], ["b", "entailment"], ["c", "yes"]])
    assert [e.label for e in all_rows(load(task, files_config(path), 1))] == [1, 0, 1]


def test_labels_in_another_order_are_read_by_name_and_a_line_names_the_lists_that_go_by_it(tmp_path: Path) -> None:
    """Named labels need no order. What 0 and 1 mean is asked, and the answer of the line gives the right labels."""
    turned = SST2.replace(labels=["positive", "negative"])
    named = write_jsonl(tmp_path / "b.jsonl", [{"sentence": "a", "label": label} for label in SST2.labels])
    assert [e.label for e in all_rows(load(turned, files_config(named), 1))] == [1, 0]
    path = write_tsv(tmp_path / "a.tsv", HEADER, sst2_rows(4))
    lists = "put task.files.labels [0, 1] and task.hub.labels [negative, positive] into the order of task.labels"
    error_line(turned, path, "label '0' is one of task.files.labels", lists)
    as_told = {"files": SST2.files.replace(labels=["1", "0"]), "hub": SST2.hub.replace(labels=turned.labels)}
    assert [e.label for e in all_rows(load(turned.replace(**as_told), files_config(path), 1))] == [1, 0, 1, 0]


def test_booleans_and_whole_floats_are_the_same_labels_in_all_formats(tmp_path: Path) -> None:
    task = SST2.replace(files=SST2.files.replace(labels=["False", "True"]))
    write_jsonl(tmp_path / "train.jsonl", [{"sentence": f"s{i}", "label": bool(i % 2)} for i in range(4)])
    (tmp_path / "dev.csv").write_text("sentence,label\na,True\nb,FALSE\n")
    (tmp_path / "test.csv").write_text("sentence,label\na,true\n")
    loaded = load(task, files_config(tmp_path), 1)
    labels = [[e.label for e in rows or ()] for rows in (loaded.train, loaded.dev, loaded.test)]
    assert labels == [[0, 1, 0, 1], [1, 0], [1]]
    floats = write_jsonl(tmp_path / "f.jsonl", [{"sentence": "a", "label": float(i)} for i in range(2)])
    assert [e.label for e in all_rows(load(SST2, files_config(floats), 1))] == [0, 1]


@pytest.mark.parametrize(
    ("one", "noted"), [('"He said ""no"" and left"', True), ('"quoted"', False), ('"a" and ""b"" "', False)]
)
def test_a_note_says_that_a_tsv_has_quotes_in_it(one: str, noted: bool, tmp_path: Path) -> None:
    path = write_tsv(tmp_path / "a.tsv", HEADER, [[one, "0"], ["plain", "1"]])
    splits = load(SST2, files_config(path), 42)
    assert one in {row.texts[0] for row in all_rows(splits)}
    assert any("are read as text: a .tsv has no quoting" in note for note in splits.notes) is noted


def test_other_label_lists_are_ignored_if_the_user_gives_labels(tmp_path: Path) -> None:
    task = SST2.replace(labels=["bad", "so so", "good"])
    path = write_tsv(tmp_path / "a.tsv", HEADER, [["a", "good"], ["b", "so so"], ["c", "bad"]])
    assert [e.label for e in all_rows(load(task, files_config(path), 1))] == [2, 1, 0]
    write_tsv(path, HEADER, [["a", "good"], ["b", "1"]])
    error_line(task, path, "a.tsv:3", "unknown label '1'", "allowed: bad, so so, good")
