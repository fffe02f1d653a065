"""`mezo tune`: trials within the ranges, recorded as a sweep; a search that was interrupted ends in the same trials."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mezo_cli import runs
from mezo_cli.commands import tune
from mezo_cli.training import loop
from mezo_cli.training.verdict import best_evaluation
from tests.command_line import Result, error_line, mezo, small
from tests.report.run_directories import make_config

optuna = pytest.importorskip("optuna")


pytestmark = pytest.mark.usefixtures("eager_kernels", "in_tmp_path")


def search(model: Any, movies: Path, folder: Path, *more: str) -> list[str]:
    words = [word for word in small(model, movies, folder, "steps=2") if not word.startswith("hydra.run.dir")]
    return ["tune", *words, f"hydra.sweep.dir={folder}", *more]


def jobs(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "sweep.json").read_text())["jobs"]


def trials(folder: Path) -> list[Any]:
    backend = optuna.storages.journal.JournalFileBackend(str(folder / "study.journal"))
    return optuna.load_study(study_name="mezo", storage=optuna.storages.JournalStorage(backend)).trials


def statuses(folder: Path) -> list[str]:
    return [run.status() for run in runs.find_runs(folder)]


@pytest.fixture(scope="module")
def searched(roberta: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A search of three trials, and what it printed."""
    from tests import tiny

    folder = tmp_path_factory.mktemp("searched")
    movies = tiny.movie_folder(folder / "movies")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEZO_EAGER", "1")
        ranges = ("--range", "optimizer.lr=1e-3:1e-1", "--range", "optimizer.samples=1:3")
        said = mezo(*search(roberta, movies, folder / "search", *ranges, "--trials", "3", "--goal", "loss"))
    return folder, said


def test_each_trial_is_a_job_of_a_sweep(searched: tuple[Path, Result]) -> None:
    folder, said = searched[0] / "search", searched[1]
    assert (said.code, said.err) == (0, ""), said
    done = trials(folder)
    assert len(done) == len(jobs(folder)) == 3
    for trial, job in zip(done, jobs(folder), strict=True):
        assert 1e-3 <= trial.params["optimizer.lr"] <= 1e-1
        assert trial.params["optimizer.samples"] in (1, 2, 3)
        lines = [f"{key}={value!r}" for key, value in trial.params.items()]
        assert job["overrides"][-2:] == lines
        run = runs.Run(folder / job["directory"])
        found = {one["step"]: one["loss"] for one in run.evaluations("dev") if one["step"]}
        assert trial.value == min(found.values())
        assert trial.intermediate_values == found
        assert "test_before" not in run.read_summary()
        assert f"lr: {trial.params['optimizer.lr']!r}" in (run.path / "config.yaml").read_text()
    best = min(done, key=lambda trial: trial.value)
    assert f"best: trial {best.number + 1}  optimizer.lr=" in said.out
    assert "3 of 3 trials finished" in said.out
    assert "MeZO" in said.out


def test_other_commands_read_it(searched: tuple[Path, Result]) -> None:
    folder = searched[0] / "search"
    assert mezo("runs", folder, "-q").out.count("\n") == 3
    assert "MeZO" in mezo("compare", folder).out
    again = mezo("resume", folder)
    assert again.code == 0, again
    assert "trial 1 of 3" not in again.out
    assert "best: trial" in again.out


def test_more_trials_go_on_and_another_search_is_refused(searched: tuple[Path, Result], roberta: Path) -> None:
    folder = searched[0] / "more"
    shutil.copytree(searched[0] / "search", folder)
    ranges = ("--range", "optimizer.lr=1e-3:1e-1", "--range", "optimizer.samples=1:3", "--goal", "loss")
    words = search(roberta, searched[0] / "movies", folder)
    for other in (ranges[:2], (*ranges[:-1], "score"), (*ranges, "seed=3")):
        assert "with other settings or ranges" in error_line(mezo(*words, *other))
    said = mezo(*words, *ranges, "--trials", "4", "-q")
    assert (said.code, said.err) == (0, ""), said
    _, best = said.out.splitlines()
    assert best.startswith("best: trial ")
    assert [job["number"] for job in jobs(folder)] == [0, 1, 2, 3]
    assert "a search of `mezo tune`" in error_line(mezo("train", "-m", *words[1:]))
    assert "does not repeat a failed trial" in error_line(mezo("resume", folder, "--retry-failed"))


