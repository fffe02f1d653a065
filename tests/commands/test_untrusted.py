"""Files and texts not to be trusted: damage is named, control characters are shown, credentials are nowhere."""

import hashlib
import json
import logging
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import yaml

from mezo_cli.config.choices import CONF
from mezo_cli.config.stored import read_config
from mezo_cli.errors import without_credentials
from mezo_cli.process.environment import logs_without_credentials
from mezo_cli.runs import Run
from mezo_cli.runs.jsonl import add_checksum, write_object
from mezo_cli.session.restore import find_step
from mezo_cli.sweep.plan import new_record
from tests.command_line import Result, error_line, mezo, ok, process, small
from tests.report.run_directories import make_run

pytestmark = pytest.mark.usefixtures("eager_kernels")

COMMANDS = {
    "show": ["show", "RUN"],
    "eval": ["eval", "RUN"],
    "eval a step": ["eval", "RUN", "--checkpoint", "2"],
    "resume": ["resume", "RUN"],
    "resume with more steps": ["resume", "RUN", "steps=14"],
    "predict": ["predict", "RUN", "--text", "a film"],
    "export": ["export", "RUN", "--out", "OUT"],
    "export --trajectory": ["export", "RUN", "--trajectory", "--out", "OUT"],
    "replay": ["replay", "RUN", "--step", "2", "--out", "OUT"],
    "prune": ["prune", "RUN"],
}
BYTES_PER_STEP = 16


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of 12 steps, beside a whole one."""
    for name, grad in {"mezo": 1.0, "momentum": 2.0}.items():
        make_run(tmp_path / "runs" / name, {"model.path": "demo", "steps": 12}, grads=[grad] * 12, dev=0.3 + grad / 5)
    return tmp_path / "runs" / "mezo"


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ["trajectory.bin", "summary.json", "metrics.jsonl"])
@pytest.mark.parametrize("kept", [None, 0, -2, -BYTES_PER_STEP, "a line less", "another's", "another's, shared"])
def test_every_command_names_the_file(run: Path, name: str, kept: int | str | None) -> None:
    data = (run / name).read_bytes()
    if str(kept).endswith("shared"):
        write_object(run / "run.json", {key: value for key, value in Run(run).info().items() if key != "argv"})
    (run / name).unlink()
    if isinstance(kept, int):
        (run / name).write_bytes(data[:kept])
    elif kept is not None:
        lines = data.splitlines(keepends=True)
        other = (run.parent / "momentum" / name).read_bytes()
        (run / name).write_bytes(other if kept.startswith("another") else b"".join(lines[:-1]))
    before = {path: path.lstat().st_mtime_ns for path in run.rglob("*")}
    out = run.parent.parent / "out"
    for command, words in COMMANDS.items():
        line = error_line(mezo(*({"RUN": run, "OUT": out}.get(word, word) for word in words)))
        assert str(run / name) in line, command
    listed = ok("runs", run.parent)
    assert str(run / name) in listed.out
    assert "momentum" in listed.out
    page = run.parent.parent / "page.html"
    compare = ["compare", run.parent]
    for words in (compare, ["report", run.parent, "--out", page]):
        said = ok(*words)
        assert f"{run} is left out: {run / name}" in said.err
    assert {path: path.lstat().st_mtime_ns for path in run.rglob("*")} == before
    assert not out.exists()


ODD: list[dict[str, Any]] = [{"race": [1]}, {"weights": "x"}, {"arithmetic": 5}, {"data_fingerprint": 5}, {"ends": [1]}]
ODD += [{"rows": {"test": "x"}}, {"stopped": {"by": "patience"}}, {"status": ["finished"]}, {"reward": "x"}]


@pytest.mark.parametrize("odd", [*ODD, {"trainable": {"count": 1, "share": None, "names": []}}])
def test_a_value_of_another_type_is_one_line(odd: dict[str, Any], run: Path) -> None:
    write_object(run / "run.json", {**Run(run).info(), **odd})
    for command, words in COMMANDS.items():
        line = error_line(mezo(*({"RUN": run, "OUT": run.parent / "out"}.get(word, word) for word in words)))
        assert f"{run / 'run.json'} is damaged: {next(iter(odd))}" in line, command
    said = mezo("report", run.parent, "--out", run.parent / "page.html")
    assert (said.code, f"{run} is left out: {run / 'run.json'} is damaged" in said.err) == (0, True)


@pytest.mark.parametrize("odd", [{"best": {}}, {"steps": "12"}, {"dev": {"intervals": {"accuracy": [1]}}}, {"test": 1}])
def test_so_it_is_of_the_summary(odd: dict[str, Any], run: Path) -> None:
    made = Run(run)
    made.write_summary({**made.read_summary(), **odd})
    assert f"{run / 'summary.json'} is damaged: {next(iter(odd))}" in error_line(mezo("show", run))


def test_the_picked_step_is_that_of_the_summary_also_in_a_run_of_an_earlier_version(run: Path) -> None:
    """Which did not record the ends of its files."""
    made, lines = Run(run), [(0, 0.9), (12, 0.4)]
    made.update(ends=None)
    (run / "metrics.jsonl").unlink()
    for step, score in lines:
        Run(run).log_metrics("eval", step, split="dev", loss=1.0, accuracy=score)
    config = read_config(run / "config.yaml")
    assert (find_step(config, made, "best"), find_step(config, made, "last")) == (12, 12)
    assert json.loads(mezo("show", run, "--json").out)["results"][1]["step"] == 12
    (run / "metrics.jsonl").unlink()
    assert "metrics.jsonl is damaged: it lacks the evaluation of step 12" in error_line(mezo("show", run))


def test_a_config_yaml_alone_is_named_as_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("steps: 3\n")
    for words in (["train", "experiment=demo", f"hydra.run.dir={tmp_path}/run"], ["resume", tmp_path / "run"]):
        assert "a config.yaml without run.json is no run, or the rest of one: remove it" in error_line(mezo(*words))


ESC = "\x1b]0;title\x07\x1b[31m\x9b31m\u202e\x7f"  # OSC, CSI, C1 CSI, bidi override, DEL
SHOWN = r"\x1b]0;title\x07\x1b[31m\x9b31m\u202e\x7f"


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


@pytest.mark.usefixtures("in_tmp_path")
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


URL = "http://user:SECRET@127.0.0.1:9"  # the discard port: nobody listens


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see (https://u:p@h:80/x) now", "see (https://h:80/x) now"),
        ("https://token@h", "https://h"),
        ("https://u:p@ss@h/x", "https://h/x"),
        ("https://u:p/q@h/x", "https://h/x"),
        ("redis://:p@h/0 https://u:p@h", "redis://h/0 https://h"),
        ("'https://h/x?X-Amz-Signature=abc&y=1&token=t'", "'https://h/x?X-Amz-Signature=...&y=1&token=...'"),
        ("https://h:80/path@v1 a@b.c git@h:x/y", "https://h:80/path@v1 a@b.c git@h:x/y"),
    ],
)
def test_what_is_cut(text: str, shown: str) -> None:
    assert without_credentials(text) == shown


def test_the_hubs_address_in_lines_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", URL)
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    line = error_line(mezo("train", "model.path=org/name", "data=demo", f"hydra.run.dir={run}"))
    assert "from http://127.0.0.1:9: " in line
    assert "SECRET" not in line
    assert not run.exists()
    env = mezo("env")
    assert "HF_ENDPOINT    http://127.0.0.1:9\n" in env.out
    assert "SECRET" not in env.out
    for words in ([f"model.path={URL}/x"], ["-m", "seed=1,2", f"task.hub.path={URL}/x"]):
        line = error_line(mezo("train", *words))
        assert "which the run would store; log in by hf auth login" in line
        assert "SECRET" not in line
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_in_run_json_and_sweep_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    argv = ["mezo", "train", f"logger.project={URL}"]
    monkeypatch.setattr(sys, "argv", argv)
    info = Run.create(tmp_path / "run", "", argv).info()
    for stored in (info["argv"], new_record({Path("0"): []}, Path(), []).argv):
        assert stored == [*argv[:2], "logger.project=http://127.0.0.1:9"]


def test_what_libraries_log(caplog: pytest.LogCaptureFixture) -> None:
    """huggingface_hub logs the address of each request that it repeats."""
    with logs_without_credentials():
        logging.getLogger("huggingface_hub").warning("HTTP Error %d requesting %s", 500, f"{URL}/x")
    assert caplog.messages[0] == "HTTP Error 500 requesting http://127.0.0.1:9/x"
