"""`mezo predict` and `load(run).predict`: bitwise as in an evaluation, every kind of input and output, mistakes."""

import csv
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mezo_cli import LoadedRun, load
from mezo_cli.objectives.prediction import CompletedPrompt
from mezo_cli.runs import Run
from tests.command_line import Result, error_line, mezo, ok

TEXTS = ["a fine film", "dull", "not bad at all , really not bad"]

pytestmark = pytest.mark.usefixtures("eager_kernels")


@pytest.fixture(scope="module")
def loaded(run: Path) -> LoadedRun:
    return load(run)


def from_stdin(monkeypatch: pytest.MonkeyPatch, stream: Any, *words: object) -> Result:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stream))
    return mezo(*words)


def test_the_rows_of_an_evaluation_in_their_order_get_its_bits(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    result = mezo("predict", run, "--file", run.parent / "movies" / "test.jsonl", "--out", out)
    assert result == Result(0, f"wrote 12 rows to {out}\n", "")
    stored = Run(run).predictions()
    assert stored is not None
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert found == [{key: row[key] for key in row if key != "label"} | {"cut": False} for row in stored]


def test_all_inputs_agree(run: Path, loaded: LoadedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "rows.csv").write_text("id,sentence\n" + "".join(f'{i},"{text}"\n' for i, text in enumerate(TEXTS)))
    (tmp_path / "rows.tsv").write_text("sentence\tid\n" + "".join(f"{text}\t1\n" for text in TEXTS))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"sentence": text}) + "\n" for text in TEXTS))
    pq.write_table(pa.table({"sentence": TEXTS}), tmp_path / "rows.parquet")
    expected = [(one.predicted, one.probabilities) for one in loaded.predict(TEXTS)]

    def rows_of(result: Result) -> list[Any]:
        assert (result.code, result.err) == (0, "")
        document = json.loads(result.out)
        assert (document["run"], document["checkpoint"], document["cut"]) == (str(run), "best", 0)
        assert [row["columns"]["sentence"] for row in document["rows"]] == TEXTS
        return [(row["predicted"], row["probabilities"]) for row in document["rows"]]

    for path in sorted(tmp_path.glob("rows.*")):
        assert rows_of(mezo("predict", run, "--json", "--file", path)) == expected
    words = [word for text in TEXTS for word in ("--text", text)]
    assert rows_of(mezo("predict", run / "checkpoints" / "best", "--json", *words)) == expected
    lines = io.BytesIO("\ufeff".encode() + "\r\n\n".join(TEXTS).encode())
    assert rows_of(from_stdin(monkeypatch, lines, "predict", run, "--json")) == expected


