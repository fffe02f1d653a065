"""Splits written as files: the rows of `load`, the lines of the source, and nothing overwritten or half-written."""

import json
from pathlib import Path

import pytest

from mezo_cli.data import export, load
from mezo_cli.errors import RunFailed, UserError
from tests.data.sample_data import HEADER, SST2, files_config, write_jsonl


def test_export_writes_short_and_empty_classes_with_a_warning(glue: Path, tmp_path: Path) -> None:
    heard: list[str] = []
    export(SST2, files_config(glue, shots=60), 42, tmp_path / "out", warn=heard.append)
    assert "train: fewer than 60 rows for class 'negative' 50, 'positive' 50" in heard
    assert (tmp_path / "out/dev.tsv").read_text() == HEADER + "\n"
    assert len((tmp_path / "out/train.tsv").read_text().splitlines()) == 101


def test_export_writes_what_load_gives(glue: Path, tmp_path: Path) -> None:
    for settings in ({}, {"shots": 5}, {"shots": 5, "eval_limit": 3}):
        config, out = files_config(glue, **settings), tmp_path / f"out{len(settings)}{len(str(settings))}"
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
