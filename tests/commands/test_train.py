"""`mezo train`: its directories, `--from`, `task=own`, and `--json` of it, of verify and of tune."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from mezo_cli import runs
from mezo_cli.config.choices import CONF
from mezo_cli.runs import Run
from tests import tiny
from tests.command_line import HANGS, Result, Train, error_line, mezo, ok, small, start

pytestmark = pytest.mark.usefixtures("eager_kernels", "in_tmp_path")


def test_run_directories_have_a_name_of_their_own(roberta: Path, movies: Path, tmp_path: Path) -> None:
    words = [word for word in small(roberta, movies, tmp_path, "steps=1") if not word.startswith("hydra")]
    for _ in range(2):
        assert mezo("train", *words).code == 0
    found = [run.path.relative_to(tmp_path).as_posix() for run in runs.find_runs(tmp_path / "outputs")]
    assert len(found) == 2
    for name in found:
        assert re.fullmatch(r"outputs/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d-sst2-mlm-mezo-[0-9a-f]{6}", name)
    assert {p.name for p in tmp_path.iterdir()} == {"outputs", "movies"}
    assert mezo("train", *words, "hydra.run.dir=runs/${task.name}-${seed}-${hydra.job.name}").code == 0
    assert Run(tmp_path / "runs" / "sst2-42-mezo").info()["status"] == "finished"


@pytest.mark.slow
def test_a_reader_that_went_away_does_not_stop_a_run(roberta: Path, movies: Path, tmp_path: Path) -> None:
    process = start("train", *small(roberta, movies, tmp_path / "run"), cwd=tmp_path)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=HANGS) in (0, 1)
    assert Run(tmp_path / "run").info()["status"] == "finished"
    assert "test at best" in (tmp_path / "run" / "train.log").read_text()
    assert "Traceback" not in process.stderr.read()


def test_quiet_prints_the_directory_and_warnings_only(roberta: Path, movies: Path, tmp_path: Path) -> None:
    words = small(roberta, movies, tmp_path / "run", "objective=cls", "steps=1")
    said = mezo("train", "-q", *words)
    assert (said.code, said.out) == (0, "run\n")
    assert said.err.startswith("a new classification head")
    assert said.err.count("\n") == 1
    assert "test at best" in (tmp_path / "run" / "train.log").read_text()
    assert mezo("resume", "-q", tmp_path / "run") == Result(0, "run\n", "")  # finished: nothing to do
    assert mezo("resume", "-q", tmp_path / "run", "steps=2") == Result(0, "run\n", "")
    assert Run(tmp_path / "run").read_summary()["steps"] == 2
    assert "already holds a run" in error_line(mezo("train", "-q", *words))


def test_a_run_of_the_users_own_task_needs_their_folder_no_more(roberta: Path, movies: Path, tmp_path: Path) -> None:
    folder = tmp_path / "conf"
    (folder / "task").mkdir(parents=True)
    text = (CONF / "task" / "sst2.yaml").read_text()
    (folder / "task" / "mine.yaml").write_text(text.replace("name: sst2", "name: mine", 1))
    words = small(roberta, movies, tmp_path / "run", "task=mine", "steps=1")
    assert mezo("train", *words, "--config-dir", folder).code == 0
    shutil.rmtree(folder)
    assert mezo("eval", tmp_path / "run").code == 0
    assert "mine" in mezo("runs", tmp_path).out


OWN = ["task=own", "task.template='{text} It is {mask}.'", "task.labels=[rude,kind]", "task.label_words=[bad,good]"]
OWN += ["task.columns=[text]", "data=files"]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Rows of one's own, in a file."""
    texts = [("you are awful, go away", "rude"), ("thanks a lot for the help", "kind")] * 12
    return tiny.write_jsonl(tmp_path / "mine.jsonl", [{"text": text, "label": label} for text, label in texts])


def composed(*words: object) -> dict[str, Any]:
    result = ok("train", *words, "--cfg", "job")
    config = yaml.safe_load(result.out)
    assert isinstance(config, dict)
    return config


