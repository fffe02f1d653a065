"""The shipped experiments: the paper's settings and grids, as FACTS section 4 has them, and one sensible job each."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mezo_cli.config.choices import conf_dir, find_choices
from mezo_cli.config.compose import build_config
from mezo_cli.config.sweep_plan import plan_sweep
from mezo_cli.errors import UserError

SEEDS = ["13", "21", "42", "87", "100"]
# experiment -> (what its config has besides the common part, the values of lr that it sweeps over)
PAPER: dict[str, tuple[dict[str, Any], str]] = {
    "mezo": ({"optimizer.name": "mezo", "peft.name": "none"}, "1e-7,1e-6,1e-5"),
    "mezo_lora": (
        {
            "optimizer.name": "mezo",
            "optimizer.weight_decay": 0.1,
            "peft.name": "lora",
            "peft.r": 8,
            "peft.alpha": 16,
            "peft.targets": "query_value",
        },
        "1e-5,5e-5,1e-4",
    ),
    "mezo_prefix": (
        {"optimizer.name": "mezo", "optimizer.eps": 0.1, "peft.name": "prefix", "peft.length": 5},
        "1e-2,5e-3,1e-3",
    ),
    "mezo_adam": (
        {
            "optimizer.name": "mezo_adam",
            "optimizer.beta1": 0.9,
            "optimizer.beta2": 0.999,
            "optimizer.window": None,
            "peft.name": "none",
        },
        "1e-6,1e-5,1e-4,1e-3",
    ),
    "ft": (
        {
            "optimizer.name": "adamw",
            "optimizer.schedule": "linear",
            "optimizer.weight_decay": 0.0,
            "steps": 1000,
            "eval_every": 100,
            "peft.name": "none",
        },
        "1e-5,3e-5,5e-5",
    ),
    "zero_shot": ({"steps": 0, "init": "none", "peft.name": "none"}, ""),
    "non_differentiable": (
        {"optimizer.name": "mezo", "peft.name": "none", "objective.loss": "accuracy", "data.shots": 512},
        "1e-7,1e-6,1e-5",
    ),
    "lp": (
        {"optimizer.name": "linear_probe", "init": "linear_probe", "probe_c": None, "steps": 0, "peft.name": "none"},
        "",
    ),
}
ZEROTH = {
    "steps": 100_000,
    "eval_every": 10_000,
    "optimizer.eps": 1e-3,
    "optimizer.weight_decay": 0.0,
    "optimizer.samples": 1,
    "optimizer.schedule": "constant",
    "optimizer.noise": "gaussian",
}
COMMON = {
    "model.path": "FacebookAI/roberta-large",
    "objective.name": "mlm",
    "objective.loss": "cross_entropy",
    "batch_size": 64,
}
FIRST_ORDER = {"ft"}


def value(made: Any, key: str) -> Any:
    for part in key.split("."):
        made = getattr(made, part)
    return made


def files() -> dict[str, Path]:
    return find_choices()["experiment"]


def test_every_paper_experiment_is_tested_here() -> None:
    names = {name.removeprefix("paper/") for name in files() if name.startswith("paper/")}
    assert names == {*PAPER, *(f"opt-13b/{name}" for name in OPT)}


@pytest.mark.parametrize("name", list(PAPER))
def test_it_is_the_papers_setting_for_every_task_and_k(name: str) -> None:
    own, _ = PAPER[name]
    zeroth = {} if {"steps", *FIRST_ORDER} & {name, *own} else ZEROTH
    for task, shots in (("sst2", 16), ("mnli", 512)):
        made = build_config([f"experiment=paper/{name}", f"task={task}", f"data.shots={shots}"])
        own = {**own, "data.shots": shots}
        wanted = {**COMMON, **zeroth, **own, "task.name": task, "seed": 42, "data.seed": 42}
        assert {key: value(made, key) for key in wanted} == wanted


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", list(PAPER))
def test_it_sweeps_over_the_papers_grid_and_the_command_line_wins(name: str) -> None:
    _, lrs = PAPER[name]
    words = [f"experiment=paper/{name}", "task=sst2", "data.shots=16"]
    seeds = ["42"] if name == "zero_shot" else SEEDS
    plan = plan_sweep(words)
    wanted = {(lr, int(seed)) for lr in (map(float, lrs.split(",")) if lrs else [1e-6]) for seed in seeds}
    assert {(job.config.optimizer.lr, job.config.seed) for job in plan.jobs or ()} == wanted
    if name == "mezo":
        ours = ["optimizer.lr=3e-6", "seed=1,2"]
        assert plan_sweep([*words, *ours]).overrides == [*words, *ours]


# LARGE_MODELS.md B1 and B2 (tables 1 and 16): experiment -> its config, the lrs of its grid, those of SQuAD and DROP
OPT_ZEROTH = {**ZEROTH, "steps": 20_000, "eval_every": 4_000, "batch_size": 16}
OPT: dict[str, tuple[dict[str, Any], list[float], list[float]]] = {
    "zero_shot": ({"steps": 0, "task.demonstrations": 0}, [], []),
    "icl": ({"steps": 0, "task.demonstrations": 32, "data.train_size": None, "data.as_released": False}, [], []),
    "mezo": ({**OPT_ZEROTH, "peft.name": "none"}, [1e-6, 1e-7], [1e-6, 5e-7, 1e-7]),
    "mezo_lora": (
        {**OPT_ZEROTH, "peft.name": "lora", "peft.r": 8, "peft.alpha": 16, "optimizer.eps": 1e-2},
        [1e-4, 5e-5],
        [1e-4, 5e-5, 1e-5],
    ),
    "mezo_prefix": (
        {**OPT_ZEROTH, "peft.name": "prefix", "peft.length": 5, "optimizer.eps": 1e-1},
        [1e-2, 1e-3],
        [5e-2, 1e-2, 5e-3],
    ),
    "ft": ({"batch_size": 8, "optimizer.name": "adamw", "optimizer.schedule": "linear"}, [1e-5, 5e-5, 8e-5], []),
    "non_differentiable": (
        {**OPT_ZEROTH, "eval_every": 0, "peft.name": "prefix", "optimizer.eps": 1e-1, "objective.reward": "f1"},
        [1e-1, 5e-2, 1e-2],
        [],
    ),
}
WORDS = ["sst2", "rte", "cb", "boolq", "wsc", "wic", "multirc"]
OPT_TASKS = {  # task -> objective, loss
    **dict.fromkeys(WORDS, ("choice", "cross_entropy")),
    **dict.fromkeys(["copa", "record"], ("choice", "lm")),
    **dict.fromkeys(["squad", "drop"], ("generate", "lm")),
}


CASES = [(name, task) for name in OPT for task in (["squad"] if name == "non_differentiable" else OPT_TASKS)]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("name", "task"), CASES)
def test_a_large_model_experiment_is_the_papers_setting_for_every_task(name: str, task: str) -> None:
    own, lrs, of_answers = OPT[name]
    objective, loss = OPT_TASKS[task]
    wanted = {
        "model.path": "facebook/opt-13b",
        "objective.name": objective,
        "objective.loss": "reward" if name == "non_differentiable" else loss,
        "data.seed": 0,
        "data.train_size": 1000,
        "data.dev_size": 100 if task in ("cb", "copa") else 500,
        "data.test_size": 1000,
        "data.as_released": True,
        "task.bos_token_id": 0,
        "metric": "f1" if name == "non_differentiable" else "loss",
        **own,
    }
    jobs = plan_sweep([f"experiment=paper/opt-13b/{name}", f"task={task}"]).jobs or []
    grid = of_answers if of_answers and task in ("squad", "drop") else lrs
    assert [job.config.optimizer.lr for job in jobs] == (grid or [1e-6])
    assert {key: value(jobs[0].config, key) for key in wanted} == wanted


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
    assert f"experiment={path.relative_to(conf_dir() / 'experiment').with_suffix('')}" in command
    assert "# Cost:" in head
    words = command.split("mezo train")[1].split("  ")[0].split()
    multirun = "-m" in words
    words = [word for word in words if word != "-m"]
    assert plan_sweep(words).jobs if multirun else build_config(words)


def test_objectives_are_four_runs_of_one_split_and_seed() -> None:
    plan = plan_sweep(["experiment=objectives"])
    assert len(plan.jobs or ()) == 4
    assert plan.overrides[:2] == ["objective=mlm,cls", "objective.loss=cross_entropy,accuracy"]
    made = build_config(["experiment=objectives"])
    assert (made.task.name, made.data.shots, made.seed, made.log_every) == ("sst2", 16, 42, 1)


def test_a_grid_that_is_not_valid_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()

    def error_of(params: dict[str, str], experiment: str = "mine") -> str:
        text = yaml.safe_dump({"hydra": {"sweeper": {"params": params}}})
        (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}")
        with pytest.raises(UserError) as caught:
            plan_sweep([f"experiment={experiment}"], str(tmp_path))
        return str(caught.value)

    assert re.match(r"unknown key 'optimizer.lrs'.* \(.*experiment=mine\)", error_of({"optimizer.lrs": "1,2"}))
    assert "no such task" in error_of({"task": "sst2,sst22"})
    assert "seed=x: allowed is a whole number" in error_of({"seed": "1,x"})
    assert "unlike grids" in error_of({"seed": "1,2"}, "mine,demo")
