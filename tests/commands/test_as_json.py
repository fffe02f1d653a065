"""`--json` of train, verify and tune: one document on standard output, however the command ends."""

import json
from pathlib import Path
from typing import Any

import pytest

from mezo_cli.runs import Run
from tests.command_line import Train, error_line, mezo, small

pytestmark = pytest.mark.usefixtures("eager_kernels", "in_tmp_path")


@pytest.mark.parametrize(
    ("words", "code", "status"),
    [([], 0, "finished"), (["max_seconds=1e-9"], 130, "interrupted"), (["model.path=missing"], 2, None)],
)
def test_train_tells_its_end(words: list[str], code: int, status: str | None, train: Train, tmp_path: Path) -> None:
    said = train(tmp_path / "run", "steps=2", *words, "--json")
    assert said.code == code
    if status is None:  # a mistake, before there is a run
        assert said.out == ""
        return
    found = json.loads(said.out)
    assert (found["run"], found["status"]) == (str(tmp_path / "run"), status)
    assert found["summary"] == (Run(tmp_path / "run").read_summary() if status == "finished" else None)
    assert said.err.splitlines()[0] == "run"  # the directory, as with --quiet
    assert error_line(mezo("train", "--json", "--cfg", "job", *words)).startswith("error: --json describes")


def without_directory(model: Any, movies: Path) -> list[str]:
    words = small(model, movies, Path(), "steps=2", "eval_every=1")
    return [word for word in words if not word.startswith("hydra.run.dir")]


def test_a_sweep_tells_of_every_job(roberta: Path, movies: Path, tmp_path: Path) -> None:
    words = [*without_directory(roberta, movies), "optimizer.lr=1e-3,1e30", "hydra.sweep.dir=sweep", "--json"]
    said = mezo("train", "-m", *words)
    found = json.loads(said.out)
    jobs = found["jobs"]
    assert (said.code, found["sweep"]) == (1, str(tmp_path / "sweep"))
    assert [job["status"] for job in jobs] == ["finished", "failed"]
    assert "optimizer.lr=0.001" in jobs[0]["overrides"]
    assert jobs[0]["summary"]["steps"] == 2
    assert jobs[1]["error"] in said.err


def test_a_search_names_its_best_trial_and_verify_its_checks(roberta: Path, movies: Path, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    words = [*without_directory(roberta, movies), "hydra.sweep.dir=search", "--range", "optimizer.lr=1e-3:1e-1"]
    said = mezo("tune", *words, "metric=loss", "--trials", 2, "--json")
    found = json.loads(said.out)
    values = [trial["value"] for trial in found["trials"]]
    assert found["best"] == 1 + values.index(min(values))
    assert [set(trial["params"]) for trial in found["trials"]] == [{"optimizer.lr"}] * 2
    verified = json.loads(mezo("verify", found["trials"][0]["run"], "--json").out)
    assert verified["verified"]
    assert [check["check"] for check in verified["checks"]] == ["data", "weights", "dev", "test", "last"]
