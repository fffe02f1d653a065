"""Control characters and rich's markup in data, labels, paths, run files and errors: shown, never acted on."""

import hashlib
import json
import unicodedata
from pathlib import Path

import pytest
import yaml

from mezo_cli.config.choices import CONF
from mezo_cli.runs.jsonl import add_checksum
from tests.command_line import Result, mezo, process, small

ESC = "\x1b]0;title\x07\x1b[31m\x9b31m\u202e\x7f"  # OSC, CSI, C1 CSI, bidi override, DEL
SHOWN = r"\x1b]0;title\x07\x1b[31m\x9b31m\u202e\x7f"

pytestmark = pytest.mark.usefixtures("eager_kernels", "in_tmp_path")


def check(text: str) -> None:
    """Check that nothing in a text is for a terminal to act on."""
    raw = {c for c in text if unicodedata.category(c) in ("Cc", "Cs") or c in "\u202a\u202b\u202c\u202d\u202e"}
    assert raw <= {"\n"}, ascii(text)


def shown(result: Result) -> str:
    """Check what a command wrote, and return it without its line ends."""
    check(result.out + result.err)
    return " ".join((result.out + result.err).split())


def task_with(folder: Path, labels: list[str], name: str = "mine") -> list[str]:
    """Write a task with these two labels, and return the words that choose it."""
    values = yaml.safe_load((CONF / "task" / "sst2.yaml").read_text())
    words = values["label_words"] if isinstance(values["label_words"], list) else list(values["label_words"].values())
    values |= {"name": name, "labels": labels, "label_words": words}
    path = folder / "conf" / "task" / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(yaml.safe_dump(values))
    return ["--config-dir", str(folder / "conf"), "task=mine"]


def rows_with(folder: Path, labels: list[str], text: str = "a fine film") -> Path:
    folder.mkdir()
    lines = [json.dumps({"sentence": f"{text} {i}", "label": labels[i % 2]}) + "\n" for i in range(12)]
    for split in ("train", "dev", "test"):
        (folder / f"{split}.jsonl").write_text("".join(lines))
    return folder


def test_text_labels_and_names_of_a_run_are_escaped_everywhere(roberta: Path, tmp_path: Path) -> None:
    labels = [f"neg{ESC}", "pos"]
    data, task = rows_with(tmp_path / "d", labels, f"film{ESC}"), task_with(tmp_path, labels, f"mine{ESC}")
    run = tmp_path / f"run{ESC}"
    trained = shown(
        mezo("train", *task, *small(roberta, data, run, f"hydra.run.dir='{run}'", "steps=2", "eval_every=2"))
    )
    assert f"predicted neg{SHOWN} " in trained
    log = (run / "train.log").read_text(encoding="utf-8")
    check(log)
    assert f"predicted neg{SHOWN} " in log
    data_words = [f"model.path={roberta}", "data=files", f"data.dir={data}"]
    assert f"film{SHOWN} 0" in shown(mezo("data", *task, *data_words))
    evaluated = shown(mezo("eval", run))
    assert f"run{SHOWN} best, test: 12 rows" in evaluated
    assert f"predicted neg{SHOWN}" in evaluated
    assert f"mine{SHOWN}" in shown(mezo("runs", tmp_path))
    assert f"mine{SHOWN}" in shown(mezo("compare", tmp_path))
    assert f"run{SHOWN} is finished" in shown(mezo("resume", run))


def test_errors_of_run_files_are_escaped(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("")
    empty = hashlib.sha256(b"").hexdigest()
    odd = {"format": 1, "status": f"failed{ESC}", "error": ESC, "config_sha256": empty}
    (run / "run.json").write_text(json.dumps(add_checksum(odd)))
    assert f"not 'failed{SHOWN}'" in shown(mezo("runs", tmp_path))
    odd = {"format": 1, "status": "failed", "error": f"it{ESC}", "start": ESC}
    (run / "run.json").write_text(json.dumps(add_checksum(odd)))
    for command in ("runs", "compare"):
        shown(mezo(command, tmp_path))
    (run / "config.yaml").write_text(f"steps: '{ESC}")
    shown(mezo("runs", tmp_path))


@pytest.mark.parametrize(
    "words",
    [
        ["train", f"task={ESC}"],
        ["train", f"task.template={ESC}{{nosuch}}"],
        ["train", "--cfg", "job", f"task.template='{ESC[:4]}{{sentence}} {{mask}}'"],
        ["data", "data=files", f"data.dir=no{ESC}"],
        ["replay", f"no{ESC}", "--step", "1", "--out", ESC],
        ["compare", "--out", f"x.{ESC}"],
        [ESC],
        ["runs", f"--{ESC}"],
    ],
)
def test_what_is_typed_is_escaped(words: list[str]) -> None:
    assert r"\x1b" in shown(mezo(*words)).replace(r"\e", r"\x1b")  # YAML's own escape


def test_a_path_that_is_not_utf8_can_be_shown(tmp_path: Path) -> None:
    result = process("runs", b"no\xff".decode("utf-8", "surrogateescape"), cwd=tmp_path)
    assert (result.code, result.err) == (2, "error: no\\udcff: no such folder\n")
