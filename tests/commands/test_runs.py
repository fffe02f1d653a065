"""`mezo runs`: the scores of the checkpoint that was picked, and damaged runs by name."""

import json
from pathlib import Path

import pytest

from mezo_cli.runs import Run
from tests.command_line import Result, error_line, mezo, small
from tests.report.run_directories import make_run
from tests.terminal import on_a_terminal

DEMO = {"model.name": "demo", "model.path": "demo", "peft.name": "bias", "seed": 13, "steps": 12}


def interrupted(path: Path) -> None:
    """Make a run that ended at step 7 of 12, last evaluated at step 6."""
    make_run(path, DEMO, ended="interrupted", grads=[1.0] * 7, between={3: 0.7, 6: 0.6})


pytestmark = pytest.mark.usefixtures("eager_kernels")


def rows(result: Result) -> dict[str, list[str]]:
    """Return the cells of each run."""
    assert result.code == 0, result
    return {line.split()[0]: line.split()[1:] for line in result.out.splitlines() if line.strip()}


def test_the_scores_are_of_the_metric_that_picked_the_checkpoint(roberta: Path, movies: Path, tmp_path: Path) -> None:
    words = small(roberta, movies, tmp_path / "run", "task.metric=matthews", "eval_every=1", "data.train_size=8")
    trained = mezo("train", *words)
    assert trained.code == 0, trained
    run = Run(tmp_path / "run")
    summary = run.read_summary()
    dev, test = (f"{100 * summary[split]['matthews']:.1f}" for split in ("dev", "test"))
    before, verdict = f"{100 * summary['test_before']['matthews']:.1f}", summary["verdict"]
    assert rows(mezo("runs", tmp_path))["run"][-7:] == ["matthews", "42", "6/6", dev, before, test, verdict]
    assert f"{100 * summary['dev']['accuracy']:.1f}" != dev
    closing = trained.out[trained.out.index("matthews  accuracy") :].splitlines()
    best = run.evaluations("dev")[[m["step"] for m in run.evaluations("dev")].index(summary["best"]["step"])]
    score, accuracy, loss = f"{100 * best['matthews']:.1f}%", f"{100 * best['accuracy']:.1f}%", f"{best['loss']:.4f}"
    assert closing[2].split()[:5] == ["dev", "best", score, accuracy, loss]


