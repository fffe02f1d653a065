"""A function as `objective.reward`: train, eval, resume, finetune; its parts and numbers; mistakes come first."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from mezo_cli import finetune, load
from mezo_cli.config.registry import OPTIMIZERS
from mezo_cli.errors import UserError
from mezo_cli.runs import Run
from tests.command_line import error_line, mezo, ok
from tests.interruption import interrupted_at

DEMO = ["task=demo-arithmetic", "data=demo", "objective=generate", "objective.max_new_tokens=6", "model.device=cpu"]
DEMO += ["model=demo-decoder", "data.eval_limit=4", "data.train_size=40", "batch_size=4", "steps=4", "eval_every=2"]
DEMO += ["log_every=1", "optimizer.eps=1e-2", "test_at_start=false"]
SHORT = ["experiment=demo-reward", "steps=3", "batch_size=4", "eval_every=3", "log_every=1", "data.train_size=16"]
SHORT += ["data.eval_limit=12", "objective.max_new_tokens=4", "optimizer.lr=1e-9", "checkpoint=trajectory"]
CODE = (
    "def score(completions, rows):\n    return [{'reward': float(len(text)), 'digits': 1.0} for text in completions]\n"
)

pytestmark = pytest.mark.usefixtures("eager_kernels", "in_tmp_path")


@pytest.fixture
def reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("MEZO_REWARD", raising=False)
    (tmp_path / "mine.py").write_text(CODE)
    return "objective.reward=mine.py:score"


def test_eval_and_resume_take_it_predict_never(reward: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with interrupted_at(OPTIMIZERS.implementation("mezo"), "step", 3):
        assert mezo("train", *DEMO, reward, "hydra.run.dir=run").code == 130
    assert "score" not in Path("run/config.yaml").read_text()
    assert "objective.reward=FILE.py:function or MEZO_REWARD" in error_line(mezo("resume", "run"))
    Path("other.py").write_text(CODE + "# changed\n")
    assert "--new-reward goes on with it" in error_line(mezo("resume", "run", "objective.reward=other.py:score"))
    assert Run(Path("run")).status() == "interrupted"
    resumed = mezo(*shlex.split(Path("run/train.log").read_text().rpartition("resume with: mezo ")[2].splitlines()[0]))
    assert f"evaluate again: mezo eval run objective.reward={tmp_path}/mine.py:score\n" in resumed.out
    assert mezo("train", *DEMO, reward, "hydra.run.dir=whole").code == 0
    weights = Path("checkpoints/last/model.safetensors")
    assert ("run" / weights).read_bytes() == ("whole" / weights).read_bytes()

    assert "objective.reward=FILE.py:function or MEZO_REWARD" in error_line(mezo("eval", "run"))
    assert "'seed=3'" in error_line(mezo("eval", "run", "seed=3"))
    shown = json.loads(mezo("show", "run", "--json").out)["commands"]
    assert mezo(*shlex.split(shown["Evaluate"])[1:]).code == 0, shown
    document = json.loads(mezo("eval", "run", reward, "--json").out)
    summary = Run(Path("run")).read_summary()
    assert all(document[name] == summary["test"][name] for name in ("loss", "reward", "reward_digits"))
    assert summary["reward"] == "mine.py:score"  # it is published
    changed = ok("eval", "run", "objective.reward=other.py:score")
    assert "other.py:score: its code is not what the run was trained on" in changed.out
    monkeypatch.setenv("MEZO_REWARD", f"{tmp_path}/mine.py:score")
    assert mezo("eval", "run", "-q").code == 0
    monkeypatch.delenv("MEZO_REWARD")
    (tmp_path / "mine.py").unlink()
    assert mezo("replay", "run", "--step", "4", "--out", "replayed").code == 0
    assert Path("replayed/model.safetensors").read_bytes() == ("run" / weights).read_bytes()
    stored = Run(Path("run")).predictions()
    assert stored is not None
    found = load("run").predict([row["columns"] for row in stored])
    assert [one.completion for one in found] == [row["completion"] for row in stored]  # type: ignore[union-attr]


def test_another_function_goes_on_with_new_reward(reward: str) -> None:
    with interrupted_at(OPTIMIZERS.implementation("mezo"), "step", 3):
        assert mezo("train", *DEMO, reward, "model.compute_dtype=bfloat16", "hydra.run.dir=run").code == 130
    assert "projected gradients are off" not in Path("run/train.log").read_text()  # 32 batches would be completed
    before = Run(Path("run")).info()["reward"]["sha256"]
    Path("mine.py").write_text(CODE.replace("len(text)", "-len(text)"))
    assert mezo("resume", "run", reward, "--new-reward").code == 0
    assert Run(Path("run")).info()["reward"]["sha256"] != before


def test_a_callable_runs_in_this_process_and_is_not_stored(reward: str, tmp_path: Path) -> None:
    calls: list[int] = []

    def mine(completions: list[str], rows: list[dict[str, Any]]) -> list[float]:
        calls.append(len(rows))
        return [float(len(text)) for text in completions]

    words = [word for word in DEMO if not word.startswith(("task=", "objective=", "model="))]
    common: dict[str, Any] = {"objective": "generate", "overrides": words}
    done = finetune("demo-decoder", "demo-arithmetic", reward=mine, output_dir=tmp_path / "run", **common)
    assert calls
    info = Run(done.run_dir).info()
    assert info["reward"]["in_process"]
    assert info["own_reward"]
    assert "reward: null\n" in (done.run_dir / "config.yaml").read_text()
    by_file = finetune(
        "demo-decoder", "demo-arithmetic", reward="mine.py:score", output_dir=tmp_path / "file", **common
    )
    assert by_file.summary["test"]["reward"] == done.summary["test"]["reward"]
    with pytest.raises(UserError, match="objective=mlm does not read it"):
        finetune("demo", "sst2", reward=mine, output_dir=tmp_path / "no", overrides=["data=demo"])
    assert not (tmp_path / "no").exists()


def test_a_sweep_opens_it_once_before_its_first_job(reward: str, tmp_path: Path) -> None:
    Path("wrong.py").write_text("def score(one):\n    return []\n")
    words = [*DEMO, "steps=1", "seed=1,2", "hydra.sweep.dir=sweep"]
    assert "takes 'one', which is no column" in error_line(
        mezo("train", "-m", *words, "objective.reward=wrong.py:score")
    )
    assert "no reward is given" in error_line(mezo("train", "-m", *words))
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["model=demo", "objective.reward=f1"], "where a decoder is needed"),
        ([], "objective.loss=reward: no reward is given: add objective.reward=NAME"),
        (["task=sst2", "objective.reward=f1"], "task.generate.prompt is not set"),
        (["objective.reward=f1", "optimizer=es", "optimizer.members=5", "optimizer.antithetic=true"], "even number"),
        (["objective.reward=f1", "objective.max_new_tokens=500"], "leaves none for a prompt"),
        (["objective.reward=f1", "distributed.split=rows"], "ranks share the members"),
    ],
)
def test_mistakes_are_refused_before_a_run_is_made(words: list[str], part: str, reward: str, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    assert part in error_line(mezo("train", *DEMO, *words, "hydra.run.dir=run"))
    assert sorted(tmp_path.iterdir()) == before


def test_a_resumed_run_of_rewards_that_float32_does_not_hold_has_the_same_summary(tmp_path: Path) -> None:
    reward = "objective.reward={countdown: 1, length: 0.01}"
    assert mezo("train", *SHORT, reward, f"hydra.run.dir={tmp_path / 'whole'}").code == 0
    assert mezo("train", *SHORT, reward, f"hydra.run.dir={tmp_path / 'cut'}", "max_seconds=1e-9").code == 130
    assert mezo("resume", tmp_path / "cut", "max_seconds=null").code == 0
    cut, whole = (Run(tmp_path / name).read_summary() for name in ("cut", "whole"))
    timeless = {"seconds": 0, "peak_memory_bytes": 0}
    assert cut | timeless == whole | timeless
    assert whole["reward"] == "countdown + 0.01 length"


def test_parts_with_the_names_of_a_lines_fields_change_none(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        "def f(completions, rows):\n"
        "    return [{'reward': .25, **dict.fromkeys(('crc', 'kind', 'loss', 'step', 'split', 'seconds'), 99.0)}"
        " for _ in completions]\n"
    )
    run = tmp_path / "run"
    ok("train", *SHORT, f"objective.reward={tmp_path / 'r.py'}:f", f"hydra.run.dir={run}")
    assert mezo("show", run).code == 0
    lines = Run(run).metrics()
    assert [line["kind"] for line in lines] == [*["eval"] * 2, *["train"] * 3, *["eval"] * 3]
    assert {line["loss"] for line in lines} == {-0.25}
    assert all(line[f"reward_{name}"] == 99 for line in lines for name in ("crc", "kind", "loss", "step", "split"))
    assert "every projected_grad was exactly 0" in (run / "train.log").read_text()
    assert "dev reward 0.2500" in (run / "train.log").read_text()  # without its mirror image, the loss


@pytest.mark.parametrize(("column", "code"), [("other", 0), ("numbers", 2), ("a", 2)])
def test_nan_is_refused_where_it_is_read_and_null_elsewhere(column: str, code: int, tmp_path: Path) -> None:
    row = {"q": "12>3=", "a": "x", "numbers": [1, 2], "target": 3, "other": 1}
    rows = [json.dumps(row | ({column: float("nan")} if number == 2 else {})) for number in range(16)]
    for split in ("train", "dev", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(rows))
    words = ["task=demo-arithmetic", "data=files", f"data.dir={tmp_path}", "task.generate.prompt='{q}'"]
    words += ["task.generate.answer='{a}'"]
    ended = mezo("train", *SHORT, *words, f"hydra.run.dir={tmp_path / 'run'}")
    assert ended.code == code, ended
    if code:
        assert f".jsonl:3: {'column ' if column == 'numbers' else ''}'{column}' is null" in error_line(ended)
