"""The result beside its baseline, from scores to summary.json: resumed, three labels, no test split, switched off."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mezo_cli.config.schema import TokenizedExample
from mezo_cli.optim.mezo import Mezo
from mezo_cli.runs import Run
from tests import tiny
from tests.command_line import Train, error_line, mezo, small
from tests.interruption import interrupt_at
from tests.optim.test_mezo import ready

pytestmark = pytest.mark.usefixtures("eager_kernels")


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


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
    said = mezo("train", *small(roberta, file, run, *words))
    assert said.code == 0, said
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
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, Mezo, "step", 4)
        assert train(run).code == 130
    path = run / "untrained.json"
    path.write_text(path.read_text().replace("0.", "1.", 1))
    assert "untrained.json is damaged" in error_line(mezo("resume", run))
    path.unlink()
    said = mezo("resume", run)
    assert said.code == 0, said
    assert "the scores of the untrained model are lost" in said.out
    assert "baselines" not in summary(run)
