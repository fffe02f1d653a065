"""What `mezo eval` restores: damage is reported, and no other step passes for the best."""

import shutil
from pathlib import Path

import pytest

from mezo_cli.runs import Run
from tests import tiny
from tests.command_line import error_line, finished_runs, mezo

pytestmark = pytest.mark.usefixtures("eager_kernels")

MODES = {"full": [], "trajectory": ["checkpoint=trajectory"]}


@pytest.fixture(scope="module")
def runs(roberta: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One finished run per mode."""
    home = tmp_path_factory.mktemp("runs")
    return finished_runs(home, roberta, tiny.movie_folder(home / "movies"), MODES)


def test_a_damaged_checkpoint_says_how_to_go_on(runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "full", run)
    wanted = mezo("eval", run).out
    path = run / "checkpoints" / "best" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    assert "remove the checkpoint's folder, and its step is replayed" in error_line(mezo("eval", run))
    shutil.rmtree(path.parent)
    assert mezo("eval", run).out == wanted


def test_a_plain_folder_with_task_and_data(runs: Path, roberta: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a model, plain"
    shutil.copytree(runs / "full" / "checkpoints" / "last", folder)
    words = ["task=sst2", "data=files", f"data.dir={runs / 'movies'}"]
    said = mezo("eval", folder, *words)
    assert said.code == 0, said
    assert said.out.splitlines()[1:] == mezo("eval", runs / "full", "--checkpoint", "last").out.splitlines()[1:]
    start = mezo("eval", roberta, *words, "--split", "dev")
    line = Run(runs / "full").evaluations("dev")[0]
    assert f"{line['accuracy']:.4f}  {line['loss']:.4f}" in start.out


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["{full}", "--split", "tset"], "(did you mean 'test'?)"),
        (["{full}", "--checkpoint", "bets"], "allowed are best, last or a step number"),
        (["{full}", "--checkpoint", "99"], "holds steps 0 to 6"),
        (["{full}", "--checkpoint", "-1"], "allowed are best, last or a step number"),
        (["{full}/checkpoints/best", "--checkpoint", "last"], "is the checkpoint 'best' of"),
        (["{model}", "task=sst2", "data=demo", "--checkpoint", "last"], "a plain model folder"),
        (["{full}", "task=sst2"], "a run has its own"),
        (["{full}/checkpoints"], "is no run: give task=... and data=..."),
        (["{full}/checkpoints/nosuch"], "no such folder"),
        (["{movies}"], "is no run: give task=... and data=..."),
        (["{movies}", "task=sst2", "data=demo"], "no config.json"),
        (["{movies}", "task=sst2,rte"], "add -m"),
    ],
)
def test_what_eval_refuses(words: list[str], part: str, runs: Path, roberta: Path) -> None:
    places = {"full": runs / "full", "movies": runs / "movies", "model": roberta}
    assert part in error_line(mezo("eval", *(word.format(**places) for word in words)))


def test_changed_data_are_reported(runs: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(runs, home)
    run = home / "full"
    text = (run / "config.yaml").read_text().replace(str(runs), str(home))
    (run / "config.yaml").write_text(text)
    assert "was edited" in error_line(mezo("eval", run))
    rows = (runs / "movies" / "test.jsonl").read_text()
    (runs / "movies" / "test.jsonl").write_text(rows.replace("film", "movie"))
    said = mezo("eval", runs / "full")
    (runs / "movies" / "test.jsonl").write_text(rows)
    assert said.code == 0
    assert "warning: the data have changed since the run" in said.out
