"""A finished run whose trajectory.bin or summary.json was deleted, emptied or cut: every command names the file."""

from pathlib import Path

import pytest

from tests.command_line import error_line, mezo
from tests.report.run_directories import make_run

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
    for name in ("mezo", "momentum"):
        make_run(tmp_path / "runs" / name, {"model.path": "demo", "steps": 12}, grads=[1.0] * 12)
    return tmp_path / "runs" / "mezo"


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ["trajectory.bin", "summary.json"])
@pytest.mark.parametrize("kept", [None, 0, -2, -BYTES_PER_STEP])
def test_every_command_names_the_file(run: Path, name: str, kept: int | None) -> None:
    data = (run / name).read_bytes()
    (run / name).unlink()
    if kept is not None:
        (run / name).write_bytes(data[:kept])
    before = {path: path.lstat().st_mtime_ns for path in run.rglob("*")}
    out = run.parent.parent / "out"
    for command, words in COMMANDS.items():
        line = error_line(mezo(*({"RUN": run, "OUT": out}.get(word, word) for word in words)))
        assert str(run / name) in line, command
    listed = mezo("runs", run.parent)
    assert listed.code == 0
    assert str(run / name) in listed.out
    assert "momentum" in listed.out
    page = run.parent.parent / "page.html"
    compare = ["compare", run.parent]
    for words in (compare, ["report", run.parent, "--out", page]):
        said = mezo(*words)
        assert said.code == 0
        assert f"{run} is left out: {run / name}" in said.err
    assert {path: path.lstat().st_mtime_ns for path in run.rglob("*")} == before
    assert not out.exists()
