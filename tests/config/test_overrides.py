"""Overrides that are not valid are one line each, with what is allowed; a quoted value arrives unchanged."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mezo_cli.config.compose import build_config
from mezo_cli.config.overrides import parse, quote
from tests.config.refused import error_of

pytestmark = pytest.mark.usefixtures("composing_all")


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("nosuch=1", ["unknown key 'nosuch'", "known: task, objective"]),
        ("lr=1e-3", ["unknown key 'lr'", "(did you mean 'optimizer.lr'?)"]),
        ("optimizer.ep=1", ["'optimizer.ep'", "(did you mean 'optimizer.eps'?)", "known under optimizer"]),
        ("steps.more=1", ["steps={more: 1}: allowed is a whole number"]),
        ("task=sst3", ["task=sst3: no such task", "(did you mean 'sst5'?)", "allowed: boolq, cb, cola, "]),
        ("+task=rte", ["write task=..."]),
        ("~task", ["one choice of each group", "allowed: boolq"]),
        ("objective.name=mml", ["not one of mlm, cls, lm"]),
        ("logger.names=[wandb,wandb]", ["wandb is named twice"]),
        ("logger=[wandb,trakio]", ["logger.names=trakio", "(did you mean 'trackio'?)"]),
        ("steps=1.5", ["steps=1.5: allowed is a whole number"]),
        ("steps=1e3", ["steps=1000.0: allowed is a whole number"]),
        ("steps=99999999999", ["out of range", "at most 4294967295"]),
        ("optimizer.lr=fast", ["optimizer.lr=fast: allowed is a finite number"]),
        ("model.path=", ["model.path is empty"]),
        ("model.revision=1e10", ["quote it"]),
        ("task.label_words=great", ["expected a list"]),
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
