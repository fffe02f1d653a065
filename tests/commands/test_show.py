"""`mezo show`: one run on the terminal, or as JSON."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from mezo_cli.report.document import document
from mezo_cli.report.entries import read_entry
from mezo_cli.report.terminal import show_document
from mezo_cli.runs import Run
from tests.command_line import error_line, mezo
from tests.report.run_directories import make_curves


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_curves(tmp_path_factory.mktemp("show") / "run", {"seed": 13}, text="dull \x1b[31mfilm [bold]x").path


def test_the_story_of_a_run(run: Path) -> None:
    said = mezo("show", run)
    assert said.code == 0, said
    lines = [" ".join(line.split()) for line in said.out.splitlines()]
    assert lines[0] == f"{run} finished"
    assert "dev before training 50.0% 0.5000 0" in lines
    assert "test at best 75.0% 0.5000 40" in lines
    assert "dev accuracy 50.0 57.5 65.0 72.5 80.0" in lines
    assert "3 of the 30 correct test rows" in lines
    assert "seed 13 (default 42)" in lines
    assert f"evaluate: mezo eval {run} --split test" in lines
    assert "20.0% zero" in said.out
    assert "\\x1b[31mfilm [bold]x" in said.out
    assert "\x1b" not in said.out


def test_lines_fit_eighty_columns(run: Path) -> None:
    """But for the commands, which are there to be copied."""
    file = io.StringIO()
    show_document(document(read_entry(Run.open(run))), Console(file=file, width=80))
    for said in (file.getvalue(), mezo("show", run).out):  # a pipe has room for more
        shown = said.split("run again:")[0]
        assert "20.0% zero" in shown
        assert max(map(len, shown.splitlines()[1:])) <= 80  # the first one is the directory


def test_a_run_that_is_not_there(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no such run directory (did you mean 'run'?)" in error_line(mezo("show", run.parent / "rum"))
    assert "holds no run" in error_line(mezo("show", tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "sweep" / "3").mkdir(parents=True)
    assert "(did you mean 'outputs/sweep/3'?)" in error_line(mezo("show", "sweep/3"))  # as `mezo runs` lists it
    (tmp_path / "outputs" / "sweep" / "sweep.json").write_text("{}")
    for command in ("show", "eval"):
        assert "outputs/sweep is a sweep: name one of its runs" in error_line(mezo(command, "outputs/sweep"))
    (tmp_path / "config.yaml").write_text("steps: 1\n")
    (tmp_path / "run.json").write_text("{")
    assert "run.json is damaged" in error_line(mezo("show", tmp_path, "--json"))
