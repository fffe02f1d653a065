"""`mezo tune`: trials within the ranges, in Optuna's journal; an interrupted search ends in the same trials."""

import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mezo_cli import runs
from mezo_cli.config.compose import build_config
from mezo_cli.sweep.search import trained_evaluations, value_of
from tests.command_line import HANGS, Result, error_line, mezo, ok, small, start
from tests.commands.test_sweep import wait_until_it_trains

optuna = pytest.importorskip("optuna")

pytestmark = pytest.mark.usefixtures("eager_kernels", "in_tmp_path")

RANGES = ("--range", "optimizer.lr=1e-3:1e-1", "--range", "optimizer.samples=1:3", "metric=loss")


def search(model: Any, movies: Path, folder: Path, *more: str) -> list[str]:
    words = [word for word in small(model, movies, folder, "steps=2") if not word.startswith("hydra.run.dir")]
    return ["tune", *words, f"hydra.sweep.dir={folder}", *more]


def study(folder: Path) -> Any:
    backend = optuna.storages.journal.JournalFileBackend(str(folder / "study.journal"))
    return optuna.load_study(study_name="mezo", storage=optuna.storages.JournalStorage(backend))


def trials(folder: Path) -> list[Any]:
    return study(folder).trials


@pytest.fixture(scope="module")
def searched(roberta: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A search of three trials, and what it printed."""
    from tests import tiny

    folder = tmp_path_factory.mktemp("searched")
    movies = tiny.movie_folder(folder / "movies")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEZO_EAGER", "1")
        said = mezo(*search(roberta, movies, folder / "search", *RANGES, "--trials", "3"))
    return folder, said


def test_each_trial_is_a_run(searched: tuple[Path, Result]) -> None:
    folder, said = searched[0] / "search", searched[1]
    assert (said.code, said.err) == (0, ""), said
    done = trials(folder)
    assert len(done) == 3
    for trial in done:
        assert 1e-3 <= trial.params["optimizer.lr"] <= 1e-1
        assert trial.params["optimizer.samples"] in (1, 2, 3)
        run = runs.Run(folder / str(trial.number))
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
    again = ok("resume", folder)
    assert "trial 1 of 3" not in again.out
    assert "best: trial" in again.out


def test_more_trials_go_on_and_another_search_is_refused(searched: tuple[Path, Result], roberta: Path) -> None:
    folder = searched[0] / "more"
    shutil.copytree(searched[0] / "search", folder)
    words = search(roberta, searched[0] / "movies", folder)
    for other in (RANGES[:2], RANGES[:-1], (*RANGES, "seed=3")):
        assert "with other settings or ranges" in error_line(mezo(*words, *other))
    said = mezo(*words, *RANGES, "--trials", "4", "-q")
    assert (said.code, said.err) == (0, ""), said
    first, best = said.out.splitlines()
    assert (Path(first).name, best[:12]) == ("more", "best: trial ")
    assert len(trials(folder)) == 4
    assert "a search of `mezo tune`" in error_line(mezo("train", "-m", *words[1:]))
    assert "a search of `mezo tune`" in error_line(mezo("resume", folder, "--jobs", "2"))


@pytest.mark.slow
def test_a_cut_search_ends_in_the_same_trials(searched: tuple[Path, Result], roberta: Path, tmp_path: Path) -> None:
    """Ctrl-C says once how to go on; the run of the open trial is finished, and told by its number."""
    more = ("steps=120", "eval_every=0", "--trials", "2")
    words = search(roberta, searched[0] / "movies", tmp_path / "cut", *RANGES, *more)
    running = start(*words, cwd=tmp_path)
    wait_until_it_trains(tmp_path / "cut", running)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=HANGS)
    assert (running.returncode, err) == (130, "error: interrupted\n")
    assert out.endswith("continue with: mezo resume cut\n")
    assert out.count("mezo resume") == 1
    assert [trial.state.name for trial in trials(tmp_path / "cut")] == ["RUNNING"]
    assert mezo("resume", "cut").code == 0
    assert mezo(*search(roberta, searched[0] / "movies", tmp_path / "whole", *RANGES, *more)).code == 0
    both = (trials(tmp_path / "cut"), trials(tmp_path / "whole"))
    assert len(both[0]) == 2
    for mine, other in zip(*both, strict=True):
        for name in ("state", "values", "params", "intermediate_values"):
            assert getattr(mine, name) == getattr(other, name), name


def test_a_trial_that_was_asked_for_only_is_left_out(searched: tuple[Path, Result], tmp_path: Path) -> None:
    """Killed between the values of a trial: another one takes its place."""
    folder = tmp_path / "asked"
    folder.mkdir()
    lines = (searched[0] / "search" / "study.journal").read_text().splitlines(keepends=True)
    cut = next(number for number, line in enumerate(lines) if "optimizer.samples" in line and '"op_code":5' in line)
    (folder / "study.journal").write_text("".join(lines[:cut]).replace('"trials":3', '"trials":1'))
    assert mezo("resume", folder).code == 0
    assert [len(trial.params) for trial in trials(folder)] == [1, 2]
    assert [run.path.name for run in runs.find_runs(folder)] == ["1"]


def test_the_seed_decides_what_is_drawn(searched: tuple[Path, Result], roberta: Path, tmp_path: Path) -> None:
    words = search(roberta, searched[0] / "movies", tmp_path / "other", *RANGES, "seed=7", "steps=1", "--trials", "1")
    assert mezo(*words).code == 0
    assert trials(tmp_path / "other")[0].params != trials(searched[0] / "search")[0].params


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
    config = build_config(["experiment=demo", "steps=4"])
    values = {step: value_of(line, config) for step, line in trained_evaluations(run, config.steps).items()}
    assert max(values, key=lambda step: values[step], default=None) == best


@pytest.mark.slow
def test_a_trial_is_pruned_by_its_metrics(roberta: Path, movies: Path, tmp_path: Path) -> None:
    folder = tmp_path / "search"
    more = ("steps=60", "eval_every=4", "--range", "optimizer.lr=1e-5:1e-1", "metric=loss", "--trials")
    assert mezo(*search(roberta, movies, folder, *more, "5")).code == 0
    said = ok(*search(roberta, movies, folder, *more, "10"))
    pruned = [trial for trial in trials(folder) if trial.state.name == "PRUNED"]
    assert pruned
    trial = pruned[0]
    run = runs.Run(folder / str(trial.number))
    assert (run.status(), run.info()["stopped"]) == ("pruned", {"by": "pruned", "step": trial.last_step})
    assert f"trial {trial.number + 1}: pruned at step {trial.last_step} of 60" in said.out
    assert f"{len(pruned)} of them pruned" in said.out
    listed = json.loads(mezo("runs", folder, "--json").out)
    assert [run["status"] for run in listed].count("pruned") == len(pruned)
    best = min(t.value for t in trials(folder) if t.state.name == "COMPLETE")
    assert trial.intermediate_values[trial.last_step] > best


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
        (["--range", "seed=1:2", "--range", "seed=3:4"], ["--range seed: it is given twice"]),
        (["steps=0"], ["--range optimizer.lr: the run takes no step"]),
        (["optimizer=linear_probe", "init=linear_probe", "steps=0"], ["--range optimizer.lr: the run takes no"]),
        (["optimizer.lr=1e-3,1e-2"], ["one value per key", "--range KEY=LOW:HIGH"]),
        (["hydra/launcher=basic"], ["one trial after the other"]),
        (["experiment=paper/mezo"], ["grid"]),
        (["max_seconds=5"], ["max_seconds"]),
        (["--trials", "0"], ["Invalid value for '--trials'"]),
    ],
)
def test_mistakes_end_in_one_line(more: list[str], parts: list[str], tmp_path: Path) -> None:
    words = ["experiment=demo"] if "experiment=paper/mezo" not in more else []
    line = error_line(mezo("tune", *words, f"hydra.sweep.dir={tmp_path / 'search'}", *more))
    for part in parts:
        assert part in line
    assert not (tmp_path / "search").exists()


def test_a_damaged_trial_is_told_once(searched: tuple[Path, Result], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(searched[0] / "search", tmp_path / "search"))
    (folder / "1" / "config.yaml").write_text("steps: 3\n")
    said = mezo("resume", folder)
    told = f"failed: trial 2: {folder}/1/config.yaml is damaged or was edited: it does not match run.json\n"
    assert (said.code, said.err) == (1, told)
    assert ("2 of 3 trials finished" in said.out, "config.yaml" in said.out) == (True, False)


def test_a_damaged_study_is_refused_and_a_strangers_is_data(searched: tuple[Path, Result], tmp_path: Path) -> None:
    folder = tmp_path / "search"
    shutil.copytree(searched[0] / "search", folder)
    journal = folder / "study.journal"
    text = journal.read_text()
    journal.write_text(text[:100] + "\n" + text[150:])
    assert "study.journal is damaged" in error_line(mezo("resume", folder))
    given = json.dumps(f"objective.reward={tmp_path}/evil.py:score")
    assert '"overrides":[' in text
    journal.write_text(text.replace('"overrides":[', f'"overrides":[{given},'))
    assert "is not taken from a file" in error_line(mezo("resume", folder))
    assert os.listdir(tmp_path) == ["search"]
