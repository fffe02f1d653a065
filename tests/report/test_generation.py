"""Runs of an objective that generates text have other metrics and no labels: every reader shows them by name."""

import json
from pathlib import Path

import pytest

from mezo_cli.config.compose import build_config
from mezo_cli.config.stored import to_yaml
from mezo_cli.runs import Run
from mezo_cli.runs.trajectory import Header, Writer
from tests.command_line import mezo


def make(path: Path, *more: str, seed: int, finished: bool = True) -> None:
    """Make a run of 4 steps whose best reward is at step 2."""
    words = ["objective=generate", "task=demo-arithmetic", "data=demo", "model=demo", "steps=4", f"seed={seed}", *more]
    config = build_config([*words, "eval_every=2", "log_every=1", "peft=lora"])
    run = Run.create(path, to_yaml(config), ["mezo", "train", *words])
    run.update(metric="reward", data_fingerprint=f"rows-{seed}", rows={"train": 8, "dev": 8, "test": 8})
    scores = {0: {"loss": -0.5, "reward": 0.5, "f1": 0.25}, 2: {"loss": -1.5, "reward": 1.5, "f1": 0.75}}
    scores[4] = {"loss": -1.0, "reward": 1.0, "f1": 0.5}
    header = Header("none", "mezo", "gaussian", seed, 1, 0.0, [], {"sample_schedule": "constant", "steps": 4})
    writer = Writer(run.open_trajectory(), header)
    with run.tracked():
        for step in range(5):
            if step:
                writer.append(step - 1, [0.5 * step], 1e-6)
                rewards = {"reward": 0.1 * step, "reward_min": 0.05 * step, "reward_max": 0.2 * step}
                run.log_metrics("train", step, loss=-0.1 * step, **rewards, lr=1e-6, seconds=float(step))
            if step in scores:
                said = {"prompt": "2 + 2 =", "completion": f" <b>{step}", "reward": 0.5 * step}
                run.log_completions(step, [said, {**said, "prompt": "3 + 3 ="}])
                run.log_metrics("eval", step, split="dev", **scores[step], drift=0.01 * step, seconds=float(step))
        writer.close()
        if not finished:
            raise KeyboardInterrupt
        run.log_metrics("eval", 4, split="test", loss=-1.25, reward=1.25, f1=0.625, seconds=5.0)
        rows = [{"prompt": f"{row} + 1 =", "completion": f" {row + 1}", "reward": row / 8} for row in range(8)]
        run.write_predictions({"columns": {"numbers": "1"}, **row, "f1": 0.5} for row in rows)
        summary = {"steps": 4, "forwards": 8, "backwards": 0, "seconds": 5.0, "best": {"step": 2, "reward": 1.5}}
        run.write_summary({**summary, "dev": scores[2], "test": {"loss": -1.25, "reward": 1.25, "f1": 0.625}})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generation") / "runs"
    make(folder / "a", seed=1)
    make(folder / "b", seed=2)
    with pytest.raises(KeyboardInterrupt):
        make(folder / "stopped", seed=3, finished=False)
    return folder


def test_the_list_has_the_reward_as_it_is(runs: Path) -> None:
    cells = {line.split()[0]: line.split() for line in mezo("runs", runs).out.splitlines()}
    assert (cells["a"][-2:], cells["stopped"][-2:]) == (["1.5", "1.25"], ["1.5", "-"])
    assert json.loads(mezo("runs", runs, "--json").out)[0]["metric"] == "reward"


def test_one_run(runs: Path) -> None:
    result = mezo("show", runs / "a")
    assert result.code == 0, result
    lines = [line.split() for line in result.out.splitlines()]
    assert ["dev", "best", "1.5", "75.0%", "-1.5000", "2"] in lines  # reward, f1, loss
    assert "0 + 1 =" in result.out
    assert "accuracy" not in result.out
    document = json.loads(mezo("show", runs / "a", "--json").out)
    assert document["metric"] == "reward"
    assert [line["reward"] for line in document["dev"]] == [0.5, 1.5, 1.0]
    assert document["completions"][0]["completion"] == " 8"
    assert "dev rows at step 4, last" in result.out
    assert "'3 + 3 =' -> ' <b>4' reward 2" in result.out
    kept = document["dev_completions"]
    assert list(kept) == ["0", "2", "4"]
    assert kept["2"][1] == {"prompt": "3 + 3 =", "completion": " <b>2", "reward": 1.0}
    assert mezo("show", runs / "stopped").code == 0


def test_the_comparison_and_the_page(runs: Path, tmp_path: Path) -> None:
    compared = mezo("compare", runs).out
    assert "1.25 (0)" in compared
    assert "(reward" in compared
    for words in ([runs], [runs / "a"]):
        page = mezo("report", *words, "--out", tmp_path / "page.html")
        assert page.code == 0, page
        text = (tmp_path / "page.html").read_text()
        assert "Reward on dev" in text
        assert " 8</span>" in text
        assert "Accuracy" not in text
        for part in ("step 0, start", "step 2, best", "step 4, last", "train, mean of the", " &lt;b&gt;2<br>"):
            assert part in text
        assert "Training loss" not in text


def test_runs_of_two_methods_are_named_by_what_each_has(runs: Path, tmp_path: Path) -> None:
    make(tmp_path / "es", "optimizer=es", seed=1)
    assert mezo("report", runs / "a", tmp_path / "es", "--out", tmp_path / "page.html").code == 0
    assert '<td class="n">es lora</td>' in (tmp_path / "page.html").read_text()
