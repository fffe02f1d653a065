"""`finetune(...)`: the command line's own path in one call."""

import logging
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import transformers

import mezo_cli
from mezo_cli.config.stored import read_config
from mezo_cli.errors import RunFailed, UserError
from mezo_cli.runs import Run
from tests import tiny
from tests.command_line import mezo, ok, small

GENERATES: dict[str, Any] = {
    "model": "demo-decoder", "task": "demo-arithmetic", "objective": "generate", "train_dataset": None, "steps": 0,
    "overrides": ["data=demo", "data.eval_limit=8", "objective.max_new_tokens=8"],
}  # fmt: skip
SETTINGS: dict[str, Any] = {"steps": 4, "batch_size": 8, "lr": 1e-2, "overrides": ["eval_every=2", "log_every=2"]}

pytestmark = pytest.mark.usefixtures("eager_kernels", "in_tmp_path")


def weights(run: Path) -> bytes:
    return (run / "checkpoints" / "last" / "model.safetensors").read_bytes()


def test_a_path_is_the_same_run_as_on_the_command_line(roberta: Path, movies: Path, tmp_path: Path) -> None:
    done = mezo_cli.finetune(
        model=str(roberta), task="sst2", train_dataset=movies, eps=2e-3, seed=7, output_dir="api", **SETTINGS
    )
    more = ["task=sst2", "steps=4", "eval_every=2", "seed=7", "optimizer.eps=2e-3"]
    assert mezo("train", *small(roberta, movies, tmp_path / "cli", *more)).code == 0
    assert done.run_dir == tmp_path / "api"
    assert done.summary == Run(done.run_dir).read_summary()
    assert (tmp_path / "api" / "config.yaml").read_text() == (tmp_path / "cli" / "config.yaml").read_text()
    assert weights(tmp_path / "api") == weights(tmp_path / "cli")
    assert Run(done.run_dir).info()["status"] == "finished"
    assert Run(done.run_dir).info()["argv"][1] == "finetune"


def rows(n: int = 40) -> list[dict[str, str]]:
    return tiny.movie_rows(n)


