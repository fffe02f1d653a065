"""Balanced batches and a budget of forwards in a run: weighted losses, the batches that steps get, resuming."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mezo_cli.runs import Run
from mezo_cli.session.session import Session
from tests.command_line import error_line, mezo, small
from tests.optim.test_mezo import SENTENCES, ready

pytestmark = pytest.mark.usefixtures("eager_kernels")


def imbalanced(folder: Path, counts: tuple[int, int] = (3, 9)) -> Path:
    """Write train, dev and test files with so many rows of each label."""
    folder.mkdir()
    names = [name for name, n in zip(("negative", "positive"), counts, strict=True) for _ in range(n)]
    for split in ("train", "dev", "test"):
        rows = [json.dumps({"sentence": f"a bad good {'great ' * i}", "label": name}) for i, name in enumerate(names)]
        (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    return folder


@pytest.mark.parametrize("micro", ["null", "2"])
def test_a_weighted_loss_is_the_weighted_mean_of_the_rows(micro: str, roberta: Path) -> None:
    session = ready(roberta, f"micro_batch_size={micro}")
    rows = session.encoder.encode_all(SENTENCES)
    weights = [0.5 + i for i in range(len(rows))]
    with torch.no_grad():
        loss = session.loss_of(rows, weights)
        expected = session.loss_of(rows).rows() * torch.tensor(weights)
        torch.testing.assert_close(loss(), expected.mean(), rtol=1e-12, atol=0)
        torch.testing.assert_close(loss.rows(), expected)


@pytest.fixture
def steps_taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any]]:
    """The labels and weights of each step of the runs of a test."""
    taken: list[tuple[Any, Any]] = []
    step = Session.step

    def recording(self: Session, rows: Any, number: int, weights: Any = None) -> Any:
        taken.append(([row.label for row in rows], weights))
        return step(self, rows, number, weights)

    monkeypatch.setattr(Session, "step", recording)
    return taken


def test_a_resumed_run_has_the_same_batches(roberta: Path, tmp_path: Path, steps_taken: list[tuple[Any, Any]]) -> None:
    data, batches = imbalanced(tmp_path / "data"), ["data.batches=balanced", "batch_size=4", "steps=4"]
    assert mezo("train", *small(roberta, data, tmp_path / "whole", *batches)).code == 0
    assert all(sorted(labels) == [0, 0, 1, 1] for labels, _ in steps_taken)
    assert all(sorted(weights) == [0.5, 0.5, 1.5, 1.5] for _, weights in steps_taken)
    part = small(roberta, data, tmp_path / "part", *batches[:2], "steps=2")
    assert mezo("train", *part).code == 0
    assert mezo("resume", str(tmp_path / "part"), "steps=4").code == 0
    assert Run(tmp_path / "part").trajectory.read_bytes()[-32:] == Run(tmp_path / "whole").trajectory.read_bytes()[-32:]


def test_what_balanced_batches_cannot_do_is_one_line(roberta: Path, tmp_path: Path) -> None:
    balanced, data = ["data.batches=balanced", "batch_size=4"], imbalanced(tmp_path / "data")
    line = error_line(mezo("train", *small(roberta, data, tmp_path / "a", *balanced, "objective.loss=accuracy")))
    assert "objective.loss=accuracy" in line
    assert "data.weights=none" in line
    line = error_line(mezo("train", *small(roberta, imbalanced(tmp_path / "one", (0, 8)), tmp_path / "b", *balanced)))
    assert "negative" in line
    assert "data.batches=balanced" in line


def test_the_steps_of_a_budget_take_the_batches_of_the_forwards_before_them(
    roberta: Path, movies: Path, tmp_path: Path, steps_taken: list[tuple[Any, Any]]
) -> None:
    words = [word for word in small(roberta, movies, tmp_path / "n") if not word.startswith(("steps", "eval_every"))]
    words = [*words, "hydra.run.dir=" + str(tmp_path / "n"), "forwards=12", "batch_size=3"]
    assert mezo("train", *words).code == 0
    single = [labels for labels, _ in steps_taken]
    steps_taken.clear()
    assert mezo("train", *words, "optimizer.samples=2", f"hydra.run.dir={tmp_path / 'two'}").code == 0
    assert [labels for labels, _ in steps_taken] == single[::2]
    assert Run(tmp_path / "two").read_summary()["forwards"] == 12
    assert "forwards=12" in error_line(mezo("resume", str(tmp_path / "two"), "steps=9"))
