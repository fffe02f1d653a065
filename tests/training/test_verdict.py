"""From a run's scores to its verdict: the best step, divergence, and the result beside the untrained model's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mezo_cli.config import compose
from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import TokenizedExample
from mezo_cli.optim.mezo import Mezo
from mezo_cli.runs import Run
from mezo_cli.session.opening import opened
from mezo_cli.training.divergence import Divergence
from mezo_cli.training.finish import judge_difference
from tests import tiny
from tests.command_line import Train, error_line, mezo, ok, small
from tests.interruption import interrupted_at
from tests.optim.test_mezo import ready

pytestmark = pytest.mark.usefixtures("eager_kernels")


def test_an_evaluation_does_not_depend_on_its_batches(roberta: Path) -> None:
    made = build_config([f"model.path={roberta}", "data=demo", "objective=mlm"])
    session = opened(made)
    rng = np.random.default_rng(0)
    rows = [
        TokenizedExample([0, *rng.integers(5, 80, size=n).tolist(), 4, 2], [0] * (n + 3), n + 1, n % 2)
        for n in range(3, 24)
    ]
    whole = session.objective.evaluate(rows)
    for size in (1, 4, 100):
        session.objective.config = build_config([f"model.path={roberta}", "data=demo", f"eval_batch_size={size}"])
        seen = session.objective.evaluate(rows)
        assert seen.details == whole.details
        assert seen.loss == pytest.approx(whole.loss, rel=1e-5)
    logits = torch.cat([session.objective.logits(session.objective.collate([row])) for row in rows])
    assert whole.metrics["accuracy"] == pytest.approx(
        float((logits.argmax(-1) == torch.tensor([row.label for row in rows])).float().mean())
    )


def test_the_best_step_has_the_best_score_then_the_lower_loss_then_is_the_earlier() -> None:
    config = build_config(["data=demo"])
    for scores, best in (
        ({0: (0.5, 1.0), 10: (0.75, 0.5), 20: (0.75, 0.5), 30: (0.25, 0.1)}, 10),
        ({0: (0.5, 1.0), 10: (0.5, 0.9)}, 10),
        ({20: (0.75, 1.0), 10: (0.75, 1.0)}, 10),
    ):
        evaluations = {step: {"accuracy": score, "loss": loss} for step, (score, loss) in scores.items()}
        assert config.best_step(evaluations) == best


FIRST = [0.5, 0.9] * 5  # mean 0.7, std 0.2: the mean of ten may rise to 0.7 + 3 * 0.7 = 2.8


@pytest.mark.parametrize(
    ("values", "after"),
    [
        (FIRST + [2.79] * 10, []),
        (FIRST + [2.81] * 10, [20]),
        (FIRST + [0.7] * 500 + [100.0], [511]),  # one loss that makes up for nine
        (FIRST + [0.7] * 500 + [20.0] + [0.7] * 5, []),
        (FIRST + [0.1] * 20 + [2.4] * 10, [40]),  # above the lowest mean, 0.1, not above the first
        ([0.01] * 10 + [0.30] * 10, []),  # the rise is less than 3 * 0.1
        ([0.01] * 10 + [0.32] * 10, [20]),
        ([10.0] + [0.0] * 9 + [2.9] * 10, []),  # mean 1, std 3, then the lowest mean is 0
        ([-5.0] * 10 + [9.0] * 10, []),  # a loss may be negative: 3 * 5 are allowed
        ([-5.0] * 10 + [11.0] * 10, [20]),
        ([0.7] * 9 + [1e9], []),  # nothing to compare with
        ([0.7, *[1e6] * 30], []),  # the first ten are high
        ([0.7] * 200, []),
    ],
)
def test_a_run_has_diverged_when_its_losses_rise_far_above_the_lowest(values: list[float], after: list[int]) -> None:
    found = Divergence()
    assert [number for number, loss in enumerate(values, 1) if found.add(loss) or found.reason is not None] == after


@pytest.mark.parametrize(
    ("metric", "rows", "interval", "repeatable", "expected", "said"),
    [
        ("accuracy", 12, (0.01, 0.2), True, "improved", "+10.0 points (95% interval +1.0 to +20.0)"),
        ("accuracy", 12, (-0.01, 0.2), True, "within_noise", "which has 0 in it"),
        ("accuracy", 12, (0.0, 0.2), True, "within_noise", "which has 0 in it"),
        ("accuracy", 12, (-0.2, -0.01), True, "worse", "test accuracy 50.0% before training, 60.0% at step 4"),
        ("accuracy", 12, (0.01, 0.2), False, "within_noise", "the reward gave other numbers"),
        ("loss", 12, (0.01, 0.2), True, "worse", "test loss 0.5000 before training"),  # a lower loss is better
        ("loss", 12, (-0.2, -0.01), True, "improved", "(95% interval -0.2000 to -0.0100)"),
        ("accuracy", 9, (0.01, 0.2), True, "not_compared", "test has 9 rows, and a comparison needs 10"),
        ("f1", 12, None, True, "not_compared", "no interval of f1"),
    ],
)
def test_the_verdict_is_the_side_of_zero_on_which_the_interval_lies(
    metric: str, rows: int, interval: Any, repeatable: bool, expected: str, said: str
) -> None:
    config = compose.load([f"metric={metric}", "data.dir=x", "data=files"], None).config
    difference = {metric: 0.1, "intervals": {} if interval is None else {metric: list(interval)}}
    found = judge_difference(config, "test", 4, rows, (0.5, 0.6), difference, repeatable)
    assert (found[0], said in found[1]) == (expected, True), found


def summary(run: Path) -> dict[str, Any]:
    return Run(run).read_summary()


def flat(run: Path) -> list[tuple[str, str]]:
    return [(line["kind"], line.get("split", line["step"])) for line in Run(run).metrics()]


def test_a_model_that_only_lost_its_bias_is_not_more_than_the_baseline(roberta: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(400) % 2
    clean = torch.randn(400, 2, generator=generator) + 1.5 * torch.eye(2)[labels]
    objective = ready(roberta, "task=sst2").objective
    rows = [TokenizedExample([0], [0], 0, label) for label in labels.tolist()]
    after, before = objective.assess(clean, rows), objective.assess(clean + torch.tensor([0.0, 4.0]), rows)
    splits = ("train", "dev")
    found = objective.compare(
        dict.fromkeys(splits, before), dict.fromkeys(splits, after), dict.fromkeys(splits, rows), trained=True
    )
    low, _ = found["difference"]["dev"]["intervals"]["accuracy"]
    assert low > 0.2  # a great gain, as it seems
    for baseline in found["baselines"].values():
        beyond = baseline["dev"]["difference"]
        assert beyond["accuracy"] == pytest.approx(0, abs=0.01)
        assert beyond["intervals"]["accuracy"][0] < 0


def test_three_labels_without_a_test_split(roberta: Path, tmp_path: Path) -> None:
    names = ["bad", "okay", "good"]
    rows = [{"sentence": f"a film {i} {names[i % 3]}", "label": names[i % 3]} for i in range(60)]
    file = tiny.write_jsonl(tmp_path / "rows.jsonl", rows)
    words = [
        *["task.labels=[bad,okay,good]", "task.label_words=[bad,okay,good]", "task.metric=f1"],
        *["task.files.labels=[]", "task.hub.labels=[]"],
    ]
    run = tmp_path / "run"
    said = ok("train", *small(roberta, file, run, *words))
    made = summary(run)
    assert made["test"] is None
    assert "test_before" not in made
    assert set(made["difference"]) == {"dev"}
    baseline = made["baselines"]["fitted_bias"]
    assert (baseline["train_rows"], len(baseline["bias"])) == (54, 3)
    assert set(baseline["dev"]) == {"accuracy", "f1", "intervals", "difference"}
    assert "dev, bias fitted on train" in said.out
    assert "test at best" not in said.out
    assert "held out of rows.jsonl" in said.out
    assert "there is no test split" in error_line(mezo("eval", run))
    assert "bias between its labels is removed" in mezo("show", run).out.replace("\n", " ")
    assert mezo("report", run, "--out", tmp_path / "page.html").code == 0
    page = (tmp_path / "page.html").read_text()
    for part in ("bias between its labels is removed", "dev, bias fitted on train (f1)", "95% interval"):
        assert part in page, part
    assert [name for name, _ in flat(run)].count("eval") == 4  # dev three times, train


def test_without_the_start_there_are_intervals_alone(train: Train, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(run, "test_at_start=false").code == 0
    made = summary(run)
    assert not {"test_before", "difference", "baselines"} & set(made)
    assert set(made["test"]["intervals"]) == {"accuracy", "loss"}
    assert not (run / "untrained.json").exists()


def test_scores_that_were_lost_are_named(train: Train, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with interrupted_at(Mezo, "step", 4):
        assert train(run).code == 130
    path = run / "untrained.json"
    path.write_text(path.read_text().replace("0.", "1.", 1))
    assert "untrained.json is damaged" in error_line(mezo("resume", run))
    path.unlink()
    said = ok("resume", run)
    assert "the scores of the untrained model are lost" in said.out
    assert "baselines" not in summary(run)


def test_rows_in_two_splits_are_said_and_dev_gives_the_verdict_without_test(roberta: Path, tmp_path: Path) -> None:
    whole, cut, data = tmp_path / "whole", tmp_path / "cut", tmp_path / "rows.jsonl"
    tiny.write_jsonl(data, tiny.movie_rows(60) * 2)  # dev is held out of it, and there is no test split
    words = ["optimizer.lr=1e-2", "steps=4", "eval_every=2"]
    assert mezo("train", *small(roberta, data, whole, *words)).code == 0
    assert " of 12 rows of dev are in train, too: " in (whole / "train.log").read_text()
    assert mezo("train", *small(roberta, data, cut, *words, "max_seconds=1e-9")).code == 130
    while Run(cut).status() == "interrupted":
        mezo("resume", cut)
    timeless = {"seconds": 0, "peak_memory_bytes": 0}
    assert summary(cut) | timeless == summary(whole) | timeless
    reason = summary(whole)["verdict_reason"]
    assert summary(whole)["best"]["step"] == 0 or "at step 4: " in reason, reason
