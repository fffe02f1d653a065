"""`mezo export --trajectory`: a run without checkpoints that rebuilds the weights elsewhere; odd ones are named."""

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

import mezo_cli
from mezo_cli import load
from mezo_cli.config.compose import build_config
from mezo_cli.config.registry import OPTIMIZERS
from mezo_cli.errors import UserError
from mezo_cli.runs import Run
from mezo_cli.runs.jsonl import add_checksum
from mezo_cli.sharing.trajectory_run import check_rebuildable
from tests import tiny
from tests.command_line import Train, error_line, mezo, small
from tests.interruption import interrupted_at

TEXTS = ["a fine film", "dull", "not bad at all"]
FILES = {"README.md", "config.yaml", "metrics.jsonl", "run.json", "start.safetensors", "summary.json"}
FILES |= {"trajectory.bin", "predictions.jsonl"}


@pytest.fixture
def shared(run: Path, tmp_path: Path) -> Path:
    """A copy of the exported run, for a test to change."""
    return Path(shutil.copytree(run.parent / "shared", tmp_path / "shared"))


def predictions(*words: Any, **options: Any) -> list[Any]:
    return [(one.predicted, one.probabilities) for one in load(*words, **options).predict(TEXTS)]


def test_it_says_nothing_of_this_machine(run: Path, roberta: Path, shared: Path) -> None:
    assert {path.name for path in shared.iterdir()} == FILES
    for path in shared.iterdir():
        data = path.read_bytes()
        for secret in (run.parent, roberta, Path.cwd(), Path.home(), socket.gethostname()):
            assert os.fsencode(str(secret)) not in data, path.name
    config = yaml.safe_load((shared / "config.yaml").read_text())
    assert (config["data"]["dir"], config["model"]["path"]) == (None, f"./{roberta.name}")
    rows, whole = (Run(one).predictions() or [] for one in (shared, run))
    assert [{*row} for row in rows] == [{"row", "label", "predicted", "probabilities"}] * len(whole)
    card, weights = (shared / "README.md").read_text(), Run(shared).info()["weights"]
    assert Run(shared).info()["ends"].keys() == FILES - {"README.md", "config.yaml", "run.json"}
    for name in ("best", "last"):
        assert f"| {name} | {weights[name]['step']} | `{weights[name]['sha256']}` |" in card
    assert "mezo predict . --base DIR --text" in card
    assert "mezo eval . --base DIR data.dir=DIR\n" in card


def test_only_finished_runs_with_a_trajectory_that_others_can_draw(run: Path, train: Train, tmp_path: Path) -> None:
    for words, said in (
        (["optimizer=sgd"], "optimizer=sgd writes no trajectory"),
        (["optimizer.noise=torch"], "optimizer.noise=torch takes z from torch's generator"),
    ):
        with pytest.raises(UserError, match=f"^here: {said}"):
            check_rebuildable(build_config(words), "here")
    with interrupted_at(OPTIMIZERS.implementation("mezo"), "step", 3):
        assert train(tmp_path / "cut").code == 130
    line = error_line(mezo("export", tmp_path / "cut", "--trajectory", "--out", tmp_path / "out"))
    assert "is interrupted: only the trajectory of a finished run" in line
    line = error_line(mezo("export", run, "--trajectory", "--checkpoint", "3", "--out", tmp_path / "out"))
    assert "leave one of them out" in line
    assert not (tmp_path / "out").exists()


def test_every_command_for_runs_opens_it(run: Path, roberta: Path, shared: Path, tmp_path: Path) -> None:
    data = f"data.dir={run.parent / 'movies'}"
    for checkpoint in ("best", "last", 3):
        assert predictions(shared, checkpoint, base=roberta) == predictions(run, checkpoint)
    theirs = mezo("eval", shared, "--base", roberta, data)
    assert theirs.out.splitlines()[-2:] == mezo("eval", run).out.splitlines()[-2:], theirs
    for name, words in (("ours", [run]), ("theirs", [shared, "--base", roberta])):
        assert mezo("replay", *words, "--step", "5", "--out", tmp_path / name).code == 0
    ours, theirs = (tmp_path / name / "model.safetensors" for name in ("ours", "theirs"))
    assert ours.read_bytes() == theirs.read_bytes()
    again = tmp_path / "again"
    assert mezo("export", shared, "--base", roberta, "--trajectory", "--out", again).code == 0
    assert all((again / name).read_bytes() == (shared / name).read_bytes() for name in FILES)
    for words in (["runs", shared], ["compare", shared], ["report", shared, "--out", tmp_path / "page.html"]):
        assert mezo(*words).code == 0, words
    shown = json.loads(mezo("show", shared, "--json").out)
    assert "mezo eval" in shown["commands"]["Evaluate"]
    assert "data.dir=DIR" in shown["commands"]["Evaluate"]
    assert "is finished" in mezo("resume", shared).out
    assert "it is read, never resumed" in error_line(mezo("resume", shared, "steps=9"))
    assert "has no full checkpoints" in error_line(mezo("prune", shared))
    assert {path.name for path in shared.iterdir()} == FILES


