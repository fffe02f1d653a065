"""Samples: few-shot sets by the reference's rules and others by their properties; splits exported as files."""

import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mezo_cli.config.schema import TaskConfig
from mezo_cli.data import export, load
from mezo_cli.data.sampling import few_shot, hold_out, limit, published_test
from mezo_cli.errors import RunFailed, UserError
from tests.data.sample_data import (
    COLA,
    HEADER,
    MNLI,
    MRPC,
    RTE,
    SST2,
    SST5,
    files_config,
    sst2_rows,
    write_jsonl,
    write_tsv,
)

LABELS = st.lists(st.integers(0, 3), min_size=2, max_size=120)


def reference_split(lines: list[str], label_at: int, shots: int, seed: int) -> tuple[list[str], list[str]]:
    """FACTS section 3, rules 2 to 4, on raw lines and with numpy's global generator as the reference uses it."""
    state = np.random.get_state()
    np.random.seed(seed)
    lines = list(lines)
    np.random.shuffle(lines)
    np.random.set_state(state)
    groups: dict[str, list[str]] = {}
    for line in lines:
        groups.setdefault(line.strip().split("\t")[label_at], []).append(line)
    train = [line for group in groups.values() for line in group[:shots]]
    return train, [line for group in groups.values() for line in group[shots : 2 * shots]]


@pytest.mark.parametrize(
    ("task", "name", "shots", "seed"),
    [(SST2, "SST-2", 16, 13), (SST2, "SST-2", 512, 42), (RTE, "RTE", 16, 87), (SST5, "sst-5", 512, 100)],
)
def test_export_is_the_published_split_byte_for_byte(
    task: TaskConfig, name: str, shots: int, seed: int, shared: Path, tmp_path: Path
) -> None:
    source = shared / "data" / ("lm-bff" if task is SST5 else "glue") / name
    published = shared / "data" / "k-shot-1k-test" / name / f"{shots}-{seed}"
    written = export(task, files_config(source, shots=shots), seed, tmp_path / "out")
    assert sorted(p.name for p in written) == sorted(p.name for p in published.iterdir())
    assert sorted((tmp_path / "out").iterdir()) == sorted(written)  # no drafts left behind
    for path in written:
        assert path.read_bytes() == (published / path.name).read_bytes(), path.name


def glue_like(task: TaskConfig, count: int) -> tuple[str | None, list[list[str]], int]:
    """A header, rows and the label's position as GLUE writes them for the task."""
    draw = random.Random(count)
    if task is COLA:
        return None, [["gj04", draw.choice("01"), "", f"Sentence {i}."] for i in range(count)], 1
    if task is MRPC:
        header = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
        return header, [[draw.choice("01"), str(i), str(i + 1), f"One {i}.", f'Two "{i}.'] for i in range(count)], 0
    if task is MNLI:
        header = "index\tsentence1\tsentence2\tlabel1\tgold_label"
        rows = [[str(i), f"P {i}", f"H {i}", "neutral", draw.choice(MNLI.labels)] for i in range(count)]
        return header, rows, -1
    return "sentence\tlabel", sst2_rows(count), -1


@pytest.mark.parametrize("task", [SST2, COLA, MRPC, MNLI], ids=lambda task: task.name)
def test_export_follows_the_rules_for_every_position_of_the_label(task: TaskConfig, tmp_path: Path) -> None:
    shots, seed = 3, 13
    header, rows, at = glue_like(task, 200)
    write_tsv(tmp_path / "in/train.tsv", header, rows)
    tests = {"dev": 30}
    if task is MNLI:
        tests = {"dev_matched": 1200, "dev_mismatched": 1100}
    for stem, count in tests.items():
        write_tsv(tmp_path / f"in/{stem}.tsv", *glue_like(task, count)[:2])
    written = {p.name: p for p in export(task, files_config(tmp_path / "in", shots=shots), seed, tmp_path / "out")}

    lines = ["\t".join(row) + "\n" for row in rows]
    train, dev = reference_split(lines, at, shots, seed)
    head = [header + "\n"] if header else []
    dev_name = "dev_matched.tsv" if task is MNLI else "dev.tsv"
    expected = {"train.tsv": head + train, dev_name: head + dev}
    for stem, count in tests.items():
        official = ["\t".join(row) + "\n" for row in glue_like(task, count)[1]]
        if count > 1000:
            random_state = np.random.RandomState(42)
            random_state.shuffle(official)
            official = official[:1000]
        expected[stem.replace("dev", "test") + ".tsv"] = head + official
    assert set(written) == set(expected)
    for name, content in expected.items():
        assert written[name].read_text() == "".join(content), name
    loaded = load(task, files_config(tmp_path / "in", shots=shots), seed)
    assert [line.split("\t")[0] for line in train] == [
        rows[int(e.where.split(":")[1]) - (2 if head else 1)][0] for e in loaded.train
    ]


@given(labels=LABELS, shots=st.integers(1, 20), seed=st.integers(0, 2**32 - 1))
def test_few_shot_draws_as_the_global_generator_does(labels: list[int], shots: int, seed: int) -> None:
    train, dev = few_shot(labels, shots, seed)
    lines = [f"{row}\t{label}\n" for row, label in enumerate(labels)]
    expected = reference_split(lines, -1, shots, seed)
    assert ([lines[i] for i in train], [lines[i] for i in dev]) == expected


