"""The settings of a choice: its own class, checked by pydantic; those of other choices are refused or dropped."""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import yaml

from mezo_cli.config.base import PositiveNumber
from mezo_cli.config.compose import build_config
from mezo_cli.config.explain import key_owners, key_schema
from mezo_cli.config.optimizers import ZerothOrderConfig
from mezo_cli.config.schema import to_dict
from mezo_cli.config.stored import read_config, to_yaml
from mezo_cli.config.validation import build
from mezo_cli.errors import UserError
from mezo_cli.optim import OPTIMIZERS, make_config
from mezo_cli.sweep.plan import plan_sweep
from tests.config.test_overrides import error_of

MEZO = ["name", "lr", "eps", "weight_decay", "noise", "schedule", "samples", "sample_schedule", "clip_g", "clip_window"]


class ClippedConfig(ZerothOrderConfig):
    implementation: ClassVar[str] = "mezo_cli.optim.mezo:Mezo"
    clip: PositiveNumber = 2.0


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two plug-ins are installed: one of them cannot be imported."""
    added = {"clipped": f"{__name__}:ClippedConfig", "broken": "no_such_package:Optimizer"}
    monkeypatch.setitem(vars(OPTIMIZERS), "targets", {**OPTIMIZERS.targets, **added})
    key_owners.cache_clear()
    yield
    key_owners.cache_clear()


def plain(**values: object) -> dict[str, object]:
    """The default config as plain values, with another optimizer."""
    return {**to_dict(build_config(["data=demo"])), "optimizer": values}


def test_config_yaml_lists_the_settings_of_the_choices_alone() -> None:
    stored = yaml.safe_load(to_yaml(build_config(["data=demo"])))
    assert (list(stored["optimizer"]), list(stored["peft"]), stored["engine"]) == (MEZO, ["name"], {"name": "none"})
    stored = yaml.safe_load(to_yaml(build_config(["data=files", "optimizer=sgd", "peft=bias"])))
    assert list(stored["optimizer"])[-3:] == ["max_grad_norm", "dropout", "momentum"]
    assert (list(stored["peft"]), stored["data"]["dir"]) == (["name", "layers"], None)


def test_a_setting_of_another_choice_is_dropped_from_a_file_and_refused_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\noptimizer: {eps: 0.5}\nseed: 7\nsteps: ${seed}\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    words = ["data=demo", "experiment=mine"]
    config = build_config([*words, "optimizer=adamw"], str(tmp_path))
    assert (config.optimizer, config.steps) == (make_config("adamw", lr=1e-5, schedule="linear"), 7)
    assert build_config(words, str(tmp_path)).optimizer.eps == 0.5  # type: ignore[attr-defined]
    refused = r"'optimizer.eps=1': optimizer=adamw does not read it, only optimizer=mezo, optimizer=mezo_momentum"
    with pytest.raises(UserError, match=refused):
        build_config([*words, "optimizer=adamw", "optimizer.eps=1"], str(tmp_path))


def test_a_sweep_over_optimizers_takes_a_setting_that_one_of_them_reads(tmp_path: Path) -> None:
    words = ["data=demo", "optimizer=mezo,adamw", f"hydra.sweep.dir={tmp_path}"]
    jobs = plan_sweep([*words, "optimizer.eps=0.5"]).jobs or ()
    assert [getattr(job.config.optimizer, "eps", None) for job in jobs] == [0.5, None]
    assert [len(job.overrides) for job in jobs] == [3, 2]  # `mezo train` refuses what adamw does not read
    of_objectives = ["data=demo", "objective=mlm,cls", "model.tie_embeddings=true", f"hydra.sweep.dir={tmp_path}"]
    assert [len(job.overrides) for job in plan_sweep(of_objectives).jobs] == [3, 2]
    with pytest.raises(UserError, match=r"job 1 of 2 \(.*\): 'optimizer.window=3': optimizer=mezo does not read it"):
        plan_sweep([*words, "optimizer.window=3"])


@pytest.mark.usefixtures("plugins")
def test_a_plug_ins_own_setting_comes_last_is_checked_and_is_read_back(tmp_path: Path) -> None:
    config = build(plain(name="clipped", clip=3))
    assert config.optimizer == ClippedConfig(name="clipped", clip=3.0)
    assert build(plain(name="clipped")).optimizer == ClippedConfig(name="clipped")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert list(yaml.safe_load(to_yaml(config))["optimizer"]) == [*MEZO, "clip"]
    assert read_config(tmp_path / "config.yaml") == config
    assert key_schema("optimizer.clip")["type"] == "number"
    with pytest.raises(UserError, match=r"optimizer.clip=0: out of range, allowed is a finite number above 0"):
        build(plain(name="clipped", clip=0))
    with pytest.raises(UserError, match=r"unknown key 'optimizer.clp' \(did you mean 'optimizer.clip'\?\)"):
        build(plain(name="clipped", clp=3))


@pytest.mark.usefixtures("plugins")
def test_a_broken_plug_in_is_reported_when_it_is_chosen() -> None:
    assert build(plain(name="mezo")).optimizer.name == "mezo"
    with pytest.raises(UserError, match=r"optimizer=broken: the plug-in no_such_package:Optimizer cannot be imported"):
        build(plain(name="broken"))


FZOO = "optimizer=fzoo"


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ([], 50),
        ([FZOO], 11),  # 9 forwards per step
        (["optimizer.samples=4"], 12),
        (["optimizer=es", "optimizer.members=10"], 10),
        (["optimizer=adamw"], 50),  # a forward and a backward
        (["optimizer.samples=5", "optimizer.sample_schedule=linear"], 17),
    ],
)
def test_the_most_steps_within_the_budget_are_taken(words: list[str], steps: int) -> None:
    config = build_config([*words, "forwards=100"])
    assert config.steps == steps
    assert config.passes(steps) <= 100
    more = build_config([*words, f"steps={steps + 1}"])
    assert more.passes(steps + 1) > 100


def test_dev_is_evaluated_after_the_first_step_at_or_past_a_number() -> None:
    config = build_config([FZOO, "forwards=100", "eval_at_forwards=[9,10,50,100]"])
    assert [step for step in range(12) if config.evaluates_at(step)] == [0, 1, 2, 6, 11]


def test_at_equal_forwards_every_method_stands_at_the_same_batch() -> None:
    mezo, fzoo = (build_config([*words, "forwards=100"]) for words in ([], [FZOO]))
    assert [mezo.batch_number(step) for step in range(4)] == [0, 1, 2, 3]
    assert [fzoo.batch_number(step) for step in range(4)] == [0, 4, 9, 13]
    assert build_config([FZOO, "steps=11"]).batch_number(3) == 3


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["forwards=100", "steps=3"], ["steps=3", "forwards=100", "forwards=null"]),
        (["forwards=5", FZOO], ["forwards=5", "9"]),
        (["forwards=10", "optimizer=linear_probe"], ["forwards=10", "linear_probe"]),
        (["forwards=100", "eval_at_forwards=[50,200]"], ["eval_at_forwards", "200", "100"]),
        (["forwards=100", "eval_at_forwards=[50]", "eval_every=5"], ["eval_every=5", "eval_at_forwards=[]"]),
        (["data.batches=balanced", "objective=generate", "task=demo-arithmetic"], ["data.batches", "generate"]),
        (["data.batches=balanced", "batch_size=1"], ["batch_size=1", "2"]),
    ],
)
def test_what_cannot_act_together_is_refused(words: list[str], parts: list[str]) -> None:
    line = error_of(*words)
    assert all(part in line for part in parts), line