def test_an_anchored_run_whose_best_step_is_the_first(train: Train, tmp_path: Path) -> None:
    """The weights of the anchor, those of step 0, are kept for the steps after it; pruning replays both too."""
    words = ["optimizer=es", "optimizer.members=2", "optimizer.anchor={l2: 0.1}", "optimizer.lr=1e-30", "steps=2"]
    assert train(tmp_path / "run", *words, "eval_every=2").code == 0
    assert Run(tmp_path / "run").read_summary()["best"]["step"] == 0
    assert mezo("export", tmp_path / "run", "--trajectory", "--out", tmp_path / "out").code == 0
    assert "pruned" in mezo("prune", tmp_path / "run").out


def test_other_weights_data_and_mistakes_are_one_line(shared: Path, roberta: Path, tmp_path: Path) -> None:
    words = ["predict", shared, "--text", "a", "--base", roberta]
    assert "its base model tiny-roberta is not here" in error_line(mezo(*words[:4])).replace(
        roberta.name, "tiny-roberta"
    )
    assert "no such folder" in error_line(mezo(*words[:4], "--base", tmp_path / "none"))
    assert "give data.dir=DIR" in error_line(mezo("eval", shared, "--base", roberta))
    assert "'steps=3': only a plain model folder takes settings" in error_line(mezo("eval", shared, "steps=3"))
    wrong = tiny.roberta(tmp_path / "wrong", seed=1)
    assert "started from other weights than these" in mezo(*words[:4], "--base", wrong).err.splitlines()[-1]
    info = Run(shared).info()
    info["weights"]["last"]["sha256"] = "0" * 64
    (shared / "run.json").write_text(json.dumps(add_checksum(info)))
    said = mezo(*words, "--checkpoint", "last").err.splitlines()[-1]
    assert "the rebuilt weights of step 6 (last) are not those of the run" in said


def test_a_run_without_a_trajectory_is_shared_with_its_adapter(roberta: Path, movies: Path, tmp_path: Path) -> None:
    lora = ["optimizer=adamw", "optimizer.lr=1e-2", "peft=lora", "data.store_texts=false"]
    assert mezo("train", *small(roberta, movies, tmp_path / "run", *lora)).code == 0
    assert mezo("export", tmp_path / "run", "--trajectory", "--out", tmp_path / "out").code == 0
    names = {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert names == FILES - {"trajectory.bin", "start.safetensors"} | {
        "adapter_config.json",
        "adapter_model.safetensors",
        "mezo.json",
    }
    assert not any(os.fsencode(str(roberta)) in path.read_bytes() for path in (tmp_path / "out").rglob("*.json*"))
    verify = ["verify", tmp_path / "out", "--base", roberta, f"data.dir={movies}"]
    said = mezo(*verify)
    assert (said.code, "training not replayed" in said.out) == (0, True), said
    info = Run(tmp_path / "out").info()
    changed = {"best": {**info["weights"]["best"], "sha256": "0" * 64}}
    Run(tmp_path / "out").update(weights=changed)
    assert "DIFFERS weights" in mezo(*verify).out


def prompts(split: str) -> list[str]:
    lines = (Path(mezo_cli.__file__).parent / f"demo/arithmetic/{split}.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return ["{}{}{}>{}=".format(*row["numbers"], row["target"]) for row in rows]


@pytest.mark.parametrize("objective", ["mlm", "generate"])
def test_no_file_has_texts_if_a_run_stores_none(objective: str, roberta: Path, movies: Path, tmp_path: Path) -> None:
    run, texts = tmp_path / "run", [row["sentence"] for row in tiny.movie_rows(48)]
    words = small(roberta, movies, run, "data.store_texts=false")
    if objective == "generate":
        words = ["experiment=demo-reward", "steps=2", "batch_size=4", "eval_every=1", "data.train_size=8"]
        words += ["data.eval_limit=8", "objective.max_new_tokens=4", "data.store_texts=false", f"hydra.run.dir={run}"]
        texts = [*prompts("train"), *prompts("dev"), *prompts("test")]
    assert mezo("train", *words).code == 0
    for path in (path for path in run.rglob("*") if path.suffix in (".json", ".jsonl", ".log", ".yaml")):
        content = path.read_text()
        assert not [text for text in texts if text.strip() in content], path.name
    assert not (run / "completions.jsonl").exists()
    assert "It keeps no texts of rows" in mezo("show", run).out
    assert mezo("report", run, "--out", tmp_path / "page.html").code == 0
