"""The shipped experiments: the paper's settings and grids, as they were recorded, and one sensible job each."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mezo_cli.config import compose
from mezo_cli.config.choices import CONF, find_choices
from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import to_dict
from mezo_cli.errors import UserError
from mezo_cli.sweep.plan import plan_sweep

SEEDS = ["13", "21", "42", "87", "100"]
# Of each experiment and task: what all tasks have unlike the defaults, and what each has beside that, without the
# settings of the task itself; `-m KEY` is the grid. It was made at fd7c4ef, and follows the released code since.
RECORD = json.loads((Path(__file__).parent / "paper_configs.json").read_text())
CASES = [(name, task) for name, rows in RECORD.items() for task in rows if task != "all"]


def files() -> dict[str, Path]:
    return find_choices()["experiment"]


def settings(words: list[str]) -> dict[str, Any]:
    """Return the settings of a run by key, without those of the task but `task.demonstrations`, and the grid."""

    def leaves(node: dict[str, Any], parent: str = "") -> Iterator[tuple[str, Any]]:
        for key, inner in node.items():
            if isinstance(inner, dict) and inner:
                yield from leaves(inner, f"{parent}{key}.")
            else:
                yield f"{parent}{key}", inner

    made = dict(leaves(to_dict(build_config(words))))
    made = {key: inner for key, inner in made.items() if not key.startswith("task.") or key == "task.demonstrations"}
    with compose.hydra_session():
        grid = compose.sweeper_of(compose.compose_node(words, None))[1]
    return made | {f"-m {key}": values for key, values in grid.items()}


def test_every_paper_experiment_is_tested_here() -> None:
    assert RECORD.keys() == {name for name in files() if name.startswith("paper/")}


@pytest.mark.sample(6)
@pytest.mark.parametrize(("name", "task"), CASES)
def test_its_config_is_as_recorded(name: str, task: str) -> None:
    made, defaults = settings([f"experiment={name}", f"task={task}"]), settings([])
    unlike = {key: value for key, value in made.items() if value != defaults.get(key)}
    assert unlike == RECORD[name]["all"] | RECORD[name][task]


def test_it_is_as_the_released_code() -> None:
    for task in ("wsc", "squad"):
        assert build_config(["experiment=paper/opt-13b/mezo", f"task={task}"]).task.bos_token_id == 0
    tied = {name: build_config(["experiment=paper/mezo", f"model={name}"]).model for name in ("demo", "bert-base")}
    assert [model.tie_embeddings for model in tied.values()] == [False, None]
    assert build_config(["experiment=paper/ft", "peft=lora"]).peft.head  # type: ignore[attr-defined]


def test_it_sweeps_over_the_papers_grid_and_the_command_line_wins() -> None:
    words = ["experiment=paper/mezo", "task=sst2", "data.shots=16"]
    wanted = {(lr, int(seed)) for lr in (1e-7, 1e-6, 1e-5) for seed in SEEDS}
    assert {(job.config.optimizer.lr, job.config.seed) for job in plan_sweep(words).jobs or ()} == wanted
    ours = ["optimizer.lr=0.5", "seed=1,2"]
    assert [job.overrides[-2:] for job in plan_sweep([*words, *ours]).jobs] == [(ours[0], f"seed={n}") for n in (1, 2)]


def test_a_sweep_over_tasks_has_one_grid_and_the_command_line_wins() -> None:
    mezo = "experiment=paper/opt-13b/mezo"
    assert len(plan_sweep([mezo, "task=copa,rte"]).jobs or ()) == 4
    with pytest.raises(UserError, match=r"task=copa and .*task=squad: their files sweep over unlike grids; run one at"):
        plan_sweep([mezo, "task=copa,squad"])
    made = build_config([mezo, "task=sst2", "objective=lm", "model=opt-66b", "data.dev_size=7"])
    assert (made.objective.name, made.model.path, made.data.dev_size) == ("lm", "facebook/opt-66b", 7)
    assert made.model.dtype == "float16"


@pytest.mark.sample(4)
@pytest.mark.parametrize("path", files().values(), ids=list(files()))
def test_its_head_says_how_to_run_it(path: Path) -> None:
    head = path.read_text(encoding="utf-8").split("defaults:")[0]
    (command, *_) = [line for line in head.splitlines() if "mezo train" in line]
    assert f"experiment={path.relative_to(CONF / 'experiment').with_suffix('')}" in command
    assert "# Cost:" in head
    words = command.split("mezo train")[1].split("  ")[0].split()
    multirun = "-m" in words
    words = [word for word in words if word != "-m"]
    assert plan_sweep(words).jobs if multirun else build_config(words)


def test_a_grid_that_is_not_valid_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()

    def error_of(params: dict[str, str], experiment: str = "mine") -> str:
        text = yaml.safe_dump({"hydra": {"sweeper": {"params": params}}})
        (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}")
        with pytest.raises(UserError) as caught:
            plan_sweep([f"experiment={experiment}"], str(tmp_path))
        return str(caught.value)

    assert re.search("unknown key 'optimizer.lrs' .*did you mean 'optimizer.lr'", error_of({"optimizer.lrs": "1,2"}))
    assert "unlike grids" in error_of({"seed": "1,2"}, "mine,demo")
    for key in ("hydra.run.dir", "hydra/launcher"):
        assert "cannot be swept over" in error_of({key: "basic"})
