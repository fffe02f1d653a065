"""What is stored of a config: config.yaml is read back as it was, damage is named, the user's own code left out."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mezo_cli.config import stored
from mezo_cli.config.compose import build_config
from mezo_cli.config.stored import from_yaml, is_same_run, read_config, to_yaml
from mezo_cli.errors import UserError
from tests.command_line import error_line, mezo

pytestmark = pytest.mark.usefixtures("composing_all")

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


REWARDED = ["experiment=demo-reward", "steps=1", "batch_size=2", "eval_every=1", "data.eval_limit=12"]
SHORT = [*REWARDED, "objective.max_new_tokens=2", "data.train_size=16"]


def test_a_function_is_told_from_names_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for word in ("reward.py:f", "'reward.py:f'", '"reward.py:f"'):
        rest, own = stored.split_own_code(["lr=1", f"objective.reward={word}", "seed=2"])
        assert (rest, own) == (["lr=1", "seed=2"], {stored.REWARD: f"{tmp_path}/reward.py:f"})
    last = ["objective.reward=a.py:f", "objective.reward=f1"]
    assert stored.split_own_code(last) == (["objective.reward=f1"], {})
    for value in ("f1", "exact,f1", "{format: {pattern: 'a:b'}}", " {a: 1}", "shuffled:f1", "null"):
        assert stored.split_own_code([f"objective.reward={value}"]) == ([f"objective.reward={value}"], {})
    for value in ("a.py:f,b.py:f", "${oc.env:X}:f"):
        with pytest.raises(UserError, match="expected one value"):
            stored.split_own_code([f"objective.reward={value}"])


@pytest.mark.parametrize(
    "word",
    [
        "objective.reward=reward.py:f",
        "++objective.reward='shuffled:package.module:f'",
        "objective.reward=${task.name}",
        "engine.python=/bin/sh",
        "engine.url=http://192.0.2.1:1",
        "hydra/launcher=joblib",
        "+hydra.callbacks.x._target_=os.getcwd",
        "hydra/sweeper@hydra.x=basic",
    ],
)
def test_what_a_sweeps_record_cannot_say(word: str, tmp_path: Path) -> None:
    stored.check_stored(["objective.reward={format: {pattern: 'a:b'}}", "objective.reward=f1", "seed=1"], tmp_path)
    with pytest.raises(UserError) as caught:
        stored.check_stored([word], tmp_path / "sweep.json")
    assert f"sweep.json: '{word}' is not taken from a file" in str(caught.value)


def test_a_function_is_in_the_config_and_not_in_what_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEZO_REWARD", raising=False)
    function = f"{tmp_path}/reward.py:score"
    (tmp_path / "reward.py").write_text("")
    config = build_config([*REWARDED, f"objective.reward={function}"])
    assert stored.reward_of(config) == function
    assert stored.own_code_used(config)
    assert "reward.py" not in to_yaml(config)
    again = from_yaml(to_yaml(config))
    assert not stored.own_code_used(again)
    with stored.for_workers({stored.REWARD: function}):
        assert stored.own_code_used(again)
    assert "MEZO_REWARD" not in os.environ
    somebody_elses = from_yaml(to_yaml(config).replace("reward: null", f"reward: {function}"))
    assert stored.reward_of(somebody_elses) is None
    assert "reward: f1\n" in to_yaml(build_config([*REWARDED, "objective.reward=f1"]))


def test_a_folder_of_the_users_names_a_reward_and_a_received_run_or_sweep_runs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eager_kernels: None
) -> None:
    """The function leaves a marker when it is called."""
    monkeypatch.chdir(tmp_path)
    marker, run, sweep = (tmp_path / name for name in ("marker", "run", "sweep"))
    Path("mine.py").write_text(
        f"from pathlib import Path\n\ndef f(completions, rows):\n    Path({str(marker)!r}).touch()\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    Path("mine/experiment").mkdir(parents=True)
    Path("mine/experiment/own.yaml").write_text(
        "# @package _global_\ndefaults:\n  - demo-reward\nobjective:\n  reward: mine.py:f\n"
    )
    own = ["--config-dir", "mine", "experiment=own", *SHORT[1:]]
    assert mezo("train", *own, f"hydra.run.dir={run}").code == 0
    assert marker.exists()
    assert mezo("train", "-m", *own, "seed=1", f"hydra.sweep.dir={sweep}").code == 0
    marker.unlink()

    for words in (["resume", run, "steps=2"], ["eval", run]):
        assert "give it again, objective.reward=FILE.py:function" in error_line(mezo(*words))
    assert "give it again, --config-dir DIR" in error_line(mezo("resume", sweep))
    record = json.loads((sweep / "sweep.json").read_text())
    for word in ("objective.reward=mine.py:f", "hydra/launcher=joblib"):
        job = {**record["jobs"][0], "overrides": [*record["jobs"][0]["overrides"], word]}
        (sweep / "sweep.json").write_text(json.dumps(record | {"jobs": [job]}))
        assert f"'{word}' is not taken from a file" in error_line(mezo("resume", sweep, "--config-dir", "mine"))
    (sweep / "sweep.json").write_text(json.dumps(record | {"config_dir": "mine"}))
    assert "config_dir" in error_line(mezo("resume", sweep))
    assert not marker.exists()

    assert mezo("eval", run, "objective.reward=mine.py:f").code == 0
    assert marker.exists()
