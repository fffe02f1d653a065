"""`finetune(...)`: the command line's own path in one call."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import transformers

import mezo_cli
from mezo_cli.errors import RunFailed, UserError
from mezo_cli.runs import Run
from tests import tiny
from tests.command_line import mezo, small

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
    columns = {
        "sentence": [row["sentence"] for row in given],
        "label": [names.index(row["label"]) for row in given],
    }
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


def test_eval_rows_are_the_test_set_and_the_run_can_be_evaluated_again(roberta: Path) -> None:
    done = mezo_cli.finetune(
        str(roberta), "sst2", rows(), eval_dataset=with_classes(rows(10)), output_dir="run", **SETTINGS
    )
    assert done.summary["test"] is not None
    test = Run(done.run_dir).evaluations("test")
    assert sum(test[0]["predicted"].values()) == 10
    said = mezo("eval", done.run_dir)
    assert said.code == 0, said
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
        ({"train_dataset": [{"sentence": object(), "label": "positive"}]}, "train_dataset, row 0: .*not JSON"),
        ({"train_dataset": [{"sentence": "a", "label": "great"}] * 5}, "great"),
        ({"train_dataset": []}, "train"),
    ],
)
def test_mistakes_are_user_errors(words: dict[str, Any], part: str, roberta: Path, movies: Path) -> None:
    given = {"model": str(roberta), "task": "sst2", "train_dataset": str(movies), "steps": 1, **words}
    with pytest.raises(UserError, match=part) as error:
        mezo_cli.finetune(**given)
    assert "\n" not in str(error.value)


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
