"""Where features meet in one run: a reward's parts and numbers, a resumption, a probe of a head, shared rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from mezo_cli.runs import Run
from tests import tiny
from tests.command_line import error_line, mezo, small

pytestmark = pytest.mark.usefixtures("eager_kernels")

DEMO = ["experiment=demo-reward", "steps=3", "batch_size=4", "eval_every=3", "log_every=1", "data.train_size=16"]
DEMO += ["data.eval_limit=12", "objective.max_new_tokens=4", "optimizer.lr=1e-9", "checkpoint=trajectory"]


def summary(run: Path) -> dict[str, Any]:
    return Run(run).read_summary() | {"seconds": 0, "peak_memory_bytes": 0}


def test_a_resumed_run_of_rewards_that_float32_does_not_hold_has_the_same_summary(tmp_path: Path) -> None:
    reward = "objective.reward={countdown: 1, length: 0.01}"
    assert mezo("train", *DEMO, reward, f"hydra.run.dir={tmp_path / 'whole'}").code == 0
    assert mezo("train", *DEMO, reward, f"hydra.run.dir={tmp_path / 'cut'}", "max_seconds=1e-9").code == 130
    assert mezo("resume", tmp_path / "cut", "max_seconds=null").code == 0
    assert summary(tmp_path / "cut") == summary(tmp_path / "whole")
    assert summary(tmp_path / "whole")["reward"] == "countdown + 0.01 length"


def test_parts_with_the_names_of_a_lines_fields_change_none(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        "def f(completions, rows):\n"
        "    return [{'reward': .25, **dict.fromkeys(('crc', 'kind', 'loss', 'step', 'split', 'seconds'), 99.0)}"
        " for _ in completions]\n"
    )
    run = tmp_path / "run"
    ended = mezo("train", *DEMO, f"objective.reward={tmp_path / 'r.py'}:f", f"hydra.run.dir={run}")
    assert ended.code == 0, ended
    assert mezo("show", run).code == 0
    lines = Run(run).metrics()
    assert [line["kind"] for line in lines] == [*["eval"] * 2, *["train"] * 3, *["eval"] * 3]
    assert {line["loss"] for line in lines} == {-0.25}
    assert all(line[f"reward_{name}"] == 99 for line in lines for name in ("crc", "kind", "loss", "step", "split"))
    assert "every projected_grad was exactly 0" in (run / "train.log").read_text()
    assert "dev reward 0.2500" in (run / "train.log").read_text()  # without its mirror image, the loss


def test_peft_head_trains_from_a_linear_probe(roberta: Path, tmp_path: Path) -> None:
    tiny.movie_folder(tmp_path / "movies")
    run = tmp_path / "run"
    assert mezo("train", *small(roberta, tmp_path / "movies", run, "peft=head", "init=linear_probe")).code == 0
    before = mezo("eval", run, "--checkpoint", "last").out
    assert mezo("prune", run).code == 0
    assert mezo("eval", run, "--checkpoint", "last").out == before


def test_rows_in_two_splits_are_said_and_dev_gives_the_verdict_without_test(roberta: Path, tmp_path: Path) -> None:
    whole, cut, data = tmp_path / "whole", tmp_path / "cut", tmp_path / "rows.jsonl"
    tiny.write_jsonl(data, tiny.movie_rows(60) * 2)  # dev is held out of it, and there is no test split
    words = ["optimizer.lr=1e-2", "steps=4", "eval_every=2"]
    assert mezo("train", *small(roberta, data, whole, *words)).code == 0
    assert " of 12 rows of dev are in train, too: " in (whole / "train.log").read_text()
    assert mezo("train", *small(roberta, data, cut, *words, "max_seconds=1e-9")).code == 130
    while Run(cut).status() == "interrupted":
        mezo("resume", cut)
    assert summary(cut) == summary(whole)
    reason = summary(whole)["verdict_reason"]
    assert summary(whole)["best"]["step"] == 0 or "at step 4: " in reason, reason


@pytest.mark.parametrize(("column", "code"), [("other", 0), ("numbers", 2), ("a", 2)])
def test_nan_is_refused_where_it_is_read_and_null_elsewhere(column: str, code: int, tmp_path: Path) -> None:
    row = {"q": "12>3=", "a": "x", "numbers": [1, 2], "target": 3, "other": 1}
    rows = [json.dumps(row | ({column: float("nan")} if number == 2 else {})) for number in range(16)]
    for split in ("train", "dev", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(rows))
    words = ["task=demo-arithmetic", "data=files", f"data.dir={tmp_path}", "task.generate.prompt='{q}'"]
    words += ["task.generate.answer='{a}'"]
    ended = mezo("train", *DEMO, *words, f"hydra.run.dir={tmp_path / 'run'}")
    assert ended.code == code, ended
    if code:
        assert f".jsonl:3: {'column ' if column == 'numbers' else ''}'{column}' is null" in error_line(ended)
