"""A run's config.yaml: what is written is read back, and damage is named."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mezo_cli.config.compose import build_config
from mezo_cli.config.stored import from_yaml, is_same_run, read_config, to_yaml
from mezo_cli.errors import UserError

words = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)
odd = st.sampled_from(["Yes", "no", "null", "~", "1e3", "0x10", "1_000", "on", "${seed}", "a: b", "- a", "'", '"', "#"])

BASE = build_config([])


@settings(max_examples=20)
@given(st.one_of(words, odd), st.lists(st.one_of(words, odd), min_size=1, max_size=3))
def test_config_yaml_reads_back_as_it_was(tmp_path_factory: Any, text: str, several: list[str]) -> None:
    task = BASE.task.replace(name=text, label_words=several, rename={several[0]: "sentence"})
    path = tmp_path_factory.mktemp("c") / "config.yaml"
    wanted = BASE.replace(task=task, model=BASE.model.replace(path=text))
    path.write_text(to_yaml(wanted), encoding="utf-8")
    assert read_config(path) == wanted


def test_a_damaged_config_yaml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for text in ("steps: [", "- a", "steps: ten", "nosuch: 1", "", "\x00"):
        path.write_text(text)
        with pytest.raises(UserError, match=r"config\.yaml"):
            read_config(path)
    with pytest.raises(UserError, match="no such file"):
        read_config(tmp_path / "none.yaml")


def test_an_alias_is_refused() -> None:
    config = build_config(["task=sst2", "model=demo"])
    assert from_yaml(f"{to_yaml(config)}# & *\n") == config
    with pytest.raises(UserError, match=r"config\.yaml is damaged: .*alias"):
        from_yaml("a: &a0 [x, x, x]\nb: [*a0, *a0]\n")


def test_a_job_whose_files_say_something_else_is_not_the_same_run() -> None:
    stored = from_yaml(to_yaml(BASE))
    assert is_same_run(stored, BASE)
    for change in ({"test_at_start": False}, {"log_every": 3}, {"steps": 7}):
        assert not is_same_run(stored, BASE.replace(**change))


@pytest.mark.parametrize(("dtype", "same"), [("float32", ["float32"]), ("float16", ["float32", "float16"])])
def test_a_dtype_that_null_stood_for_is_the_same_run(dtype: str, same: list[str]) -> None:
    def made(compute: str) -> Any:
        return build_config(["task=sst2", "model=demo", f"model.dtype={dtype}", f"model.compute_dtype={compute}"])

    assert [chosen for chosen in ("float32", "float16") if is_same_run(made(chosen), made("null"))] == same
    assert not is_same_run(made("float16"), made("float32"))
