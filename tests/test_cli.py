"""The command line: exit statuses, one-line errors, --cfg, and how little `mezo --help` loads."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import typer
import yaml

from mezo_cli import cli
from mezo_cli.config.explain import key_owners
from mezo_cli.errors import UserError
from tests.command_line import environment, error_line, mezo, ok
from tests.report.run_directories import make_run

pytestmark = pytest.mark.usefixtures("in_tmp_path", "composing_all")


def test_help_and_no_words_exit_0_and_name_the_commands() -> None:
    for words in (["--help"], ["-h"], []):
        said = ok(*words)
        assert all(name in said.out for name in ("train", "eval", "resume", "replay", "runs", "data", "env"))
    said = mezo("train", "--help").out
    keys = ["task", "objective", "model", "data", "optimizer", "peft", "steps", "batch_size", "eval_every", "seed"]
    assert all(f" {key}=" in said for key in keys)
    assert said.count(" mezo train ") == 5


@pytest.mark.parametrize("command", ["", *typer.main.get_command(cli.app).commands])  # type: ignore[attr-defined]
def test_the_help_of_every_command_fits_80_columns(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = ok(*command.split(), "--help")
    assert max(map(len, said.out.splitlines())) <= 80
    usage = next(line for line in said.out.splitlines() if "Usage: " in line)
    assert "[[" not in usage


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["trian"], "Did you mean 'train'?"),
        (["nosuch"], "Commands: train, eval"),
        (["--nosuch"], "No such option"),
        (["train", "--multirum"], "--multirun"),
        (["train", "--cfg"], "requires an argument"),
        (["train", "--cfg", "jb"], "allowed is job"),
        (["train", "--config-dir", "nowhere"], "no such folder"),
        (["eval"], "Missing argument 'RUN'"),
        (["replay", "x", "--step", "a", "--out", "b"], "--step"),
        (["train", "demo"], "(did you mean model=demo or data=demo or experiment=demo?)"),
        (["doctor", "--experiment=demo"], "Settings are given without dashes: experiment=VALUE"),
        (["train", "--lr", "1e-3"], "Settings are given without dashes: optimizer.lr=VALUE"),
        (["train", "--path"], "model.path=VALUE or task.hub.path=VALUE"),
        (["train", "--learning-rate", "1e-3"], "Settings are given without dashes: give optimizer.lr=..."),
        (["predict", "outputs/run", "a fine film"], "(a fine film): a text is given as --text TEXT"),
        (["runs"], "there is no folder outputs/ here"),
        (["train", f"model.path={'x' * 10_000}"], "x [...] x"),
        (["train", "task=demo-arithmetic"], "or use objective=generate, for which the task has a prompt"),
        (["eval", "nowhere"], "nowhere: no such folder"),
        (["resume", "nowhere"], "nowhere: no such run directory"),
    ],
)
def test_a_mistake_is_exit_2_and_one_line_and_leaves_nothing(words: list[str], part: str, tmp_path: Path) -> None:
    said = error_line(mezo(*words))
    assert part in said
    assert len(said) < 2100
    assert list(tmp_path.iterdir()) == []


def test_an_error_is_told_in_one_line() -> None:
    def fails(**_: object) -> None:
        raise UserError("one\n  two\nthree")

    assert error_line(mezo(run=fails)) == "error: one two three\n"


def test_a_closed_pipe_ends_quietly(tmp_path: Path) -> None:
    """The reader has gone before anything is printed: status 1, and no traceback."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "mezo_cli", "train", "--cfg", "job"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("command", "code", "out", "err"),
    [
        ("runs . >&-", 0, "", ""),
        ("runs caf\xe9 2>&-", 2, "", ""),
        ("runs . > /dev/full", 1, "", "error: standard output: cannot be written: No space left on device\n"),
        ("--help > /dev/full", 1, "", "error: standard output: cannot be written: No space left on device\n"),
        ("runs r\xe9sum\xe9 -q", 0, "r\\xe9sum\\xe9/r\n", ""),
    ],
)
def test_odd_standard_streams(command: str, code: int, out: str, err: str, tmp_path: Path) -> None:
    make_run(tmp_path / "r\xe9sum\xe9" / "r")
    locale = {"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "ascii"}
    words = ["sh", "-c", f"exec {sys.executable} -m mezo_cli {command}"]
    done = subprocess.run(words, cwd=tmp_path, env=environment(**locale), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, out, err)


def test_versions_are_printed() -> None:
    said = mezo("--version")
    assert (said.code, said.out) == (0, f"mezo {metadata.version('mezo-runner')}\n")
    said = ok("env")
    names = {line.split()[0] for line in said.out.splitlines()}
    assert {"python", "torch", "transformers", "datasets", "hydra-core", "platform", "cores", "cuda"} <= names


def test_cfg_job_prints_the_composed_config_and_runs_nothing(tmp_path: Path) -> None:
    said = ok("train", "task=rte", "--cfg", "job", "steps=5", "optimizer.lr=0.5")
    shown = yaml.safe_load(said.out)
    assert (shown["task"]["name"], shown["steps"], shown["optimizer"]["lr"]) == ("rte", 5, 0.5)
    assert set(shown) == {key.split(".")[0] for key in key_owners()}
    assert list(tmp_path.iterdir()) == []
