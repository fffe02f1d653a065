"""Runs of objective generate whose completions come from an engine: those of the model itself, replayed without it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mezo_cli.config.compose import build_config
from mezo_cli.engine.placement import variables_of_rank
from mezo_cli.errors import UserError
from tests.command_line import mezo
from tests.engine.fakes import fake_python
from tests.engine.step_checks import compare_scores
from tests.ranks import run_ranks

DEMO = ["task=demo-arithmetic", "data=demo", "model=demo-decoder", "objective=generate", "objective.max_new_tokens=6"]
DEMO += ["model.device=cpu", "data.eval_limit=4", "data.train_size=8", "batch_size=4", "steps=3", "eval_every=0"]
DEMO += ["log_every=1", "test_at_start=false", "optimizer.lr=1e-2"]
REWARD = "def score(completions, rows):\n    return [sum(map(ord, text)) / 1000 for text in completions]\n"
ES = ["optimizer=es", "optimizer.members=5"]
CASES = {
    "lora": [*ES, "peft=lora", "optimizer.eps=0.3", "engine.max_loras=2"],
    "lora pairs": ["optimizer.samples=2", "optimizer.lr=1e-4", "optimizer.eps=0.3", "peft=lora", "engine.max_loras=3"],
    "all parameters": [*ES, "optimizer.eps=0.1", "optimizer.weight_decay=0.1"],
    "fzoo": ["optimizer=fzoo", "optimizer.members=4", "optimizer.eps=0.1"],
    "answers": ["objective.loss=lm", "optimizer.lr=1e-4", "peft=lora"],
}

pytestmark = [pytest.mark.usefixtures("eager"), pytest.mark.usefixtures("in_tmp_path")]


def train(name: str, case: str, mode: str | None, *more: str) -> Any:
    """Train a run; by the fake engine if a mode is given."""
    Path("mine.py").write_text(REWARD)
    words = [word for word in CASES[case] if mode is not None or not word.startswith("engine.")]
    engine = [] if mode is None else ["engine=vllm", f"engine.python={fake_python(Path.cwd() / 'bin', mode)}"]
    given = {word.split("=")[0] for word in words}
    default = [word for word in DEMO if word.split("=")[0] not in given]
    return mezo("train", *default, *engine, *words, "objective.reward=mine.py:score", *more, f"hydra.run.dir={name}")


def lines(name: str) -> list[dict[str, Any]]:
    """The numbers of metrics.jsonl, without times."""
    left_out = ("seconds", "crc", "completions")
    read = map(json.loads, Path(name, "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k not in left_out and not isinstance(v, str)} for line in read]


def check_same(name: str, other: str) -> None:
    """Check that two runs have the same rewards and lengths, and losses as close as forwards round."""
    for line, wanted in zip(lines(name), lines(other), strict=True):
        assert line == pytest.approx(wanted, rel=1e-3, abs=1e-4)


def check_replay(name: str) -> None:
    assert mezo("replay", name, "--step", "3", "--out", f"{name}-again").code == 0
    (file,) = Path(f"{name}-again").glob("*model.safetensors")
    last = load_file(Path(name, "checkpoints", "last", file.name))
    assert all(torch.equal(value, last[key]) for key, value in load_file(file).items())


@pytest.mark.parametrize(
    "case", [case if case == "lora" else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_the_engine_says_what_the_model_says(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = compare_scores(monkeypatch)
    result = train("by-engine", case, "")
    assert result.code == 0, result.err
    assert len(errors) == 3
    assert max(errors) <= 1e-4
    if case != "answers":
        assert len({line["reward"] for line in lines("by-engine") if "reward_std" in line}) > 1
    record = json.loads(Path("by-engine/run.json").read_text())["engine"]
    assert record == {"name": "vllm", "version": "0", "texts_repeat": True}
    assert train("own", case, None).code == 0
    check_same("by-engine", "own")
    check_replay("by-engine")


@pytest.mark.slow
def test_drawn_completions_are_those_of_their_seeds_and_a_resumed_run_goes_on() -> None:
    drawn = ["objective.temperature=1", "objective.samples=2"]
    dies = train("died", "all parameters", "dies=9", *drawn, "checkpoint_every=1")
    assert dies.code == 1
    assert dies.err.splitlines()[-1].endswith("engine=vllm failed: its process was ended by SIGKILL: out of luck")
    python = fake_python(Path.cwd() / "bin", "")
    resumed = mezo("resume", "died", f"engine.python={python}", "objective.reward=mine.py:score")
    assert resumed.code == 0, resumed.err
    assert train("whole", "all parameters", "", *drawn, "checkpoint_every=1").code == 0
    check_same("died", "whole")
    check_replay("died")


@pytest.mark.slow
def test_an_engine_that_hangs_ends_the_run_in_one_line() -> None:
    result = train("hangs", "lora", "hangs=8", "engine.timeout=25")
    assert result.code == 1
    line = result.err.splitlines()[-1]
    assert line == "error: engine=vllm failed: it did not answer within engine.timeout=25 s"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["optimizer=es", "optimizer.anchor={l2: 0.1}"], "without an anchor; or use peft=lora"),
        (["optimizer=mezo_momentum"], "sums of c z alone"),
    ],
)
def test_methods_with_dense_state_are_refused_with_all_parameters(words: list[str], part: str) -> None:
    with pytest.raises(UserError, match=part):
        build_config([*DEMO, "engine=vllm", *words])


RANKS = ["optimizer=es", "optimizer.members=5", "peft=lora", "optimizer.eps=0.3", "engine.max_loras=2"]


def ranked(name: str, modes: list[str]) -> list[Any]:
    """Train a run by ranks, each with a fake engine."""
    Path("mine.py").write_text(REWARD)
    common = [*DEMO, *RANKS, "engine=vllm", "objective.reward=mine.py:score", f"hydra.run.dir={name}"]
    words = [["train", *common, f"engine.python={fake_python(Path.cwd() / 'bin', mode)}"] for mode in modes]
    return run_ranks(*words)


@pytest.mark.slow
def test_each_rank_has_an_engine_of_its_own() -> None:
    for result in ranked("ranks", ["", ""]):
        assert result.code == 0, result
    assert train("alone", "lora", "").code == 0
    for line, wanted in zip(lines("ranks"), lines("alone"), strict=True):
        same = ("loss", "loss_std", "loss_min", "loss_max", "step")
        assert {k: v for k, v in line.items() if k in same} == {k: v for k, v in wanted.items() if k in same}
    check_replay("ranks")


@pytest.mark.slow
def test_an_engine_that_dies_ends_all_ranks_in_one_line() -> None:
    results = ranked("died", ["", "dies=8"])
    assert [result.code for result in results] == [1, 1]
    line = results[0].err.splitlines()[-1]
    assert line == "error: rank 1: engine=vllm failed: its process was ended by SIGKILL: out of luck"
    python = fake_python(Path.cwd() / "bin", "")
    assert mezo("resume", "died", f"engine.python={python}", "objective.reward=mine.py:score").code == 0
    check_replay("died")


def test_ranks_share_the_gpus_and_cpus_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    for name, value in {"RANK": 5, "LOCAL_RANK": 1, "WORLD_SIZE": 6, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    placed = variables_of_rank(2)
    assert (placed["CUDA_VISIBLE_DEVICES"], placed["VLLM_CPU_OMP_THREADS_BIND"], placed["RANK"]) == ("6,7", "2|3", None)
    monkeypatch.delenv("RANK")
    assert variables_of_rank(2) == {}