def test_an_interrupted_search_ends_in_the_same_trials(
    searched: tuple[Path, Result], roberta: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, count = loop.train, 0

    def interrupted(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        return train(*args)

    monkeypatch.setattr(loop, "train", interrupted)
    ranges = ("--range", "optimizer.lr=1e-3:1e-1", "--range", "optimizer.samples=1:3")
    words = search(roberta, searched[0] / "movies", tmp_path / "cut", *ranges, "--trials", "3", "--goal", "loss")
    said = mezo(*words)
    assert (said.code, said.err) == (130, "error: interrupted\n")
    assert said.out.endswith("continue with: mezo resume cut\n")
    assert statuses(tmp_path / "cut") == ["finished", "interrupted"]
    said = mezo("resume", "cut")
    assert (said.code, said.err) == (0, ""), said
    assert jobs(tmp_path / "cut") == jobs(searched[0] / "search")
    assert [t.value for t in trials(tmp_path / "cut")] == [t.value for t in trials(searched[0] / "search")]


def test_a_trial_that_was_asked_for_only_is_completed(
    searched: tuple[Path, Result], roberta: Path, tmp_path: Path
) -> None:
    """Killed between the values of a trial: the first is kept."""
    folder = tmp_path / "asked"
    folder.mkdir()
    lines = (searched[0] / "search" / "study.journal").read_text().splitlines(keepends=True)
    (folder / "study.journal").write_text("".join(lines[:3]))  # the study, the first trial, its first value
    record = json.loads((searched[0] / "search" / "sweep.json").read_text())
    (folder / "sweep.json").write_text(json.dumps({**record, "jobs": [], "tune": {**record["tune"], "trials": 1}}))
    assert mezo("resume", folder).code == 0
    (job,), before = jobs(folder), jobs(searched[0] / "search")[0]
    assert job["overrides"][:-1] == before["overrides"][:-1]
    assert job["overrides"][-1] in {f"optimizer.samples={n}" for n in (1, 2, 3)}


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ([(0.9, 0.1), (0.5, 0.5), (0.6, 0.7), (0.6, 0.6), (0.6, 0.6)], 3),  # step 0 is not the trial's; ties by loss
        ([(0.9, 0.1), (0.5, 1e9), (0.500001, 1e10)], 2),  # the loss never outweighs the score
        ([(0.9, 0.1)], None),
    ],
)
def test_the_best_evaluation_of_a_trial(scores: list[tuple[float, float]], best: int | None) -> None:
    lines = [{"step": step, "accuracy": score, "loss": loss} for step, (score, loss) in enumerate(scores)]
    run: Any = SimpleNamespace(evaluations=lambda _: lines)
    found = best_evaluation(run, make_config({"steps": 4}), "score")
    assert (found and found["step"]) == best


