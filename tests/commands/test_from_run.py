"""`mezo train --from`: the same again with changes; and `task=own`, a task that is given on the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import tiny
from tests.command_line import Train, error_line, mezo

OWN = ["task=own", "task.template='{text} It is {mask}.'", "task.labels=[rude,kind]", "task.label_words=[bad,good]"]
OWN += ["task.columns=[text]", "data=files"]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Rows of one's own, in a file."""
    texts = [("you are awful, go away", "rude"), ("thanks a lot for the help", "kind")] * 12
    return tiny.write_jsonl(tmp_path / "mine.jsonl", [{"text": text, "label": label} for text, label in texts])


def composed(*words: object) -> dict[str, Any]:
    result = mezo("train", *words, "--cfg", "job")
    assert result.code == 0, result
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
    assert f"mezo train --from {run}" in mezo("show", run).out
    printed = mezo("train", "--from", run, "-m", "--print", "seed=1,2", f"hydra.sweep.dir={tmp_path}/sweep").out
    assert [line.count("seed=") for line in printed.splitlines()] == [1, 1]


def test_a_task_of_ones_own_begins_another_run(roberta: Path, rows: Path, tmp_path: Path, eager_kernels: None) -> None:
    words = [*OWN, f"data.dir={rows}", f"model.path={roberta}", "steps=2", "batch_size=4", "optimizer.lr=1e-3"]
    result = mezo("train", *words, "eval_every=2", f"hydra.run.dir={tmp_path / 'run'}")
    assert result.code == 0, result
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
    result = mezo("data", "data=files", f"data.dir={rows}", f"model.path={roberta}")
    assert result.code == 0, result
    command = result.out.splitlines()[-1]
    assert command.startswith('mezo train task=own \'task.columns=["text"]\' \'task.labels=["kind", "rude"]\'')
    assert json.dumps("{text} All in all, it was {mask}.") in command