def test_standard_input_is_answered_line_by_line(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Lines(io.RawIOBase):
        """Gives one line at a time, and notes what has been printed when it is asked for the next."""

        def __init__(self, printed: Callable[[], str]) -> None:
            self._left, self._printed = list(TEXTS), printed

        def readable(self) -> bool:
            return True

        def readline(self, size: int | None = -1) -> bytes:
            seen.append(self._printed())
            return f"{self._left.pop(0)}\n".encode() if self._left else b""

    class Stdin:
        buffer = Lines(lambda: sys.stdout.getvalue())  # type: ignore[attr-defined]  # a StringIO here

        def isatty(self) -> bool:
            return False

    monkeypatch.setattr(sys, "stdin", Stdin())
    result = mezo("predict", run)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines(keepends=True)
    assert seen == ["".join(lines[:n]) for n in range(4)]
    for line, text in zip(lines, TEXTS, strict=True):
        label, *words = line.split("  ")
        assert label in ("negative", "positive")
        assert words[-1] == f"{text}\n"


def test_a_long_text_is_cut_and_this_is_counted_and_said(run: Path, loaded: LoadedRun) -> None:
    long = "good " * 300
    result = ok("predict", run, "--text", "short", "--text", long, "--json")
    assert result.err.startswith("note: 1 of 2 rows was longer than ")
    document = json.loads(result.out)
    assert [row["cut"] for row in document["rows"]] == [False, True]
    assert document["cut"] == 1
    (whole,) = loaded.predict([long])
    (same,) = loaded.predict(["good " * 299])
    assert whole.probabilities == same.probabilities  # what is cut off is not seen


def test_csv_output(run: Path, loaded: LoadedRun, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    formula = "=cmd|' /C calc'!A0"  # which a spreadsheet would run
    assert mezo("predict", run, "--text", 'he said "no", twice', "--text", formula, "--out", out).code == 0
    one, two = loaded.predict(['he said "no", twice', formula])
    scores, others = (",".join(repr(value) for value in row.probabilities.values()) for row in (one, two))
    assert out.read_text() == (
        "sentence,predicted,probability_negative,probability_positive\n"
        f'"he said ""no"", twice",{one.predicted},{scores}\n'
        f"'{formula},{two.predicted},{others}\n"
    )


def test_quiet_prints_the_labels_only(run: Path, loaded: LoadedRun, tmp_path: Path) -> None:
    words = [word for text in TEXTS for word in ("--text", text)]
    labels = "".join(f"{one.predicted}\n" for one in loaded.predict(TEXTS))
    assert mezo("predict", run, "-q", *words) == Result(0, labels, "")
    assert mezo("predict", run, "-q", *words, "--out", tmp_path / "out.csv") == Result(0, "", "")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--file", "header.csv"], ["header.csv", "no rows"]),
        (["--file", "other.csv"], ["other.csv", "no column 'sentence'"]),
        (["--file", "number.jsonl", "--out", "out.csv"], ["number.jsonl:2", "not a text"]),
        (["--file", "heade.csv"], ["did you mean 'header.csv'?"]),
        (["--text", "a", "--file", "header.csv"], ["--text and --file"]),
        (["--text", ""], ["--text", "a text"]),
        (["--text", "a", "--out", "x.xls"], ["x.xls", ".jsonl, .csv"]),
        (["--text", "a", "--out", "no/x.csv"], ["no/x.csv"]),
        (["--text", "a", "--checkpoint", "bets"], ["--checkpoint bets"]),
        (["--text", "a", "--checkpoint", "7"], ["holds steps 0 to 6"]),
    ],
)
def test_mistakes(words: list[str], parts: list[str], run: Path, in_tmp_path: None, tmp_path: Path) -> None:
    (tmp_path / "header.csv").write_text("sentence\n")
    (tmp_path / "other.csv").write_text("sentense,id\nx,1\n")
    (tmp_path / "number.jsonl").write_text('{"sentence": "a"}\n{"sentence": 3}\n')
    before = sorted(tmp_path.iterdir())
    line = error_line(mezo("predict", run, *words))
    assert all(part in line for part in parts), line
    assert sorted(tmp_path.iterdir()) == before  # nothing half-written


def test_no_text_on_standard_input(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, said in ((b"\n \n", "standard input: no text"), (b"a\n\xff\n", "standard input:2: byte 0xff")):
        for more in ([], ["--json"]):
            result = from_stdin(monkeypatch, io.BytesIO(stream), "predict", run, *more)
            assert said in error_line(result)
            assert not more or result.out == ""


def test_completions_of_prompts(sums: list[object], tmp_path: Path) -> None:
    run, rows = tmp_path / "run", tmp_path / "rows.jsonl"
    words = ["steps=1", "batch_size=4", "eval_every=0", "objective.max_new_tokens=4", f"hydra.run.dir={run}"]
    ok("train", *sums, *words)
    prompt = "Add [3, 1]: 3 + 1?\nAnswer:"
    document = json.loads(mezo("predict", run, "--file", rows, "--json").out)
    assert [row["prompt"] for row in document["rows"]][3] == prompt
    assert document["rows"][3]["columns"] == json.loads(rows.read_text().splitlines()[3])
    said = [row["completion"] for row in document["rows"]]
    assert all(said)
    lines = mezo("predict", run, "--file", rows).out.splitlines()
    assert lines[3] == f"{prompt} -> {said[3]!r}".replace("\n", "\\n")
    quiet = mezo("predict", run, "--text", "numbers=1", "--text", "question=who?", "--quiet")
    assert (quiet.code, quiet.out.count("\n")) == (0, 1)
    assert mezo("predict", run, "--file", rows, "--out", tmp_path / "out.csv").code == 0
    with (tmp_path / "out.csv").open(newline="") as file:
        table = list(csv.reader(file))
    assert table[0] == ["numbers", "question", "prompt", "completion"]
    assert table[4] == ["[3, 1]", "3 + 1? ", prompt, said[3]]
    model = load(run)
    assert model.columns == ["numbers", "question"]
    [completed] = model.predict([{"numbers": [3, 1], "question": "3 + 1? "}])
    assert completed == CompletedPrompt(
        {"numbers": [3, 1], "question": "3 + 1? "}, prompt, said[3], [said[3]], cut=False
    )
    missing = mezo("predict", run, "--text", "numbers=1")
    assert "the last row lacks question" in error_line(missing)
