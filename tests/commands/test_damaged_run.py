"""A finished run whose files were deleted, emptied, cut or another run's: every command names the file."""

import json
from pathlib import Path
from typing import Any

import pytest

from mezo_cli.config.stored import read_config
from mezo_cli.runs import Run
from mezo_cli.runs.jsonl import write_object
from mezo_cli.session.restore import find_step
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
