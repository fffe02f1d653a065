"""What is told about one run: held against a run directory whose numbers are known."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mezo_cli.errors import UserError
from mezo_cli.report.details import NO_PREDICTIONS, OPEN_END, RunDetails, read_details
from mezo_cli.report.read import read_run
from tests.report.run_directories import make_curves, make_run

OLD = Path(__file__).parents[1] / "fixtures" / "runs"


def details(path: Path) -> RunDetails:
    return read_details(read_run(path))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_curves(tmp_path_factory.mktemp("details") / "run", {"seed": 13}).path


def test_the_result_against_the_start(finished: Path) -> None:
    run = details(finished)
    assert [(one.name, one.score, one.step) for one in run.results()] == [
        ("dev before training", 0.5, 0),
        ("dev best", 0.8, 40),
        ("test at best", 0.75, 40),
    ]
    assert run.gain() == pytest.approx(30.0)
    assert run.forwards(40) == 80
    assert run.prompt == "<s>a film of no great length. It was<mask>.</s>"
    assert run.label_words() == [("negative", "terrible"), ("positive", "great")]
    assert "MeZO trained all 1,000 parameters of roberta-large on sst2 (32 training rows" in run.sentence()
    assert "for 40 steps of 32 rows:" in run.sentence()  # batch_size=64, of which there are 32


def test_how_it_was_started(finished: Path, tmp_path: Path) -> None:
    assert dict(details(finished).facts())["command line"] == f"mezo train steps=40 data.dir={'a/long/path' * 9}"
    called = make_run(tmp_path / "run", {"steps": 4})
    called.update(argv=["ipython", "finetune", "task=sst2", "steps=4"])
    assert dict(details(called.path).facts())["Python call"] == "finetune(task=sst2, steps=4)"


def test_the_curves(finished: Path) -> None:
    run = details(finished)
    assert run.loss is not None
    assert run.gradients is not None
    assert run.speed is not None
    np.testing.assert_allclose(run.loss.values, 1 - np.arange(1, 41) / 80)
    assert (run.gradients.zeros, run.gradients.total) == (8, 40)
    assert run.gradient_stats["zero_fraction"] == 0.2
    np.testing.assert_allclose(run.speed.values, 4.0)


def test_the_test_rows_are_spread_from_sure_to_unsure(finished: Path) -> None:
    found = details(finished).examples
    assert (len(found.right), len(found.wrong)) == (10, 10)
    assert (found.right_count, found.wrong_count) == (30, 10)
    assert [one.row for one in found.right][:: len(found.right) - 1] == [39, 1]
    assert all(one.predicted != one.label for one in found.wrong)
    sure = [one.confidence for one in found.right]
    assert sure == sorted(sure, reverse=True)
    assert found.majority == 0.5
    assert found.counts["negative", "positive"] == 10


def test_a_running_run(tmp_path: Path) -> None:
    held = make_curves(tmp_path / "run", ended="running")
    run = details(held.path)
    assert run.entry.status == "running"
    assert run.examples.message == OPEN_END
    assert [one.name for one in run.results()] == ["dev before training", "dev best so far"]
    assert "MeZO trains all" in run.sentence()


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    held = make_run(tmp_path / "run", {"steps": 4}, ended="running")
    (held.path / "metrics.jsonl").unlink()
    run = details(held.path)
    assert run.entry.status == "running"
    assert (run.dev, run.loss, run.speed, run.gradients, run.results()) == (None, None, None, None, [])


@pytest.mark.parametrize("name", ["mezo", "nspsa_linear", "adam_window-interrupted"])
def test_runs_of_earlier_versions(name: str) -> None:
    run = details(OLD / name)
    finished = run.entry.finished
    assert run.examples.message == (NO_PREDICTIONS if finished else OPEN_END)
    assert run.prompt is None
    assert run.gradients is not None
    assert run.gradients.total == {"mezo": 12, "nspsa_linear": 24, "adam_window-interrupted": 7}[name]


def test_records_that_a_power_cut_lost_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"steps": 4}, grads=[1.0, 2.0], ended="interrupted")
    content = run.trajectory.read_bytes()
    run.trajectory.write_bytes(content[:-16] + bytes(16))
    found = details(run.path)
    assert found.gradients is not None
    assert found.gradients.total == 1
    assert "its last record" in found.damage[0]


def test_damage_is_named(finished: Path, tmp_path: Path) -> None:
    broken = tmp_path / "run"
    for name, change in (
        ("predictions.jsonl", lambda text: text.replace('"row": 3,', '"row": 4,')),
        ("metrics.jsonl", lambda text: text.replace('"loss": 0.5', '"loss": 0.4', 1)),
        ("run.json", lambda text: json.dumps({**json.loads(text), "trainable": [1]})),
    ):
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(finished, broken)
        (broken / name).write_text(change((broken / name).read_text()))
        with pytest.raises(UserError, match="damaged"):
            details(broken)
