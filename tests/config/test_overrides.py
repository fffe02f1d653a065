"""Overrides that are not valid are one line each, of a run and of a sweep, whose jobs are checked before the first."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mezo_cli.config.compose import build_config, load
from mezo_cli.config.explain import OTHER_NAMES, key_owners
from mezo_cli.config.overrides import HYDRA_DIRS, parse, quote
from mezo_cli.errors import UserError
from mezo_cli.sweep.plan import plan_sweep

pytestmark = pytest.mark.usefixtures("composing_all")


def error_of(*words: str, config_dir: Path | None = None, compose: Callable[..., Any] = load) -> str:
    with pytest.raises(UserError) as error:
        compose(words, None if config_dir is None else str(config_dir))
    line = str(error.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("nosuch=1", ["unknown key 'nosuch'", "known: task, objective"]),
        ("r=8", ["unknown key 'r'", "(did you mean 'peft.r'?)"]),
        ("optimizer.ep=1", ["'optimizer.ep'", "(did you mean 'optimizer.eps'?)", "known under optimizer"]),
        ("steps.more=1", ["steps={more: 1}: allowed is a whole number"]),
        ("task=sst3", ["task=sst3: no such task", "(did you mean 'sst5'?)", "allowed: boolq, cb, cola, "]),
        ("+task=rte", ["write task=..."]),
        ("~task", ["one choice of each group", "allowed: boolq"]),
        ("objective.name=mml", ["not one of mlm, cls, lm"]),
        ("logger.names=[wandb,wandb]", ["wandb is named twice"]),
        ("logger=[wandb,trakio]", ["logger.names=trakio", "(did you mean 'trackio'?)"]),
        ("steps=1.5", ["steps=1.5: allowed is a whole number"]),
        (f"steps={'9a' * 99}", [f"steps={'9a' * 20} [...] {'9a' * 20}: allowed is a whole number"]),
        ("steps=99999999999", ["out of range", "at most 4294967295"]),
        ("optimizer.lr=fast", ["optimizer.lr=fast: allowed is a finite number"]),
        ("model.path=", ["model.path is empty"]),
        ("model.revision=1e10", ["quote it"]),
        ("task.label_words=great", ["expected a list, e.g. 'task.label_words=[one,two]'"]),
        ("task.label_words=good,bad", ["add -m to sweep over them, or write 'task.label_words=[good,bad]' for a list"]),
        ("task.label_words=[good,", ["quote a list with spaces for the shell, 'task.label_words=[one, two]'"]),
        ("logger=none,wandb", ["or write 'logger=[none,wandb]' for a list"]),
        ("task.labels=[a,b,c]", ["task.label_words has 2 and task.files.labels has 2 and task.hub.labels has 2: giv"]),
        ("task.labels=[positive,negative]", ["put task.label_words [terrible, great] and task.files.labels [0, 1]"]),
        ("task.label_words=[Yes,true]", ["boolean True", "quote the word"]),
        ("task.labels=[a,[b]]", ["expected a text"]),
        ("task.hub=null", ["expected a group of keys"]),
        ("+steps=5", ["steps exists already", "write steps=..."]),
        ("~steps", ["cannot be removed"]),
        ("=5", ["is not KEY=VALUE"]),
        ("task.template={sentence} It was {mask}.", ["cannot be read", "quote"]),
        ("steps=1,2", ["names several values: add -m"]),
        ("steps=${sed}", ["(did you mean 'seed'?)"]),
        ("model.path=${oc.env:MEZO_NOT_SET}", ["model.path: an interpolation does not resolve", "MEZO_NOT_SET"]),
        ("hydra.run.dir=", ["hydra.run.dir needs a folder"]),
        ("hydra.run.dir='~/runs'", ["$HOME"]),
        ("hydra.run.dri=x", ["(did you mean 'hydra.run.dir'?)"]),
        ("+hydra.x=1", ["only hydra.run.dir"]),
        ("hydra.sweep.dir=x", ["'hydra.sweep.dir=x' is about how a sweep is run: add -m"]),
    ],
)
def test_an_override_that_is_not_valid_is_one_line(word: str, parts: list[str]) -> None:
    line = error_of(word)
    for part in parts:
        assert part in line


@pytest.mark.parametrize("name", [name for name in OTHER_NAMES if " " not in name])
@pytest.mark.parametrize("group", ["", "data.", "train."])
def test_the_names_of_other_programs_are_answered(name: str, group: str) -> None:
    """Each answer is a sentence, or a key that takes a value."""
    key, line = OTHER_NAMES[name], error_of(f"{group}{name}=1")
    assert line == f"unknown key '{group}{name}': {key if ' ' in key else f'give {key}=...'}"
    assert " " in key or key in key_owners() or key in HYDRA_DIRS


def test_a_number_with_an_exponent_is_a_whole_number() -> None:
    assert build_config(["steps=1e3"]).steps == 1000


def test_labels_in_a_new_order_need_every_list_that_goes_by_it() -> None:
    words = ["objective=cls", "task.labels=[positive,negative]", "task.hub.labels=[positive,negative]"]
    assert error_of(*words) == "task.labels has a new order: put task.files.labels [0, 1] into it, too"
    assert build_config([*words, "task.files.labels=['1','0']"]).task.files.labels == ["1", "0"]


words = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)
odd = st.sampled_from(["'", "\\", "\\'", "${seed}", "a,b", "[a]", "{a:b}", " ", "null", "1e3", "#", "\\\\"])


@settings(max_examples=50)
@given(st.one_of(words, odd))
def test_a_quoted_value_is_read_back_unchanged(text: str) -> None:
    (override,) = parse([f"logger.project={quote(text)}"], {})
    assert override.value.replace("\\${", "${") == text  # the rest OmegaConf resolves


def test_a_quoted_value_reaches_the_config_unchanged() -> None:
    text = "'a\\', ${seed} [b]\\"
    assert build_config([f"logger.project={quote(text)}"]).logger.project == text


sweep_error_of = partial(error_of, compose=plan_sweep)


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("steps=1,ten", "steps=ten: allowed is a whole number"),
        ("seed=range(3,1)", "names no value"),
        ("task=glob(x*)", "names no value"),
    ],
)
def test_a_sweep_is_checked_whole(word: str, part: str) -> None:
    assert part in sweep_error_of("batch_size=8", word, "seed=1,2" if "seed" not in word else "steps=1")


def test_a_sweep_counts_its_jobs() -> None:
    for words, count in ((["task=sst2,rte", "seed=13,42,87"], 6), (["task=glob(sst*)", "seed=range(0,2)"], 4), ([], 1)):
        assert len(plan_sweep(["steps=1", *words]).jobs) == count


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "words",
    [
        ["experiment=paper/zero_shot", "task=sst2,rte", "seed=1,2"],
        ["task=rte,sst2", "task.template='${task.name}{mask}'", "task.name=a,b", "optimizer.lr=1,2"],
        ["+task.rename.a=label", "task=rte,sst2", "seed=1,2"],
        ["optimizer=mezo,mezo_adam", "optimizer.lr=1e-3,2e-3", "optimizer.lr=5e-3", "data=files", "data.dir=a,'b c'"],
        ["task.hub.path=a,b", "task.hub={path: x}"],
        ["seed=1,2", "hydra.sweep.subdir=${hydra.job.override_dirname}"],
    ],
)
def test_each_job_is_what_hydra_composes_for_it(words: list[str]) -> None:
    for job in plan_sweep(words).jobs:
        assert job.config == build_config(job.overrides)


def test_pairs_are_validated_too() -> None:
    line = sweep_error_of("optimizer=mezo,adamw", "objective.loss=cross_entropy,accuracy")
    assert line.startswith("job 4 of 4 (optimizer=adamw objective.loss=accuracy): objective.loss=accuracy: it has no ")


def test_too_many_jobs_are_refused() -> None:
    assert "at most 100,000" in sweep_error_of("seed=range(0,1000)", "steps=range(0,1000)")
    assert "at most 100,000" in sweep_error_of("seed=range(0,1000000000)")


def test_directories_share_one_time() -> None:
    plan = plan_sweep(["task=sst2,rte", "hydra.sweep.subdir=${now:%f}-${mezo_unique:}-${hydra:job.num}"])
    first, second = [job.directory.name for job in plan.jobs or ()]
    assert (first[-2:], second[-2:]) == ("-0", "-1")
    assert first[:-2] == second[:-2]
