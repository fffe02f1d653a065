"""Drift from the start and the rows of `data.keep`, at each evaluation of a run on generated text."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mezo_cli.config.stored import read_config
from mezo_cli.runs import Run
from mezo_cli.training.loggers.base import RunLoggers
from tests import tiny
from tests.command_line import error_line, mezo, ok
from tests.interruption import replay_from_base

WORDS = ["task=demo-arithmetic", "model=demo-decoder", "data=demo", "objective=generate", "objective.max_new_tokens=8"]
WORDS += ["objective.reward=countdown", "batch_size=16", "eval_every=2", "data.eval_limit=16", "model.device=cpu"]
WORDS += ["optimizer.lr=1e-3", "optimizer.eps=1e-2", "test_at_start=false"]
KEPT = [{"prompt": "123>06=", "answer": "(1+2+3)"}, {"prompt": "234>24=", "answer": "(2*3*4)"}]


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of 4 steps with two rows to keep."""
    folder = tmp_path_factory.mktemp("generated")
    tiny.write_jsonl(folder / "keep.jsonl", KEPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEZO_EAGER", "1")
        words = [*WORDS, "steps=4", f"data.keep={folder / 'keep.jsonl'}"]
        result = ok("train", *words, f"hydra.run.dir={folder / 'run'}")
        assert "tokens/s" in result.out
        assert "  drift 0  keep_log_prob " in result.out
        yield folder / "run"


def dev(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("split") == "dev"]


def test_the_figures_are_those_of_the_weights(generated: Path) -> None:
    run = Run.open(generated)
    config = read_config(generated / "config.yaml")
    (_, start), (_, end) = (
        (step, {n: p.detach().clone() for n, p in replay_from_base(config, run, step).params.tensors.items()})
        for step in (0, 4)
    )
    length, moved = (
        sum(float((end[n] * sign - start[n]).double().square().sum()) for n in start) ** 0.5 for sign in (0, 1)
    )
    first, *_, last = dev(generated)
    assert (first["drift"], first["keep_kl"]) == (0, 0)
    assert last["drift"] == pytest.approx(moved / length, rel=1e-5)
    log_probs = []
    for step in (0, 4):
        session = replay_from_base(config, run, step)
        parts = []
        for row in KEPT:
            tokenizer = session.loaded.tokenizer
            prompt = session.encoder.tokenizer(row["prompt"])["input_ids"]
            answer = [*tokenizer.encode(row["answer"], add_special_tokens=False), tokenizer.eos_token_id]
            if session.encoder.stop and row["answer"].endswith(tuple(session.encoder.stop)):
                answer.pop()
            with torch.no_grad():
                logits = session.loaded.model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0].double()
            rows = logits[len(prompt) - 1 : -1].log_softmax(dim=-1)
            parts.append((rows, torch.tensor(answer)))
        log_probs.append(parts)
    tokens = sum(len(answer) for _, answer in log_probs[1])
    chosen = sum(float(rows.gather(1, answer.unsqueeze(1)).sum()) for rows, answer in log_probs[1])
    divergence = sum(float((old.exp() * (old - new)).sum()) for (old, _), (new, _) in zip(*log_probs, strict=True))
    assert last["keep_log_prob"] == pytest.approx(chosen / tokens, rel=1e-5)
    assert last["keep_kl"] == pytest.approx(divergence / tokens, rel=1e-3)
    assert last["keep_kl"] > 0


def test_a_resumed_run(generated: Path, tmp_path: Path, eager_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: dict[str, float] = {}
    monkeypatch.setattr(RunLoggers, "log", lambda loggers, step, scalars: logged.update(scalars))
    words = [*WORDS, "steps=4", "max_seconds=0.001", "at_limit=stop", f"data.keep={generated.parent / 'keep.jsonl'}"]
    assert mezo("train", *words, f"hydra.run.dir={tmp_path / 'run'}").code != 0
    assert len(dev(tmp_path / "run")) < 3
    ok("resume", tmp_path / "run", "max_seconds=null")
    names = ("step", "drift", "keep_log_prob", "keep_kl", "reward")
    assert {name: logged[f"dev/{name}"] for name in names[1:]} == {name: dev(generated)[-1][name] for name in names[1:]}
    assert [[line[name] for name in names] for line in dev(tmp_path / "run")] == [
        [line[name] for name in names] for line in dev(generated)
    ]


def test_a_resumed_run_with_another_file_is_refused(tmp_path: Path, eager_kernels: None) -> None:
    tiny.write_jsonl(tmp_path / "keep.jsonl", KEPT)
    words = [*WORDS, "steps=2", "max_seconds=0.001", "at_limit=stop", f"data.keep={tmp_path / 'keep.jsonl'}"]
    words += ["objective.drift=false"]
    assert mezo("train", *words, f"hydra.run.dir={tmp_path / 'run'}").code != 0
    assert all("drift" not in line and "keep_kl" in line for line in dev(tmp_path / "run"))
    tiny.write_jsonl(tmp_path / "keep.jsonl", KEPT[:1])
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    line = error_line(mezo("resume", tmp_path / "run", "max_seconds=null"))
    assert f"data.keep={tmp_path / 'keep.jsonl'} has changed" in line
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("rows", "said"),
    [(None, "keep.jsonl: cannot be read: No such file or directory"), ([{"prompt": "1", "reply": "2"}], "'answer'")],
)
def test_no_file_or_column(rows: list[dict[str, str]] | None, said: str, tmp_path: Path, eager_kernels: None) -> None:
    if rows is not None:
        tiny.write_jsonl(tmp_path / "keep.jsonl", rows)
    words = [*WORDS, "steps=2", f"data.keep={tmp_path / 'keep.jsonl'}"]
    line = error_line(mezo("train", *words, f"hydra.run.dir={tmp_path / 'run'}"))
    assert line.startswith("error: data.keep: ")
    assert said in line
    assert not (tmp_path / "run").exists()