@pytest.mark.slow
def test_a_search_prunes_and_a_killed_one_ends_alike(
    roberta: Path, movies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before an evaluation is reported, and again after that, before the pruner is asked."""
    more = ("steps=3", "eval_every=1", "--range", "optimizer.lr=1e-4:1", "--goal", "loss", "--trials")
    assert mezo(*search(roberta, movies, tmp_path / "cut", *more, "5")).code == 0
    shutil.copytree(tmp_path / "cut", tmp_path / "whole")
    said = mezo(*search(roberta, movies, tmp_path / "whole", *more, "7"))
    whole = trials(tmp_path / "whole")
    pruned = next(trial for trial in whole if trial.state.name == "PRUNED")
    path = tmp_path / "whole" / str(pruned.number)
    assert runs.Run(path).read_summary()["stopped"] == "pruned"
    assert runs.Run(path).info()["stopped"] == {"by": "pruned", "step": pruned.last_step}
    assert f"trial {pruned.number + 1}: pruned at step {pruned.last_step} of 3, loss " in said.out
    assert "stopped by the pruner of its search" in mezo("resume", path).out

    def killed(trial: Any, *_: Any) -> Any:
        raise KeyboardInterrupt

    words = search(roberta, movies, tmp_path / "cut", *more, "7")
    for owner, name in ((tune, "_report"), (optuna.trial.Trial, "should_prune")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, killed)
            assert mezo(*words).code == 130
    assert mezo(*words).code == 0
    for mine, other in zip(trials(tmp_path / "cut"), whole, strict=True):
        for name in ("state", "values", "params", "intermediate_values"):
            assert getattr(mine, name) == getattr(other, name), name

    page = tmp_path / "page.html"
    assert mezo("report", tmp_path / "whole", "--out", page).code == 0
    text = page.read_text()
    assert "whole: loss against optimizer.lr" in text
    assert 'scope="col">lr' not in text  # the corner of a heat map


def test_a_trial_whose_loss_is_not_finite_is_the_worst(roberta: Path, movies: Path, tmp_path: Path) -> None:
    words = search(roberta, movies, tmp_path / "search", "optimizer.lr=1e30", "--trials", "1")  # its default ranges
    said = mezo(*words)
    assert said.code == 1, said
    assert said.err.startswith("failed: trial 1: ")
    assert said.err.count("\n") == 1
    (trial,) = trials(tmp_path / "search")
    assert list(trial.params) == ["optimizer.lr", "optimizer.eps"]
    assert (trial.state.name, trial.value) == ("COMPLETE", float("-inf"))
    assert "best: none" in mezo("resume", tmp_path / "search").out


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (["--range", "optimizer.lr"], ["expected KEY=LOW:HIGH"]),
        (["--range", "optimizer.lr=1e-3:1e-4"], ["LOW below HIGH"]),
        (["--range", "optimizer.lr=-1:1"], ["optimizer.lr"]),
        (["--range", "optimizer.lrr=1:2"], ["unknown key", "optimizer.lr"]),
        (["--range", "optimizer.noise=1:2"], ["takes a number"]),
        (["--range", "optimizer.samples=1:2.5"], ["whole numbers"]),
        (["optimizer.lr=1e-3,1e-2"], ["one value per key", "--range optimizer.lr=LOW:HIGH"]),
        (["hydra/launcher=basic"], ["one trial after the other"]),
        (["experiment=paper/mezo"], ["grid"]),
        (["max_seconds=5"], ["max_seconds"]),
        (["--trials", "0"], ["--trials 0"]),
        (["--goal", "test"], ["allowed are score, loss"]),
    ],
)
def test_mistakes_end_in_one_line(more: list[str], parts: list[str], tmp_path: Path) -> None:
    words = ["experiment=demo"] if "experiment=paper/mezo" not in more else []
    line = error_line(mezo("tune", *words, f"hydra.sweep.dir={tmp_path / 'search'}", *more))
    for part in parts:
        assert part in line
    assert not (tmp_path / "search").exists()


def test_a_damaged_study_is_refused(searched: tuple[Path, Result], tmp_path: Path) -> None:
    folder = tmp_path / "search"
    shutil.copytree(searched[0] / "search", folder)
    journal = folder / "study.journal"
    text = journal.read_text()
    journal.write_text(text[:100] + "\n" + text[150:])
    assert "study.journal is damaged" in error_line(mezo("resume", folder))
    journal.write_text("")
    assert "they do not belong together" in error_line(mezo("resume", folder))
