"""Runs of objective generate: resumed and replayed bit for bit, in micro-batches, by ranks, evaluated again."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from mezo_cli.errors import UserError
from mezo_cli.objectives import generation
from mezo_cli.perturb import members
from mezo_cli.perturb.members import MemberRows
from mezo_cli.runs import Run
from tests.command_line import mezo
from tests.interruption import interrupt_and_resume, last_weights
from tests.ranks import run_ranks

DEMO = ["task=demo-arithmetic", "data=demo", "model=demo-decoder", "objective=generate", "objective.max_new_tokens=6"]
DEMO += ["objective.reward={contains: 0.1, countdown: {weight: 1, numbers_used: 0.1}}", "model.device=cpu"]
DEMO += ["data.eval_limit=6", "data.train_size=40", "batch_size=6", "steps=4", "eval_every=2", "log_every=1"]
DEMO += ["optimizer.lr=1e-2", "optimizer.eps=3e-2", "test_at_start=false"]
DRAWN = ["objective.temperature=1", "objective.samples=2", "objective.eval_temperature=0.7", "objective.eval_samples=2"]
CASES = {
    "greedy": [],
    "drawn, max": [*DRAWN, "objective.reduce=max"],
    "es": ["optimizer=es", "optimizer.members=4", *DRAWN],
    "es, pairs, lora": ["optimizer=es", "optimizer.members=4", "optimizer.antithetic=true", "peft=lora"],
    "lora": ["peft=lora", *DRAWN],
    "lm": ["objective.loss=lm", "objective.reward=countdown"],
}

pytestmark = pytest.mark.usefixtures("eager_kernels")


def words(name: str) -> list[str]:
    keys = [word.split("=")[0] for word in CASES[name]]
    return [*(word for word in DEMO if word.split("=")[0] not in keys), *CASES[name]]


def figures(run: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without times, and without what counts by process."""
    left_out = ("seconds", "completions", "crc")
    return [{key: value for key, value in line.items() if key not in left_out} for line in Run(run).metrics()]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_resumed_replayed_and_evaluated_it_is_bitwise_identical(name: str, tmp_path: Path) -> None:
    run, whole = interrupt_and_resume(words(name), tmp_path, "es" if "es" in name.split(",") else "mezo")
    assert figures(run) == figures(whole)
    assert (run / "predictions.jsonl").read_bytes() == (whole / "predictions.jsonl").read_bytes()
    assert mezo("replay", run, "--step", "4", "--out", tmp_path / "replayed").code == 0
    assert last_weights(tmp_path / "replayed") == last_weights(whole)
    summary = Run(run).read_summary()
    document = json.loads(mezo("eval", run, "--json").out)
    assert [document[key] for key in ("loss", "reward")] == [summary["test"][key] for key in ("loss", "reward")]
    lines = (run / "predictions.jsonl").read_text().splitlines(keepends=True)
    assert len(Run(run).predictions() or []) == len(lines)
    (run / "predictions.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(UserError, match=r"predictions\.jsonl is damaged"):
        Run(run).predictions()


def test_micro_batches_give_the_same_rewards(tmp_path: Path) -> None:
    for size in ("null", "2"):
        assert mezo("train", *words("es"), f"micro_batch_size={size}", f"hydra.run.dir={tmp_path / size}").code == 0
    assert figures(tmp_path / "2") == figures(tmp_path / "null")


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", ["mezo", "es", "fzoo"])
def test_members_of_a_lora_share_batches(optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = ["peft=lora", f"optimizer={optimizer}", "eval_every=4"]
    more += {"mezo": DRAWN, "es": ["optimizer.members=6", "optimizer.antithetic=true"], "fzoo": []}[optimizer]
    lines, shared = [], []
    batches = mock.Mock(wraps=MemberRows)
    monkeypatch.setattr(members, "MemberRows", batches)
    for tokens in (generation.MEMBER_TOKENS, 0):
        monkeypatch.setattr(generation, "MEMBER_TOKENS", tokens)
        assert mezo("train", *DEMO, *more, f"hydra.run.dir={tmp_path / str(tokens)}").code == 0
        lines.append(figures(tmp_path / str(tokens)))
        shared.append([call.args[0] for call in batches.call_args_list])
        batches.reset_mock()
    count = {"mezo": 2, "es": 6, "fzoo": 9}[optimizer]  # FZOO's baseline is one of them
    assert shared == [[count] * 4, []]
    assert lines[0] == lines[1]  # the texts are the same
    assert any(line["reward_std"] for line in lines[0] if line["kind"] == "train")


@pytest.mark.sample(1)
@pytest.mark.parametrize("peft", ["lora", "none"])
def test_ranks_share_the_members(peft: str, tmp_path: Path) -> None:
    ours = [*words("es"), "distributed.split=directions", f"peft={peft}"]
    assert mezo("train", *ours, f"hydra.run.dir={tmp_path / 'single'}").code == 0
    ended = run_ranks(*[["train", *ours, f"hydra.run.dir={tmp_path / 'ranks'}"]] * 2)
    assert [rank.code for rank in ended] == [0, 0], ended
    single, both = (figures(tmp_path / name) for name in ("single", "ranks"))
    assert both == single
    assert last_weights(tmp_path / "ranks") == last_weights(tmp_path / "single")


def test_the_reward_length_is_not_the_length_of_completions(tmp_path: Path) -> None:
    more = ["objective.reward={length: 0.1, contains: 1}", "steps=0", f"hydra.run.dir={tmp_path / 'run'}"]
    assert mezo("train", *(word for word in DEMO if "reward" not in word), *more).code == 0
    line = Run(tmp_path / "run").metrics()[0]
    assert line["reward_length"] < 0 < line["length"]
    assert line["reward"] == pytest.approx(0.1 * line["reward_length"] + line["reward_contains"])