@pytest.mark.parametrize("count", [1, 999, 1000, 1001, 2210])
def test_the_test_set_is_that_of_pandas_sample_and_of_a_shuffle(count: int) -> None:
    pandas = pytest.importorskip("pandas")
    kept = published_test(count)
    if count <= 1000:
        assert kept == list(range(count))
        return
    assert kept == pandas.DataFrame({"x": range(count)}).sample(n=1000, random_state=42)["x"].tolist()
    order = list(range(count))
    np.random.RandomState(42).shuffle(order)
    assert kept == order[:1000]


@given(labels=LABELS, share=st.floats(0, 1), seed=st.integers(0, 2**32 - 1))
def test_held_out_rows_are_a_stratified_part(labels: list[int], share: float, seed: int) -> None:
    size = max(1, min(len(labels) - 1, int(share * len(labels))))
    train, dev = hold_out(labels, size, seed)
    assert sorted(train + dev) == list(range(len(labels)))
    assert train == sorted(train)
    assert dev == sorted(dev)
    assert len(dev) == size
    whole, part = Counter(labels), Counter(labels[i] for i in dev)
    if min(whole.values()) > 1 and size <= len(labels) // 10:
        for label, count in whole.items():
            assert abs(part[label] - count * len(dev) / len(labels)) < 1 + 1e-9
            assert part[label] < count  # no class is taken from train altogether
    assert (train, dev) == hold_out(labels, size, seed)


@settings(max_examples=50)
@given(count=st.integers(1, 300), small=st.integers(1, 300), large=st.integers(1, 300))
def test_limit_keeps_the_order_and_nests(count: int, small: int, large: int) -> None:
    small, large = sorted((small, large))
    rows = list(range(1000, 1000 + count))
    few, many = limit(rows, small), limit(rows, large)
    assert len(few) == min(small, count)
    assert few == sorted(few)
    assert set(few) <= set(many) <= set(rows)
    assert limit(rows, None) == rows


def test_export_writes_short_and_empty_classes_with_a_warning(glue: Path, tmp_path: Path) -> None:
    heard: list[str] = []
    export(SST2, files_config(glue, shots=60), 42, tmp_path / "out", warn=heard.append)
    assert "train: fewer than 60 rows for class 'negative' 50, 'positive' 50" in heard
    assert (tmp_path / "out/dev.tsv").read_text() == HEADER + "\n"
    assert len((tmp_path / "out/train.tsv").read_text().splitlines()) == 101


def test_export_writes_what_load_gives(glue: Path, tmp_path: Path) -> None:
    for more in ({}, {"shots": 5}, {"shots": 5, "eval_limit": 3}):
        config, out = files_config(glue, **more), tmp_path / f"out{len(more)}"
        written = export(SST2, config, 42, out)
        assert [p.name for p in written] == ["train.tsv", "dev.tsv", "test.tsv"]
        assert load(SST2, files_config(out), 0).fingerprint == load(SST2, config, 42).fingerprint


def test_export_keeps_every_column(tmp_path: Path) -> None:
    rows = [{"id": i, "sentence": f"é {i} ", "label": SST2.labels[i % 2]} for i in range(20)]
    config = files_config(write_jsonl(tmp_path / "all.jsonl", rows), shots=3)
    written = export(SST2, config, 42, tmp_path / "out")
    assert [p.name for p in written] == ["train.jsonl", "dev.jsonl"]
    lines = [json.loads(line) for line in written[0].read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 6
    assert all(line in rows for line in lines)


def test_export_keeps_crlf_and_ends_every_line(tmp_path: Path) -> None:
    content = "sentence\tlabel\r\n" + "".join(f"s {i} \t{i % 2}\r\n" for i in range(9)) + "last\t1"
    (tmp_path / "train.tsv").write_bytes(content.encode())
    (train, dev) = export(SST2, files_config(tmp_path / "train.tsv", shots=4), 3, tmp_path / "out")
    written = (train.read_bytes() + dev.read_bytes()).decode()
    assert written.count("sentence\tlabel\r\n") == 2
    source = {line.rstrip("\r\n") for line in content.split("\n")}
    assert {line.rstrip("\r") for line in written.split("\n")} <= source | {""}


def test_export_overwrites_nothing(glue: Path, tmp_path: Path) -> None:
    before = {p.name: p.read_bytes() for p in glue.iterdir()}
    for out in (glue, glue / "train.tsv"):
        with pytest.raises(UserError, match="it exists and is not an empty folder"):
            export(SST2, files_config(glue, shots=5), 42, out)
    assert {p.name: p.read_bytes() for p in glue.iterdir()} == before


def test_a_failed_export_leaves_nothing(glue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.write_bytes

    def fails(self: Path, content: bytes) -> int:
        if "dev" in self.name:
            raise OSError(28, "No space left on device")
        return real(self, content)

    monkeypatch.setattr(Path, "write_bytes", fails)
    with pytest.raises(RunFailed, match=r"--export .*out: cannot be written: No space left on device"):
        export(SST2, files_config(glue, shots=5), 42, tmp_path / "out")
    assert not (tmp_path / "out").exists()