def with_classes(given: list[dict[str, str]]) -> Any:
    names = ["positive", "negative"]  # an order that is not the task's
    columns = {"sentence": [row["sentence"] for row in given], "label": [names.index(row["label"]) for row in given]}
    features = {"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=names)}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def test_rows_in_every_form_are_the_same_run(roberta: Path, tmp_path: Path) -> None:
    def stream() -> Iterator[dict[str, str]]:
        yield from rows()

    forms: dict[str, Any] = {
        "dicts": rows(),
        "dataset": datasets.Dataset.from_list(rows()),
        "classes": with_classes(rows()),
        "stream": stream(),
        "unread columns": datasets.Dataset.from_list([{**row, "when": datetime(2026, 1, 1)} for row in rows()]),
        "numpy": datasets.Dataset.from_list([{**row, "x": [0.0]} for row in rows()]).with_format("numpy"),
        "objects": [{**row, "x": object(), "label": np.int64(row["label"] == "positive")} for row in rows()],
        "frame": pd.DataFrame(rows()).assign(x=np.nan),
        "columns": {name: [row[name] for row in rows()] for name in ("sentence", "label")},
    }
    made = {
        name: mezo_cli.finetune(str(roberta), "sst2", given, output_dir=name, **SETTINGS)
        for name, given in forms.items()
    }
    first = made["dicts"]
    assert first.summary["test"] is None
    for name, done in made.items():
        assert weights(done.run_dir) == weights(first.run_dir), name
        assert done.run_dir == tmp_path / name
    assert len((first.run_dir / "data" / "train.jsonl").read_text().splitlines()) == 40


def test_predict_takes_rows_as_finetune_does(roberta: Path) -> None:
    run = mezo_cli.finetune(str(roberta), "sst2", rows(), output_dir="run", steps=0).run_dir
    loaded, texts = mezo_cli.load(run), [row["sentence"] for row in rows(3)]
    dataset = datasets.Dataset.from_dict({"sentence": texts, "x": [datetime(2026, 1, 1)] * 3})
    forms: list[Any] = [dataset, dataset[:3], dataset["sentence"], pd.DataFrame({"sentence": texts}), iter(texts)]
    forms.append([[one] for one in texts])
    expected = loaded.predict(texts)
    assert [one.columns["sentence"] for one in expected] == texts
    assert all(loaded.predict(form) == expected for form in forms)
    for form, part in (("one text", "^rows: one str"), ({"sentence": "a"}, "one mapping, with a str")):
        with pytest.raises(UserError, match=part):
            loaded.predict(form)


def test_a_mapping_of_rewards_is_that_of_the_command_line(tmp_path: Path) -> None:
    reward = {"countdown": 1, "format": {"weight": 0.1, "pattern": "^[(]"}}
    done = mezo_cli.finetune(reward=reward, output_dir="run", **{**GENERATES, "train_dataset": None})
    assert set(done.summary["dev"]) >= {"reward", "reward_countdown", "reward_format"}
    assert read_config(tmp_path / "run" / "config.yaml").objective.reward == reward  # type: ignore[attr-defined]


def test_eval_rows_are_the_test_set_and_the_run_can_be_evaluated_again(roberta: Path) -> None:
    done = mezo_cli.finetune(
        str(roberta), "sst2", rows(), eval_dataset=with_classes(rows(10)), output_dir="run", **SETTINGS
    )
    assert done.summary["test"] is not None
    test = Run(done.run_dir).evaluations("test")
    assert sum(test[0]["predicted"].values()) == 10
    said = ok("eval", done.run_dir)
    assert f"{done.summary['test']['accuracy']:.4f}  {done.summary['test']['loss']:.4f}" in said.out


def test_a_directory_of_its_own(roberta: Path, movies: Path, tmp_path: Path) -> None:
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "own.yaml").write_text(f"name: own\npath: {roberta}\n")
    runs = [mezo_cli.finetune("own", "sst2", movies, config_dir=tmp_path / "conf", steps=0).run_dir for _ in "ab"]
    assert runs[0] != runs[1]
    for run in runs:
        assert run.is_relative_to(tmp_path / "outputs")
        assert "name: own" in (run / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ({"task": "nosuch"}, "task=nosuch: no such task"),
        ({"lr": float("nan")}, "out of range"),
        ({"overrides": ["nosuch=1"]}, "unknown key 'nosuch'"),
        ({"eval_dataset": [{}]}, "needs train_dataset"),
        ({"train_dataset": ["a", "b"]}, "train_dataset, row 0: a str where a mapping"),
        ({"train_dataset": [{"sentence": object(), "label": "positive"}]}, "train_dataset, row 0: column 'sentence'"),
        ({"train_dataset": [*tiny.movie_rows(20), {"sentence": "a", "label": "great"}]}, "^train_dataset, row 20: un"),
        ({"train_dataset": [*tiny.movie_rows(5), {"sentence": 5}]}, "^train_dataset, row 5: .* 'label'"),
        ({"train_dataset": [{"sentence": "\ud800", "label": "positive"}]}, "row 0: column 'sentence' contains an unp"),
        ({"train_dataset": [{"text": "a", "label": "positive"}]}, "^train_dataset: no column 'sentence'.*: text, l"),
        ({"train_dataset": []}, "train_dataset"),
        ({"train_dataset": {"sentence": "a", "label": "positive"}}, "^train_dataset: one mapping, with a str as 'sent"),
        ({"train_dataset": {"sentence": ["a"], "label": []}}, "^train_dataset: columns of other lengths: sentence 1"),
        ({"train_dataset": datasets.DatasetDict({"a": datasets.Dataset.from_list([])})}, "a DatasetDict of the "),
        ({"train_dataset": 5}, "^train_dataset: one int: rows are a list of mappings, "),
        ({"train_dataset": tiny.movie_rows(20), "eval_dataset": "data"}, "^eval_dataset: one str: rows are"),
        ({"overrides": "steps=1"}, "a list of KEY=VALUE texts is expected"),
        ({"reward": 3, **GENERATES}, "^objective.reward=3: expected a name, {NAME: WEIGHT}, "),
        ({"reward": ["exact"], **GENERATES}, r"^objective.reward=\[exact\]: expected a name, {NAME: WEIGHT}, "),
        ({"reward": {"exat": 1}, **GENERATES}, "exat.*did you mean 'exact'"),
        ({"reward": lambda texts, rows: [], **GENERATES}, "takes 'texts', which is no column"),
    ],
)
def test_mistakes_are_one_line(words: dict[str, Any], part: str, roberta: Path, movies: Path, tmp_path: Path) -> None:
    given = {"model": str(roberta), "task": "sst2", "train_dataset": str(movies), "steps": 1, **words}
    with pytest.raises(UserError, match=part) as error:
        mezo_cli.finetune(**given)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("outputs/*/*"))  # nothing is left


def test_a_failed_run_is_an_exception_and_recorded(roberta: Path, movies: Path) -> None:
    with pytest.raises(RunFailed, match="not finite"):
        mezo_cli.finetune(str(roberta), "sst2", movies, steps=5, lr=1e30, output_dir="run")
    assert Run(Path("run")).info()["status"] == "failed"


def test_the_callers_program_is_left_as_it_was(roberta: Path, movies: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger, seen = logging.getLogger("mezo"), []

    class Theirs(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    theirs = Theirs()
    logger.addHandler(theirs)
    before = (list(logger.handlers), logger.level, logger.propagate, list(logging.getLogger().handlers))
    argv, verbosity = list(sys.argv), transformers.logging.get_verbosity()
    transformers.logging.enable_progress_bar()
    try:
        mezo_cli.finetune(str(roberta), "sst2", movies, **SETTINGS)
        with pytest.raises(UserError):
            mezo_cli.finetune(str(roberta), "sst2", "nowhere", **SETTINGS)
        assert (list(logger.handlers), logger.level, logger.propagate, list(logging.getLogger().handlers)) == before
    finally:
        logger.removeHandler(theirs)
    assert sys.argv == argv
    assert transformers.logging.get_verbosity() == verbosity
    assert transformers.logging.is_progress_bar_enabled()
    assert any("dev accuracy" in line for line in seen)
    assert "dev accuracy" in capsys.readouterr().out