def differing(one: Any, other: Any, prefix: str = "") -> set[str]:
    """Return the dotted keys whose values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = one.keys() | other.keys()
        return {found for key in keys for found in differing(one.get(key), other.get(key), f"{prefix}{key}.")}
    return set() if one == other else {prefix[:-1]}


def test_a_run_begins_with_the_settings_of_another(train: Train, tmp_path: Path, eager_kernels: None) -> None:
    """What is given wins; what followed another key follows it again; a choice brings its own settings."""
    run = tmp_path / "run"
    words = ["steps=2", "seed=3", "optimizer.weight_decay=0.1", "batch_size=4", "task.max_length=64", "peft=bias"]
    assert train(run, *words).code == 0
    stored = yaml.safe_load((run / "config.yaml").read_text())
    assert composed("--from", run) == stored == composed("--from", run / "checkpoints" / "best")
    (tmp_path / "my.yaml").write_text(mezo("train", "--from", run, "--cfg", "job").out)
    assert composed("--from", tmp_path / "my.yaml", "task.max_length=64") == stored
    assert differing(composed("--from", run, "seed=7"), stored) == {"seed", "data.seed"}
    changed = composed("--from", run, "optimizer=es", "data.seed=9")
    assert changed["optimizer"]["weight_decay"] == 0
    assert {key for key in differing(changed, stored) if not key.startswith("optimizer.")} == {"data.seed"}
    assert {"steps", "forwards"} == differing(composed("--from", run, "forwards=40"), stored)
    shared = tmp_path / "shared"
    assert mezo("export", run, "--trajectory", "--out", shared).code == 0
    assert composed("--from", shared)["optimizer"] == stored["optimizer"]
    assert "mezo train --from run" in mezo("show", run).out
    printed = mezo("train", "--from", run, "-m", "--print", "seed=1,2", f"hydra.sweep.dir={tmp_path}/sweep").out
    assert [line.count("seed=") for line in printed.splitlines()] == [1, 1]


def test_a_task_of_ones_own_begins_another_run(roberta: Path, rows: Path, tmp_path: Path, eager_kernels: None) -> None:
    words = [*OWN, f"data.dir={rows}", f"model.path={roberta}", "steps=2", "batch_size=4", "optimizer.lr=1e-3"]
    ok("train", *words, "eval_every=2", f"hydra.run.dir={tmp_path / 'run'}")
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["task"]["name"] == "mine"
    assert composed("--from", tmp_path / "run") == config
    assert differing(composed("--from", tmp_path / "run", "task.label_words=[so,no]"), config) == {"task.label_words"}
    assert composed("--from", tmp_path / "run", "task=sst2", "data=demo")["task"]["name"] == "sst2"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (OWN[:1], ["task=own needs task.columns, task.labels, task.template, task.label_words", "a row of mine.jsonl"]),
        ([*OWN[:1], *OWN[2:5]], ["task=own needs task.template;", "{text} All in all, it was {mask}."]),
        ([*OWN[:1], "objective=cls"], ["task.columns, task.labels;", """'task.labels=["kind", "rude"]'"""]),
        (["task=own", "task.template={text} It is {mask}."], ["quote it: 'task.template=\"{text} It is {mask}.\"'"]),
        (["task=own", "data=demo"], ["task=own needs data=files data.dir=PATH, or data=hub"]),
        (["--from", "nowhere"], ["nowhere: no such run directory"]),
        (["--from", "my.yaml", "experiment=demo"], ["leave experiment=... out"]),
        (["--from", "my.yaml", "data.stray=1"], ["data.stray"]),
        (["--from", "engine.yaml"], ["engine.url is not taken from a file: give it again, engine.url=http://x"]),
    ],
)
def test_what_is_not_given(words: list[str], said: list[str], rows: Path, roberta: Path, in_tmp_path: None) -> None:
    """With a row of the data and a proposal; what only a user may name is given again."""
    Path("my.yaml").write_text(mezo("train", "--cfg", "job", "data=demo", "model=demo").out)
    Path("engine.yaml").write_text(
        mezo("train", "--cfg", "job", "data=demo", "model=demo-decoder", "objective=lm", "peft=lora",
             "task.lm.label_words=[a,b]", "engine=openai", "engine.url=http://x", "engine.adapter_dir=.").out
    )  # fmt: skip
    more = [] if "--from" in words or "data=demo" in words else ["data=files", f"data.dir={rows}"]
    line = error_line(mezo("train", *words, *more, *([] if "--from" in words else [f"model.path={roberta}"])))
    for part in said:
        assert part in line


def test_data_proposes_a_command_for_a_file_without_a_task(rows: Path, roberta: Path, in_tmp_path: None) -> None:
    result = ok("data", "data=files", f"data.dir={rows}", f"model.path={roberta}")
    command = result.out.splitlines()[-1]
    assert command.startswith('mezo train task=own \'task.columns=["text"]\' \'task.labels=["kind", "rude"]\'')
    assert json.dumps("{text} All in all, it was {mask}.") in command


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