def test_the_step_is_the_last_that_was_recorded(tmp_path: Path) -> None:
    """Every step is recorded in the trajectory; metrics.jsonl has the logged and the evaluated ones."""
    interrupted(tmp_path / "run")
    assert rows(mezo("runs", tmp_path))["run"][-5:] == ["7/12", "70.0", "-", "-", "-"]  # the best so far
    assert "for 7 of 12 steps" in " ".join(mezo("show", tmp_path / "run").out.split())


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four runs: two finished, one interrupted, one damaged."""
    folder = tmp_path_factory.mktemp("some")
    adam = {"optimizer.name": "mezo_adam", "optimizer.beta1": 0.8}
    make_run(folder / "mezo", DEMO, dev=0.8, test=0.7, grads=[1.0] * 12)
    make_run(folder / "adam", {**DEMO, **adam}, dev=0.7, test=0.9)
    make_run(folder / "momentum", {**DEMO, "optimizer.name": "mezo_momentum"})
    interrupted(folder / "mezo-interrupted")
    (folder / "momentum" / "summary.json").unlink()
    return folder


def names(*words: object) -> list[str]:
    result = mezo("runs", *words, "-q")
    assert result.code == 0, result
    return [Path(line).name for line in result.out.splitlines()]


def test_order(some: Path) -> None:
    assert names(some, "--sort", "test")[:2] == ["adam", "mezo"]
    assert names(some, "--sort", "run") == ["adam", "mezo", "mezo-interrupted", "momentum"]
    assert names(some, "--sort", "optimizer.beta1")[0] == "adam"


def test_the_lowest_loss_is_the_best(tmp_path: Path) -> None:
    judged = {"metric": "loss", "optimizer.lr": 1e-5}
    make_run(tmp_path / "low", judged, dev=0.3).update(metric="loss")
    make_run(tmp_path / "high", judged, dev=0.9).update(metric="loss")
    make_run(tmp_path / "running", judged, ended="interrupted", between={5: 0.5}).update(metric="loss")
    assert names(tmp_path, "--sort", "dev") == ["low", "running", "high"]
    assert rows(mezo("runs", tmp_path))["running"][-2] == "0.6500"  # 0.7 at step 0


def test_json(some: Path) -> None:
    result = mezo("runs", some, "--json", "--sort", "run")
    found = {Path(run["run"]).name: run for run in json.loads(result.out)}
    assert list(found) == ["adam", "mezo", "mezo-interrupted", "momentum"]
    summary = Run(some / "mezo").read_summary()
    wanted = {"status": "finished", "task": "sst2", "optimizer": "mezo", "peft": "bias", "seed": 13, "problem": None}
    wanted |= {"dev": summary["dev"]["accuracy"], "test": summary["test"]["accuracy"], "step": 12, "steps": 12}
    assert {key: found["mezo"][key] for key in wanted} == wanted
    assert found["mezo-interrupted"]["test"] is None
    assert "summary.json" in found["momentum"]["problem"]


def test_an_unknown_column_is_refused(some: Path) -> None:
    assert "(did you mean 'test'?)" in error_line(mezo("runs", some, "--sort", "tset"))


def test_it_fits_80_columns(some: Path) -> None:
    code, seen = on_a_terminal(["runs", str(some)], some, columns=80)
    assert code == 0, seen
    table = seen.split("momentum: ")[0]
    assert max(map(len, table.splitlines())) <= 80
    assert "all: task sst2, objective mlm, model demo, metric accuracy, seed 13" in table
    assert "mezo_adam bias" in table


def test_80_columns_keep_what_tells_runs_apart(tmp_path: Path) -> None:
    lora = {"peft.name": "lora", "peft.r": 8, "peft.alpha": 16, "peft.targets": "query_value"}
    for number, method in enumerate(({}, lora)):
        for task, lr, seed in (("sst2", 1e-6, 13), ("trec", 1e-5, 100)):
            settings = {"task": task, "optimizer.lr": lr, "seed": seed, "data.shots": 16, **method}
            make_run(tmp_path / f"a-sweep-with-a-long-name-{number}" / f"task={task},lr={lr}", settings)
    code, seen = on_a_terminal(["runs", str(tmp_path)], tmp_path, columns=80)
    assert code == 0, seen
    (header,) = (line.split() for line in seen.splitlines() if line.startswith("run "))
    assert {"status", "task", "method", "lr", "seed", "dev", "test"} <= set(header)


def test_every_setting_that_differs_is_shown(tmp_path: Path) -> None:
    """But not what follows from another: the template from the task, the data's seed from the run's."""
    make_run(tmp_path / "a", {"seed": 1, "optimizer.lr": 1e-5, "logger.names": ["wandb"]})
    make_run(tmp_path / "b", {"seed": 2, "optimizer.lr": 2e-5, "task": "rte"})
    make_run(tmp_path / "c", {"seed": 2, "optimizer.lr": 2e-5, "data.shots": 16})
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "run.json").write_text("{")
    result = mezo("runs", tmp_path)
    same, header, *_ = result.out.splitlines()
    assert same == "all: objective mlm, method mezo, model roberta-large, metric accuracy"
    assert header.split() == ["run", "status", "task", "seed", "lr", "data.shots", "step", "dev", "test"]
    assert rows(result)["a"][2:5] == ["1", "1e-05", "null"]
    assert rows(result)["c"][2:5] == ["2", "2e-05", "16"]
    document = {Path(run["run"]).name: run["settings"] for run in json.loads(mezo("runs", tmp_path, "--json").out)}
    assert document["torn"] is None
    assert document["c"]["data.shots"] == 16
    assert document["b"]["task.template"] != document["a"]["task.template"]
    assert "optimizer.eps" not in document["a"]
