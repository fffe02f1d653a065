"""What is told about one run, of a directory whose numbers are known, and about runs that generate text."""

import json
from pathlib import Path
from typing import Any

import pytest

from mezo_cli.config.compose import build_config
from mezo_cli.config.stored import to_yaml
from mezo_cli.report.document import OPEN_END, conclusion, document, next_command
from mezo_cli.report.entries import read_entry
from mezo_cli.runs import Run
from mezo_cli.runs.jsonl import write_object
from mezo_cli.runs.trajectory import Header, Writer
from tests.command_line import mezo, ok
from tests.report.run_directories import make_curves, make_entry, make_run


def told(path: Path) -> dict[str, Any]:
    return document(read_entry(Run.open(path)))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 40 steps, with curves and predictions."""
    return make_curves(tmp_path_factory.mktemp("curves") / "run", {"seed": 13}).path


def test_the_result_against_the_start_and_the_steps(finished: Path) -> None:
    run = told(finished)
    assert [(one["name"], one["accuracy"], one["step"]) for one in run["results"]] == [
        ("dev before training", 0.5, 0),
        ("dev best", 0.8, 40),
        ("test at best", 0.75, 40),
    ]
    assert run["prompt"] == "<s>a film of no great length. It was<mask>.</s>"
    assert run["label_words"] == {"negative": "terrible", "positive": "great"}
    assert "MeZO trained all 1,000 parameters of roberta-large on sst2 (32 training rows" in run["sentence"]
    assert "for 40 steps of 32 rows:" in run["sentence"]  # batch_size=64, of which there are 32
    assert run["loss"] == {"steps": [*range(1, 41)], "values": [1 - step / 80 for step in range(1, 41)]}
    assert run["projected_grad"]["zero_fraction"] == 0.2


@pytest.mark.parametrize("ended", ["finished", "interrupted"])
def test_all_samples_that_were_drawn_count_and_no_others(ended: str, tmp_path: Path) -> None:
    """n-SPSA with a linear schedule draws 1, 2, 3 and 4 samples; the file has four numbers per step."""
    settings = {"optimizer.samples": 4, "optimizer.sample_schedule": "linear", "steps": 4}
    grads = [[1.0], [-2.0, 3.0], [0.0, 1.0, 1.0], [1.0, 1.0, -1.0, 1.0]]
    run = make_run(tmp_path / "a", settings, grads=grads, ended=ended)
    if ended == "interrupted":
        run.truncate_metrics(2)  # not only the logged steps
    assert list(told(run.path)["projected_grad"].values()) == [0.1, 1.2, 0.0, 3.0]  # zeros, mean, least, most


def test_the_test_rows_are_spread_from_sure_to_unsure(finished: Path) -> None:
    run = told(finished)
    assert (len(run["right"]), len(run["wrong"])) == (10, 10)
    assert run["test_rows"] == {"correct": 30, "wrong": 10}
    assert [row["row"] for row in run["right"]][::9] == [39, 1]
    assert all(row["predicted"] != row["label"] for row in run["wrong"])
    sure = [row["probabilities"][row["predicted"]] for row in run["right"]]
    assert sure == sorted(sure, reverse=True)


def test_a_running_run(tmp_path: Path) -> None:
    held = make_curves(tmp_path / "run", ended="running")
    run = told(held.path)
    assert (run["status"], run["no_test_rows"]) == ("running", OPEN_END)
    assert [one["name"] for one in run["results"]] == ["dev before training", "dev best so far"]
    assert "MeZO trains all" in run["sentence"]


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    held = make_run(tmp_path / "run", {"steps": 4}, ended="running")
    (held.path / "metrics.jsonl").unlink()
    run = told(held.path)
    assert (run["status"], run["dev"], run["loss"], run["results"]) == ("running", [], None, [])
    assert run["projected_grad"]["zero_fraction"] is None


@pytest.mark.parametrize(
    ("ended", "more"), [("interrupted", "Resume"), ("no memory", "Resume"), ("finished", "Evaluate")]
)
def test_the_commands_depend_on_how_the_run_ended(ended: str, more: str, tmp_path: Path) -> None:
    made = make_run(tmp_path / "a run", {"steps": 9}, ended=ended, grads=[1.0])
    made.update(argv=["mezo", "train", "task=sst2", "hydra.run.dir=x", "--config-dir", "mine", "-q"])
    found = told(made.path)["commands"]
    assert list(found) == ["Run again", "With changes", more]
    assert found["Run again"] == "mezo train task=sst2 --config-dir mine"
    assert f"'{tmp_path}/a run'" in found[more]


def test_a_shared_folder_is_evaluated_on_data_that_are_named(tmp_path: Path) -> None:
    made = make_run(tmp_path / "run", {"data.name": "files"}, grads=[1.0])
    write_object(made.path / "run.json", {key: value for key, value in made.info().items() if key != "argv"})
    changed, evaluate = told(made.path)["commands"].values()
    assert changed == f"mezo train --from {tmp_path}/run"
    assert evaluate.endswith("--split test data.dir=DIR")


def ended(verdict: str, low: float = 0.01, untrained: float = 0.4) -> Any:
    """A finished run with a verdict, whose result differs from a removed bias by `low` to 0.06."""
    difference = {"accuracy": 0.03, "intervals": {"accuracy": [low, 0.06]}}
    bias = {"accuracy": 0.7, "intervals": {"accuracy": [untrained, 0.75]}, "difference": difference}
    entry = make_entry({"optimizer.lr": 1e-3})
    entry.verdict, entry.info = verdict, {"argv": ["mezo", "train", "task=sst2", "seed=1", "hydra.run.dir=a"]}
    entry.summary = {
        "verdict": verdict,
        "verdict_reason": "FIGURES",
        "test": {"accuracy": 0.7},
        "baselines": {"x": {"test": bias}},
    }
    return entry


@pytest.mark.parametrize(
    ("verdict", "low", "told"),
    [
        ("improved", 0.01, "from that: it is more than a removed bias."),
        ("improved", -0.01, "from that: nothing shows that it is more than a removed bias."),
        *(
            (verdict, 0.01, "bias between its labels is removed.")
            for verdict in ("within_noise", "not_improved", "worse")
        ),
    ],
)
def test_one_sentence_ends_a_run_and_agrees_with_its_verdict(verdict: str, low: float, told: str) -> None:
    entry = ended(verdict, low)
    text = conclusion(entry.summary, entry.config)
    assert text.startswith(f"{verdict}: FIGURES. The untrained model has 70.0% on test once the bias")
    assert text.endswith(told)


@pytest.mark.parametrize(
    ("verdict", "untrained", "command"),
    [
        ("improved", 0.4, "mezo train -m task=sst2 seed=13,21,42,87,100  # the same with more seeds; mezo doctor"),
        ("worse", 0.4, "mezo train task=sst2 seed=1 optimizer.lr=0.0003  # a lower rate than 0.001; mezo doctor"),
        ("diverged", 0.4, "mezo train task=sst2 seed=1 optimizer.lr=0.0003  # a lower"),
        ("within_noise", 0.4, "mezo data --words task=sst2 seed=1  # words that the model tells apart; mezo doctor"),
        ("not_improved", 0.6, "mezo doctor task=sst2 seed=1  # what keeps it from learning; it measures AdamW"),
        ("not_compared", 0.6, ""),
    ],
)
def test_the_next_command_follows_from_the_verdict(verdict: str, untrained: float, command: str) -> None:
    found = next_command(ended(verdict, untrained=untrained))
    assert found.startswith(command)
    assert bool(found) == bool(command)


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
    result = ok("show", runs / "a")
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
        ok("report", *words, "--out", tmp_path / "page.html")
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
