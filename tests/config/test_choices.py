"""YAML files of the user's own: tasks and experiments, and what is wrong with a bad one in one line."""

from pathlib import Path

import pytest

from mezo_cli.config.choices import CONF
from mezo_cli.config.compose import build_config
from mezo_cli.sweep.plan import plan_sweep
from tests.config.refused import error_of

pytestmark = pytest.mark.usefixtures("composing_all")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A config folder with a space, a comma and a quote in its name."""
    folder = tmp_path / "my own, 'conf'"
    (folder / "task").mkdir(parents=True)
    (folder / "experiment").mkdir()
    text = (CONF / "task" / "sst2.yaml").read_text()
    (folder / "task" / "mine.yaml").write_text(text.replace("name: sst2", "name: mine", 1))
    return folder


def test_a_task_of_the_users_own(own: Path) -> None:
    assert build_config(["task=mine"], str(own)).task.name == "mine"
    assert "did you mean 'mine'" in error_of("task=mime", config_dir=own)
    assert "no such task" in error_of("task=mine")
    assert len(plan_sweep(["task=mine,rte"], str(own)).jobs or ()) == 2


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("name: bad\ntemplate: [", ["task/bad.yaml:", "not YAML"]),
        ("name: bad\ntemplate: x\ntempalte: y\n", ["'task.tempalte'", "did you mean 'task.template'", "bad.yaml:3"]),
        ("name: bad\n", ["task.template is not set"]),
        ("name: bad\ntemplate: x\nlabel_words: [Yes, No]\n", ["boolean True", "quote the word", "bad.yaml:3"]),
        ("name: bad\ntemplate: x\nmax_length: long\n", ["task.max_length=long", "whole number", "bad.yaml:3"]),
        ("name: bad\ntemplate: ${nosuch}\n", ["task.template", "does not resolve", "bad.yaml:2"]),
        ("just words\n", ["task.just words"]),
        ("", ["task.name is not set"]),
        ("name: bad\ntemplate: x\nhub: hello\n", ["task.hub"]),
    ],
)
def test_a_bad_task_file_is_one_line(own: Path, text: str, parts: list[str]) -> None:
    (own / "task" / "bad.yaml").write_text(text)
    line = error_of("task=bad", config_dir=own)
    for part in parts:
        assert part in line


def test_a_built_in_name_is_not_taken_silently(own: Path) -> None:
    (own / "task" / "rte.yaml").write_text("name: rte\n")
    assert "task=rte is already defined" in error_of("task=mine", config_dir=own)


def test_a_config_folder_that_is_none(tmp_path: Path) -> None:
    assert "no such folder" in error_of("steps=1", config_dir=tmp_path / "none")


def test_an_experiment_sets_and_the_command_line_wins(own: Path) -> None:
    (own / "experiment" / "small.yaml").write_text(
        "# @package _global_\n"
        "defaults:\n  - override /task: rte\n  - override /data: demo\n"
        "steps: 7\nseed: 3\noptimizer:\n  lr: 0.5\n"
    )
    made = build_config(["experiment=small"], str(own))
    assert (made.task.name, made.data.name, made.steps, made.optimizer.lr) == ("rte", "demo", 7, 0.5)
    assert made.data.seed == 3
    for words in (["experiment=small", "task=sst2", "steps=9"], ["steps=9", "task=sst2", "experiment=small"]):
        made = build_config(words, str(own))
        assert (made.task.name, made.data.name, made.steps, made.optimizer.lr) == ("sst2", "demo", 9, 0.5)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("# @package _global_\nstepps: 7\n", ["'stepps'", "did you mean 'steps'", "bad.yaml:2"]),
        ("# @package _global_\noptimizer:\n  lr: fast\n", ["optimizer.lr=fast", "bad.yaml:3"]),
        ("# @package _global_\ndefaults:\n  - override /task: nosuch\n", ["nosuch"]),
        ("steps: 7\n", ["experiment"]),
    ],
)
def test_a_bad_experiment_is_one_line(own: Path, text: str, parts: list[str]) -> None:
    (own / "experiment" / "bad.yaml").write_text(text)
    line = error_of("experiment=bad", config_dir=own)
    for part in parts:
        assert part in line
