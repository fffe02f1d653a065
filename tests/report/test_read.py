"""Reading runs: where they are found, what damage does, and the statistics of one run."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from mezo_cli.report.read import read_runs, statistics_of
from mezo_cli.runs import Run
from tests.report.run_directories import make_run

FIXTURES = Path(__file__).parents[1] / "fixtures" / "runs"
OLD_RUNS = [FIXTURES / name for name in ("mezo", "momentum", "adam_window", "nspsa_linear")]


def test_each_run_is_found_once_also_inside_a_sweep(tmp_path: Path) -> None:
    make_run(tmp_path / "multirun" / "2026-01-01" / "0", {"seed": 1})
    make_run(tmp_path / "multirun" / "2026-01-01" / "1", {"seed": 2})
    entries, _ = read_runs([tmp_path, tmp_path / "multirun", tmp_path / "multirun" / "2026-01-01" / "1"])
    assert sorted(entry.config.seed for entry in entries) == [1, 2]


def damage(run: Run, name: str) -> None:
    file = run.path / name
    file.write_bytes(file.read_bytes().replace(b"0.5", b"0.6").replace(b"sst2", b"sst5").replace(b"finished", b"fin"))


@pytest.mark.parametrize("name", ["config.yaml", "run.json", "summary.json"])
def test_a_damaged_run_is_one_warning(name: str, tmp_path: Path) -> None:
    damage(make_run(tmp_path / "a"), name)
    make_run(tmp_path / "b", {"seed": 1})
    entries, (warning,) = read_runs([tmp_path])
    assert [entry.config.seed for entry in entries] == [1]
    assert "is left out: " in warning
    assert "damaged" in warning
    assert "\n" not in warning


@pytest.mark.parametrize("name", ["config.yaml", "summary.json"])
def test_a_missing_file_is_one_warning(name: str, tmp_path: Path) -> None:
    (make_run(tmp_path / "a").path / name).unlink()
    entries, (warning,) = read_runs([tmp_path])
    assert not entries
    assert str(tmp_path / "a") in warning


def test_a_run_json_of_another_program_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "run.json").write_text('{"status": "finished"}')
    entries, (warning,) = read_runs([tmp_path])
    assert not entries
    assert "theirs is left out: " in warning


def test_a_summary_with_wrong_fields_is_one_warning(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    run.write_summary({**run.read_summary(), "test": {"accuracy": "high"}})
    entries, (warning,) = read_runs([tmp_path])
    assert not entries
    assert "summary.json is damaged: test lacks accuracy" in warning


@pytest.mark.parametrize(
    ("settings", "shots", "seed"),
    [
        ({"seed": 7}, None, 7),
        ({"seed": 7, "data.seed": 13, "data.shots": 16}, 16, 13),
        ({"data.name": "files", "data.dir": "/k/SST-2/16-87"}, 16, 87),
        ({"data.name": "files", "data.dir": "/k/SST-2/512-13", "data.shots": 16, "data.seed": 21}, 16, 21),
        ({"data.name": "files", "data.dir": "/k/SST-2"}, None, 42),
    ],
)
def test_shots_and_data_seed(settings: dict[str, Any], shots: int | None, seed: int, tmp_path: Path) -> None:
    make_run(tmp_path / "a", settings)
    (entry,) = read_runs([tmp_path])[0]
    assert (entry.shots, entry.data_seed) == (shots, seed)


# --- statistics ---


def test_all_steps_count_not_only_the_logged_ones(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", grads=[0.0, 1.0, 0.0, 0.0])
    run.truncate_metrics(2)
    (entry,), _ = read_runs([tmp_path])
    seen = statistics_of(entry, pytest.fail)
    assert seen is not None
    assert tuple(seen.projected_grad.values()) == (0.75, 0.25, 0.0, 1.0)


@pytest.mark.parametrize("ended", ["finished", "interrupted"])
def test_samples_that_were_not_drawn_do_not_count(ended: str, tmp_path: Path) -> None:
    """n-SPSA with a linear schedule draws 1, 2, 3 and 4 samples; the file has four numbers per step."""
    settings = {"optimizer.samples": 4, "optimizer.sample_schedule": "linear", "steps": 4}
    grads = [[1.0], [-2.0, 3.0], [0.0, 1.0, 1.0], [1.0, 1.0, -1.0, 1.0]]
    make_run(tmp_path / "a", settings, grads=grads, ended=ended)
    (entry,), _ = read_runs([tmp_path])
    found = statistics_of(entry, pytest.fail)
    assert found is not None
    assert found.projected_grad == {"zero_fraction": 0.1, "mean_abs": 1.2, "min_abs": 0.0, "max_abs": 3.0}


@pytest.mark.parametrize("path", OLD_RUNS, ids=lambda path: path.name)
def test_projected_gradients_are_those_of_the_summary(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "run")
    (entry,), _ = read_runs([tmp_path])
    found = statistics_of(entry, pytest.fail)
    assert found is not None
    assert found.projected_grad == entry.summary["projected_grad"]
