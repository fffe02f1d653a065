"""`metric=loss`: the lowest dev loss is the best one, in every command that orders results."""

import json
from pathlib import Path

import pytest

from mezo_cli.runs import Run
from tests import tiny
from tests.command_line import mezo, small
from tests.interruption import interrupt_at

GENERATE = ["task=demo-arithmetic", "data=demo", "model=demo-decoder", "data.eval_limit=4", "data.train_size=8"]
OBJECTIVES = {
    "mlm": [],
    "choice": ["task.choice.candidates=[' bad', ' good']"],
    "generate": [*GENERATE, "objective.loss=lm", "objective.max_new_tokens=4", "objective.reward=countdown"],
}

pytestmark = pytest.mark.usefixtures("eager_kernels")


def command(objective: str, folder: Path, *more: str) -> list[str]:
    """The words of a run: its rates are so high that the dev loss moves."""
    model = (tiny.roberta if objective in ("mlm", "cls") else tiny.decoder)(folder / f"model-{objective}")
    data = tiny.movie_folder(folder / "data")
    words = [*OBJECTIVES[objective], f"objective={objective}", "metric=loss", "steps=2", "eval_every=1", *more]
    if objective != "generate":
        return small(model, data, folder / "run", *words)
    return [*words, "batch_size=4", "optimizer.lr=1e-3", f"hydra.run.dir={folder / 'run'}"]


@pytest.mark.parametrize(
    ("objective", "at_start"), [*((name, "true") for name in OBJECTIVES), ("mlm", "false"), ("generate", "false")]
)
def test_every_command_takes_the_lowest_loss(objective: str, at_start: str, tmp_path: Path) -> None:
    words, run = command(objective, tmp_path, f"test_at_start={at_start}"), tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, Run, "open_trajectory", 1)
        assert mezo("train", *words).code == 130
    done = mezo("resume", run)
    assert done.code == 0, done
    losses = {line["step"]: line["loss"] for line in Run(run).evaluations("dev")}
    best = min(losses, key=lambda step: losses[step])
    assert json.loads((run / "summary.json").read_text())["best"] == {"step": best, "loss": losses[best]}
    assert json.loads(output("runs", tmp_path, "--json"))[0]["dev"] == losses[best]
    results = json.loads(output("show", run, "--json"))["results"]
    assert [one["step"] for one in results if one["name"].startswith("dev best")] == [best]
    output("show", run)
    output("compare", tmp_path)
    output("report", tmp_path, "--out", tmp_path / "page.html")


def output(*words: object) -> str:
    done = mezo(*words)
    assert done.code == 0, done
    return done.out
