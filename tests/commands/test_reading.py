"""`mezo runs`, `show` and `compare`: scores of the picked checkpoint, the lowest loss, damaged runs, mistakes."""

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from mezo_cli.report.document import document
from mezo_cli.report.entries import read_entry
from mezo_cli.report.terminal import show_document
from mezo_cli.runs import Run
from tests import tiny
from tests.command_line import Result, error_line, mezo, ok, small
from tests.interruption import interrupted_at
from tests.report.run_directories import make_curves, make_run, make_two_methods
from tests.terminal import on_a_terminal

pytestmark = pytest.mark.usefixtures("eager_kernels")

DEMO = {"model.name": "demo", "model.path": "demo", "peft.name": "bias", "seed": 13, "steps": 12}


def interrupted(path: Path) -> None:
    """Make a run that ended at step 7 of 12, last evaluated at step 6."""
    make_run(path, DEMO, ended="interrupted", grads=[1.0] * 7, between={3: 0.7, 6: 0.6})


def rows(result: Result) -> dict[str, list[str]]:
    """Return the cells of each run."""
    assert result.code == 0, result
    return {line.split()[0]: line.split()[1:] for line in result.out.splitlines() if line.strip()}


def test_the_scores_are_of_the_metric_that_picked_the_checkpoint(roberta: Path, movies: Path, tmp_path: Path) -> None:
    words = small(roberta, movies, tmp_path / "run", "task.metric=matthews", "eval_every=1", "data.train_size=8")
    trained = ok("train", *words)
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
    result = ok("runs", *words, "-q")
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


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_curves(tmp_path_factory.mktemp("show") / "run", {"seed": 13}, text="dull \x1b[31mfilm [bold]x").path


def test_the_story_of_a_run(run: Path) -> None:
    said = ok("show", run)
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


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return make_two_methods(tmp_path / "runs")


def test_several_folders_and_the_one_by_default(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mezo("compare", runs / "mezo", runs / "other").out == mezo("compare", runs).out
    os.rename(runs, runs.parent / "outputs")
    monkeypatch.chdir(runs.parent)
    assert "91.0 (2.0)" in mezo("compare").out


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["{root}/rnus"], "no such folder (did you mean 'runs'?)"),
        (["{root}", "--out", "{root}/t.csw"], "allowed are .csv (did you mean '.csv'?)"),
        (["{root}", "--out", "{root}/folder.csv"], "this is a folder"),
        (["{root}", "--out", "{root}/runs/other/a/t.csv"], "is a run directory"),
        (["{root}", "--json", "--out", "{root}/t.csv"], "a document is printed or written, not both"),
    ],
)
def test_mistakes(words: list[str], part: str, runs: Path) -> None:
    root = runs.parent
    (root / "folder.csv").mkdir()
    before = sorted(root.rglob("*"))
    assert part in error_line(mezo("compare", *(word.replace("{root}", str(root)) for word in words)))
    assert sorted(root.rglob("*")) == before


def test_damaged_runs_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run").path
    (run / "run.json").write_text("{")
    assert f"no runs under {tmp_path} that can be read: " in mezo("compare", tmp_path).err


def test_no_outputs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "there is no folder outputs/ here" in error_line(mezo("compare"))
    assert mezo("compare", "--paper").code == 0


GENERATE = ["task=demo-arithmetic", "data=demo", "model=demo-decoder", "data.eval_limit=4", "data.train_size=8"]
OBJECTIVES = {
    "mlm": [],
    "choice": ["task.choice.candidates=[' bad', ' good']"],
    "generate": [*GENERATE, "objective.loss=lm", "objective.max_new_tokens=4", "objective.reward=countdown"],
}


def command(objective: str, folder: Path, *more: str) -> list[str]:
    """The words of a run: its rates are so high that the dev loss moves."""
    model = (tiny.roberta if objective in ("mlm", "cls") else tiny.decoder)(folder / f"model-{objective}")
    data = tiny.movie_folder(folder / "data")
    words = [*OBJECTIVES[objective], f"objective={objective}", "metric=loss", "steps=2", "eval_every=1", *more]
    if objective != "generate":
        return small(model, data, folder / "run", *words)
    return [*words, "batch_size=4", "optimizer.lr=1e-3", f"hydra.run.dir={folder / 'run'}"]


@pytest.mark.parametrize(
    ("objective", "at_start"), [*((name, "true") for name in OBJECTIVES), ("mlm", "false"), ("generate", "false")]
)
def test_every_command_takes_the_lowest_loss(objective: str, at_start: str, tmp_path: Path) -> None:
    words, run = command(objective, tmp_path, f"test_at_start={at_start}"), tmp_path / "run"
    with interrupted_at(Run, "open_trajectory", 1):
        assert mezo("train", *words).code == 130
    ok("resume", run)
    losses = {line["step"]: line["loss"] for line in Run(run).evaluations("dev")}
    best = min(losses, key=lambda step: losses[step])
    assert json.loads((run / "summary.json").read_text())["best"] == {"step": best, "loss": losses[best]}
    assert json.loads(output("runs", tmp_path, "--json"))[0]["dev"] == losses[best]
    results = json.loads(output("show", run, "--json"))["results"]
    assert [one["step"] for one in results if one["name"].startswith("dev best")] == [best]
    output("show", run)
    output("compare", tmp_path)
    output("report", tmp_path, "--out", tmp_path / "page.html")


def output(*words: object) -> str:
    done = ok(*words)
    return done.out
